"""The record of what was sent in each round (`traffic.jsonl`), from which a run can be timed on any network later."""

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
from fedbcgd.files import open_regular, verify_checksum

MAX_FILE_BYTES = 1 << 29  # of a file that is read
MAX_LINE_BYTES = 1 << 26
Count = Annotated[int, Field(ge=0, lt=2**53)]


class LinkTimes(Protocol):
    """Computes the seconds that clients' links and processors take: `fedbcgd.network.links.Links` does."""

    def seconds(
        self, clients: np.ndarray, download: int, evaluations: np.ndarray, upload: np.ndarray
    ) -> np.ndarray: ...


@dataclass(frozen=True)
class Round:
    """What was sent in one round. Lists have an entry for each upload that arrived, in the order of the plan.

    Attributes:
        round: its number, from 1.
        asked: how many clients were sampled.
        download: bytes of the broadcast to each of them; 0 if no upload arrived.
        waited: seconds until the round closed, if the server waited for uploads that did not arrive; else 0.
        clients: the client of each upload.
        blocks: the block that each upload names.
        upload: bytes of each upload, as encoded.
        evaluations: how many gradients of minibatches each client computed.
        accepted: 1, or 0 if the server refused the upload.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, allow_inf_nan=False)  # for reading

    round: Count
    asked: Count
    download: Count
    waited: Annotated[float, Field(ge=0)]
    clients: list[Count]
    blocks: list[int]
    upload: list[Count]
    evaluations: list[Count]
    accepted: list[Count]

    @classmethod
    def of(cls, server: Server, tasks: Sequence[Task], waited: float) -> "Round":
        """Record the round that the server has just committed.

        Args:
            server: its ledger has the entries of the round.
            tasks: the tasks of the round.
            waited: the value of the attribute.
        """
        position = {task.client: k for k, task in enumerate(tasks)}
        entries = [e for e in server.ledger.entries if 0 <= e.client < server.clients]
        entries.sort(key=lambda e: (position.get(e.client, len(tasks)), e.client))
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
        """Return the round as a row of `traffic.jsonl`."""
        return dict(vars(self))

    def seconds(self, links: LinkTimes) -> float:
        """Compute how long the round takes on these links: until the slowest client that the server waited for."""
        clients, evaluations, upload = (np.array(v, int) for v in (self.clients, self.evaluations, self.upload))
        slowest = float(links.seconds(clients, self.download, evaluations, upload).max(initial=0.0))
        return max(slowest, self.waited)


_ROUND = TypeAdapter(Round)


def read(path: Path) -> Iterator[Round]:
    """Read the rounds of a run in order. A last line without a newline is still being written and is left out.

    Args:
        path: the file `traffic.jsonl`.

    Yields:
        Each round.

    Raises:
        UserError: a line is damaged, or the file is not regular, or too large.
    """
    try:
        with open_regular(path) as file:
            for number in itertools.count(1):
                line = file.readline(MAX_LINE_BYTES)
                if len(line) == MAX_LINE_BYTES or file.tell() > MAX_FILE_BYTES:
                    raise UserError(
                        f"{path}, line {number}: expected lines below {MAX_LINE_BYTES:,} bytes and at most "
                        f"{MAX_FILE_BYTES:,} bytes in all, got more"
                    )
                if not line.endswith(b"\n"):
                    return
                yield _parse(line, path, number)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; every run writes this file in its folder") from None


def _parse(line: bytes, path: Path, number: int) -> Round:
    try:
        verify_checksum(line)
        round = _ROUND.validate_json(line)
        lists = (round.clients, round.blocks, round.upload, round.evaluations, round.accepted)
        if len({len(values) for values in lists}) > 1:
            raise ValueError("expected lists of one length, got several")
    except ValueError:
        raise UserError(f"{path}, line {number}: expected the record of a round, got something else") from None
    if round.round != number:
        raise UserError(f"{path}, line {number}: expected round {number}, got round {round.round}")
    return round
