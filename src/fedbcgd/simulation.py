"""A federation simulated on this machine, from Python: `simulate`."""

import copy
import logging
import math
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedbcgd.algorithm import Algorithm, make_algorithm
from fedbcgd.carriers import Carrier, InProcess, Workers
from fedbcgd.carriers.inprocess import Transport
from fedbcgd.carriers.where import Where
from fedbcgd.data.sources import Source, as_source, batch_in_channels_last, in_channels_last, pooled, to_device
from fedbcgd.errors import Diverged, UserError
from fedbcgd.flat import Layout
from fedbcgd.job import Job
from fedbcgd.local.stack import why_not
from fedbcgd.loop import Callback, Loop, Outcome, Stop
from fedbcgd.network.settings import NO_WORKERS, Network, as_network
from fedbcgd.network.watch import Watch, fit_to_links
from fedbcgd.objective import Loss, Metrics, Objective, objective
from fedbcgd.onednn import keep_within_bounds, writes_astray
from fedbcgd.processes import cores, start_early
from fedbcgd.report.progress import single
from fedbcgd.server import Server
from fedbcgd.state import StateStore
from fedbcgd.streams import stream
from fedbcgd.threads import one_thread

log = logging.getLogger("fedbcgd")


@dataclass
class Result(Outcome):
    """How a run went, and the model it trained."""

    module: nn.Module


class Interrupted(KeyboardInterrupt):
    """Ctrl-C; `result` holds the run up to the last finished round."""

    def __init__(self, result: Result):
        super().__init__("interrupted")
        self.result = result


def simulate(
    model: nn.Module,
    clients: Sequence[Any],
    algorithm: str | Algorithm = "fedbcgd",
    *,
    test: Any = None,
    rounds: int | None = None,
    budget: float | None = None,
    target: float | tuple[str, float] | tuple[str, str, float] | None = None,
    cohort: int | None = None,
    seed: int = 0,
    loss: Loss | nn.Module | None = None,
    metrics: Metrics | None = None,
    weights: Mapping[str, Tensor] | None = None,
    evaluate_every: int = 1,
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
    workers: int | None = None,
    carrier: str = "workers",
    address: str | None = None,
    gpus: float | None = None,
    device: str | torch.device = "cpu",
    channels_last: bool | None = None,
    together: int | None = None,
    transport: Transport | None = None,
    network: str | Mapping[str, Any] | Network | None = None,
    **options: Any,
) -> Result:
    """Train `model` on `clients` with a federated algorithm, on this machine.

    model: any nn.Module; it is copied, not changed. `weights` (a state_dict) replaces its values first.
    clients: for each client a pair (x, y) of tensors, a dictionary of tensors, or a map-style data set.
    algorithm: a registered name, with its hyper-parameters as further options (`blocks=5, lr=0.1, momentum=0.8`), or an
        Algorithm. `fedbcgd.algorithm_names()` lists the names.
    test: data of the same kinds as a client's, for the metrics.
    rounds, budget, target: when to stop, whichever comes first. `budget` is the upload of a client in units of the
        model's size d; `target` is an accuracy on `test`, a pair such as ("test_loss", 0.5) (names with "loss" or
        "error" are to fall, others to rise), or ("test_mse", "<=", 0.1).
    cohort: clients sampled in a round; default 10, or all where there are fewer.
    seed: of every random draw. evaluate_every: rounds between evaluations; the last round is always evaluated.
    loss: a callable (model, batch) → scalar, or a criterion module for (x, y) batches; default cross entropy.
    metrics: a callable (model, batch) → dictionary of means over the batch, or of boolean tensors (an entry for each
        example), which are counted exactly; default loss and accuracy.
    callbacks: called with a RoundInfo after each round; `info.stop()` ends the run.
    progress: show a progress bar; default: when the output is a terminal.
    workers: processes that do the clients' work; default one per core, 0 for this process itself (for debugging, and
        quicker to start). The result is the same to the bit.
    carrier: "workers", processes of this machine, or "ray" (extra `ray`), actors of a Ray cluster. address: of the cluster
        ("auto", "host:port"); without one Ray is started here. gpus: the share of a GPU that each actor gets.
    channels_last: compute in that memory format; default: for models with 2-d convolutions that can.
    together: compute up to so many clients in one multiplication, with models that offer it (logistic regression and other
        linear ones): much faster for small models, and equal up to rounding.
    transport: stands for the network, for tests and studies: gets each upload and may lose (None) or damage it. Only
        with workers=0.
    network: whose links the clients have: the name of a profile ("4g", "broadband", "datacentre", "mix") or a dictionary of
        the settings of `[network]` in docs/network.md. Rows then have `hours`, on the clock of that network; deadlines,
        over-sampling and faults are among the settings.
    """
    algorithm = _algorithm(algorithm, options)
    conditions = as_network(network)
    stop = Stop(rounds, budget, make_target(target))
    _check(model, clients, test, stop, evaluate_every, seed, callbacks)
    if cohort is not None:
        _whole("cohort", cohort, 1)
    if transport is not None and (workers or carrier == "ray"):
        raise UserError("transport: only the carrier in this process has one (workers=0)")
    where = Where(carrier, 0 if transport is not None else workers, address, gpus, str(device))
    where.check()
    if conditions is not None and conditions.crash and (where.workers == 0 or carrier == "ray"):
        raise UserError(f"network.{NO_WORKERS}")
    if carrier == "workers" and where.workers != 0 and str(device) == "cpu":
        start_early()
    algorithm = fit_to_links(algorithm, conditions, model, clients, cohort, seed)
    job = make_job(model, clients, algorithm, test, seed, loss, metrics, weights, where.home, channels_last, together)
    watch = None if conditions is None else Watch(job, conditions)
    server = make_server(job, cohort, stop, watch)
    server.reliable = transport is None
    store = StateStore(algorithm.state_names, job.layout.dim, job.layout.dtype)
    carried = make_carrier(job, store, server.cohort, where, transport)
    try:
        with single(algorithm.name, progress) as bar:
            loop = Loop(server, carried, stop, evaluate_every, [*callbacks, bar] if bar else callbacks, watch=watch)
            loop.overlap = not callbacks  # a user's callback sees each row with its own round
            try:
                reason = loop.run()
            except KeyboardInterrupt:
                raise Interrupted(_result(loop, model, job, "interrupted")) from None
            except Diverged as error:
                error.result = _result(loop, model, job, "diverged")
                raise
        return _result(loop, model, job, reason)
    finally:
        carried.close()
        store.close()


