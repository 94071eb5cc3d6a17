"""The choice of the best run of a sweep."""

import io

import pytest
from rich.console import Console

from fedbcgd import UserError
from fedbcgd.core.ledger import Ledger
from fedbcgd.engine.loop import DIVERGED, Outcome
from fedbcgd.runs import config as configuration
from fedbcgd.runs import sweep


def outcome(stopped, **final):
    return Outcome("fedavg", [{"round": 1, **final}], Ledger(4, 4, 1), 1, 0.0, stopped)


def runs_and(outcomes):
    runs = sweep.plan(configuration.check({"run": {"rounds": 1}}, "test"), ["lr=0.1,0.2"])
    return runs, {run.label: end for run, end in zip(runs, outcomes, strict=True)}


def test_if_all_runs_diverged_nothing_is_chosen(tmp_path):
    runs, outcomes = runs_and([outcome(DIVERGED, validation_loss=1.0), outcome(DIVERGED)])
    with pytest.raises(UserError, match=r"got none: 2 of 2 diverged; lower learning rates may help$"):
        sweep.write(runs, outcomes, tmp_path)
    assert "diverged" in shown(sweep.table(runs, outcomes))


@pytest.mark.parametrize(
    ("first", "second", "stated", "best"),
    [
        ({"accuracy": 0.5}, {"accuracy": 0.6}, (), 1),
        ({"loss": 0.5}, {"loss": 0.6}, (), 0),
        ({"loss": 0.5, "mae": 3.0}, {"loss": 0.6, "mae": 2.0}, (), 1),
        ({"loss": 0.5, "score": 3.0}, {"loss": 0.6, "score": 2.0}, ("score", "min"), 1),
        ({"accuracy": 0.5, "f1": 0.3}, {"accuracy": 0.6, "f1": 0.2}, ("f1",), 0),
        ({"loss": float("nan")}, {"loss": 0.6}, (), 1),
    ],
)
def test_the_best_is_chosen_by_any_metric(tmp_path, first, second, stated, best):
    ends = [outcome("rounds", **{f"validation_{k}": v for k, v in end.items()}) for end in (first, second)]
    for end in ends:
        end.metric, end.goal = (*stated, None, None)[:2]
    runs, outcomes = runs_and(ends)
    assert sweep.write(runs, outcomes, tmp_path) == runs[best]
    table = shown(sweep.table(runs, outcomes))
    assert table.index(runs[best].label) < table.index(runs[1 - best].label)
    assert (stated[0] if stated else "") in table


def shown(table):
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()
