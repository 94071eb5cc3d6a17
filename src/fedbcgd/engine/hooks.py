"""What may attach to the rounds of a run: the simulated network and Flower's grid do."""

from fedbcgd.core.messages import Plan
from fedbcgd.core.server import Conditions, Server
from fedbcgd.core.vector import Layout
from fedbcgd.engine.backend import Backend, Inbox


class RoundHooks:
    """Called when the server is made, and by the loop in every round. These hooks change nothing; others override some.

    In each round the loop calls `prepare`, `plan`, `inbox` and `committed`, in this order.
    """

    def sampled(self, cohort: int, clients: int) -> int:
        """Return how many clients to sample, so that there are `cohort` to wait for."""
        return cohort

    def conditions(self, cohort: int, sampled: int, layout: Layout) -> Conditions:
        """Return what the server must know before it plans its first round.

        Args:
            cohort: the clients to wait for in a round.
            sampled: the clients to sample, at least `cohort`.
            layout: where each block lies in x.
        """
        return Conditions()

    def prepare(self) -> None:
        """Wait for what the next round needs. Ctrl-C may interrupt it."""

    def plan(self, server: Server) -> Plan:
        """Open a round."""
        return server.plan()

    def next_upload_d(self, server: Server) -> float:
        """Return what the next round will upload, in d."""
        return server.next_upload_d()

    def inbox(self, server: Server, backend: Backend) -> Inbox:
        """Return where the backend hands in uploads: the server, or something that stands before it."""
        return server

    def committed(self, server: Server) -> None:
        """Take note of a round that was committed."""

    def columns(self) -> dict[str, float]:
        """Return columns to add to a row of metrics."""
        return {}
