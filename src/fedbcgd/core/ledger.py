"""The traffic of a run, counted the same way for every algorithm: bytes as they were encoded."""

from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class LedgerEntry:
    """One upload that arrived: its traffic, and the gradients computed for it."""

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
    """Totals of a run so far, and the entries of the newest round. A refused upload counts too, since it was sent."""

    dim: int
    itemsize: int
    blocks: int
    upload_d: float = 0.0  # sum over rounds of the mean upload of a participating client, in units of d
    upload_floats: int = 0
    upload_bytes: int = 0
    upload_max_bytes: int = 0  # the largest upload of any one client in any one round
    upload_wait_bytes: int = 0  # sum over rounds of the largest upload of a client, which the round waits for
    download_bytes: int = 0
    gradient_evaluations: int = 0
    refused: int = 0
    lost: int = 0
    wire_bytes: int = 0  # uploads as the network counted them, with its overhead; 0 without a network
    block_bytes: list[int] = field(default_factory=list)
    entries: list[LedgerEntry] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.block_bytes = self.block_bytes or [0] * self.blocks

    def open_round(self) -> None:
        """Begin a round: forget the entries of the one before."""
        self.entries = []

    def record(self, entry: LedgerEntry) -> None:
        """Count an upload, accepted or refused."""
        self.entries.append(entry)
        self.upload_floats += entry.upload_floats
        self.upload_bytes += entry.upload_bytes
        self.download_bytes += entry.download_bytes
        self.gradient_evaluations += entry.gradient_evaluations
        self.refused += not entry.accepted
        if 0 <= entry.block < self.blocks:
            self.block_bytes[entry.block] += entry.upload_bytes

    def record_lost(self, download_bytes: int) -> None:
        """Count a client that got the model and whose upload did not arrive."""
        self.lost += 1
        self.download_bytes += download_bytes

    def close_round(self) -> None:
        """Count what is known only when a round ends: its mean and its largest upload."""
        by_client: dict[int, int] = {}
        for entry in self.entries:
            by_client[entry.client] = by_client.get(entry.client, 0) + entry.upload_bytes
        if by_client:
            self.upload_d += sum(by_client.values()) / len(by_client) / (self.dim * self.itemsize)
            largest = max(by_client.values())
            self.upload_max_bytes = max(self.upload_max_bytes, largest)
            self.upload_wait_bytes += largest

    def totals(self) -> dict[str, Any]:
        """Return all totals by name."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "entries"}
        return values | {"block_bytes": list(self.block_bytes)}

    @classmethod
    def from_totals(cls, totals: dict[str, Any]) -> "Ledger":
        """Make a ledger that continues from these totals."""
        return cls(**totals | {"block_bytes": list(totals["block_bytes"])})
