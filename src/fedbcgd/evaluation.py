"""Metrics of a model on a data set: means over its examples, batch by batch, so that batches can be spread out."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from fedbcgd.data.sources import Source, to_device
from fedbcgd.objective import Objective

SPAN = 500  # examples that a process evaluates at a time
BATCH = 100  # of them at once: larger batches leave the cache, and cost memory

Batch = tuple[int, dict[str, float]]  # examples, and the means over them


def spans(examples: int) -> list[tuple[int, int]]:
    """The parts an evaluation consists of, whoever does them."""
    return _cut(0, examples, SPAN)


def evaluate_span(module: nn.Module, objective: Objective, data: Source, start: int, stop: int) -> Batch:
    device = next(module.parameters()).device
    rng = np.random.default_rng(0)  # no source augments what it evaluates on; the protocol wants a generator
    module.eval()
    batches = []
    with torch.no_grad():
        for at, end in _cut(start, stop, BATCH):
            batch = to_device(data.gather(torch.arange(at, end), rng), device)
            batches.append((end - at, {name: float(v) for name, v in objective.metrics(module, batch).items()}))
    return stop - start, combine(batches)


def combine(batches: Sequence[Batch]) -> dict[str, float]:
    """Means over all examples, summed in the order of the batches."""
    total = sum(n for n, _ in batches)
    names = dict.fromkeys(name for _, values in batches for name in values)
    return {name: sum(n * values[name] for n, values in batches) / total for name in names}


def _cut(start: int, stop: int, size: int) -> list[tuple[int, int]]:
    return [(at, min(at + size, stop)) for at in range(start, stop, size)]
