"""`compare` and `sweep` from Python: the runs, tables and files of the commands."""

import csv

import pytest
import torch
from torch import nn

import fedbcgd
from fedbcgd import UserError, make_algorithm
from fedbcgd.runs import compare as comparison
from fedbcgd.runs import config as configuration
from tests.command import fedbcgd as command
from tests.runs.test_execute import rows_of
from tests.runs.test_from_python import absolute_error, houses, measured

QUICK = {"rounds": 3, "cohort": 3, "workers": 0, "batch_size": 4, "local_steps": 2, "lr": 0.03}
TASK = {"loss": absolute_error, "metrics": measured, "metric": "mae"}


@pytest.fixture(scope="module", autouse=True)
def without_figures(no_figures):
    pass


def make_model():
    return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 1))


def compare(folder, algorithms=("fedavg", "fedbcgd"), **options):
    data = houses(7)
    options = {"seeds": 2, "test": data[-1], "progress": False, **QUICK, **TASK, **options}
    return fedbcgd.compare(make_model, data[:-1], algorithms, out=folder, **options)


def test_it_writes_what_the_command_writes(tmp_path):
    runs = compare(tmp_path, {"fedavg": {}, "two blocks": {"name": "fedbcgd", "blocks": 2}}, momentum=0.5)
    assert {p.name for p in tmp_path.iterdir()} == {
        *("fedavg", "two blocks", "compare.csv", "reach.csv", "compare.png", "compare.svg"),
    }
    with (tmp_path / "compare.csv").open() as file:
        written = list(csv.DictReader(file))
    assert [(row["algorithm"], row["seed"]) for row in written] == [
        ("fedavg", "0"), ("fedavg", "1"), ("two blocks", "0"), ("two blocks", "1"),
    ]  # fmt: skip
    assert [float(row["test_mae"]) for row in written] == [row["test_mae"] for row in runs.rows]
    options = configuration.read_table(tmp_path / "two blocks" / "seed-1" / "config.toml")["algorithm"]
    assert (options["blocks"], options["momentum"]) == (2, 0.5)  # fedavg has no momentum
    for text in (str(runs), runs._repr_html_()):
        assert "mae" in text
        assert "to reach test mae" in text
        assert "accuracy" not in text
    runs.page(tmp_path / "page.html")
    assert "two blocks" in (tmp_path / "page.html").read_text()
    assert "test mae" in command("hours", str(tmp_path), "--network", "4g").stdout
    assert len(runs.frame()) == 4


def test_each_run_is_that_of_simulate_with_its_seed(tmp_path):
    compare(tmp_path)
    data = houses(7)
    torch.manual_seed(1)
    alone = fedbcgd.simulate(
        make_model(), data[:-1], "fedbcgd", seed=1, test=data[-1], out=tmp_path / "alone", **QUICK, **TASK
    )
    assert rows_of(tmp_path / "fedbcgd" / "seed-1") == rows_of(tmp_path / "alone")
    assert alone.rows


def test_finished_runs_are_kept_and_others_go_on(tmp_path):
    whole = compare(tmp_path / "whole")

    def interrupt(info):
        if (info.server.algorithm.name, info.server.round) == ("fedbcgd", 2):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(tmp_path / "cut", callbacks=[interrupt])
    kept = (tmp_path / "cut" / "fedavg" / "seed-0" / "metrics.jsonl").read_bytes()
    again = compare(tmp_path / "cut")
    assert (tmp_path / "cut" / "fedavg" / "seed-0" / "metrics.jsonl").read_bytes() == kept
    assert [row["test_mae"] for row in again.rows] == [row["test_mae"] for row in whole.rows]


def test_an_algorithm_object_is_compared_too(tmp_path):
    own = make_algorithm("fedbcgd", blocks=2, batch_size=4, local_steps=2, lr=0.03)
    settings = {k: QUICK[k] for k in ("rounds", "cohort", "workers")}
    data = houses(7)
    runs = fedbcgd.compare(make_model(), data[:-1], {"mine": own}, out=tmp_path, test=data[-1], **settings, **TASK)
    assert [row["algorithm"] for row in runs.rows] == ["mine"]


