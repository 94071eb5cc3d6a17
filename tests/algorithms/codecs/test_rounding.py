"""QSGD's rounding: the definition, and the fast form against it, by mean and variance. All seeds are fixed."""

import math

import numpy as np
import pytest
import torch

from fedbcgd.algorithms.codecs import QSGD
from fedbcgd.algorithms.codecs._fast_qsgd import FastRounding
from fedbcgd.algorithms.codecs.qsgd import round_to_levels
from fedbcgd.rng import stream


def fast(rows, scale, levels, rng):
    return FastRounding()(rows, scale, levels, rng).to(torch.uint8)


ROUNDINGS = {"definition": round_to_levels, "fast": fast}


@pytest.mark.parametrize("name", ROUNDINGS)
@pytest.mark.parametrize("levels", [1, 7, 127])
def test_mean_and_variance_are_those_of_independent_draws(name, levels):
    """Of every value; and of sums over a bucket, over one place of all buckets, and over all with random signs, whose
    variance is the sum of p(1−p) only if no two draws depend on each other. 40 buckets: more than one group of 32."""
    draws, buckets, size = 2000, 40, 24
    rng = stream(0, "rounding")
    rows = torch.from_numpy(rng.normal(size=(buckets, size)).astype(np.float32))
    scale = rows.abs().amax(1)
    exact = rows.double() / scale.double()[:, None] * levels + levels
    p = exact - exact.floor()
    variance = p * (1 - p)
    rounding = ROUNDINGS[name]
    off = torch.stack([rounding(rows, scale, levels, rng).double() - exact for _ in range(draws)])
    assert (off.abs() < 1 + 1e-4).all()
    # 1e-4: a value on a level may lie a float32's rounding beside it, and leave it once in 100,000 draws
    assert (off.mean(0).abs() <= 5 * ((variance + 1e-4) / draws).sqrt()).all()
    signs = torch.from_numpy(rng.choice([-1.0, 1.0], (3, buckets, size)))
    weights = [torch.zeros(buckets, size), torch.zeros(buckets, size), *signs]
    weights[0][3], weights[1][:, 5] = 1, 1
    for weight in weights:
        ratio = float((off * weight).sum((1, 2)).var() / (variance * weight.square()).sum())
        assert 0.8 < ratio < 1.25  # standard deviation 0.03, or three times that for sums of products


def rounded_up(p: float, n: int, seeds: int, level: int = 0) -> list[int]:
    """How many of n values, at p above a level, or below minus that, were rounded up or down: a count for each seed."""
    codec = QSGD()
    v = torch.full((n,), (math.copysign(level, p) + p) / codec.levels)
    v[::512] = 1.0  # the scale of each bucket
    goal = codec.levels + math.copysign(level + 1, p)
    encoded = (codec.encode(v, stream(seed, "x"))[-n:].view(-1, 512)[:, 1:] for seed in range(seeds))
    return [int((code == goal).sum()) for code in encoded]


@pytest.mark.parametrize("p", [0.001, 0.003, 0.5])
def test_values_near_a_level_vary_as_they_should_in_long_vectors(p):
    """A million values a little above a level: the count of those rounded up has variance n·p(1−p) over the draws."""
    n, seeds = 1 << 20, 60
    ups, count = rounded_up(p, n, seeds, level=63), n - n // 512
    assert abs(np.mean(ups) - count * p) <= 5 * math.sqrt(count * p * (1 - p) / seeds)
    assert 0.4 < np.var(ups, ddof=1) / (count * p * (1 - p)) < 2.0  # standard deviation 0.18


@pytest.mark.parametrize(("n", "seeds"), [(1 << 20, 20), (1 << 14, 1280)])
@pytest.mark.parametrize("p", [5e-6, -5e-6])
def test_small_values_round_up_as_often_as_they_should(p, n, seeds):
    """5e-6 of a level: 105 of 21 million, give or take 10. With 16 random bits it would be none, or 320."""
    expected = seeds * n * 511 / 512 * abs(p)
    assert abs(sum(rounded_up(p, n, seeds)) - expected) <= 5 * math.sqrt(expected)


def test_the_fast_form_takes_the_definitions_word_for_the_odd_buckets():
    """Zeros, NaN, infinity, subnormal values and an ordinary bucket, each value of which is on a level."""
    rows = torch.tensor([[0.0, 0.0], [1.0, math.nan], [math.inf, -1.0], [3e-45, -3e-45], [4.0, -4.0], [1e-30, 0.0]])
    scale = rows.abs().amax(1)
    for levels in (1, 127):
        codes = [rounding(rows, scale, levels, stream(0, "x")).tolist() for rounding in ROUNDINGS.values()]
        assert codes[0] == codes[1]
        assert codes[1] == [[levels, levels]] * 3 + [[2 * levels, 0]] * 2 + [[2 * levels, levels]]
