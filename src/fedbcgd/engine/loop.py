"""The loop of a run: rounds, evaluations, callbacks, and when to stop."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedbcgd.core.ledger import Ledger
from fedbcgd.core.messages import RoundReport
from fedbcgd.core.server import Server
from fedbcgd.engine.backend import Backend, OverlappingBackend
from fedbcgd.engine.hooks import RoundHooks
from fedbcgd.engine.signals import uninterrupted
from fedbcgd.engine.threads import threads
from fedbcgd.errors import unknown

Row = dict[str, float]
Callback = Callable[["RoundInfo"], None]


@dataclass
class RoundInfo:
    """What a callback sees after each round."""

    report: RoundReport  # report.round counts from 0, row["round"] from 1
    row: Row | None  # the last of `rows`; with overlapping evaluation it is of an earlier round; None: no new row
    server: Server
    progress: float  # 0 to 1, by the stopping rule that is nearest to its end
    reason: str  # why the run ends with this round; empty if it continues
    rows: Sequence[Row] = ()  # all rows of metrics since the last call
    seconds: float = 0.0  # of the whole run so far
    metric: str | None = None  # the metric that the run names as its own, such as "mae"
    model: "Callable[[], nn.Module] | None" = None
    client_metrics: Mapping[int, Row] = field(default_factory=dict)  # of each client, if they were measured this round

    @property
    def module(self) -> nn.Module:
        """A copy of the model as it is after this round, made when it is asked for."""
        assert self.model is not None
        return self.model()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the model as it is after this round."""
        return self.module.state_dict()

    @property
    def cohort(self) -> list[int]:
        """The clients whose uploads arrived in this round, refused ones included, in ascending order."""
        return sorted({entry.client for entry in self.ledger.entries if entry.client >= 0})

    @property
    def ledger(self) -> Ledger:
        """The account of the traffic so far."""
        return self.server.ledger

    def stop(self) -> None:
        """End the run after this round."""
        self.reason = self.reason or "callback"


@dataclass(frozen=True)
class Stop:
    """When a run ends: whichever comes first."""

    rounds: int | None = None
    budget: float | None = None  # mean upload of a client, in d
    target: tuple[str, str, float] | None = None  # a metric, "<=" or ">=", a value

    def check(self, server: Server, row: Row | None, hooks: RoundHooks) -> str:
        """Return which rule ends the run now: "target", "rounds" or "budget"; empty if none does."""
        if row and self.target:
            name, how, value = self.target
            column = next((c for c in (name, f"test_{name}", f"validation_{name}") if c in row), None)
            if column is None:
                raise unknown("target", name, row)
            if row[column] <= value if how == "<=" else row[column] >= value:
                return "target"
        if self.rounds is not None and server.round >= self.rounds:
            return "rounds"
        # Another round is begun only if the budget covers it.
        spent = server.ledger.upload_d
        if self.budget is not None and spent + hooks.next_upload_d(server) > self.budget * (1 + 1e-9):
            return "budget"
        return ""

    def progress(self, server: Server) -> float:
        """Return how far the run is, 0 to 1, by the rule that is nearest to its end."""
        parts = [server.round / self.rounds] if self.rounds else []
        if self.budget and (per_round := mean_round_upload(server)):
            affordable = max(1, math.floor(self.budget / per_round * (1 + 1e-9)))  # rounds
            parts.append(server.ledger.upload_d / (per_round * affordable))
        return min(1.0, max(parts, default=0.0))


DIVERGED = "diverged"  # how a run ends if most of its uploads are refused


