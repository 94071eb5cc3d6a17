"""Runs that go on: order, one search after the other, several processes, what is kept, and a kill in the middle."""

from dataclasses import replace

import pytest

from fedbcgd.paper import batch
from fedbcgd.paper.engine import Request
from fedbcgd.paper.items import ITEMS
from fedbcgd.paper.spec import Contender, Halving
from tests.paper.small import Shown, item, small

AVG = Contender("fedavg", "FedAvg", {"name": "fedavg"})
BLOCKS = Contender("fedbcgd", "FedBCGD", {"name": "fedbcgd", "blocks": 5}, ("lr", "momentum"))
AGAIN = Contender("again", "Again", {"name": "fedavg", "over_norm": "scale", "max_norm": 1e6}, tuned_as="fedavg")


def halved(*contenders, rates=(0.003, 0.01, 0.03, 0.1), rounds=8, rungs=2, seeds=1, **changes):
    panel = small(*(contenders or (AVG,)), rates=rates, seeds=seeds)
    effort = replace(panel.effort, halving=Halving(rounds, candidates=4, rungs=rungs))
    return replace(panel, effort=effort, **{"budget": 4.0, **changes})


@pytest.fixture
def only(monkeypatch):
    """Make a panel the only item."""

    def use(panel):
        monkeypatch.setitem(ITEMS, "item", item(panel, "item"))
        return ["item"]

    return use


def work(names, out, **request):
    """Do all that is left; return the labels of the runs, and the results."""
    shown, said, written = Shown(), [], []
    begun = []

    def display(labels):
        begun.extend(labels)
        return shown.display(labels)

    request = Request("smoke", out, **request)
    batch.Batch(names, request).run(display, said.append, lambda name, results: written.append((name, results)))
    return begun, written


def test_the_search_goes_before_its_run_and_a_second_start_does_nothing(only, tmp_path):
    names = only(halved(AVG, BLOCKS, seeds=2))
    begun, written = work(names, tmp_path)
    kinds = ["search" if label.startswith("search") else label.rsplit(", ", 1)[1] for label in begun]
    assert kinds == ["search"] * 6 + ["seed 1"] + ["search"] * 6 + ["seed 1", "seed 2", "seed 2"]
    assert work(names, tmp_path)[0] == []
    (result,) = written[-1][1]
    assert {key: list(runs) for key, runs in result.outcomes.items()} == {"fedavg": [1, 2], "fedbcgd": [1, 2]}
