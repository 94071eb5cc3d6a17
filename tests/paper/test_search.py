"""The search by successive halving: who is tried, for how long, who goes on, and that trials are extended."""

import math
from collections import Counter
from dataclasses import replace

import pytest

from fedbcgd.engine.run_folder import RunFolder
from fedbcgd.paper import search
from fedbcgd.paper.items import ITEMS
from fedbcgd.paper.plan import Machine
from fedbcgd.paper.search import Rung
from fedbcgd.paper.spec import Contender, Halving
from fedbcgd.runs import config as configuration
from fedbcgd.runs.execute import execute
from fedbcgd.runs.folder import finished
from tests.paper.small import small

AVG = Contender("fedavg", "FedAvg", {"name": "fedavg"})


def halved(*contenders, rates=(0.003, 0.01, 0.03, 0.1), rounds=8, rungs=2, most=4, budget=4.0):
    panel = small(*(contenders or (AVG,)), rates=rates)
    return replace(panel, budget=budget, effort=replace(panel.effort, halving=Halving(rounds, most, rungs)))


@pytest.fixture
def table3():
    return ITEMS["table3"].panels["desk"][0]


def test_the_rungs_of_a_search():
    """Eight rounds' worth of gradients in two rungs: 4 candidates share 4, so each gets 1; 2 share 4, so 2 more each."""
    panel = halved()
    assert search.rungs(panel, AVG) == [Rung(4, 1), Rung(2, 3)]
    # What a rung could not divide is left for the next: of 10, 5 for 4 candidates is 1 each; then 6 for 2 is 3 each.
    assert search.rungs(halved(rounds=10), AVG) == [Rung(4, 1), Rung(2, 4)]
    assert search.rungs(halved(rounds=100), AVG) == [
        Rung(4, 4)
    ]  # never longer than a whole run: FedAvg has 4 rounds for 4 d
    assert search.rungs(halved(rates=(0.01,)), AVG) == []


def test_every_algorithm_gets_the_same_gradient_evaluations(table3):
    """120 rounds of FedAvg, whatever it searches; FedBCGD+ has fewer rounds, as it takes more gradients in one."""
    for contender in table3.contenders:
        if contender.tuned_as is not None:
            continue
        spent, before = 0.0, 0
        for rung in search.rungs(table3, contender):
            spent += rung.candidates * (rung.rounds - before) * search.gradients(table3, contender)
            before = rung.rounds
        assert 110 < spent <= 120 + 1e-9, contender.key
    # LeNet-5: 10 batches, 50 steps. SVRG takes the 10 at the anchor and one for each step but the first: 59 of 50.
    assert search.gradients(table3, table3.contender("fedbcgd+")) == pytest.approx(59 / 50)


def test_candidates_are_drawn_evenly_and_are_the_same_for_all(table3):
    drawn = search.candidates(table3, table3.contender("fedbcgd"))
    assert len(drawn) == len({tuple(point.items()) for point in drawn}) == 12
    assert set(Counter(point["lr"] for point in drawn).values()) == {2}
    momenta = Counter(point["momentum"] for point in drawn)
    assert len(momenta) == 7
    assert max(momenta.values()) == 2
    assert search.candidates(table3, table3.contender("fedavgm")) == drawn
    assert [point["lr"] for point in search.candidates(table3, table3.contender("fedavg"))] == list(
        table3.effort.grid["lr"]
    )
    assert search.candidates(table3, table3.contender("scaffold")) == []  # tuned as the form that sends d
    tried = {
        key: {name for p in search.candidates(table3, table3.contender(key)) for name in p} for key in ("fedadam",)
    }
    assert tried == {"fedadam": {"lr", "server_lr"}}
    alphas = {point["alpha"] for point in search.candidates(table3, table3.contender("feddc-derived"))}
    assert alphas == {0.001, 0.01, 0.1}


