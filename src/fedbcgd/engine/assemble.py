"""Puts a run together: `make_job` prepares model and data, `Run` makes server, client state, backend and loop."""

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedbcgd.core.algorithm import Algorithm
from fedbcgd.core.objective import PRECISIONS, Loss, Metrics, Objective, Precision
from fedbcgd.core.objective import objective as make_objective
from fedbcgd.core.onednn import has_faulty_kernel
from fedbcgd.core.own_training import LIKELY_CAUSE, Train, check_own_training
from fedbcgd.core.reading import shorten
from fedbcgd.core.server import Server
from fedbcgd.core.stack import unbatchable_reason
from fedbcgd.core.vector import Layout
from fedbcgd.data.sources import as_source, in_channels_last, pooled
from fedbcgd.engine.backend import Backend
from fedbcgd.engine.checkpoint import Checkpoints
from fedbcgd.engine.client_evaluation import ClientEvaluation
from fedbcgd.engine.client_state import StateStore
from fedbcgd.engine.hooks import RoundHooks
from fedbcgd.engine.job import Job
from fedbcgd.engine.loop import Loop, Outcome, Stop
from fedbcgd.engine.probe import computes_in_channels_last, takes_channels_last
from fedbcgd.errors import UserError

log = logging.getLogger("fedbcgd")

DEFAULT_COHORT = 10

MakeBackend = Callable[[Job, StateStore, int], Backend]  # a function of job, client state and cohort


