"""A federation simulated on this machine: the loop around Server, carrier and evaluation."""

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fedbcgd.algorithm import Algorithm, make_algorithm
from fedbcgd.carriers.inprocess import InProcess, Transport
from fedbcgd.client import Client
from fedbcgd.data.sources import Source, as_source
from fedbcgd.errors import UserError, unknown
from fedbcgd.evaluation import evaluate
from fedbcgd.flat import FlatModel
from fedbcgd.ledger import Ledger
from fedbcgd.messages import RoundReport
from fedbcgd.objective import Loss, Metrics, Objective, objective
from fedbcgd.report.progress import single
from fedbcgd.server import Server

Row = dict[str, float]
Callback = Callable[["RoundInfo"], None]


@dataclass
class RoundInfo:
    """What a callback sees after each round."""

    report: RoundReport
    row: Row | None  # the newest metrics, in rounds that were evaluated
    server: Server
    progress: float  # of the stopping rules, the nearest: 0 to 1
    stopped: bool = False

    @property
    def ledger(self) -> Ledger:
        return self.server.ledger

    def stop(self) -> None:
        """End the run after this round."""
        self.stopped = True


@dataclass
class Result:
    """A trained model, and how it came about."""

    module: nn.Module
    rows: list[Row]
    algorithm: Algorithm
    ledger: Ledger
    rounds: int
    seconds: float
    stopped: str  # rounds, budget, target, callback, interrupted
    notes: list[str] = field(default_factory=list)

    @property
    def final(self) -> Row:
        return self.rows[-1] if self.rows else {}


class Interrupted(KeyboardInterrupt):
    """Ctrl-C; `result` holds the run up to the last finished round."""

    def __init__(self, result: Result):
        super().__init__("interrupted")
        self.result = result


@dataclass(frozen=True)
class Stop:
    """When a run ends: whichever comes first."""

    rounds: int | None = None
    budget: float | None = None  # upload, in d
    target: tuple[str, float] | None = None  # a metric: at least this, or for a loss at most this

    def check(self, server: Server, evaluated: Row | None) -> str:
        if evaluated and self.target:
            name, value = self.target
            if name not in evaluated:
                raise unknown("target metric", name, evaluated)
            if evaluated[name] <= value if "loss" in name else evaluated[name] >= value:
                return "target"
        if self.rounds is not None and server.round >= self.rounds:
            return "rounds"
        # Another round is begun only if the budget covers it.
        if self.budget is not None and server.ledger.upload_d + _cost(server) > self.budget * (1 + 1e-9):
            return "budget"
        return ""

    def progress(self, server: Server) -> float:
        parts = [server.round / self.rounds] if self.rounds else []
        if self.budget:
            cost = _cost(server)
            parts.append(server.ledger.upload_d / max(cost, cost * math.floor(self.budget / cost * (1 + 1e-9))))
        return min(1.0, max(parts, default=0.0))


def _cost(server: Server) -> float:
    return server.algorithm.upload_d(server.layout)


def simulate(
    model: nn.Module,
    clients: Sequence[Any],
    algorithm: str | Algorithm = "fedbcgd",
    *,
    test: Any = None,
    rounds: int | None = None,
    budget: float | None = None,
    target: float | tuple[str, float] | None = None,
    cohort: int | None = None,
    seed: int = 0,
    loss: Loss | nn.Module | None = None,
    metrics: Metrics | None = None,
    weights: Mapping[str, Tensor] | None = None,
    evaluate_every: int = 1,
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
    device: str | torch.device = "cpu",
    channels_last: bool | None = None,
    transport: Transport | None = None,
    **options: Any,
) -> Result:
    """Train `model` on `clients` with a federated algorithm, on this machine.

    model: any nn.Module; it is copied, not changed. `weights` (a state_dict) replaces its values first.
    clients: for each client a pair (x, y) of tensors, a dictionary of tensors, or a map-style data set.
    algorithm: a registered name, with its hyper-parameters as further options (`blocks=5, lr=0.1, momentum=0.8`), or an
        Algorithm. `fedbcgd.algorithm_names()` lists the names.
    test: data of the same kinds as a client's, for the metrics.
    rounds, budget, target: when to stop, whichever comes first. `budget` is the upload of a client in units of the
        model's size d; `target` is an accuracy on `test`, or a pair such as ("test_loss", 0.5).
    cohort: clients sampled in a round; default 10, or all where there are fewer.
    loss: a callable (model, batch) → scalar, or a criterion module for (x, y) batches; default cross entropy.
    metrics: a callable (model, batch) → dictionary of means over the batch; default loss and accuracy.
    callbacks: called with a RoundInfo after each round; `info.stop()` ends the run.
    progress: show a progress bar; default: when the output is a terminal.
    channels_last: compute in that memory format; default: for models with 2-d convolutions.
    transport: stands for the network, for tests and studies: gets each upload and may lose (None) or damage it.
    """
    algorithm = _algorithm(algorithm, options)
    stop = Stop(rounds, budget, ("test_accuracy", target) if isinstance(target, (int, float)) else target)
    _check(clients, test, stop, evaluate_every)
    data = None if test is None else as_source(test, "test")
    module = _prepare(model, weights, device, channels_last)
    goal = objective(loss, metrics)
    layout = algorithm.uplink.layout(module)
    client = Client(algorithm, layout, module, goal, seed)
    size = min(10, len(clients)) if cohort is None else cohort
    server = Server(algorithm, layout, client.model.vector, len(clients), size, seed)
    cost = _cost(server)
    if budget is not None and cost > budget * (1 + 1e-9):
        raise UserError(
            f"budget: {budget:g} d does not pay for one round of {algorithm.name}, which uploads {cost:.3g} d"
        )
    carrier = InProcess(client, clients, transport)
    return _run(server, carrier, client.model, model, goal, data, stop, evaluate_every, callbacks, progress)


