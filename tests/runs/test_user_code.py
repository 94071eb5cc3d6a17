"""Algorithms, clients and callbacks of a user's own in a configuration, and the callbacks that are ready."""

import csv
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fedbcgd import ClientCsv, EarlyStopping, KeepBest, UserError, load_model, simulate
from fedbcgd.algorithms import registry
from fedbcgd.engine.run_folder import RunFolder
from fedbcgd.runs import compare as comparison
from fedbcgd.runs import config as configuration
from fedbcgd.runs.execute import execute
from fedbcgd.runs.retiming import hours
from tests.runs.test_execute import rows_of, stop_after
from tests.runs.test_from_python import QUICK, regression, same_run

CODE = """
import torch
from torch import nn
from fedbcgd import make_algorithm
from fedbcgd.algorithms.registry import algorithm_names, register

fixed = make_algorithm("fedavg", lr=0.05, batch_size=4, local_steps=2)

def mine(lr=0.05, blocks=2):
    return make_algorithm("fedbcgd", lr=lr, blocks=blocks, batch_size=4, local_steps=2)

def register_all():
    register("own average", uplink="whole", local="sgd", server="average", codec="float16")

def nothing():
    pass

def three():
    return 3

def fails():
    return 1 / 0

def fails_on(model, batch):
    raise ValueError("no such batch")

def net_that_fails():
    return *net()[:2], fails_on

if "own at import" not in algorithm_names():
    register("own at import", uplink="blocks", local="sgd", server="average", codec="plain")

def clients(seed, count=6):
    g = torch.Generator().manual_seed(seed)
    slope = torch.randn(5, generator=g)
    made = [(x, x @ slope) for x in torch.randn(count + 1, 12, 5, generator=g)]
    return made[:-1], made[-1]

def alone():
    return clients(0)[0]

def error(model, batch):
    return (model(batch[0])[:, 0] - batch[1]).abs().mean()

def net():
    return nn.Linear(5, 1), error, lambda model, batch: {"mae": error(model, batch)}

seen = []

def note(info):
    seen.append((info.server.round, len(info.cohort), type(info.module).__name__))

class Stops:
    def __call__(self, info):
        if info.server.round == 2:
            info.stop()
"""