class Run:
    """A run in memory: server, clients' state, backend and loop. Every run is put together here.

    It is used in three steps. The first finds every mistake of the user, before anything is written; the second
    restores a checkpoint, before any work begins; the third makes backend and loop:

        with Run(job, stop, cohort=10) as run:
            run.restore(checkpoints)
            reason = run.start(make_backend, callbacks=[show]).run()
            outcome = run.outcome(reason)

    Leaving the `with` block releases backend and state.

    Args:
        job: the clients' work.
        stop: when the run ends.
        cohort: clients of a round; None: 10, or all if there are fewer.
        hooks: called in every round, see `RoundHooks`; None: no hooks.
        clients: how many clients there are; None: those of the job.
        x: the model to begin with; None: the job's.
        reliable: whether every client that is given a task will answer it; see `Conditions`.
        keeps_state: whether the clients' state is kept here; on Flower the clients keep it themselves.
        clients_evaluation: evaluates the model on each client's own examples; None: it is not.

    Raises:
        UserError: cohort or budget do not fit the job.
    """

    def __init__(
        self,
        job: Job,
        stop: Stop,
        *,
        cohort: int | None = None,
        hooks: RoundHooks | None = None,
        clients: int | None = None,
        x: Tensor | None = None,
        reliable: bool = True,
        keeps_state: bool = True,
        clients_evaluation: ClientEvaluation | None = None,
    ):
        self.job = job
        self.stop = stop
        self.hooks = hooks or RoundHooks()
        self.server = make_server(job, cohort, stop, self.hooks, clients=clients, x=x, reliable=reliable)
        self.store: StateStore | None = None
        self.loop: Loop | None = None
        self._keeps_state = keeps_state
        self._clients_evaluation = clients_evaluation

    def restore(self, checkpoints: Checkpoints | None = None) -> dict[str, Any] | None:
        """Create the clients' state; if there is a checkpoint, load it into that state and into the server.

        Args:
            checkpoints: the run's checkpoints, whose folder also holds the clients' state; None: no checkpoints, and
                state in a temporary file.

        Returns:
            The checkpoint's plain values; None if there is no checkpoint.
        """
        names = self.job.algorithm.state_names if self._keeps_state else ()
        file = checkpoints.clients if checkpoints is not None and self._keeps_state else None
        self.store = StateStore(names, self.job.layout.dim, self.job.layout.dtype, file)
        return None if checkpoints is None else checkpoints.restore(self.server, self.store)

    def start(self, make_backend: MakeBackend, *, stop: Stop | None = None, **options: Any) -> Loop:
        """Make backend and loop.

        Args:
            make_backend: returns a backend for a job, the clients' state and the number of clients in a round.
            stop: replaces the stopping rule of the run, to continue it after its first end.
            **options: further arguments of `Loop`.
        """
        if self.store is None:
            self.restore()
        assert self.store is not None
        backend = make_backend(self.job, self.store, self.server.cohort)
        if self._clients_evaluation is not None:
            options["measure_clients"] = self._clients_evaluation.measure
        self.loop = Loop(self.server, backend, stop or self.stop, hooks=self.hooks, model=self.module, **options)
        return self.loop

    def outcome(self, reason: str) -> Outcome:
        """Return the outcome of the run, which stopped for this reason."""
        assert self.loop is not None
        return Outcome.of(self.loop, reason)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the model as an ordinary state_dict."""
        return self.job.state_dict(self.server.x)

    def module(self) -> nn.Module:
        """Return a copy of the model as it is now."""
        module = copy.deepcopy(self.job.module)
        module.load_state_dict(self.state_dict())
        return module

    def close(self) -> None:
        """Release all resources; safe to call twice."""
        if self.loop is not None:
            self.loop.backend.close()
        if self.store is not None:
            self.store.close()

    def __enter__(self) -> "Run":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def make_job(
    model: nn.Module,
    clients: Sequence[Any],
    algorithm: Algorithm,
    test: Any,
    seed: int,
    *,
    loss: Loss | nn.Module | None = None,
    metrics: Metrics | None = None,
    weights: Mapping[str, Tensor] | None = None,
    device: str | torch.device = "cpu",
    channels_last: bool | None = None,
    batch_clients: int | None = None,
    train: Train | None = None,
    precision: Precision = "fp32",
) -> Job:
    """Return all that a process needs for the clients' work, with the model copied and laid out.

    Args:
        model: it is copied, not changed.
        clients: the data of each client; empty if the clients are on other machines (Flower).
        algorithm: the four choices.
        test: data for the metrics, or None.
        seed: fixes every random draw.
        loss: see `fedbcgd.simulate`.
        metrics: see `fedbcgd.simulate`.
        weights: a state_dict that replaces the model's values.
        device: where the model computes.
        channels_last: whether to compute in that memory format; None: decide by a trial on the clients' or test data.
        batch_clients: how many clients are trained in one batch, at most; None: each by itself.
        train: see `fedbcgd.simulate`.
        precision: see `fedbcgd.simulate`.

    Raises:
        UserError: the model, the data and the algorithm do not fit together.
    """
    module = _copied(model).to(make_device(device))
    if weights is not None:
        _load_weights(module, weights)
    algorithm.check(module)  # before any worker starts
    if train is not None:
        _check_with_train(train, algorithm, batch_clients, precision)
        channels_last = bool(channels_last)  # a user's data is not a Source, so no trial is possible
    if precision not in PRECISIONS:
        raise UserError(f"precision: expected {' or '.join(map(repr, PRECISIONS))}, got {precision!r}")
    objective = make_objective(loss, metrics, precision)
    data = None if test is None else as_source(test, "test")
    if channels_last is None:
        channels_last = computes_in_channels_last(module, clients, data, objective)
    if channels_last:
        _check_kernels(module)
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    layout = algorithm.uplink.layout(module)
    if precision == "bf16" and layout.dtype != torch.float32:
        raise UserError(
            f"precision: expected 'fp32' for a model of {layout.dtype}, which computes in its own type, got 'bf16'; "
            "model.float() makes one that takes both"
        )
    if channels_last and train is None and takes_channels_last(module, clients, data, objective):
        clients = in_channels_last(clients)
        data = None if data is None else in_channels_last([data])[0]
    if algorithm.uplink.pooled:
        clients = [pooled(clients)]
    if batch_clients is not None:
        _check_batchable(batch_clients, algorithm, layout, module, objective, clients)
    job = Job(algorithm, layout, module, objective, seed, clients, data, channels_last, batch_clients, train)
    module_device = next(module.parameters()).device
    if module_device.type != "cpu":
        job.move_to(module_device)
    return job


def _copied(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except RuntimeError as error:
        if "deepcopy protocol" not in str(error):
            raise
        raise UserError(
            "model: expected a module that can be copied (copy.deepcopy), got one with a computed tensor as an attribute; "
            "if that is due to torch.nn.utils.weight_norm, use torch.nn.utils.parametrizations.weight_norm"
        ) from error


def _check_with_train(train: Train, algorithm: Algorithm, batch_clients: int | None, precision: Precision) -> None:
    """Raise a UserError if a user's own training function cannot be used with one of these."""
    check_own_training(train, algorithm)
    if batch_clients is not None:
        raise UserError(
            f"batch_clients: expected none with train, which trains one client at a time, got {batch_clients}; leave it "
            "out"
        )
    if precision != "fp32":
        raise UserError(
            f"precision: expected 'fp32' with train, got {precision!r}; use torch.autocast in your function"
        )