def make_job(
    model: nn.Module,
    clients: Sequence[Any],
    algorithm: Algorithm,
    test: Any,
    seed: int,
    loss: Loss | nn.Module | None = None,
    metrics: Metrics | None = None,
    weights: Mapping[str, Tensor] | None = None,
    device: str | torch.device = "cpu",
    channels_last: bool | None = None,
    together: int | None = None,
) -> Job:
    """All that a process needs for the clients' work, the model copied and laid out."""
    module = copy.deepcopy(model).to(make_device(device))
    if weights is not None:
        if not isinstance(weights, Mapping):
            raise UserError(f"weights: a state_dict is wanted (torch.load gives one), given {weights!r}")
        try:
            module.load_state_dict(dict(weights))
        except RuntimeError as error:
            raise UserError(f"weights: {error}") from None
    algorithm.check(module)  # here too, so that it is said before any worker starts
    goal = objective(loss, metrics)
    if channels_last is None:
        channels_last = likes_channels_last(module, clients, goal)
    elif channels_last and any(map(writes_astray, module.modules())):
        raise UserError("channels_last: not with a 1×1 convolution that has a stride and fewer than 8 input channels")
    if channels_last:
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    layout = algorithm.uplink.layout(module)
    data = None if test is None else as_source(test, "test")
    if channels_last and takes_channels_last(module, clients, data, goal):
        clients = in_channels_last(clients)
        data = None if data is None else in_channels_last([data])[0]
    if algorithm.uplink.pooled:
        clients = [pooled(clients)]
    if together is not None:
        _check_together(together, algorithm, layout, module, goal, clients)
    job = Job(algorithm, layout, module, goal, seed, clients, data, together)
    where = next(module.parameters()).device
    if where.type != "cpu":
        job.move_to(where)
    return job


