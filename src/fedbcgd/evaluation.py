"""Metrics of a model on a data set: means over its examples, batch by batch, so that batches can be spread out."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from fedbcgd.data.sources import Source, to_device
from fedbcgd.objective import Objective

BATCH = 500

Batch = tuple[int, dict[str, float]]  # examples, and the means over them


def spans(examples: int) -> list[tuple[int, int]]:
    """The batches an evaluation consists of, whoever does them."""
    return [(at, min(at + BATCH, examples)) for at in range(0, examples, BATCH)]


def evaluate_batch(module: nn.Module, objective: Objective, data: Source, start: int, stop: int) -> Batch:
    device = next(module.parameters()).device
    rng = np.random.default_rng(0)  # no source augments what it evaluates on; the protocol wants a generator
    module.eval()
    with torch.no_grad():
        batch = to_device(data.gather(torch.arange(start, stop), rng), device)
        values = {name: float(value) for name, value in objective.metrics(module, batch).items()}
    return stop - start, values


def combine(batches: Sequence[Batch]) -> dict[str, float]:
    """Means over all examples, summed in the order of the batches."""
    total = sum(n for n, _ in batches)
    names = dict.fromkeys(name for _, values in batches for name in values)
    return {name: sum(n * values[name] for n, values in batches) / total for name in names}
