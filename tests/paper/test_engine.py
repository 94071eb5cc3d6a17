"""The engine on a problem of seconds: what it searches, chooses, keeps and shares."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from fedbcgd.errors import UserError
from fedbcgd.paper import origin, pages, plan
from fedbcgd.paper.items import ITEMS
from fedbcgd.paper.plan import Machine
from fedbcgd.paper.request import Request, panels_for, select_panels
from fedbcgd.paper.spec import Contender, Item
from tests.paper.small import item, run, small


def test_hyper_parameters_are_chosen_on_data_held_out_and_seeds_run_on_all(tmp_path):
    (result,), shown = run(item(small(seeds=2)), tmp_path)
    assert len(result.trials) == 2
    best = min(result.trials, key=lambda trial: trial.score)  # a loss
    assert best.chosen
    assert result.chosen["fedavg"] == best.options
    assert sum(trial.chosen for trial in result.trials) == 1
    configs = [json.loads(p.read_text())["config"] for p in tmp_path.glob("runs/*/summary.json")]
    assert sorted((c["data"]["validation"], c["run"]["seed"]) for c in configs) == [(0, 1), (0, 2), (0.1, 0), (0.1, 0)]
    assert len(shown.begun) == 4
    for summary in tmp_path.glob("runs/*/summary.json"):
        rows = [json.loads(line) for line in (summary.parent / "metrics.jsonl").read_text().splitlines()]
        held = json.loads(summary.read_text())["config"]["data"]["validation"] > 0
        assert all(("validation_loss" in row) == held and ("test_loss" in row) != held for row in rows)


def test_what_is_finished_is_not_run_again_and_more_seeds_go_on_from_it(tmp_path):
    run(item(small()), tmp_path)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.glob("runs/*/summary.json")}
    (result,), shown = run(item(small()), tmp_path)
    assert shown.begun == []
    (result,), shown = run(item(small()), tmp_path, seeds=3)
    assert len(shown.begun) == 2
    assert sorted(result.outcomes["fedavg"]) == [1, 2, 3]
    assert all(p.stat().st_mtime_ns == then for p, then in before.items())
    (result,), shown = run(item(small()), tmp_path, seeds=1)
    assert shown.begun == []
    assert sorted(result.outcomes["fedavg"]) == [1, 2, 3]  # what is there is shown


def test_items_share_the_runs_that_they_have_in_common(tmp_path):
    one = small()
    more = small(*one.contenders, Contender("fedbcgd", "FedBCGD", {"name": "fedbcgd", "blocks": 5}, ("lr", "momentum")))
    _, first = run(item(one, "one"), tmp_path)
    _, second = run(item(more, "two"), tmp_path)
    assert len(first.begun) == 3
    assert len(second.begun) == 3
    assert all("FedBCGD" in label for label in second.begun)


def test_two_contenders_that_are_the_same_run_are_run_once(tmp_path):
    twin = Contender("again", "FedAvg again", {"name": "fedavg"})
    (result,), shown = run(item(small(*small().contenders, twin)), tmp_path)
    assert len(shown.begun) == 3
    assert result.finals("again") == result.finals("fedavg")


def test_where_it_is_computed_is_no_part_of_what_a_run_is():
    panel = small()
    (_, here), (_, there) = (
        plan.seed_runs(panel, {"fedavg": {"lr": 0.01}}, 1, Machine(workers))[0] for workers in (0, 3)
    )
    assert here.folder == there.folder
    (_, other) = plan.seed_runs(panel, {"fedavg": {"lr": 0.02}}, 1, Machine())[0]
    assert other.folder != here.folder
    assert here.folder.startswith("embedded-binary-logistic-fedavg-")


def test_a_learning_rate_that_diverges_is_not_chosen(tmp_path):
    panel = replace(small(rates=(1e20, 0.01)), budget=20.0)  # ten rounds for the search
    (result,), _ = run(item(panel), tmp_path)
    lost, kept = result.trials
    assert math.isnan(lost.score)
    assert not lost.chosen
    assert kept.chosen
    assert "diverged" in pages._search_section([result])


def test_settings_of_another_contender(tmp_path):
    """Tuned as FedBCGD: its learning rate is taken, its momentum is not where the contender says its own."""
    tuned = Contender("b", "B", {"name": "fedbcgd"}, ("lr", "momentum"))
    plain = Contender("a", "A", {"name": "fedbcgd", "momentum": 0.0}, tuned_as="b")
    (result,), shown = run(item(small(plain, tuned)), tmp_path)
    assert len(shown.begun) == 4  # two of the search, and one each
    configs = [json.loads(p.read_text())["config"] for p in tmp_path.glob("runs/*/summary.json")]
    final = [c["algorithm"] for c in configs if not c["data"]["validation"]]
    assert sorted(a["momentum"] for a in final) == [0.0, 0.5]
    assert {a["lr"] for a in final} == {result.chosen["b"]["lr"]}


def test_centralised_training_gets_the_minibatches_of_the_other(tmp_path):
    central = Contender("central", "Centralised SGD", {"name": "central"}, rounds_of="b")
    other = Contender("b", "B", {"name": "fedbcgd", "blocks": 5, "lr": 0.01, "momentum": 0.5})
    panel = small(replace(central, algorithm={"name": "central", "lr": 0.01}), other)
    (result,), _ = run(item(panel), tmp_path)
    one, two = (result.outcomes[key][1].ledger for key in ("central", "b"))
    assert one.gradient_evaluations == two.gradient_evaluations == 10 * 10  # 10 rounds of 10 clients with one step
    assert one.upload_bytes == 0


def test_another_data_set_can_stand_in(tmp_path):
    request = Request("smoke", tmp_path, data={"embedded": "mine"})
    (panel,) = panels_for(item(small()), request)
    assert panel.data["name"] == "mine"


def test_a_panel_that_is_not_there_is_named():
    with pytest.raises(UserError, match="--only: expected part of one of logistic, got 'lenet'"):
        select_panels([small()], "lenet")


def test_a_panel_left_out_now_still_shows_what_was_finished(tmp_path):
    one = small()
    two = replace(one, key="other", title="other", data={**one.data, "dirichlet": 5.0})
    both = Item("both", "Both", dict.fromkeys(("paper", "cpu", "smoke"), (one, two)))
    first, _ = run(both, tmp_path, only="other")
    assert [bool(r.contenders) for r in first] == [False, True]
    second, _ = run(both, tmp_path, only="logistic")
    assert [bool(r.contenders) for r in second] == [True, True]


def test_killed_in_the_middle_it_goes_on_and_repeats_nothing(tmp_path):
    command = [sys.executable, "-m", "fedbcgd", "reproduce", "figure8", "--scale", "smoke", "--out", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while len(list(tmp_path.glob("runs/*/summary.json"))) < 3:
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    before = {p: p.stat().st_mtime_ns for p in tmp_path.glob("runs/*/summary.json")}
    assert not (tmp_path / "figure8").exists()
    results, shown = run(ITEMS["figure8"], tmp_path)
    assert all(p.stat().st_mtime_ns == then for p, then in before.items())
    assert len(shown.begun) == 9 - len(before)
    assert len(results[0].contenders) == 9


def test_a_data_set_that_is_missing_matters_only_where_it_is_asked_for(tmp_path):
    here = small()
    missing = replace(here, key="missing", data={**here.data, "name": "not-here"})
    both = Item("both", "Both", dict.fromkeys(("paper", "cpu", "smoke"), (here, missing)))
    results, _ = run(both, tmp_path, only="logistic")
    assert [bool(r.contenders) for r in results] == [True, False]
    with pytest.raises(UserError, match="not-here"):
        run(both, tmp_path, only="missing")


def test_a_run_knows_the_source_that_made_it_and_the_command_can_be_typed(tmp_path):
    (result,), _ = run(item(small()), tmp_path)
    assert result.commits == {origin.current_commit()}
    request = Request("smoke", tmp_path, seeds=2, only="log", data={"embedded": "mine", "cifar10": "other"})
    assert (
        request.command(item(small()))
        == "fedbcgd reproduce item --scale smoke --only log --seeds 2 --data embedded=mine"
    )