@dataclass
class Outcome:
    """How a run went."""

    algorithm: str
    rows: list[Row]
    ledger: Ledger
    rounds: int
    seconds: float
    stopped: str  # rounds, budget, target, patience, callback, interrupted, diverged
    metric: str | None = None  # the metric that the run names as its own, such as "mae"
    goal: str | None = None  # "min" or "max", if the run says what this metric should do

    @property
    def diverged(self) -> bool:
        """Whether most uploads were refused in the end."""
        return self.stopped == DIVERGED

    @property
    def final(self) -> Row:
        """The last row of metrics; empty if there is none."""
        return self.rows[-1] if self.rows else {}

    @classmethod
    def of(cls, loop: "Loop", reason: str) -> "Outcome":
        """Return the outcome of a loop that ended for this reason."""
        server = loop.server
        name, stated = server.algorithm.name, (loop.metric, loop.goal)
        return cls(name, loop.rows, server.ledger, server.round, loop.seconds, reason, *stated)

    def summary(self) -> dict[str, Any]:
        """Return plain values, which `from_summary` reads."""
        head = {"algorithm": self.algorithm, "rounds": self.rounds, "seconds": self.seconds, "stopped": self.stopped}
        stated = {name: value for name in ("metric", "goal") if (value := getattr(self, name)) is not None}
        return head | stated | {"final": self.final, "ledger": self.ledger.totals()}

    @classmethod
    def from_summary(cls, summary: dict[str, Any], rows: list[Row]) -> "Outcome":
        """Read what `summary` returned.

        Raises:
            ValueError: a number is not finite.
        """
        ledger = Ledger.from_totals(summary["ledger"])
        totals = [value for name, value in ledger.totals().items() if name != "block_bytes"]
        if not all(map(math.isfinite, (*totals, *ledger.block_bytes, summary["rounds"], summary["seconds"]))):
            raise ValueError("summary: expected finite numbers, got NaN or infinity")
        names = str(summary["algorithm"]), str(summary["stopped"])
        stated = [value if isinstance(value := summary.get(name), str) else None for name in ("metric", "goal")]
        return cls(names[0], rows, ledger, summary["rounds"], summary["seconds"], names[1], *stated)


def train_columns(report: RoundReport) -> Row:
    """Return the metrics of a round's training, under their names in a row: `train_…`."""
    metrics = {f"train_{name.removeprefix('train_')}": value for name, value in report.metrics.items()}
    return {**metrics, "train_loss": report.train_loss}


def mean_round_upload(server: Server) -> float:
    """Return the mean upload of a client in a round, in d."""
    return server.algorithm.upload_d(server.layout)