@pytest.mark.parametrize(
    ("algorithms", "options", "said"),
    [
        (["fedavgg"], {}, "algorithm: expected one of .* Did you mean 'fedavg'"),
        ("fedavg", {}, "algorithms: expected a list of names"),
        ({"fedavg": 3}, {}, "expected a dictionary of options"),
        (["fedavg"], {"learning_rate": 0.1}, "learning_rate: no such option; it is called lr"),
        (["fedavg"], {"seeds": 0}, "seeds: expected an integer ≥ 1"),
        (["fedavg"], {"lr": -1.0}, "lr: expected"),
        (["fedavg"], {"resume": True}, "resume: expected none"),
        (["fedavg"], {"metric": "rmse"}, "metric: expected one of loss, mae, got 'rmse'"),
    ],
)
def test_mistakes_are_found_before_anything_is_written(tmp_path, algorithms, options, said):
    with pytest.raises(UserError, match=said):
        compare(tmp_path / "out", algorithms, **options)
    assert not (tmp_path / "out").exists()


def test_sweep_chooses_on_examples_that_no_client_trains_on(tmp_path):
    data = houses(6)
    seen = []

    def counted(model, batch):
        seen.append(len(batch[0]))
        return measured(model, batch)

    grid = {"lr": [0.0001, 0.05], "momentum": [0.0]}
    settings = {k: v for k, v in QUICK.items() if k != "lr"} | TASK | {"metrics": counted}
    found = fedbcgd.sweep(make_model, data, "fedbcgd", grid=grid, out=tmp_path, validation=0.25, **settings)
    assert found.best["lr"] == 0.05
    assert set(seen) == {6 * 3}  # a quarter of the 12 examples of each client
    assert (tmp_path / "lr=0.05_momentum=0.0" / "metrics.jsonl").exists()
    assert "validation_mae" in found.rows[0]
    assert str(found).index("0.05") < str(found).index("0.0001")
    with pytest.raises(UserError, match="test: expected none"):
        fedbcgd.sweep(make_model, data, grid=grid, out=tmp_path, test=data[0])


@pytest.mark.parametrize(
    ("grid", "options", "said"),
    [
        ({"lr": 0.1}, {}, "grid: expected a list of values of lr, got 0.1"),
        ({"rounds": [1]}, {}, "rounds: expected an option of"),
        ({"lr": [0.1]}, {"metric": "rmse"}, "metric: expected one of loss, mae, got 'rmse'"),
    ],
)
def test_wrong_sweeps_are_explained_before_anything_is_written(tmp_path, grid, options, said):
    with pytest.raises(UserError, match=said):
        fedbcgd.sweep(make_model(), houses(3), grid=grid, out=tmp_path / "out", rounds=1, **{**TASK, **options})
    assert not (tmp_path / "out").exists()


def test_sweep_measures_on_given_data(tmp_path):
    data = houses(7)
    grid = {"lr": [0.01, 0.05]}
    settings = {k: v for k, v in QUICK.items() if k != "lr"} | TASK
    found = fedbcgd.sweep(make_model(), data[:-1], grid=grid, out=tmp_path, validation=data[-1], **settings)
    assert len(found.outcomes) == 2
    assert repr(found) == f"<2 runs in {tmp_path}; print them for their tables>"
    assert all(outcome.final["validation_mae"] > 0 for outcome in found.outcomes.values())


def test_the_command_and_python_share_their_tables():
    assert fedbcgd.compare.__module__ == "fedbcgd.comparison"
    assert comparison.options_of("fedavg", {"name": "x", "momentum": 1, "lr": 2}, {"lr": 3}) == {
        "name": "fedavg", "lr": 3,
    }  # fmt: skip
