"""The choice of the best run of a sweep."""

import pytest

from fedbcgd import UserError
from fedbcgd.core.ledger import Ledger
from fedbcgd.engine.loop import DIVERGED, Outcome
from fedbcgd.runs import config as configuration
from fedbcgd.runs import sweep


def outcome(stopped, **final):
    return Outcome("fedavg", [{"round": 1, **final}], Ledger(4, 4, 1), 1, 0.0, stopped)


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        ((DIVERGED, DIVERGED), r"got none: 2 of 2 diverged; lower learning rates may help$"),
        (("rounds", "rounds"), r"got none: 2 of 2 ended without it; metrics of your own need an `accuracy`$"),
        ((DIVERGED, "rounds"), r"got none: 1 of 2 diverged; .*; 1 of 2 ended without it"),
    ],
)
def test_without_an_accuracy_nothing_is_chosen(tmp_path, ends, words):
    """Only runs that diverged are said to have diverged: others may have no accuracy at all."""
    runs = sweep.plan(configuration.check({"run": {"rounds": 1}}, "test"), ["lr=0.1,0.2"])
    outcomes = {run.label: outcome(end, validation_loss=1.0) for run, end in zip(runs, ends, strict=True)}
    with pytest.raises(UserError, match=words):
        sweep.write(runs, outcomes, tmp_path)
    outcomes[runs[1].label] = outcome("rounds", validation_accuracy=0.5)
    assert sweep.write(runs, outcomes, tmp_path) == runs[1]
