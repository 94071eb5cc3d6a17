"""What may attach to the rounds of a run: the simulated network does."""

from typing import Protocol

from fedbcgd.core.messages import Plan
from fedbcgd.core.server import Server
from fedbcgd.engine.backend import Backend, Inbox


class RoundHooks(Protocol):
    """Called by whoever makes the server, and by the loop in every round."""

    def sampled(self, cohort: int, clients: int) -> int:
        """How many clients are asked so that there are `cohort` to wait for."""

    def attach(self, server: Server, cohort: int) -> None:
        """Tell the server what it must know before it plans its first round."""

    def plan(self, server: Server) -> Plan:
        """Open a round."""

    def next_upload_d(self, server: Server) -> float:
        """What the next round will upload, in d."""

    def inbox(self, server: Server, backend: Backend) -> Inbox:
        """Where uploads are handed in: the server itself, unless something is to go wrong on the way."""

    def committed(self, server: Server) -> None:
        """Take note of a round that was committed."""

    def columns(self) -> dict[str, float]:
        """Columns to add to a row of metrics."""
