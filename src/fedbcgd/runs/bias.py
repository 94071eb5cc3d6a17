"""Whether some blocks are served by fast clients more often than by slow ones."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from fedbcgd.engine.traffic import Round
from fedbcgd.network.links import Links

FIFTHS = 5  # groups of equally many clients, the slowest first


@dataclass(frozen=True)
class BlockBias:
    """Who sent the accepted uploads of one block.

    Attributes:
        block: its number, from 0.
        uploads: how many were accepted.
        clients: how many different clients sent them.
        rank: mean rank of their uplinks: 0 is the slowest client, 1 the fastest; 0.5 is fair.
        shares: the share of the uploads that came from each fifth of the clients, the slowest first; 0.2 each is fair.
        distance: total variation between `shares` and equal shares: 0 if they are equal, 0.8 if all uploads come from one
            fifth. Chance alone gives about √(1/uploads).
    """

    block: int
    uploads: int
    clients: int
    rank: float
    shares: tuple[float, ...]
    distance: float

    def row(self) -> dict[str, float]:
        """Return the bias as a row of a table."""
        fifths = {f"from_fifth_{k + 1}": share for k, share in enumerate(self.shares)}
        head = {"block": self.block + 1, "uploads": self.uploads, "clients": self.clients, "mean_rank": self.rank}
        return head | fifths | {"distance": self.distance}


def block_biases(rounds: Iterable[Round], links: Links) -> list[BlockBias]:
    """Measure the bias of each block.

    Args:
        rounds: the rounds of a run.
        links: the links of its clients.

    Returns:
        The bias of each block that was served, in the order of the blocks.
    """
    rank_of = np.empty(len(links), int)
    rank_of[np.argsort(links.uplink, kind="stable")] = np.arange(len(links))
    clients_of: dict[int, array[int]] = {}
    for sent in rounds:
        for client, block, accepted in zip(sent.clients, sent.blocks, sent.accepted, strict=True):
            if accepted:
                clients_of.setdefault(block, array("q")).append(client)
    out = []
    for block in sorted(clients_of):
        ranks = rank_of[clients_of[block]]
        shares = np.bincount(ranks * FIFTHS // len(links), minlength=FIFTHS) / len(ranks)
        rank = float(ranks.mean()) / max(1, len(links) - 1)
        distance = float(np.abs(shares - 1 / FIFTHS).sum() / 2)
        out.append(BlockBias(block, len(ranks), len(set(clients_of[block])), rank, tuple(map(float, shares)), distance))
    return out
