"""Timing finished runs on other networks, and who served which block."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

from fedbcgd import UserError
from fedbcgd.engine.run_folder import RunFolder
from fedbcgd.engine.traffic import Round
from fedbcgd.network.links import Links
from fedbcgd.report import reach
from fedbcgd.report.network import (
    format_hours,
    hours_table,
    measure_hours,
    measure_runs,
    runs_in,
    runs_table,
    select_networks,
)
from fedbcgd.runs import config as configuration
from fedbcgd.runs.bias import block_biases
from fedbcgd.runs.execute import execute
from fedbcgd.runs.retiming import Tied, bias, check_target, hours, to_reach


def make(network=None, **run):
    raw = {
        "data": {"clients": 8},
        "model": {"name": "logistic"},
        "algorithm": {"name": "fedbcgd", "blocks": 2, "local_steps": 1, "batch_size": 4},
        "run": {"rounds": 4, "cohort": 4, "workers": 0, "evaluate_every": 2, **run},
        **({"network": network} if network else {}),
    }
    return configuration.check(raw, "test")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "one"
    execute(make({"profile": "broadband"}), path)
    return path


def test_afterwards_is_as_it_was_watched(run, tmp_path):
    """The hours that a run recorded equal those computed from its traffic."""
    watched = [row["hours"] for row in RunFolder(run).rows()]
    assert hours(run) == watched
    assert hours(run, "broadband") == pytest.approx(watched, rel=1e-12)
    execute(make({"profile": "4g", "compute": 3.0}), tmp_path / "other")
    assert hours(run, {"profile": "4g", "compute": 3.0}) == pytest.approx(hours(tmp_path / "other"), rel=1e-12)
    assert hours(run, "datacentre")[-1] < watched[-1] < hours(run, "4g")[-1]


def test_a_run_without_a_network_is_recorded_too(tmp_path):
    execute(make(), tmp_path / "plain")
    execute(make({"profile": "mix"}), tmp_path / "watched")
    assert hours(tmp_path / "plain", "mix") == pytest.approx(hours(tmp_path / "watched"), rel=1e-12)
    with pytest.raises(UserError, match="was run without a network"):
        hours(tmp_path / "plain")


TIES = [{"deadline": 600.0}, {"oversample": 2.0}, {"minimum": 1}, {"absences": True}, {"dropout": 0.2}]


@pytest.mark.parametrize("tie", [*TIES, {"uplink": "matched"}], ids=str)
def test_a_run_that_its_network_had_a_hand_in_has_no_hours_elsewhere(tmp_path, tie):
    """On its own network, under any name, it has the hours that it recorded."""
    config = make({"profile": "broadband", **{k: v for k, v in tie.items() if k != "uplink"}}, rounds=2)
    if "uplink" in tie:
        config = config.model_copy(update={"algorithm": config.algorithm | tie})
    execute(config, tmp_path / "run")
    with pytest.raises(Tied, match=f"{next(iter(tie))}.*would mislead"):
        hours(tmp_path / "run", "4g")
    assert hours(tmp_path / "run", "broadband") == pytest.approx(hours(tmp_path / "run"), rel=1e-12)
    said = []
    outcomes = {"run": {0: RunFolder(tmp_path / "run").outcome()}}
    shutil.copytree(tmp_path / "run", tmp_path / "all" / "run" / "seed-0")
    (row,) = reach.rows(outcomes, tmp_path / "all", say=said.append)
    assert "hours_4g" not in row
    assert row["hours_own"] > 0
    assert len(said) == 1


def test_matched_without_haste_or_fitted_blocks_is_tied_to_nothing(tmp_path):
    config = make({"profile": "broadband"}, rounds=2)
    own = {"uplink": "matched", "haste": 0.0, "divider": "even"}
    execute(config.model_copy(update={"algorithm": config.algorithm | own}), tmp_path / "run")
    assert hours(tmp_path / "run", "4g")[-1] > hours(tmp_path / "run")[-1]


def test_links_made_elsewhere(run):
    """Nothing but latency, a second each way: two seconds a round."""
    links = Links(np.full(8, np.inf), np.full(8, np.inf), np.ones(8), np.zeros(8), np.ones(8))
    assert hours(run, links) == pytest.approx([4 / 3600, 8 / 3600])


@pytest.mark.parametrize("damage", ["absent", "cut", "nonsense", "out of order", "no run"])
def test_damaged_records_are_explained(run, tmp_path, damage):
    path = tmp_path / "copy"
    shutil.copytree(run, path)
    traffic = path / "traffic.jsonl"
    lines = traffic.read_text().splitlines()
    if damage == "absent":
        traffic.unlink()
    elif damage == "no run":
        shutil.rmtree(path)
        path.mkdir()
    else:
        kept = {"cut": lines[:3], "nonsense": [*lines[:3], '{"round": 4}'], "out of order": lines[::-1]}[damage]
        traffic.write_text("\n".join(kept) + "\n")
    messages = {
        "absent": "has no traffic.jsonl",
        "cut": "expected 4 rounds as in the metrics, got 3",
        "nonsense": "line 4: expected the record",
        "out of order": "line 1: expected round 1, got round 4",
        "no run": "expected the folder of a run",
    }
    with pytest.raises(UserError, match=messages[damage]):
        hours(path, "4g")


def test_the_first_row_that_reached_the_target():
    rows = [{"test_accuracy": a} for a in (0.2, 0.6, 0.5, 0.7)]
    assert to_reach(rows, [1.0, 2.0, 3.0, 4.0], "test_accuracy", 0.55) == 2.0
    assert to_reach(rows, [1.0, 2.0, 3.0, 4.0], "test_accuracy", 0.65) == 4.0
    assert to_reach(rows, [1.0, 2.0, 3.0, 4.0], "test_accuracy", 0.9) is None


@pytest.mark.parametrize("target", [80.0, 1.5, 0.0, -1.0, float("nan"), float("inf")])
def test_a_target_is_an_accuracy(target):
    with pytest.raises(UserError, match=r"target: expected an accuracy > 0 and ≤ 1"):
        check_target(target)


def test_one_damaged_record_leaves_the_others_their_hours(run, tmp_path):
    for seed in (0, 1):
        shutil.copytree(run, tmp_path / "fedbcgd" / f"seed-{seed}")
    traffic = tmp_path / "fedbcgd" / "seed-1" / "traffic.jsonl"
    traffic.write_text(traffic.read_text()[:-20])
    messages = []
    whole, cut = reach.rows({"fedbcgd": {s: RunFolder(run).outcome() for s in (0, 1)}}, tmp_path, say=messages.append)
    assert whole["hours_4g"] > 0
    assert "hours_4g" not in cut
    assert cut["rounds"] == whole["rounds"]
    assert len(messages) == 1
    assert "seed-1/traffic.jsonl: expected 4 rounds as in the metrics, got 3" in messages[0]


@pytest.mark.parametrize(
    ("time", "words"), [(59 / 3600, "59 s"), (0.000001, "0.0036 s"), (0.02, "0.02 h"), (123.4, "123 h")]
)
def test_times_as_a_person_says_them(time, words):
    assert format_hours(time) == words


def test_a_problem_without_accuracy_has_hours_to_its_own_metric(tmp_path):
    raw = {"data": {"name": "quadratics", "clients": 6}, "model": {"name": "point"}, "algorithm": {"name": "fedavg"}}
    raw["run"] = {"rounds": 2, "cohort": 3, "workers": 0}
    execute(configuration.check(raw, "test"), tmp_path)
    chosen = select_networks(tmp_path, None, None)
    assert list(chosen) == ["4g", "broadband", "datacentre", "mix"]
    found = measure_hours(tmp_path, chosen, None)
    least = min(row["test_gap"] for row in RunFolder(tmp_path).rows())
    assert all((row["metric"], row["target"]) == ("test_gap", least) for row in found)
    assert [str(column.header) for column in hours_table(found).columns][1:] == [
        "whole run",
        f"to test gap {least:.4g}",
    ]
    (row,) = measure_hours(tmp_path, select_networks(tmp_path, "4g", None), 1e9)  # above, so from the first row on
    assert row["hours_to_target"] == hours(tmp_path, "4g")[0]
    lines = [{k: v for k, v in row.items() if "loss" not in k and "gap" not in k} for row in RunFolder(tmp_path).rows()]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert all(set(row) == {"network", "hours"} for row in measure_hours(tmp_path, chosen, None))
    with pytest.raises(UserError, match="--target: expected a run with an accuracy or a loss"):
        measure_hours(tmp_path, chosen, 0.5)


def test_a_metric_that_falls_is_reached_from_above(run, tmp_path):
    """What the summary says of its metric counts; without a summary the name does."""
    folder = tmp_path / "regression"
    shutil.copytree(run, folder)
    falling = [{**row, "test_mae": 4.0 - row["round"]} for row in RunFolder(run).rows()]
    falling = [{k: v for k, v in row.items() if "accuracy" not in k} for row in falling]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in falling))
    summary = json.loads((run / "summary.json").read_text())
    summary.pop("crc", None)
    (folder / "summary.json").write_text(json.dumps(summary | {"metric": "mae", "goal": "min"}))
    (row,) = measure_hours(folder, select_networks(folder, "4g", None), 2.0)
    assert (row["metric"], row["target"]) == ("test_mae", 2.0)
    at = hours(folder, "4g")
    rounds = [r["round"] for r in falling]
    assert row["hours_to_target"] == at[rounds.index(2)]  # 4 − 2
    assert [str(column.header) for column in hours_table([row]).columns][-1] == "to test mae 2"
    outcome = dataclasses.replace(RunFolder(run).outcome(), rows=falling)
    (found,) = reach.rows({"regression": {0: outcome}}, tmp_path / "elsewhere", target=2.5)
    assert found["metric"] == "test_mae"  # no summary is there: of one's own metrics and the loss, the metric
    shutil.copytree(folder, tmp_path / "all" / "regression" / "seed-0")
    (found,) = reach.rows({"regression": {0: outcome}}, tmp_path / "all")
    assert (found["metric"], found["target"]) == ("test_mae", 4.0 - rounds[-1])
    assert found["rounds"] == rounds[-1]
    assert reach.table([found]).title == f"to reach test mae {4 - rounds[-1]:g} (mean over seeds)"


def test_hours_of_a_comparison(run, tmp_path):
    """A row for each algorithm: the mean over its seeds, to what all reached; a run without metrics says why."""
    for name, seed, gain in (("a", 0, 0.0), ("a", 1, 0.25), ("b", 0, 0.3)):
        folder = tmp_path / name / f"seed-{seed}"
        shutil.copytree(run, folder)
        rows = [{**row, "test_accuracy": 0.1 * row["round"] + gain} for row in RunFolder(run).rows()]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.copytree(run, tmp_path / "c" / "seed-0")
    (tmp_path / "c" / "seed-0" / "metrics.jsonl").write_text("")
    runs = runs_in(tmp_path)
    assert [str(path.relative_to(tmp_path)) for path in runs] == ["a/seed-0", "a/seed-1", "b/seed-0", "c/seed-0"]
    assert runs_in(run) == [run]
    found = measure_runs(tmp_path, runs, "4g,mix", None, None)
    last = rows[-1]["round"]
    assert {row["target"] for row in found if "target" in row} == {0.1 * last}
    assert [row["run"] for row in found] == ["a/seed-0"] * 2 + ["a/seed-1"] * 2 + ["b/seed-0"] * 2 + ["c/seed-0"]
    assert "expected metrics, got none yet" in found[-1]["why"]
    first, second, third = (row["hours_to_target"] for row in found if row["network"] == "4g")
    assert first > second == third  # 0.1·round + gain, seen after rounds 2 and 4
    table = runs_table(found)
    assert [str(column.header) for column in table.columns] == ["run", "4g", "mix"]
    names, on_4g = ([str(cell) for cell in table.columns[k].cells] for k in (0, 1))
    assert names == ["a", "b", "c"]
    assert on_4g[0].endswith(f"\n{format_hours((first + second) / 2)}")
    assert on_4g[-1] == "–"


def test_the_own_network_comes_first_and_measurements_before_it(run, tmp_path):
    csv = tmp_path / "links.csv"
    csv.write_text("uplink_mbit,downlink_mbit,latency_ms,gradient_ms\n1,1,1,1\n")
    assert list(select_networks(run, None, None))[:2] == ["own", "4g"]
    assert list(select_networks(run, "4g,own", csv)) == [str(csv), "own", "4g"]


def test_bias_by_hand():
    """Ten clients, the uplink of client i is i + 1. Block 0 is served by clients 0, 0 and 1 (the slowest fifth alone),
    block 1 by 8 and, refused, by 2. Ranks: (0 + 0 + 1)/3/9 and 8/9; distance of (1, 0, 0, 0, 0) from fair: 0.8."""
    links = Links(np.arange(1.0, 11), *(np.ones(10) for _ in range(4)))
    first = Round(1, 3, 0, 0.0, [0, 1, 8], [0, 0, 1], [0] * 3, [0] * 3, [1, 1, 1])
    second = Round(2, 2, 0, 0.0, [0, 2], [0, 1], [0] * 2, [0] * 2, [1, 0])
    slow, fast = block_biases([first, second], links)
    assert (slow.block, slow.uploads, slow.clients) == (0, 3, 2)
    assert slow.rank == pytest.approx(1 / 27)
    assert slow.shares == (1, 0, 0, 0, 0)
    assert slow.distance == pytest.approx(0.8)
    assert (fast.uploads, fast.clients, fast.rank, fast.shares[4]) == (1, 1, pytest.approx(8 / 9), 1)
    assert fast.row()["from_fifth_5"] == 1


def test_matched_blocks_are_biased_as_haste_says(tmp_path):
    """Uplinks differ a thousandfold and nothing else matters: matched blocks are biased to fast clients, others are not."""

    def largest(haste):
        network = {"uplink_mbit": {"median": 0.01, "spread": 1000.0, "shape": "loguniform"}}
        config = make(network, rounds=40, cohort=8, evaluate_every=40)
        own = {"uplink": "matched", "haste": haste, "divider": [1, 9]}
        execute(config.model_copy(update={"algorithm": config.algorithm | own}), tmp_path / str(haste))
        return bias(tmp_path / str(haste))[1].rank

    assert largest(1.0) > 0.75
    assert largest(0.0) == pytest.approx(0.5, abs=0.1)


def test_what_it_took_to_reach_an_accuracy(run, tmp_path):
    """Without a target: what every run reached. A run without traffic.jsonl has no hours."""
    for seed in (0, 1):
        shutil.copytree(run, tmp_path / "fedbcgd" / f"seed-{seed}")
    outcomes = {"fedbcgd": {seed: RunFolder(run).outcome() for seed in (0, 1)}}
    (tmp_path / "fedbcgd" / "seed-1" / "traffic.jsonl").unlink()
    first, second = reach.rows(outcomes, tmp_path)
    best = max(row["test_accuracy"] for row in RunFolder(run).rows())
    at = next(k for k, row in enumerate(RunFolder(run).rows()) if row["test_accuracy"] == best)
    assert first["target"] == best
    assert first["rounds"] == RunFolder(run).rows()[at]["round"]
    for profile in ("4g", "broadband", "datacentre", "mix"):
        assert first[f"hours_{profile}"] == hours(run, profile)[at]
    assert first["hours_own"] == hours(run)[at]
    assert "hours_4g" not in second
    assert reach.table([first, second]).row_count == 1
    unreached = reach.rows(outcomes, tmp_path, target=1.0)
    assert unreached[0]["rounds"] is None
    assert json.dumps(unreached)