@dataclass
class Loop:
    """A run in progress: rounds, evaluations, callbacks, until a stopping rule holds.

    Attributes:
        server: holds the model.
        backend: runs the tasks of a round.
        stop: when the run ends.
        every: rounds between evaluations; the last round is always evaluated.
        callbacks: called after each round.
        metric_prefix: begins the metrics' names in a row, such as "test".
        rows: the metrics so far; those of an earlier part of the same run come first.
        seconds: the time that the run took so far.
        hooks: called in every round.
        overlap: whether a model may be evaluated during the next round; its row then comes one round later.
        on_commit: called right after a commit, while signals are still delayed.
        metric: the metric that the run names as its own, such as "mae".
        goal: "min" or "max", if the run says what this metric should do.
        model: returns a copy of the model, for callbacks.
        measure_clients: returns further columns of the model x after a number of rounds, and the metrics of each client, see
            `ClientEvaluation`.
        folder: that of the run; None: it has none.
        metadata: of the files in which callbacks write the model.
        ended: set by a callback's `start` if the resumed run was over already: the reason, such as "patience"; else empty.
    """

    server: Server
    backend: Backend
    stop: Stop
    every: int = 1
    callbacks: Sequence[Callback] = ()
    metric_prefix: str = "test"
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0
    hooks: RoundHooks = field(default_factory=RoundHooks)
    overlap: bool = False
    on_commit: Callable[[], None] = lambda: None
    metric: str | None = None
    goal: str | None = None
    model: Callable[[], nn.Module] | None = None
    measure_clients: Callable[[Tensor, int], tuple[Row, dict[int, Row]]] = lambda x, round: ({}, {})
    folder: Path | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    ended: str = ""
    _lap_start: float = field(default_factory=time.perf_counter)
    _pending_row: Row | None = None  # a row whose metrics are still being computed
    _reported: int = 0  # rows that the callbacks have seen
    _client_metrics: dict[int, Row] = field(default_factory=dict)  # that were measured this round

    def run(self) -> str:
        """Run rounds until a stopping rule holds, and return its name.

        If an exception (Ctrl-C too) interrupts a round, server and state are as after the last finished round.
        """
        self._lap_start = time.perf_counter()
        self._pending_row, self._reported = None, len(self.rows)
        for callback in self.callbacks:
            start = getattr(callback, "start", None)
            if start is not None:
                start(self)
        try:
            with threads(1):  # the cores belong to the workers
                reason = self._finish_last_round() or self.ended
                while not reason:
                    reason = self._round()
        except BaseException:
            with uninterrupted():
                self.server.abandon()
                self.backend.store.abandon()
                self.update_seconds()
            raise
        finally:
            for callback in self.callbacks:
                end = getattr(callback, "end", None)
                if end is not None:
                    end(self)
        return reason

    def update_seconds(self) -> float:
        """Update `seconds`, the time of the whole run, and return it."""
        now = time.perf_counter()
        self.seconds += now - self._lap_start
        self._lap_start = now
        return self.seconds

    def _finish_last_round(self) -> str:
        """Evaluate the last round if an interrupt came between its commit and its evaluation.

        Returns:
            The reason to stop; empty if there is none.
        """
        last = self.rows[-1] if self.rows else None
        if self.server.last is not None and (last is None or last["round"] != self.server.round):
            return self._after_commit(self.server.last)
        return self.stop.check(self.server, last, self.hooks)

    def _round(self) -> str:
        self.hooks.prepare()
        with uninterrupted():
            plan = self.hooks.plan(self.server)
        self.backend.run_round(self.hooks.inbox(self.server, self.backend), plan)
        self._collect()  # before the commit: if this is interrupted, x has not moved yet and the row can be computed again
        with self.backend.timings.measure("sums"), uninterrupted():
            report = self.server.commit()
            self.backend.store.commit()
            self.hooks.committed(self.server)
            self.on_commit()
        return self._after_commit(report)

    def _after_commit(self, report: RoundReport) -> str:
        """Evaluate if this round is due, call the callbacks, and return the reason to stop; empty if there is none."""
        server = self.server
        self._client_metrics = {}
        reason = self.stop.check(server, None, self.hooks)
        if reason or server.round % self.every == 0:
            self._pending_row = self._columns(report)
            if reason or not self._begin_evaluation():
                self._collect(server.x)
                reason = self.stop.check(server, self.rows[-1], self.hooks)
        new = self.rows[self._reported :]
        progress = 1.0 if reason else self.stop.progress(server)
        row, seconds = new[-1] if new else None, self.update_seconds()
        of_clients = self._client_metrics
        info = RoundInfo(report, row, server, progress, reason, new, seconds, self.metric, self.model, of_clients)
        for callback in self.callbacks:
            callback(info)
            if info.reason and (not self.rows or self.rows[-1]["round"] != server.round):
                # This callback stopped the run: the callbacks after it see a last row.
                self._pending_row = self._pending_row or self._columns(report)
                self._collect(server.x)
                info.row = self.rows[-1]
                info.rows = self.rows[self._reported :]
                info.client_metrics = self._client_metrics
        self._reported = len(self.rows)
        return info.reason

    def _begin_evaluation(self) -> bool:
        """Start to evaluate the model during the next round; return whether that is possible."""
        backend = self.backend
        if not self.overlap or self.stop.target is not None or not isinstance(backend, OverlappingBackend):
            return False
        backend.begin_evaluation(self.server.x)
        return True

    def _collect(self, x: Tensor | None = None) -> None:
        """Complete the pending row, if there is one: with the metrics of x, or of the evaluation in progress."""
        if self._pending_row is None:
            return
        backend = self.backend
        with backend.timings.measure("evaluation"):
            if x is not None:
                metrics = backend.evaluate(x)
            else:
                assert isinstance(backend, OverlappingBackend)
                metrics = backend.finish_evaluation()
        named = {n if n.startswith("clients_") else f"{self.metric_prefix}_{n}": v for n, v in metrics.items()}
        self.rows.append({"round": self._pending_row.pop("round"), **named, **self._pending_row})
        self._pending_row = None

    def _columns(self, report: RoundReport) -> Row:
        """Return the columns of a row that are not metrics of the test data.

        A new column of costs goes here, into COSTS of report/page/numbers.js and into docs/runs.md.
        """
        ledger = self.server.ledger
        with self.backend.timings.measure("evaluation"):
            of_clients, self._client_metrics = self.measure_clients(self.server.x, self.server.round)
        return {
            "round": self.server.round,
            **of_clients,
            **train_columns(report),
            "upload_d": ledger.upload_d,
            "upload_bytes": ledger.upload_bytes,
            "upload_max_bytes": ledger.upload_max_bytes,
            "upload_wait_bytes": ledger.upload_wait_bytes,
            "download_bytes": ledger.download_bytes,
            "gradient_evaluations": ledger.gradient_evaluations,
            **self.hooks.columns(),
            "seconds": self.update_seconds(),
        }
