"""Hooks that a run calls in every round; the simulated network and Flower's grid override some."""

from fedbcgd.core.messages import Plan
from fedbcgd.core.server import Conditions, Server
from fedbcgd.core.vector import Layout
from fedbcgd.engine.backend import Backend, Inbox


class RoundHooks:
    """Hooks that change nothing; subclasses override some of them.

    `sampled`, `conditions` and `next_upload_d` are called when the server is made. In each round the loop calls
    `prepare`, `plan`, `inbox` and `committed`, in this order, and then `next_upload_d` if the run has a budget.
    `columns` is called for each row of metrics.
    """

    def sampled(self, cohort: int, clients: int) -> int:
        """Return how many clients to sample for a cohort of this size: more, if some may be late."""
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
        """Return the mean upload of a client in the next round, in d (1 d is the size of the model)."""
        return server.next_upload_d()

    def inbox(self, server: Server, backend: Backend) -> Inbox:
        """Return what receives the uploads of a round: the server, or a wrapper around it."""
        return server

    def committed(self, server: Server) -> None:
        """Called when a round has been committed."""

    def columns(self) -> dict[str, float]:
        """Return columns to add to a row of metrics."""
        return {}
