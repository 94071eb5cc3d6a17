"""What was sent in each round, kept beside a run, so that any network can be applied to it afterwards."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedbcgd.errors import UserError
from fedbcgd.files import open_regular, unsealed
from fedbcgd.network.links import Links
from fedbcgd.server import Server


@dataclass(frozen=True)
class Round:
    """A list entry for each upload that arrived, refused ones included."""

    round: int
    asked: int  # clients that were asked
    download: int  # bytes of the broadcast, to each
    waited: float  # seconds until the round closed, where the server waited for uploads that did not come; 0 otherwise
    clients: list[int]
    blocks: list[int]
    upload: list[int]  # bytes as encoded
    evaluations: list[int]  # gradients of minibatches
    accepted: list[int]  # 0 or 1

    @classmethod
    def of(cls, server: Server, asked: int, waited: float) -> "Round":
        """The round that the server has just committed."""
        entries = [e for e in server.ledger.entries if 0 <= e.client < server.clients]
        return cls(
            server.round,
            asked,
            max((e.download_bytes for e in entries), default=0),
            waited,
            [e.client for e in entries],
            [e.block for e in entries],
            [e.upload_bytes for e in entries],
            [e.gradient_evaluations for e in entries],
            [int(e.accepted) for e in entries],
        )

    def row(self) -> dict[str, Any]:
        return dict(vars(self))

    def seconds(self, links: Links) -> float:
        """How long it took: the slowest client that was waited for decides."""
        clients, evaluations, upload = (np.array(v, int) for v in (self.clients, self.evaluations, self.upload))
        slowest = float(links.seconds(clients, self.download, evaluations, upload).max(initial=0.0))
        return max(slowest, self.waited)


def read(path: Path) -> Iterator[Round]:
    """All rounds of a run, the first one first."""
    try:
        with open_regular(path) as file:
            lines = file.read().splitlines()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; it is written with every run") from None
    for number, line in enumerate(lines, 1):
        try:
            round = Round(**unsealed(line)[0])
        except (ValueError, TypeError):
            raise UserError(f"{path}, line {number}: this is no record of a round") from None
        if round.round != number:
            raise UserError(f"{path}, line {number}: round {round.round} stands where round {number} should be")
        yield round
