"""What is read off a run, against numbers worked by hand."""

import math

import pytest

from fedbcgd.paper.measures import floats_to, last_tenth, mean_and_deviation


def rows(*values, every=1, cost=0.25):
    return [
        {"round": every * (k + 1), "test_accuracy": v, "upload_d": cost * every * (k + 1)} for k, v in enumerate(values)
    ]


def test_the_last_tenth_of_twenty_rounds_is_two():
    """Rounds 19 and 20: (0.5 + 0.7)/2."""
    assert last_tenth(rows(*[0.1] * 18, 0.5, 0.7), "test_accuracy") == pytest.approx(0.6)


def test_of_fewer_than_ten_rounds_it_is_the_last():
    assert last_tenth(rows(0.1, 0.2, 0.9), "test_accuracy") == 0.9


def test_only_evaluations_inside_it_count():
    """Every third round of 30: rounds 28 to 30 hold one evaluation, that of round 30; round 27 is outside."""
    assert last_tenth(rows(*[0.1] * 9, 0.8, every=3), "test_accuracy") == 0.8


def test_a_run_without_evaluations_has_none():
    assert math.isnan(last_tenth([], "test_accuracy"))


def test_floats_to_the_target_are_those_of_the_first_evaluation_there():
    """0.40 is reached in round 3, at 3·0.25 d, though round 4 falls below it again."""
    assert floats_to(rows(0.1, 0.3, 0.4, 0.35, 0.5), "test_accuracy", 0.40) == 0.75


def test_a_target_never_reached_is_infinity():
    assert floats_to(rows(0.1, 0.3999), "test_accuracy", 0.40) == math.inf


def test_a_loss_is_reached_from_above():
    assert floats_to(rows(0.9, 0.5, 0.2), "test_accuracy", 0.5, higher_is_better=False) == 0.5


def test_mean_and_deviation():
    """1, 2, 6: mean 3, deviations −2, −1, 3, variance 14/2 = 7."""
    mean, deviation = mean_and_deviation([1.0, 2.0, 6.0])
    assert (mean, deviation) == (3.0, pytest.approx(math.sqrt(7)))


def test_one_seed_has_no_deviation_and_infinity_stays():
    assert mean_and_deviation([4.0]) == (4.0, None)
    assert mean_and_deviation([4.0, math.inf]) == (math.inf, None)
    mean, deviation = mean_and_deviation([])
    assert math.isnan(mean)
    assert deviation is None
