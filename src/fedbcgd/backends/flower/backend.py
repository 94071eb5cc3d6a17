"""Flower's grid as a backend: tasks go out as messages, uploads come back as replies."""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flwr.serverapp import Grid
from torch import Tensor

from fedbcgd.backends.flower.exchange import exchange
from fedbcgd.core.messages import Plan
from fedbcgd.core.own_training import LIKELY_CAUSE
from fedbcgd.core.reading import RULE
from fedbcgd.core.server import Conditions, Server
from fedbcgd.core.vector import Layout
from fedbcgd.engine.backend import Clock, Inbox
from fedbcgd.engine.client_state import StateStore
from fedbcgd.engine.closing import Quorum, share_of
from fedbcgd.engine.hooks import RoundHooks
from fedbcgd.engine.job import Job

if TYPE_CHECKING:
    from fedbcgd.backends.flower.federation import Federation

log = logging.getLogger("flwr.fedbcgd")  # shown where Flower shows its own

EVALUATE_FN = "evaluate_fn_"  # prefix for a value of `evaluate_fn` that has the name of a metric on the test data


def evaluate_fn_names(values: Mapping[str, Any], row: Mapping[str, float]) -> dict[str, str]:
    """Return, for each value of `evaluate_fn`, the name of its column in a row of metrics."""
    columns = {}
    for name in values:
        short = name.removeprefix("test_")
        columns[name] = f"test_{EVALUATE_FN}{short}"
        if columns[name] not in row:
            columns[name] = f"test_{short}"
    return columns


class GridHooks(RoundHooks):
    """Samples only clients that are online, and tells the federation of each commit.

    Args:
        federation: the strategy that the run belongs to.
    """

    def __init__(self, federation: "Federation"):
        self._federation = federation
        self._online: Sequence[int] | None = None

    def conditions(self, cohort: int, sampled: int, layout: Layout) -> Conditions:
        cause = "" if self._federation.most_train(RULE) else LIKELY_CAUSE
        return Conditions(available=lambda round: self._online, reliable=False, likely_cause=cause)

    def sampled(self, cohort: int, clients: int) -> int:
        return min(clients, share_of(cohort, self._federation.oversample))

    def prepare(self) -> None:
        assert self._federation.grid is not None
        self._online = self._federation.online(self._federation.grid)

    def committed(self, server: Server) -> None:
        self._federation.committed()


class GridBackend:
    """Sends the clients' work to the nodes of a Flower grid.

    Args:
        federation: makes the messages and reads the replies.
        grid: Flower's grid, which sends messages to the nodes.
        job: the job, for evaluation on the server.
        store: an empty store, since the clients keep their state themselves.
    """

    def __init__(self, federation: "Federation", grid: Grid, job: Job, store: StateStore):
        self.clock = Clock()
        self.store = store
        self._federation = federation
        self._grid = grid
        self._job = job

    def run_round(self, inbox: Inbox, plan: Plan) -> None:
        """Send the tasks, and read replies until each block has enough uploads or the time is up.

        Clients that have not answered by then are reported as lost.
        """
        federation = self._federation
        quorum = Quorum((task.block for task in plan.tasks), close_at=federation.close_at)
        messages, on_wait = federation.messages(plan), federation.monitor.waiting
        replies = exchange(self._grid, messages, federation.timeout, on_wait, lambda: quorum.complete)
        while True:
            with self.clock.timing("waiting"):
                reply = next(replies, None)
            if reply is None:
                break
            with self.clock.timing("sums"):
                if (answer := federation.take(reply)) is not None:
                    quorum.answered(answer.task.block, valid=answer.accepted)
        federation.give_up_missing(closed_early=quorum.complete)

    def evaluate(self, x: Tensor) -> dict[str, float]:
        """Return the metrics on the test data, the numbers of `evaluate_fn`, and those of the clients as `clients_…`."""
        federation = self._federation
        values = self._job.metrics(x)
        for name, value in federation.evaluate_centrally().items():
            if isinstance(value, (int, float)):
                name = name.removeprefix("test_")
                values[f"{EVALUATE_FN}{name}" if name in values else name] = float(value)
        questions = list(federation.configure_evaluate(0))
        if questions:
            means = federation.aggregate_evaluate(0, exchange(self._grid, questions, federation.timeout))
            values |= {f"clients_{name}": float(v) for name, v in (means or {}).items()}  # type: ignore[arg-type]
            target = federation.target[0] if federation.target is not None else ""
            if target.startswith("clients_") and target not in values:
                log.warning("target: most clients that answered did not report %s", target)
                values[target] = math.nan  # the target is not reached; a missing metric would end the run
        return values

    def close(self) -> None:
        """Do nothing: Flower made the grid, and closes it."""
