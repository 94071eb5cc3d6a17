"""Flower's grid as a backend: tasks go out as messages, uploads come back as replies."""

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid
from torch import Tensor

from fedbcgd.backends.flower.exchange import exchange
from fedbcgd.core.messages import Plan
from fedbcgd.core.server import Conditions, Server
from fedbcgd.core.vector import Layout
from fedbcgd.engine.backend import Inbox
from fedbcgd.engine.client_state import StateStore
from fedbcgd.engine.clock import Clock
from fedbcgd.engine.closing import Quorum, share_of
from fedbcgd.engine.hooks import RoundHooks
from fedbcgd.engine.job import Job

if TYPE_CHECKING:
    from fedbcgd.backends.flower.federation import Federation

log = logging.getLogger("flwr.fedbcgd")  # shown where Flower shows its own


class GridHooks(RoundHooks):
    """Sample only clients that are online; tell the federation which rounds were committed."""

    def __init__(self, federation: "Federation"):
        self._federation = federation
        self._online: Sequence[int] | None = None

    def conditions(self, cohort: int, sampled: int, layout: Layout) -> Conditions:
        return Conditions(available=lambda round: self._online, reliable=False)

    def sampled(self, cohort: int, clients: int) -> int:
        return min(clients, share_of(cohort, self._federation.oversample))

    def prepare(self) -> None:
        assert self._federation.grid is not None
        self._online = self._federation.online(self._federation.grid)

    def committed(self, server: Server) -> None:
        self._federation.committed()


class GridBackend:
    """Have the nodes of a Flower grid do the clients' work."""

    def __init__(self, federation: "Federation", grid: Grid, job: Job, store: StateStore):
        self.clock = Clock()
        self.store = store
        self._federation = federation
        self._grid = grid
        self._job = job

    def carry(self, inbox: Inbox, plan: Plan) -> None:
        """Send the tasks, and take replies until each block has enough, or the timeout.

        Clients that have not answered then are lost.
        """
        federation = self._federation
        quorum = Quorum((task.block for task in plan.tasks), close_at=federation.close_at)
        messages, on_wait = federation.messages(plan), federation.monitor.waiting
        replies = exchange(self._grid, messages, federation.timeout, on_wait, lambda: quorum.done)
        while True:
            with self.clock.timing("waiting"):
                reply = next(replies, None)
            if reply is None:
                break
            with self.clock.timing("sums"):
                if (answer := federation.take(reply)) is not None:
                    quorum.answered(answer[0].block, whole=answer[1])
        federation.give_up_missing(closed_early=quorum.done)

    def evaluate(self, x: Tensor) -> dict[str, float]:
        """Return the metrics on the test data here, and those of the clients, which are named `clients_…`."""
        federation = self._federation
        values = self._job.metrics(x)
        questions = list(federation.configure_evaluate(0, ArrayRecord(), ConfigRecord(), self._grid))
        if questions:
            means = federation.aggregate_evaluate(0, exchange(self._grid, questions, federation.timeout))
            values |= {f"clients_{name}": float(v) for name, v in (means or {}).items()}  # type: ignore[arg-type]
            target = federation.target[0] if federation.target is not None else ""
            if target.startswith("clients_") and target not in values:
                log.warning("most clients that answered did not report %s, the target of the run", target)
                values[target] = math.nan  # the target is not reached; a missing metric would end the run
        return values

    def close(self) -> None:
        pass
