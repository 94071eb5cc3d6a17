"""Means of metrics over the examples of batches and of clients."""

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

Total = int | float | Fraction


def total(value: Any, examples: int) -> Total:
    """Return the sum over some examples of a metric that was measured on them.

    A metric that counts examples is summed in integers, so that 7 of 10 gives exactly 0.7 and meets a target of 0.7.

    Args:
        value: a boolean tensor, whose true entries are counted; otherwise a number, the mean over the examples. If it is
            exactly the float64 or float32 nearest to k/examples, it is taken as a count and the sum is the integer k.
        examples: the number of examples.
    """
    if isinstance(value, Tensor) and value.dtype == torch.bool:
        return Fraction(examples * int(value.count_nonzero()), value.numel())
    mean = float(value)
    if examples and 0 <= mean <= 1:
        count = round(examples * mean)
        if mean in (count / examples, float(np.float32(count / examples))):
            return count
    return examples * mean


def means_over_clients(reports: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, float]:
    """Return the means of the clients' metrics, weighted by their examples.

    Args:
        reports: the examples and the metrics of each client.

    Returns:
        The means; a metric that half of the clients or fewer report is left out, and so is one whose mean overflows.
    """
    means: dict[str, float] = {}
    for name in dict.fromkeys(name for _, metrics in reports for name in metrics):
        values = [(examples, metrics[name]) for examples, metrics in reports if name in metrics]
        weight = sum(examples for examples, _ in values)
        mean = float(sum(total(value, examples) for examples, value in values) / weight)
        if not math.isfinite(mean):  # a sum overflowed
            mean = sum(examples / weight * value for examples, value in values)
        if 2 * len(values) > len(reports) and math.isfinite(mean):
            means[name] = mean
    return means