def _run(
    server: Server,
    carrier: InProcess,
    flat: FlatModel,
    original: nn.Module,
    goal: Objective,
    test: Source | None,
    stop: Stop,
    every: int,
    callbacks: Sequence[Callback],
    progress: bool | None,
) -> Result:
    rows: list[Row] = []
    start = time.perf_counter()
    reason = ""
    watchers = list(callbacks)
    with single(server.algorithm.name, progress) as bar:
        watchers += [bar] if bar else []
        try:
            while not reason:
                plan = server.plan()
                carrier.carry(server, plan)
                report = server.commit()
                reason = stop.check(server, None)
                row = None
                if reason or server.round % every == 0:
                    row = measure(server, flat, goal, test, report, time.perf_counter() - start)
                    rows.append(row)
                    reason = stop.check(server, row) or reason
                info = RoundInfo(report, row, server, 1.0 if reason else stop.progress(server))
                for watch in watchers:
                    watch(info)
                if info.stopped and not reason:
                    reason = "callback"
        except KeyboardInterrupt:
            result = _result(server, flat, original, rows, start, "interrupted")
            raise Interrupted(result) from None
        finally:
            carrier.close()
    return _result(server, flat, original, rows, start, reason)


def measure(
    server: Server, flat: FlatModel, goal: Objective, test: Source | None, report: RoundReport, seconds: float
) -> Row:
    """A row of metrics after a round."""
    row: Row = {"round": server.round}
    if test is not None:
        flat.load(server.x)
        row |= {f"test_{name}": value for name, value in evaluate(flat.module, goal, test).items()}
    ledger = server.ledger
    return row | {
        "train_loss": report.train_loss,
        "upload_d": ledger.upload_d,
        "upload_bytes": ledger.upload_bytes,
        "upload_max_bytes": ledger.upload_max_bytes,
        "download_bytes": ledger.download_bytes,
        "gradient_evaluations": ledger.gradient_evaluations,
        "seconds": seconds,
    }


def _result(server: Server, flat: FlatModel, original: nn.Module, rows: list[Row], start: float, reason: str) -> Result:
    flat.load(server.x)
    module = copy.deepcopy(original)  # ordinary parameters, each with memory of its own
    module.load_state_dict(flat.state_dict())
    seconds = time.perf_counter() - start
    return Result(module, rows, server.algorithm, server.ledger, server.round, seconds, reason)


def _algorithm(algorithm: str | Algorithm, options: dict[str, Any]) -> Algorithm:
    if isinstance(algorithm, Algorithm):
        if options:
            raise UserError(
                f"options {', '.join(options)}: an Algorithm has its options already; pass its name to set some"
            )
        return algorithm
    return make_algorithm(algorithm, **options)


def _check(clients: Sequence[Any], test: Any, stop: Stop, every: int) -> None:
    if not len(clients):
        raise UserError("clients: at least one is needed, the list is empty")
    if stop.rounds is None and stop.budget is None and stop.target is None:
        raise UserError("say when to stop: rounds=…, budget=… (upload in d) or target=… (a metric on test)")
    if stop.rounds is not None and stop.rounds < 1:
        raise UserError(f"rounds: at least 1 is needed, given {stop.rounds}")
    if stop.target is not None and test is None:
        raise UserError("target: a metric on test data is wanted, but test is not given")
    if every < 1:
        raise UserError(f"evaluate_every: at least 1 is needed, given {every}")
    if isinstance(clients, (list, tuple)):  # a lazy sequence is checked client by client, as each is used
        for i, data in enumerate(clients):
            as_source(data, f"client {i}")


def _prepare(
    model: nn.Module, weights: Mapping[str, Tensor] | None, device: str | torch.device, channels_last: bool | None
) -> nn.Module:
    """A copy of the model, ready to be laid out: values, device, memory format."""
    module = copy.deepcopy(model).to(device)
    if weights is not None:
        try:
            module.load_state_dict(dict(weights))
        except RuntimeError as error:
            raise UserError(f"weights: {error}") from None
    if channels_last is None:
        channels_last = any(isinstance(m, nn.Conv2d) for m in module.modules())
    if channels_last:
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return module