@pytest.fixture
def own(tmp_path, monkeypatch, request):
    """A module of its own for each test, since modules and registered names stay."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_RECIPES", dict(registry._RECIPES))  # what it registers goes again
    name = f"own_{abs(hash(request.node.nodeid))}"
    code = CODE.replace("own average", f"average of {name}").replace("own at import", f"imported {name}")
    Path(f"{name}.py").write_text(code)
    return name


def settings(own, algorithm=None, data=None, **run):
    run = {"rounds": 3, "cohort": 3, "workers": 0, "metric": "mae", **run}
    raw = {
        "data": {"clients_from": f"{own}.py:clients", **(data or {})},
        "model": {"name": f"{own}:net"},
        "algorithm": algorithm or {"name": "fedbcgd", "blocks": 2, "batch_size": 4, "local_steps": 2, "lr": 0.05},
        "run": run,
    }
    return configuration.check(raw, "test")


@pytest.mark.parametrize(
    ("name", "options", "stands_for"),
    [
        ("fixed", {}, "fedavg"),
        ("mine", {"lr": 0.01}, "fedbcgd"),
        ("register_all", {"lr": 0.01, "batch_size": 4, "local_steps": 2}, "average of {own}"),
        ("imported {own}", {"blocks": 2, "batch_size": 4, "local_steps": 2}, "imported {own}"),
    ],
)
def test_own_algorithms(tmp_path, own, name, options, stands_for):
    algorithm = {"name": f"{own}.py:{name.format(own=own)}", **options}
    outcome = execute(settings(own, algorithm), tmp_path / "run")
    assert outcome.algorithm == stands_for.format(own=own)
    execute(settings(own, algorithm, rounds=4), tmp_path / "run", resume=True)
    execute(configuration.load(tmp_path / "run" / "config.toml"), tmp_path / "again")
    same_run(tmp_path / "run", tmp_path / "again")


def test_they_are_compared(tmp_path, own):
    config = settings(own, {"lr": 0.02, "batch_size": 4})
    runs = comparison.plan(config, ["fedavg", f"{own}.py:mine"], 2)
    assert [run.folder for run in runs][2:] == ["mine/seed-0", "mine/seed-1"]
    assert runs[2].config.algorithm == {"name": f"{own}.py:mine", "lr": 0.02}


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("absent", {}, "expected a name in own_.* got 'absent'"),
        ("nothing", {}, "or to register one algorithm, got neither"),
        ("three", {}, "to be or to return an Algorithm or a name, got int"),
        ("fixed", {"lr": 0.1}, "lr: expected no options with .*:fixed"),
        ("fails", {}, r"fails failed: ZeroDivisionError: .* \(.*own_\d+\.py, line 22\)"),
        ("mine", {"learning": 0.1}, r"learning: expected an argument of .*mine \(lr, blocks\)"),
    ],
)
def test_wrong_algorithms_are_explained(own, name, options, said):
    with pytest.raises(UserError, match=said):
        settings(own, {"name": f"{own}.py:{name}", **options})


def test_what_reads_a_folder_imports_nothing_of_it(tmp_path, own):
    execute(settings(own, {"name": f"{own}.py:mine"}), tmp_path / "run")
    sys.modules.pop(own)
    Path(f"{own}.py").write_text("raise SystemExit('imported')")
    assert len(hours(tmp_path / "run", "4g")) == 3


def test_own_clients_are_counted_and_the_same_as_given_ones(tmp_path, own):
    execute(settings(own, data={"options": {"seed": 0}}), tmp_path / "configured")
    values = configuration.read_table(tmp_path / "configured" / "config.toml")
    assert values["data"]["clients"] == 6
    module = sys.modules[own]
    (clients, test), (_, loss, metrics) = module.clients(0), module.net()
    torch.manual_seed(0)
    options = {"blocks": 2, "batch_size": 4, "local_steps": 2, "lr": 0.05, "rounds": 3, "cohort": 3, "workers": 0}
    objective = {"loss": loss, "metrics": metrics, "metric": "mae"}
    simulate(torch.nn.Linear(5, 1), clients, test=test, out=tmp_path / "given", **options, **objective)
    assert rows_of(tmp_path / "given") == rows_of(tmp_path / "configured")
    execute(settings(own, data={"options": {"seed": 0}}), tmp_path / "configured", resume=True)


def test_own_clients_are_held_out_for_validation(tmp_path, own):
    outcome = execute(settings(own, data={"validation": 0.25}), tmp_path / "run")
    assert "validation_mae" in outcome.final


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"clients_from": "{own}.py:three"}, "expected .*three to return a list of clients, .*, got int"),
        ({"name": "embedded"}, r"data\.name: expected none with data\.clients_from"),
        ({"options": {"towns": 3}}, r"data\.options\.towns: expected an argument of"),
        ({"clients_from": "{own}.py:fails"}, r"data: .*fails failed: ZeroDivisionError: .* \(.*own_\d+\.py, line 22\)"),
    ],
)
def test_wrong_clients_are_explained(tmp_path, own, data, said):
    data = {k: v.format(own=own) if isinstance(v, str) else v for k, v in data.items()}
    with pytest.raises(UserError, match=said):
        execute(settings(own, data=data), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_callbacks_by_name(tmp_path, own):
    outcome = execute(settings(own, callbacks=[f"{own}.py:note", f"{own}.py:Stops", "csv"]), tmp_path / "run")
    assert (outcome.rounds, outcome.stopped) == (2, "callback")
    assert sys.modules[own].seen == [(1, 3, "Linear"), (2, 3, "Linear")]
    with (tmp_path / "run" / "clients.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["round"] for row in rows] == ["1"] * 3 + ["2"] * 3
    assert set(rows[0]) >= {"client", "block", "upload_bytes", "accepted"}
    with pytest.raises(UserError, match=r"run\.callbacks: expected .*fixed to be a function of a RoundInfo"):
        execute(settings(own, callbacks=[f"{own}.py:fixed"]), tmp_path / "other")


@pytest.mark.parametrize(
    ("model", "run", "said"),
    [
        ("net", {"callbacks": ["tsv"]}, "run.callbacks: expected one of csv, .*, got 'tsv'"),
        ("net", {"callbacks": ["{own}.py:fails"]}, r"run.callbacks: .* \(.*own_\d+\.py, line 22\)"),
        ("net", {"metric": "rmse"}, "metric: expected one of loss, mae, got 'rmse'"),
        ("net", {"target": {"maee": 0.1}}, "target: expected one of loss, mae, got 'maee'"),
        ("net_that_fails", {}, r"metrics: expected .* no such batch \(.*own_\d+\.py, line 25\)"),
    ],
)
def test_mistakes_are_found_before_anything_is_written(tmp_path, own, model, run, said):
    run = {k: [v[0].format(own=own)] if k == "callbacks" else v for k, v in run.items()}
    config = settings(own, **run).model_copy(update={"model": configuration.Model(name=f"{own}:{model}")})
    with pytest.raises(UserError, match=said):
        execute(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def values_of(folder):
    return [row["test_mae"] for row in RunFolder(folder).rows()]


def test_patience_and_the_best_model(tmp_path, own):
    options = {"rounds": 40, "patience": 3, "keep_best": True}
    fast = {"name": "fedavg", "lr": 1.0, "batch_size": 4, "local_steps": 2}
    outcome = execute(settings(own, fast, **options), tmp_path / "whole")
    values = values_of(tmp_path / "whole")
    assert outcome.stopped == "patience"
    assert min(range(len(values)), key=values.__getitem__) == len(values) - 4
    module = sys.modules[own]
    best = load_model(tmp_path / "whole" / "best.safetensors", model=torch.nn.Linear(5, 1))
    test = module.clients(0)[1]
    assert float(module.error(best, test).detach()) == pytest.approx(min(values), rel=1e-5)
    for cut in range(1, len(values)):
        with pytest.raises(KeyboardInterrupt):
            execute(settings(own, fast, **options), tmp_path / str(cut), callbacks=[stop_after(cut)])
        again = execute(settings(own, fast, **options), tmp_path / str(cut), resume=True)
        assert again.stopped == "patience"
        same_run(tmp_path / "whole", tmp_path / str(cut))
        files = [(tmp_path / name / "best.safetensors").read_bytes() for name in ("whole", str(cut))]
        assert files[0] == files[1]


def test_a_run_that_patience_ended_is_not_continued(tmp_path, own):
    fast = {"name": "fedavg", "lr": 1.0, "batch_size": 4, "local_steps": 2}
    first = execute(settings(own, fast, rounds=40, patience=2), tmp_path)
    again = execute(settings(own, fast, rounds=40, patience=2), tmp_path, resume=True)
    assert (again.rounds, again.stopped) == (first.rounds, "patience")


def test_ready_callbacks_from_python(tmp_path):
    metric = {"metric": "mae", "rounds": 30, "lr": 1.0}
    result = regression(tmp_path, callbacks=[EarlyStopping(2), KeepBest(), ClientCsv(tmp_path / "all.csv")], **metric)
    assert result.stopped == "patience"
    assert (tmp_path / "best.safetensors").exists()
    assert len((tmp_path / "all.csv").read_text().splitlines()) == 1 + QUICK["cohort"] * result.rounds
    with pytest.raises(UserError, match="KeepBest: expected a path"):
        regression(None, callbacks=[KeepBest()])
    with pytest.raises(UserError, match="patience: expected an integer ≥ 1"):
        EarlyStopping(0)


def test_wandb_and_mlflow_get_every_row_and_the_end(tmp_path, own, monkeypatch):
    """The packages are faked; the last row of a run that patience ends is among the rows, and Ctrl-C ends them too."""
    said = []
    log = SimpleNamespace(log=lambda row, step: said.append((step, row["test_mae"])), finish=lambda: said.append("end"))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **options: said.append(options) or log))
    fake = SimpleNamespace(
        start_run=lambda **options: said.append(options),
        log_metrics=lambda row, step: said.append((step, row["test_mae"])),
        end_run=lambda: said.append("end"),
    )
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    fast = {"name": "fedavg", "lr": 1.0, "batch_size": 4, "local_steps": 2}
    for name, begun in (("wandb", {"name": "wandb"}), ("mlflow", {})):
        options = {"rounds": 40, "patience": 2, "evaluate_every": 2, "callbacks": [name]}
        said.clear()
        outcome = execute(settings(own, fast, **options), tmp_path / name)
        assert outcome.stopped == "patience"
        assert said == [begun, *((row["round"], row["test_mae"]) for row in outcome.rows), "end"]
        with pytest.raises(KeyboardInterrupt):
            execute(settings(own, fast, **options), tmp_path / f"cut-{name}", callbacks=[stop_after(1)])
        assert said[-1] == "end"
        monkeypatch.setitem(sys.modules, name, None)  # not installed
        with pytest.raises(UserError, match=f"expected the package {name}, got none: pip install {name}"):
            execute(settings(own, fast, **options), tmp_path / f"without-{name}")


@pytest.mark.parametrize("goal", ["min", "max"])
def test_early_stopping_follows_the_goal(tmp_path, goal):
    """A metric that always falls: better each time with goal "min", never with "max"."""

    def falling(model, batch):
        falling.value -= 1.0
        return {"score": torch.tensor(falling.value)}

    falling.value = 100.0
    result = regression(None, metrics=falling, metric="score", goal=goal, rounds=6, callbacks=[EarlyStopping(2)])
    assert (result.rounds, result.stopped) == ((6, "rounds") if goal == "min" else (3, "patience"))