def _check_together(
    count: Any, algorithm: Algorithm, layout: Layout, module: nn.Module, goal: Objective, clients: Sequence[Any]
) -> None:
    _whole("together", count, 1)
    why = why_not(algorithm.local, layout, module, goal)
    if getattr(as_source(clients[0], "client 0"), "augment", False):
        why = why or "augmentation is drawn for each client's minibatch"
    if why:
        raise UserError(f"together: clients cannot be computed together here: {why}. Leave it out")


def make_server(job: Job, cohort: int | None, stop: Stop, watch: Watch | None = None) -> Server:
    x = job.layout.vector(job.module.state_dict(), next(job.module.parameters()).device)
    size = min(10, len(job.clients)) if cohort is None or job.algorithm.uplink.pooled else cohort
    if job.algorithm.uplink.pooled and stop.rounds is None and stop.target is None:
        raise UserError(f"{job.algorithm.name} uploads nothing, so no budget ends it: give rounds or a target")
    _whole("cohort", size, 1)
    asked = size if watch is None or size > len(job.clients) else watch.sampled(size, len(job.clients))
    server = Server(job.algorithm, job.layout, x, len(job.clients), asked, job.seed)
    if watch is not None:
        watch.attach(server, size)
    need = server.next_upload_d() if watch is None else watch.next_upload_d(server)
    if stop.budget is not None and need > stop.budget * (1 + 1e-9):
        raise UserError(
            f"budget: {stop.budget:g} d does not pay for one round of {job.algorithm.name}, which uploads {need:.3g} d"
        )
    return server


def make_carrier(job: Job, store: StateStore, cohort: int, where: Where, transport: Transport | None = None) -> Carrier:
    """Worker processes, one per core unless told otherwise; this process where 0 is asked for or a GPU computes."""
    if where.carrier == "ray":
        if job.together is not None:
            raise UserError("together: only worker processes and this process compute clients together, not Ray")
        from fedbcgd.carriers.ray import Ray

        return Ray(job, store, cohort, where.workers, where.address, where.gpus, where.device)
    on_cpu = next(job.module.parameters()).device.type == "cpu"
    if where.workers == 0 or not on_cpu:
        return InProcess(job, store, transport)
    return Workers(job, store, min(where.workers or cores(), cohort), cohort)


def export(job: Job, x: Tensor) -> dict[str, Tensor]:
    """The model x as an ordinary state_dict."""
    job.client.model.load(x)  # which also puts back what is not trained, such as a count of batches
    return job.client.model.state_dict()


def _result(loop: Loop, model: nn.Module, job: Job, reason: str) -> Result:
    module = copy.deepcopy(model)  # ordinary parameters, each with memory of its own
    module.load_state_dict(export(job, loop.server.x))
    return Result(**vars(Outcome.of(loop, reason)), module=module)


def _algorithm(algorithm: str | Algorithm, options: dict[str, Any]) -> Algorithm:
    if isinstance(algorithm, Algorithm):
        if options:
            given = ", ".join(options)
            raise UserError(f"options {given}: an Algorithm has its options already; pass its name to set some")
        return algorithm
    return make_algorithm(algorithm, **options)


def _check(model: Any, clients: Any, test: Any, stop: Stop, every: Any, seed: Any, callbacks: Any) -> None:
    if not isinstance(model, nn.Module):
        raise UserError(f"model: an nn.Module is wanted (an instance, not a class), given {model!r}")
    if not isinstance(clients, Sequence) and not (hasattr(clients, "__len__") and hasattr(clients, "__getitem__")):
        raise UserError(f"clients: a list with the data of each client is wanted, given {type(clients).__name__}")
    if isinstance(clients, Mapping):
        raise UserError("clients: a list is wanted, given a dictionary; list(clients.values()) makes one")
    if not len(clients):
        raise UserError("clients: at least one is needed, the list is empty")
    if stop.rounds is None and stop.budget is None and stop.target is None:
        raise UserError("say when to stop: rounds=…, budget=… (upload in d) or target=… (a metric on test)")
    _whole("rounds", 1 if stop.rounds is None else stop.rounds, 1)
    if stop.budget is not None and not (isinstance(stop.budget, (int, float)) and 0 < stop.budget < math.inf):
        raise UserError(f"budget: a positive number of d is wanted, given {stop.budget!r}")
    if stop.target is not None and test is None:
        raise UserError("target: a metric on test data is wanted, but test is not given")
    _whole("evaluate_every", every, 1)
    _whole("seed", seed, 0)
    if callable(callbacks) or not all(map(callable, callbacks)):
        raise UserError("callbacks: a list of callables is wanted")
    if isinstance(clients, (list, tuple)):  # a lazy sequence is checked client by client, as each is used
        for i, data in enumerate(clients):
            as_source(data, f"client {i}")


