"""Trials of a user's model on a small batch before a run: whether it works at all, and in channels_last."""

import copy
import logging
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fedbcgd.core.objective import Objective
from fedbcgd.core.onednn import avoid_faulty_kernel, has_faulty_kernel
from fedbcgd.data.sources import Source, as_source, batch_in_channels_last, to_device
from fedbcgd.engine.evaluation import BATCH, evaluate_span
from fedbcgd.engine.job import Job
from fedbcgd.engine.threads import threads
from fedbcgd.errors import UserError, with_line
from fedbcgd.rng import stream

log = logging.getLogger("fedbcgd")


def _small_batch(data: Source) -> Any:
    """Return a batch of at most two examples."""
    return data.gather(torch.arange(min(2, len(data))), stream(0, "probe"))


def try_out(job: Job) -> None:
    """Compute gradient and metrics of one batch, so that a mistake in a user's own code shows before a run begins.

    Raises:
        UserError: model, loss or metrics failed; the message names the line.
    """
    try:
        batch = _small_batch(as_source(job.clients[0], "client 0"))
        with torch.random.fork_rng([]), threads(1):
            module = copy.deepcopy(job.module)
            avoid_faulty_kernel(module)
            job.objective.loss(module, to_device(batch, next(module.parameters()).device)).backward()
    except UserError:
        raise
    except Exception as error:
        if "Expected more than 1 value per channel" in str(error):  # BatchNorm, and a client with one example
            return
        raise explained(error, job) or UserError(
            "model, loss: expected a loss that can be computed and differentiated, got an error on the first batch: "
            f"{with_line(error)}"
        ) from error
    if job.test is None:
        return
    try:
        metric_names(job, job.test)
    except UserError:
        raise
    except Exception as error:
        raise explained(error, job) or UserError(
            f"metrics: expected metrics of the test data, got an error on the first batch: {with_line(error)}"
        ) from error


def metric_names(job: Job, test: Source) -> list[str]:
    """Return the names of the metrics that the first batch of test data gives."""
    module = copy.deepcopy(job.module)
    avoid_faulty_kernel(module)
    with torch.random.fork_rng([]), threads(1):
        _, sums = evaluate_span(module, job.objective, test, 0, min(BATCH, len(test)))
    return list(sums)


_EXPLAINED = {
    "same dtype|expected scalar type|Input type .* and weight type": (
        "expected data of the type of the model's parameters, {dtype}, got another one; convert the data "
        "(x.float()) or the model (model.double())"
    ),
    "stack expects each tensor to be equal size": (
        "expected items of equal shape, which can be stacked to a batch, got items of unequal length; pad them, or pass "
        "train=… and DataLoaders of your own with a collate_fn"
    ),
}


def explained(error: Exception, job: Job) -> UserError | None:
    """Return a message with the remedy for an error that comes of the usual mistakes in the data; None for any other."""
    for pattern, message in _EXPLAINED.items():
        if isinstance(error, RuntimeError) and re.search(pattern, str(error)):
            text = message.format(dtype=str(job.layout.dtype).removeprefix("torch."))
            return UserError(f"clients, test: {text} ({str(error).splitlines()[0]})")
    return None


def computes_in_channels_last(
    module: nn.Module, clients: Sequence[Any], test: Source | None, objective: Objective
) -> bool:
    """Return whether to compute in channels_last: the model has convolutions, and a trial does not fail for that format.

    A model that uses `.view` after a convolution fails, for example. The trial uses data of the first client, else
    `test`; without any data the answer is no.
    """
    convolutions = [m for m in module.modules() if isinstance(m, nn.Conv2d)]
    if not convolutions:
        return False
    if any(map(has_faulty_kernel, convolutions)):
        log.info("the model has a narrow 1×1 convolution with a stride, so it is not computed in channels_last")
        return False
    if not len(clients) and test is None:
        log.info("there is no data to try channels_last on, so it is not used; pass test=…, or channels_last=True")
        return False
    probe = copy.deepcopy(module).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    data = as_source(clients[0] if len(clients) else test, "client 0")
    device = next(module.parameters()).device
    try:
        with torch.random.fork_rng([]), threads(1):
            objective.loss(probe, to_device(_small_batch(data), device)).backward()
    except Exception as error:
        if isinstance(error, RuntimeError) and "view size is not compatible" in str(error):
            log.info("the model uses .view after a convolution, so it is not computed in channels_last; use .reshape")
            return False
        # Training on these clients will show any other error, with an explanation. If the clients are on other machines
        # (Flower), nobody would see it, so channels_last is not used.
        return len(clients) > 0
    return True


def takes_channels_last(module: nn.Module, clients: Sequence[Any], test: Source | None, objective: Objective) -> bool:
    """Return whether loss and metrics also work if the images, and not only the weights, are in channels_last."""
    if not len(clients):
        return False
    probe, device = copy.deepcopy(module), next(module.parameters()).device
    avoid_faulty_kernel(probe)

    def images(source: Source) -> Any:
        return to_device(batch_in_channels_last(_small_batch(source)), device)

    try:
        with torch.random.fork_rng([]), threads(1):
            objective.loss(probe, images(as_source(clients[0], "client 0"))).backward()
            if test is not None:
                probe.eval()
                with torch.no_grad():
                    objective.metrics(probe, images(test))
    except Exception:
        return False
    return True
