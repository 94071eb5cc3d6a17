"""Metrics over all examples: what counts examples is exact, whoever evaluated which of them."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedbcgd import simulate
from fedbcgd.core.objective import objective
from fedbcgd.data.sources import as_source
from fedbcgd.engine.evaluation import combine, evaluate_span, spans, total


class Known(nn.Module):
    """Two classes; it answers what the example says."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return torch.stack([1 - x[:, 0], x[:, 0]], 1) * self.w[0].abs().clamp(min=0.1)


def answers(right: int, examples: int):
    """So many examples, of which the first `right` are answered correctly."""
    said = (torch.arange(examples) < right).float()
    return said[:, None], torch.ones(examples, dtype=torch.int64)


def mean_in_float32(model, batch):
    return {"accuracy": (model(batch[0]).argmax(1) == batch[1]).float().mean()}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("metrics", [None, mean_in_float32])
def test_a_target_that_is_met_exactly_is_met(workers, metrics):
    """7 of 10; in float32 that is 0.69999999."""
    data = answers(7, 10)
    options = {"lr": 1e-9, "blocks": 1, "shared": "none", "rounds": 3, "target": 0.7, "workers": workers}
    result = simulate(Known(), [data] * 2, "fedbcgd", test=data, metrics=metrics, **options)
    assert (result.stopped, result.rounds) == ("target", 1)
    assert result.final["test_accuracy"] == 0.7


@pytest.mark.parametrize("metrics", [None, mean_in_float32])
@pytest.mark.parametrize("right", [1, 823, 864, 1233])
def test_accuracy_is_one_division_of_two_integers(right, metrics):
    """1,234 examples: three spans, thirteen batches."""
    x, y = answers(right, 1234)
    mixed = torch.randperm(1234, generator=torch.Generator().manual_seed(0))
    source, goal = as_source((x[mixed], y[mixed]), "test"), objective(None, metrics)
    found = combine([evaluate_span(Known(), goal, source, *span) for span in spans(1234)])
    assert found["accuracy"] == right / 1234


@given(st.integers(1, 2000), st.data())
def test_a_mean_that_is_a_count_stands_for_it(examples, data):
    """Also where examples·(count/examples) is not the count in float64, such as 49·(1/49)."""
    count = data.draw(st.integers(0, examples))
    for mean in (count / examples, np.float32(count / examples), torch.tensor(count / examples)):
        assert total(mean, examples) == count
    right = torch.arange(examples) < count
    assert total(right, examples) == count
    assert total(right[:, None].expand(examples, 3), examples) == count  # three answers for each example
    assert total(torch.tensor([True, False, False]), 2) == Fraction(2, 3)


@pytest.mark.parametrize("mean", [math.pi, -0.5, 1e300, 0.123456789, math.inf])
def test_other_means_are_summed_in_float64(mean):
    assert total(mean, 7) == 7 * mean
    assert math.isnan(total(math.nan, 7))
    assert combine([(7, {"m": total(mean, 7)}), (3, {"m": 0})])["m"] == 7 * mean / 10