def scripted(monkeypatch, scores):
    """Replace the runs by scores: (lr, rounds) → the held-out loss; None: not there yet."""

    def reached(planned, rounds, later, runs):
        value = scores.get((planned.config.algorithm["lr"], rounds))
        diverged = value is not None and math.isnan(value)
        return None if value is None else [] if diverged else [{"round": rounds, "validation_loss": value}]

    monkeypatch.setattr(search, "_reached", reached)


def test_the_better_half_goes_on_and_the_last_rung_decides(monkeypatch, tmp_path):
    panel = halved()
    first = {(0.003, 1): 0.9, (0.01, 1): 0.5, (0.03, 1): math.nan, (0.1, 1): 0.4}
    scripted(monkeypatch, first)
    state = search.state(panel, AVG, tmp_path, Machine())
    assert state.chosen is None
    assert [p.config.algorithm["lr"] for p in state.due] == [0.01, 0.1]
    assert {p.config.run.rounds for p in state.due} == {3}
    assert not state.folders  # a trial may still be extended, so nothing is packed
    scripted(monkeypatch, first | {(0.1, 3): 0.35})
    assert [p.config.algorithm["lr"] for p in search.state(panel, AVG, tmp_path, Machine()).due] == [0.01]
    scripted(monkeypatch, first | {(0.1, 3): 0.35, (0.01, 3): 0.3})  # it was behind after one round
    state = search.state(panel, AVG, tmp_path, Machine())
    assert state.chosen == {"lr": 0.01}
    assert state.due == ()
    assert len(state.folders) == 4
    assert [(t.rung, t.rounds, t.options["lr"], t.chosen) for t in state.trials] == [
        (1, 1, 0.003, False),
        (1, 1, 0.01, False),
        (1, 1, 0.03, False),
        (1, 1, 0.1, False),
        (2, 3, 0.01, True),
        (2, 3, 0.1, False),
    ]


def test_what_diverged_does_not_go_on(monkeypatch, tmp_path):
    """One is left: it is chosen at once. If all diverge, the first stands, and its run will show it."""
    scripted(monkeypatch, {(rate, 1): math.nan for rate in (0.003, 0.03, 0.1)} | {(0.01, 1): 2.0})
    assert search.state(halved(), AVG, tmp_path, Machine()).chosen == {"lr": 0.01}
    scripted(monkeypatch, {(rate, 1): math.nan for rate in (0.003, 0.01, 0.03, 0.1)})
    assert search.state(halved(), AVG, tmp_path, Machine()).chosen == {"lr": 0.003}


def test_a_trial_is_one_run_that_is_extended(tmp_path):
    """Its rows are those of a run without a stop, and the first rung still knows its score, also in the middle."""
    panel = halved()
    point = search.candidates(panel, AVG)[0]
    short, long = (search.trial(panel, AVG, point, rung, Machine()) for rung in search.rungs(panel, AVG))
    assert short.folder == long.folder
    assert search._reached(short, 1, [1, 3], tmp_path) is None
    execute(short.config, tmp_path / short.folder, figures=False)
    once = search._reached(short, 1, [1, 3], tmp_path)
    assert [row["round"] for row in once] == [1]
    assert search._reached(long, 3, [3], tmp_path) is None
    execute(long.config, tmp_path / long.folder, resume=True, figures=False)
    assert search._reached(short, 1, [1, 3], tmp_path) == once
    rows = search._reached(long, 3, [3], tmp_path)
    execute(long.config, tmp_path / "straight", figures=False)
    losses = [row["validation_loss"] for row in finished(RunFolder(tmp_path / "straight"), complete(long)).rows]
    assert [row["validation_loss"] for row in rows] == losses
    (tmp_path / long.folder / "summary.json").unlink()  # as while it is extended
    assert search._reached(short, 1, [1, 3], tmp_path) == once
    assert search._reached(long, 3, [3], tmp_path) is None


def complete(planned):
    return configuration.complete(planned.config)
