"""One account of the traffic, whatever the algorithm: bytes as they were encoded."""

from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Entry:
    """What one client cost in one round."""

    round: int
    client: int
    block: int
    upload_floats: int
    upload_bytes: int
    download_bytes: int
    accepted: bool
    gradient_evaluations: int = 0


@dataclass
class Ledger:
    """Totals of a run so far, and the entries of the newest round. A refused upload was sent, so it counts."""

    dim: int
    itemsize: int
    blocks: int
    upload_d: float = 0.0  # sum over rounds of the mean upload of a participating client, in units of d
    upload_floats: int = 0
    upload_bytes: int = 0
    upload_max_bytes: int = 0  # the largest upload of any one client in any one round
    upload_wait_bytes: int = 0  # sum over rounds of the largest upload of a client: what each round waits for
    download_bytes: int = 0
    gradient_evaluations: int = 0
    refused: int = 0
    lost: int = 0
    wire_bytes: int = 0  # uploads as a network counted them, with whatever it adds; 0 where there is none
    block_bytes: list[int] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.block_bytes = self.block_bytes or [0] * self.blocks

    def open_round(self) -> None:
        self.entries = []

    def record(self, entry: Entry) -> None:
        self.entries.append(entry)
        self.upload_floats += entry.upload_floats
        self.upload_bytes += entry.upload_bytes
        self.download_bytes += entry.download_bytes
        self.gradient_evaluations += entry.gradient_evaluations
        self.refused += not entry.accepted
        if 0 <= entry.block < self.blocks:
            self.block_bytes[entry.block] += entry.upload_bytes

    def record_lost(self, download_bytes: int) -> None:
        """A client that was asked and never answered: the model went down, nothing that we know of came up."""
        self.lost += 1
        self.download_bytes += download_bytes

    def close_round(self) -> None:
        by_client: dict[int, int] = {}
        for entry in self.entries:
            by_client[entry.client] = by_client.get(entry.client, 0) + entry.upload_bytes
        if by_client:
            self.upload_d += sum(by_client.values()) / len(by_client) / (self.dim * self.itemsize)
            largest = max(by_client.values())
            self.upload_max_bytes = max(self.upload_max_bytes, largest)
            self.upload_wait_bytes += largest

    def totals(self) -> dict[str, Any]:
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "entries"}
        return values | {"block_bytes": list(self.block_bytes)}

    @classmethod
    def from_totals(cls, totals: dict[str, Any]) -> "Ledger":
        return cls(**totals | {"block_bytes": list(totals["block_bytes"])})
