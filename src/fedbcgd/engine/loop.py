"""The loop of a run: rounds, evaluations, callbacks, and when to stop."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fedbcgd.core.ledger import Ledger
from fedbcgd.core.messages import RoundReport
from fedbcgd.core.server import Server
from fedbcgd.engine.backend import Backend, OverlappingBackend
from fedbcgd.engine.hooks import RoundHooks
from fedbcgd.engine.signals import uninterrupted
from fedbcgd.engine.threads import one_thread
from fedbcgd.errors import unknown

Row = dict[str, float]
Callback = Callable[["RoundInfo"], None]


@dataclass
class RoundInfo:
    """What a callback sees after each round."""

    report: RoundReport
    row: Row | None  # the newest metrics, where some came in since the last call: of this round, or of one before it
    server: Server
    progress: float  # of the stopping rules, the nearest: 0 to 1
    reason: str  # why the run ends with this round; empty if it goes on
    rows: Sequence[Row] = ()  # all metrics that came in since the last call; `row` is the last of them

    @property
    def ledger(self) -> Ledger:
        return self.server.ledger

    def stop(self) -> None:
        """End the run after this round."""
        self.reason = self.reason or "callback"


@dataclass(frozen=True)
class Stop:
    """When a run ends: whichever comes first."""

    rounds: int | None = None
    budget: float | None = None  # upload, in d
    target: tuple[str, str, float] | None = None  # a metric, "<=" or ">=", a value

    def check(self, server: Server, row: Row | None, watch: RoundHooks | None = None) -> str:
        if row and self.target:
            name, how, value = self.target
            if name not in row:
                raise unknown("target metric", name, row)
            if row[name] <= value if how == "<=" else row[name] >= value:
                return "target"
        if self.rounds is not None and server.round >= self.rounds:
            return "rounds"
        # Another round is begun only if the budget covers it.
        if self.budget is not None:
            need = server.next_upload_d() if watch is None else watch.next_upload_d(server)
            if server.ledger.upload_d + need > self.budget * (1 + 1e-9):
                return "budget"
        return ""

    def progress(self, server: Server) -> float:
        parts = [server.round / self.rounds] if self.rounds else []
        if self.budget and cost(server):
            affordable = math.floor(self.budget / cost(server) * (1 + 1e-9))
            parts.append(server.ledger.upload_d / max(1, affordable) / cost(server))
        return min(1.0, max(parts, default=0.0))


DIVERGED = "diverged"  # how a run ends whose uploads are no numbers any more


@dataclass
class Outcome:
    """How a run went."""

    algorithm: str
    rows: list[Row]
    ledger: Ledger
    rounds: int
    seconds: float
    stopped: str  # rounds, budget, target, callback, interrupted, diverged

    @property
    def diverged(self) -> bool:
        return self.stopped == DIVERGED

    @property
    def final(self) -> Row:
        return self.rows[-1] if self.rows else {}

    @classmethod
    def of(cls, loop: "Loop", reason: str) -> "Outcome":
        server = loop.server
        return cls(server.algorithm.name, loop.rows, server.ledger, server.round, loop.seconds, reason)

    def summary(self) -> dict[str, Any]:
        """Plain values; `from_summary` undoes it."""
        head = {"algorithm": self.algorithm, "rounds": self.rounds, "seconds": self.seconds, "stopped": self.stopped}
        return head | {"final": self.final, "ledger": self.ledger.totals()}

    @classmethod
    def from_summary(cls, summary: dict[str, Any], rows: list[Row]) -> "Outcome":
        ledger = Ledger.from_totals(summary["ledger"])
        totals = [value for name, value in ledger.totals().items() if name != "block_bytes"]
        if not all(map(math.isfinite, (*totals, *ledger.block_bytes, summary["rounds"], summary["seconds"]))):
            raise ValueError("a summary with numbers that are none")
        names = str(summary["algorithm"]), str(summary["stopped"])
        return cls(names[0], rows, ledger, summary["rounds"], summary["seconds"], names[1])


def cost(server: Server) -> float:
    """Upload of a round, in d."""
    return server.algorithm.upload_d(server.layout)


@dataclass
class Loop:
    """A run in progress. `rows` and `seconds` may start from an earlier part of the same run."""

    server: Server
    backend: Backend
    stop: Stop
    every: int = 1
    callbacks: Sequence[Callback] = ()
    metric_prefix: str = "test"
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0
    watch: RoundHooks | None = None  # the network of the run
    overlap: bool = False  # whether a row may come with the round after its own
    _lap: float = field(default_factory=time.perf_counter)
    _due: Row | None = None  # a row whose metrics are not there yet
    _told: int = 0  # rows that the callbacks have seen

    def run(self) -> str:
        """Go on until a stopping rule holds; why it stopped. Ctrl-C leaves everything as after the last whole round."""
        self._lap = time.perf_counter()
        self._due, self._told = None, len(self.rows)
        try:
            with one_thread():  # the cores belong to the workers
                reason = self._pending()
                while not reason:
                    reason = self._round()
        except BaseException:
            with uninterrupted():
                self.server.abandon()
                self.backend.store.abandon()
                self.lap()
            raise
        return reason

    def lap(self) -> float:
        """Seconds of the whole run up to now."""
        now = time.perf_counter()
        self.seconds += now - self._lap
        self._lap = now
        return self.seconds

    def _pending(self) -> str:
        """What is left to do for rounds before this call: nothing, or the evaluation that an interrupt cut off."""
        last = self.rows[-1] if self.rows else None
        if self.server.last is not None and (last is None or last["round"] != self.server.round):
            return self._after(self.server.last)
        return self.stop.check(self.server, last, self.watch)

    def _round(self) -> str:
        with uninterrupted():
            plan = self.watch.plan(self.server) if self.watch else self.server.plan()
        self.backend.carry(self.watch.inbox(self.server, self.backend) if self.watch else self.server, plan)
        self._collect()  # before the round counts: whoever is interrupted here finds the model that is due
        with self.backend.clock.timing("sums"), uninterrupted():
            report = self.server.commit()
            self.backend.store.commit()
            if self.watch:
                self.watch.committed(self.server)
        return self._after(report)

    def _after(self, report: RoundReport) -> str:
        """Evaluate where it is time to, tell the callbacks, and say whether to stop."""
        server = self.server
        reason = self.stop.check(server, None, self.watch)
        if reason or server.round % self.every == 0:
            self._due = self._columns(report)
            if reason or not self._begin():
                self._collect(server.x)
                reason = self.stop.check(server, self.rows[-1], self.watch)
        new = self.rows[self._told :]
        progress = 1.0 if reason else self.stop.progress(server)
        info = RoundInfo(report, new[-1] if new else None, server, progress, reason, new)
        for callback in self.callbacks:
            callback(info)
            if info.reason and (not self.rows or self.rows[-1]["round"] != server.round):
                # it asked to stop: what follows sees a last row
                self._due = self._due or self._columns(report)
                self._collect(server.x)
                info.row = self.rows[-1]
                info.rows = self.rows[self._told :]
        self._told = len(self.rows)
        return info.reason

    def _begin(self) -> bool:
        """Have the model of this round evaluated beside the next one, where that is possible and nothing waits for it."""
        backend = self.backend
        if not self.overlap or self.stop.target is not None or not isinstance(backend, OverlappingBackend):
            return False
        backend.begin_evaluation(self.server.x)
        return True

    def _collect(self, x: Tensor | None = None) -> None:
        """The row that is due: its model is x, or is being evaluated already."""
        if self._due is None:
            return
        backend = self.backend
        with backend.clock.timing("evaluation"):
            if x is not None:
                metrics = backend.evaluate(x)
            else:
                assert isinstance(backend, OverlappingBackend)
                metrics = backend.finish_evaluation()
        named = {n if n.startswith("clients_") else f"{self.metric_prefix}_{n}": v for n, v in metrics.items()}
        self.rows.append({"round": self._due.pop("round"), **named, **self._due})
        self._due = None

    def _columns(self, report: RoundReport) -> Row:
        """All of a row but its metrics."""
        ledger = self.server.ledger
        return {
            "round": self.server.round,
            "train_loss": report.train_loss,
            "upload_d": ledger.upload_d,
            "upload_bytes": ledger.upload_bytes,
            "upload_max_bytes": ledger.upload_max_bytes,
            "upload_wait_bytes": ledger.upload_wait_bytes,
            "download_bytes": ledger.download_bytes,
            "gradient_evaluations": ledger.gradient_evaluations,
            **(self.watch.columns() if self.watch else {}),
            "seconds": self.lap(),
        }