def _load_weights(module: nn.Module, weights: Any) -> None:
    if not isinstance(weights, Mapping):
        raise UserError(f"weights: expected a state_dict (torch.load gives one), got {weights!r}")
    try:
        module.load_state_dict(dict(weights))
    except RuntimeError as error:
        difference = shorten(" ".join(str(error).split("\n")[1:]).strip() or str(error), 1000)
        raise UserError(f"weights: expected a state_dict of this model, got another one: {difference}") from None


def _check_kernels(module: nn.Module) -> None:
    if any(map(has_faulty_kernel, module.modules())):
        raise UserError(
            "channels_last: expected False, since the model has a 1×1 convolution with a stride and fewer than 8 input "
            "channels, got True"
        )


def _check_batchable(
    count: Any, algorithm: Algorithm, layout: Layout, module: nn.Module, objective: Objective, clients: Sequence[Any]
) -> None:
    check_integer("batch_clients", count, 1)
    why = unbatchable_reason(algorithm.local, layout, module, objective)
    if getattr(as_source(clients[0], "client 0"), "augment", False):
        why = why or "augmentation is drawn for each client's minibatch"
    if why:
        raise UserError(f"batch_clients: expected none here, got {count}: {why}; leave it out")


def make_server(
    job: Job,
    cohort: int | None,
    stop: Stop,
    hooks: RoundHooks | None = None,
    *,
    clients: int | None = None,
    x: Tensor | None = None,
    reliable: bool = True,
) -> Server:
    """Return the server of a job; the arguments are those of `Run`."""
    hooks = hooks or RoundHooks()
    algorithm, layout = job.algorithm, job.layout
    count = len(job.clients) if clients is None else clients
    if algorithm.uplink.pooled and stop.rounds is None and stop.target is None:
        raise UserError(
            f"rounds, target: expected one of them, got none; {algorithm.name} uploads nothing, so no budget ends it"
        )
    if cohort is None or algorithm.uplink.pooled:
        cohort = min(DEFAULT_COHORT, count)
    check_integer("cohort", cohort, 1)
    if layout.blocks > cohort and not algorithm.uplink.pooled:
        log.warning(
            "blocks: %d blocks but %d clients in a round, so at most %d of the %d are trained in it; blocks='auto' takes no "
            "more blocks than clients", layout.blocks, cohort, cohort, layout.blocks
        )  # fmt: skip
    sampled = cohort if cohort > count else hooks.sampled(cohort, count)
    conditions = hooks.conditions(cohort, sampled, layout)
    if not reliable:
        conditions = replace(conditions, reliable=False)
    if job.train is not None and not conditions.likely_cause:
        conditions = replace(conditions, likely_cause=LIKELY_CAUSE)
    if x is None:
        x = layout.vector(job.module.state_dict(), next(job.module.parameters()).device)
    server = Server(algorithm, layout, x, count, sampled, job.seed, conditions)
    need = hooks.next_upload_d(server)
    if stop.budget is not None and need > stop.budget * (1 + 1e-9):
        raise UserError(
            f"budget: expected at least {need:.3g} d, the upload of one round of {algorithm.name}, got {stop.budget:g} d"
        )
    return server


def check_integer(name: str, value: Any, least: int) -> None:
    """Raise a UserError unless the value is an integer (True and False are none) of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not least <= value < 2**63:
        raise UserError(f"{name}: expected an integer ≥ {least}, got {value!r}")


def make_device(name: str | torch.device) -> torch.device:
    """Return the device of this name, after a trial that it can be used.

    Raises:
        UserError: this machine has no such device.
    """
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f"device: expected one of this machine, such as 'cpu', got {str(name)!r}: {str(error).splitlines()[0]}"
        ) from None
    return device
