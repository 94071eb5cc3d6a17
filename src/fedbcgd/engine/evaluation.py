"""Metrics of a model on a data set: means over its examples, computed in spans that several processes can share."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from fedbcgd.core.metric_means import Total, total
from fedbcgd.core.objective import Objective
from fedbcgd.data.sources import Source, to_device

SPAN = 500  # examples that a process evaluates for one request
BATCH = 100  # examples of one forward pass: larger batches do not fit into the cache, and take more memory

Batch = tuple[int, dict[str, Total]]  # how many examples a batch or a span has, and the sums of the metrics over them


def spans(examples: int) -> list[tuple[int, int]]:
    """Return start and stop of each span of an evaluation; they are the same on every backend."""
    return _cut(0, examples, SPAN)


def evaluate_span(module: nn.Module, objective: Objective, data: Source, start: int, stop: int) -> Batch:
    """Return the sums of the metrics over the examples from `start` to `stop`."""
    device = next(module.parameters()).device
    rng = np.random.default_rng(0)  # unused: test data are not augmented
    module.eval()
    batches = []
    with torch.no_grad():
        for at, end in _cut(start, stop, BATCH):
            batch = to_device(data.gather(torch.arange(at, end), rng), device)
            measured = objective.metrics(module, batch)
            batches.append((end - at, {name: total(value, end - at) for name, value in measured.items()}))
    return stop - start, _sums(batches)


def combine(batches: Sequence[Batch]) -> dict[str, float]:
    """Return the means over all examples: the sums are added in the order of the spans, and divided once at the end."""
    examples = sum(n for n, _ in batches)
    return {name: float(value / examples) for name, value in _sums(batches).items()}


def _sums(batches: Sequence[Batch]) -> dict[str, Total]:
    names = dict.fromkeys(name for _, values in batches for name in values)
    return {name: sum(values[name] for _, values in batches) for name in names}


def _cut(start: int, stop: int, size: int) -> list[tuple[int, int]]:
    return [(at, min(at + size, stop)) for at in range(start, stop, size)]
