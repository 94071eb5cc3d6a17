"""Flower's grid as a backend: tasks go out as messages, uploads come back as replies."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flwr.serverapp import Grid
from torch import Tensor

from fedbcgd.backends.flower.evaluations import CentralEvaluation
from fedbcgd.backends.flower.exchange import exchange
from fedbcgd.backends.flower.log import log
from fedbcgd.backends.flower.results import EVALUATE_FN
from fedbcgd.core.messages import Plan
from fedbcgd.core.own_training import LIKELY_CAUSE
from fedbcgd.core.reading import RULE
from fedbcgd.core.server import Conditions, Server
from fedbcgd.core.vector import Layout
from fedbcgd.engine.backend import Inbox, Timings
from fedbcgd.engine.client_state import StateStore
from fedbcgd.engine.closing import share_of
from fedbcgd.engine.hooks import RoundHooks
from fedbcgd.engine.job import Job

if TYPE_CHECKING:
    from fedbcgd.backends.flower.federation import Federation


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
        return min(clients, share_of(cohort, self._federation.options.oversample))

    def prepare(self) -> None:
        assert self._federation.grid is not None
        self._online = self._federation.rounds.online(self._federation.grid)

    def committed(self, server: Server) -> None:
        self._federation.rounds.committed()


class GridBackend:
    """Sends the clients' work to the nodes of a Flower grid.

    Args:
        federation: has the run's rounds and evaluations.
        grid: Flower's grid, which sends messages to the nodes.
        central: calls the user's `evaluate_fn`.
        job: the job, for evaluation on the server.
        store: an empty store, since the clients keep their state themselves.
    """

    def __init__(self, federation: "Federation", grid: Grid, central: CentralEvaluation, job: Job, store: StateStore):
        self.timings = Timings()
        self.store = store
        self._federation = federation
        self._grid = grid
        self._central = central
        self._job = job

    def run_round(self, inbox: Inbox, plan: Plan) -> None:
        """Ask the clients of the plan, and wait for their uploads."""
        rounds, settings = self._federation.rounds, self._federation.settings
        rounds.wait(self._grid, rounds.ask(plan, settings), settings.timeout, self.timings)

    def evaluate(self, x: Tensor) -> dict[str, float]:
        """Return the metrics on the test data, the numbers of `evaluate_fn`, and those of the clients as `clients_…`."""
        federation = self._federation
        values = self._job.metrics(x)
        for name, value in self._central.values().items():
            if isinstance(value, (int, float)):
                name = name.removeprefix("test_")
                values[f"{EVALUATE_FN}{name}" if name in values else name] = float(value)
        if questions := federation.evaluation.ask(federation.settings):
            means = federation.evaluation.means(exchange(self._grid, questions, federation.settings.timeout))
            values |= {f"clients_{name}": value for name, value in means.items()}
            target = federation.target[0] if federation.target is not None else ""
            if target.startswith("clients_") and target not in values:
                log.warning("target: most clients that answered did not report %s", target)
                values[target] = math.nan  # the target is not reached; a missing metric would end the run
        return values

    def close(self) -> None:
        """Do nothing: Flower made the grid, and closes it."""