def _whole(name: str, value: Any, least: int) -> None:
    if not isinstance(value, (int, np.integer)) or not least <= value < 2**63:
        raise UserError(f"{name}: a whole number of at least {least} is wanted, given {value!r}")


def make_target(target: Any) -> tuple[str, str, float] | None:
    """What users write, as (metric, "<=" or ">=", value)."""
    match target:
        case None:
            return None
        case str(name), (int() | float()) as value:
            return name, "<=" if "loss" in name or "error" in name else ">=", float(value)
        case str(name), ("<=" | ">=") as how, (int() | float()) as value:
            return name, how, float(value)
    try:
        return "test_accuracy", ">=", float(target)
    except (TypeError, ValueError):
        raise UserError(
            f'target: an accuracy such as 0.9, a pair ("test_loss", 0.5) or ("test_mse", "<=", 0.1), given {target!r}'
        ) from None


def make_device(name: str | torch.device) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device: {str(name)!r} cannot be used here: {str(error).splitlines()[0]}") from None
    return device


def _few(data: Source) -> Any:
    """A batch to try something with."""
    return data.gather(torch.arange(min(2, len(data))), stream(0, "probe"))


def try_out(job: Job) -> None:
    """One small batch through model and loss, so that a mistake in a user's own code is told before anything is begun."""
    batch = _few(as_source(job.clients[0], "client 0"))
    try:
        with torch.random.fork_rng([]), one_thread():
            module = copy.deepcopy(job.module)
            keep_within_bounds(module)
            job.objective.loss(module, to_device(batch, next(module.parameters()).device)).backward()
    except UserError:
        raise
    except Exception as error:
        if "Expected more than 1 value per channel" in str(error):  # BatchNorm, and a client with one example
            return
        ours = (str(Path(__file__).parent), str(Path(torch.__file__).parent))
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)]
        where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
        raise UserError(
            f"the model or its loss failed on a first batch: {type(error).__name__}: {error}{where}"
        ) from error


def likes_channels_last(module: nn.Module, clients: Sequence[Any], goal: Objective) -> bool:
    """Whether a convolutional model computes in channels_last: `.view` after a convolution, for one, does not."""
    convolutions = [m for m in module.modules() if isinstance(m, nn.Conv2d)]
    if not convolutions:
        return False
    if any(map(writes_astray, convolutions)):
        log.info("the model has a narrow 1×1 convolution with a stride, so it is not computed in channels_last")
        return False
    if not len(clients):
        return True
    probe = copy.deepcopy(module).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    data = as_source(clients[0], "client 0")
    device = next(module.parameters()).device
    try:
        with torch.random.fork_rng([]), one_thread():
            goal.loss(probe, to_device(_few(data), device)).backward()
    except RuntimeError as error:
        if "view size is not compatible" in str(error):
            log.info(
                "the model uses .view on convolutions' outputs, so it is not computed in channels_last (reshape can be)"
            )
            return False
    except Exception:
        pass  # whatever else is wrong will show, and be explained, in training
    return True


def takes_channels_last(module: nn.Module, clients: Sequence[Any], test: Source | None, goal: Objective) -> bool:
    """Whether loss and metrics also take images that lie in channels_last themselves, and not only weights that do."""
    if not len(clients):
        return False
    probe, device = copy.deepcopy(module), next(module.parameters()).device
    keep_within_bounds(probe)

    def some(source: Source) -> Any:
        return to_device(batch_in_channels_last(_few(source)), device)

    try:
        with torch.random.fork_rng([]), one_thread():
            goal.loss(probe, some(as_source(clients[0], "client 0"))).backward()
            if test is not None:
                probe.eval()
                with torch.no_grad():
                    goal.metrics(probe, some(test))
    except Exception:
        return False
    return True
