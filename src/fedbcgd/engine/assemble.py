"""What a run is put together from: the job of the clients, the server, and whether a model can do what is asked of it."""

import copy
import logging
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedbcgd.core.algorithm import Algorithm
from fedbcgd.core.objective import Loss, Metrics, Objective, objective
from fedbcgd.core.onednn import keep_within_bounds, writes_astray
from fedbcgd.core.server import Server
from fedbcgd.core.stack import why_not
from fedbcgd.core.vector import Layout
from fedbcgd.data.sources import Source, as_source, batch_in_channels_last, in_channels_last, pooled, to_device
from fedbcgd.engine.hooks import RoundHooks
from fedbcgd.engine.job import Job
from fedbcgd.engine.loop import Stop
from fedbcgd.engine.threads import one_thread
from fedbcgd.errors import UserError
from fedbcgd.rng import stream

log = logging.getLogger("fedbcgd")


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
    check_integer("together", count, 1)
    why = why_not(algorithm.local, layout, module, goal)
    if getattr(as_source(clients[0], "client 0"), "augment", False):
        why = why or "augmentation is drawn for each client's minibatch"
    if why:
        raise UserError(f"together: clients cannot be computed together here: {why}. Leave it out")


def make_server(
    job: Job, cohort: int | None, stop: Stop, watch: RoundHooks | None = None, reliable: bool = True
) -> Server:
    """Return the server of a job.

    Args:
        job: what the clients do.
        cohort: clients asked in a round; None: 10, or all where there are fewer.
        stop: when the run ends; a budget must pay for one round at least.
        watch: the network of the run, if it has one.
        reliable: whether what is asked for arrives, unless it is given up before it begins.
    """
    x = job.layout.vector(job.module.state_dict(), next(job.module.parameters()).device)
    size = min(10, len(job.clients)) if cohort is None or job.algorithm.uplink.pooled else cohort
    if job.algorithm.uplink.pooled and stop.rounds is None and stop.target is None:
        raise UserError(f"{job.algorithm.name} uploads nothing, so no budget ends it: give rounds or a target")
    check_integer("cohort", size, 1)
    asked = size if watch is None or size > len(job.clients) else watch.sampled(size, len(job.clients))
    server = Server(job.algorithm, job.layout, x, len(job.clients), asked, job.seed, reliable)
    if watch is not None:
        watch.attach(server, size)
    need = server.next_upload_d() if watch is None else watch.next_upload_d(server)
    if stop.budget is not None and need > stop.budget * (1 + 1e-9):
        raise UserError(
            f"budget: {stop.budget:g} d does not pay for one round of {job.algorithm.name}, which uploads {need:.3g} d"
        )
    return server


def export(job: Job, x: Tensor) -> dict[str, Tensor]:
    """The model x as an ordinary state_dict."""
    job.client.model.load(x)  # which also puts back what is not trained, such as a count of batches
    return job.client.model.state_dict()


def check_integer(name: str, value: Any, least: int) -> None:
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
        ours = (str(Path(__file__).parent.parent), str(Path(torch.__file__).parent))
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
