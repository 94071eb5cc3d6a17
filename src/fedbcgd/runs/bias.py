"""Whether blocks lean to fast clients: who served each block, by the speed of its uplink."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from fedbcgd.engine.traffic import Round
from fedbcgd.network.links import Links

CLASSES = 5  # fifths of the clients, the slowest first


@dataclass(frozen=True)
class Lean:
    """Of the uploads of one block that were accepted."""

    block: int
    uploads: int
    clients: int  # different ones
    rank: float  # mean rank of their uplinks: 0 the slowest client, 1 the fastest; fair is 0.5
    shares: tuple[float, ...]  # from each fifth of the clients, the slowest first; fair is 0.2 each
    distance: float  # of the shares from fair ones (total variation): 0 fair, 0.8 one fifth alone

    def row(self) -> dict[str, float]:
        fifths = {f"from_fifth_{k + 1}": share for k, share in enumerate(self.shares)}
        head = {"block": self.block + 1, "uploads": self.uploads, "clients": self.clients, "mean_rank": self.rank}
        return head | fifths | {"distance": self.distance}


def leans(rounds: Iterable[Round], links: Links) -> list[Lean]:
    """One for each block. `distance` is that of few uploads too: chance alone gives about √(1/uploads)."""
    order = np.empty(len(links), int)
    order[np.argsort(links.uplink, kind="stable")] = np.arange(len(links))
    served: dict[int, array[int]] = {}
    for sent in rounds:
        for client, block, accepted in zip(sent.clients, sent.blocks, sent.accepted, strict=True):
            if accepted:
                served.setdefault(block, array("q")).append(client)
    out = []
    for block in sorted(served):
        ranks = order[served[block]]
        shares = np.bincount(ranks * CLASSES // len(links), minlength=CLASSES) / len(ranks)
        rank = float(ranks.mean()) / max(1, len(links) - 1)
        distance = float(np.abs(shares - 1 / CLASSES).sum() / 2)
        out.append(Lean(block, len(ranks), len(set(served[block])), rank, tuple(map(float, shares)), distance))
    return out
