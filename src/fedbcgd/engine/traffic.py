"""What was sent in each round, kept beside a run, so that any network can be applied to it afterwards."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter

from fedbcgd.core.messages import Task
from fedbcgd.core.server import Server
from fedbcgd.errors import UserError
from fedbcgd.files import open_regular, vouched

LARGEST = 1 << 29  # bytes of a record that is read
LONGEST = 1 << 26  # bytes of one round
Count = Annotated[int, Field(ge=0, lt=2**53)]


class Clock(Protocol):
    """Knows the clients' links: `fedbcgd.network.links.Links` does."""

    def seconds(
        self, clients: np.ndarray, download: int, evaluations: np.ndarray, upload: np.ndarray
    ) -> np.ndarray: ...


@dataclass(frozen=True)
class Round:
    """A list entry for each upload that arrived, refused ones included, in the order of the plan."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, allow_inf_nan=False)  # where it is read

    round: Count
    asked: Count  # clients that were asked
    download: Count  # bytes of the broadcast, to each
    waited: Annotated[float, Field(ge=0)]  # seconds until the round closed with some missing; 0 if all were there
    clients: list[Count]
    blocks: list[int]  # of a refused upload whatever it said
    upload: list[Count]  # bytes as encoded
    evaluations: list[Count]  # gradients of minibatches
    accepted: list[Count]  # 0 or 1

    @classmethod
    def of(cls, server: Server, tasks: Sequence[Task], waited: float) -> "Round":
        """The round of these tasks, which the server has just committed."""
        place = {task.client: k for k, task in enumerate(tasks)}
        entries = [e for e in server.ledger.entries if 0 <= e.client < server.clients]
        entries.sort(key=lambda e: (place.get(e.client, len(tasks)), e.client))  # not as they arrived
        return cls(
            server.round,
            len(tasks),
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

    def seconds(self, links: Clock) -> float:
        """How long it took: the slowest client that was waited for decides."""
        clients, evaluations, upload = (np.array(v, int) for v in (self.clients, self.evaluations, self.upload))
        slowest = float(links.seconds(clients, self.download, evaluations, upload).max(initial=0.0))
        return max(slowest, self.waited)


_ROUND = TypeAdapter(Round)


def read(path: Path) -> Iterator[Round]:
    """All rounds of a run, the first one first. What stands after the end of the last line is still being written.

    Raises:
        UserError: a line is damaged, or it is no regular file, or too large.
    """
    try:
        with open_regular(path) as file:
            for number in itertools.count(1):
                line = file.readline(LONGEST)
                if len(line) == LONGEST or file.tell() > LARGEST:
                    raise UserError(f"{path}, line {number}: it is larger than any that a run writes")
                if not line.endswith(b"\n"):
                    return
                try:
                    vouched(line)
                    round = _ROUND.validate_json(line)
                    lists = (round.clients, round.blocks, round.upload, round.evaluations, round.accepted)
                    if len({len(values) for values in lists}) > 1:
                        raise ValueError("lists of different lengths")
                except ValueError:
                    raise UserError(f"{path}, line {number}: this is no record of a round") from None
                if round.round != number:
                    raise UserError(f"{path}, line {number}: round {round.round} stands where round {number} should be")
                yield round
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; it is written with every run") from None
