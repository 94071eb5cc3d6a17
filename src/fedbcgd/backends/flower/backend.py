"""Flower's grid as a backend: tasks go out as messages, uploads come back as replies."""

import copy
import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid
from torch import Tensor

from fedbcgd.backends.flower.exchange import exchange
from fedbcgd.core.messages import Plan, RoundReport
from fedbcgd.core.vector import FlatModel
from fedbcgd.engine.backend import Inbox
from fedbcgd.engine.client_state import StateStore
from fedbcgd.engine.clock import Clock
from fedbcgd.engine.evaluation import combine, evaluate_span, spans
from fedbcgd.engine.loop import Loop

if TYPE_CHECKING:
    from fedbcgd.backends.flower.federation import Federation

log = logging.getLogger("flwr.fedbcgd")  # shown where Flower shows its own


class GridBackend:
    def __init__(self, federation: "Federation", grid: Grid):
        layout = federation.layout
        self.clock = Clock()
        self.store = StateStore((), layout.dim, layout.dtype)  # clients keep their state themselves
        self.federation = federation
        self._grid = grid
        self._model: FlatModel | None = None

    def online(self) -> Sequence[int]:
        with self.clock.timing("waiting"):
            return self.federation.online(self._grid)

    def carry(self, inbox: Inbox, plan: Plan) -> None:
        """Who has not answered by the timeout is given up for this round, when the server commits."""
        federation = self.federation
        replies = exchange(self._grid, federation.messages(plan), federation.timeout)
        while True:
            with self.clock.timing("waiting"):
                reply = next(replies, None)
            if reply is None:
                return
            with self.clock.timing("sums"):
                federation.take(reply)

    def evaluate(self, x: Tensor) -> dict[str, float]:
        """On the test data here, and on the clients, whose metrics are named `clients_…`."""
        federation = self.federation
        values: dict[str, float] = {}
        if federation.test is not None:
            if self._model is None:
                self._model = FlatModel(copy.deepcopy(federation.module), federation.layout)
            self._model.load(x)
            module, test = self._model.module, federation.test
            values = combine([evaluate_span(module, federation.objective, test, *span) for span in spans(len(test))])
        questions = list(federation.configure_evaluate(0, ArrayRecord(), ConfigRecord(), self._grid))
        if questions:
            found = federation.aggregate_evaluate(0, exchange(self._grid, questions, federation.timeout))
            values |= {f"clients_{name}": float(v) for name, v in (found or {}).items()}  # type: ignore[arg-type]
            wanted = federation.target[0] if federation.target is not None else ""
            if wanted.startswith("clients_") and wanted not in values:
                log.warning("most clients that answered did not report %s, the target of the run", wanted)
                values[wanted] = math.nan  # not reached; without the name the run would end
        return values

    def close(self) -> None:
        pass


class GridLoop(Loop):
    """A loop that asks who is online before it plans a round."""

    def _round(self) -> str:
        backend = self.backend
        assert isinstance(backend, GridBackend)
        self.server.available = backend.online()
        return super()._round()

    def _after(self, report: RoundReport) -> str:
        assert isinstance(self.backend, GridBackend)
        self.backend.federation.committed()
        return super()._after(report)
