"""Runs in folders from Python: the same files as from a configuration, and what they say of objects without a name."""

import json
import tomllib
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fedbcgd import Interrupted, UserError, load_model, make_algorithm, model_info, simulate
from fedbcgd.data import dirichlet, fashion_mnist, split
from fedbcgd.engine.run_folder import RunFolder
from fedbcgd.models import Logistic
from fedbcgd.report.collect import Collector
from fedbcgd.runs import config as configuration
from fedbcgd.runs.check import check
from fedbcgd.runs.execute import execute
from fedbcgd.runs.retiming import hours
from tests.runs.test_execute import rows_of

QUICK = {"rounds": 3, "cohort": 3, "workers": 0, "batch_size": 4, "local_steps": 2}


def absolute_error(model, batch):
    return (model(batch[0])[:, 0] - batch[1]).abs().mean()


def squared_error(model, batch):
    return (model(batch[0])[:, 0] - batch[1]).square().mean()


def measured(model, batch):
    return {"mae": absolute_error(model, batch)}


def houses(count, seed=0):
    g = torch.Generator().manual_seed(seed)
    slope = torch.randn(5, generator=g)
    return [(x, x @ slope) for x in torch.randn(count, 12, 5, generator=g)]


def regression(folder, algorithm="fedbcgd", seed=0, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 1))
    data = houses(7, seed)
    options = {**QUICK, "loss": absolute_error, "metrics": measured, "test": data[-1], **options}
    return simulate(model, data[:-1], algorithm, out=folder, **options)


def same_run(a, b):
    assert rows_of(a) == rows_of(b)
    assert (a / "model.safetensors").read_bytes() == (b / "model.safetensors").read_bytes()


@pytest.mark.parametrize("workers", [0, 2])
def test_the_same_run_as_from_a_configuration(tmp_path, workers):
    raw = {
        "data": {"clients": 12, "dirichlet": 0.3},
        "model": {"name": "logistic"},
        "algorithm": {"name": "fedbcgd+", "blocks": 3, "batch_size": 4, "local_steps": 2},
        "run": {"rounds": 3, "cohort": 3, "workers": workers, "seed": 5},
        "network": {"profile": "4g"},
    }
    execute(configuration.check(raw, "test"), tmp_path / "configured")
    train, test = fashion_mnist()
    clients = split(train, dirichlet(train.labels.numpy(), 12, 0.3, 5))
    torch.manual_seed(5)
    options = {**raw["algorithm"], **raw["run"], "algorithm": "fedbcgd+"}
    del options["name"]
    result = simulate(Logistic(10, (1, 28, 28)), clients, test=test, network="4g", out=tmp_path / "given", **options)
    configured, given = tmp_path / "configured", tmp_path / "given"
    assert {p.name for p in given.iterdir()} == {p.name for p in configured.iterdir()}
    assert rows_of(given) == rows_of(configured)
    assert (given / "traffic.jsonl").read_bytes() == (configured / "traffic.jsonl").read_bytes()
    models = [load_file(folder / "model.safetensors") for folder in (given, configured)]
    assert all(value.numpy().tobytes() == models[1][name].numpy().tobytes() for name, value in models[0].items())
    counts = [json.loads((folder / "label_counts.json").read_text())["counts"] for folder in (given, configured)]
    assert counts[0] == counts[1]
    assert all(torch.equal(value, models[0][name]) for name, value in result.module.state_dict().items())
    assert RunFolder(given).outcome().rows == result.rows


def test_it_goes_on_to_the_same_bits_after_ctrl_c(tmp_path):
    whole = regression(tmp_path / "whole", "fedbcgd+", rounds=6)

    def interrupt(info):
        if info.server.round == 3:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted, match="resume=True continues from there") as stopped:
        regression(tmp_path / "cut", "fedbcgd+", rounds=6, callbacks=[interrupt])
    assert [row["round"] for row in stopped.value.result.rows] == [1, 2, 3]
    resumed = regression(tmp_path / "cut", "fedbcgd+", rounds=6, resume=True)
    same_run(tmp_path / "cut", tmp_path / "whole")
    assert all(torch.equal(v, whole.module.state_dict()[k]) for k, v in resumed.module.state_dict().items())
    again = regression(tmp_path / "cut", "fedbcgd+", rounds=6, resume=True)  # it is finished: nothing is trained
    assert [row["seconds"] for row in again.rows] == [row["seconds"] for row in resumed.rows]


def test_the_folder_says_where_things_came_from_and_every_command_reads_it(tmp_path):
    result = regression(tmp_path, metric="mae", target={"mae": 1e-9}, network={"profile": "4g", "dropout": 0.1})
    values = tomllib.loads((tmp_path / "config.toml").read_text())
    assert values["data"] == {"name": "python", "clients": 6}
    assert values["model"]["name"].endswith(":Sequential")
    assert values["algorithm"]["name"], values["algorithm"]["blocks"] == ("fedbcgd", 5)
    assert values["run"]["target"] == {"mae": 1e-9}
    assert values["network"]["dropout"] == 0.1
    assert values["origin"]["loss"].endswith("test_from_python:absolute_error")
    assert values["origin"]["metrics"].endswith("test_from_python:measured")
    assert {finding.state for finding in check(tmp_path)} == {"whole"}
    assert hours(tmp_path) == [row["hours"] for row in result.rows]
    runs, problems = Collector([tmp_path]).collect()
    assert not problems
    assert (runs[0].status, runs[0].summary["metric"]) == ("finished", "mae")
    with pytest.raises(UserError, match=r"data\.name: expected data that a configuration can name"):
        execute(configuration.load(tmp_path / "config.toml"), tmp_path / "other")
    module = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 1))
    loaded = load_model(tmp_path, model=module)
    assert torch.equal(loaded[0].weight, result.module[0].weight)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"loss": squared_error}, "origin.loss"),
        ({"seed": 1}, "origin.data"),
        ({"algorithm": "fedavg"}, "algorithm.name"),
        ({"momentum": 0.1}, "algorithm.momentum"),
        ({"cohort": 2}, "run.cohort"),
    ],
)
def test_another_run_is_not_resumed(tmp_path, changed, said):
    regression(tmp_path)
    with pytest.raises(UserError, match=said):
        regression(tmp_path, resume=True, **changed)


def test_a_folder_with_a_run_is_refused_and_so_is_resume_without_one(tmp_path, net, toys):
    regression(tmp_path)
    with pytest.raises(UserError, match="resume=True continues it, another out begins a new run"):
        regression(tmp_path)
    with pytest.raises(UserError, match="resume: expected out"):
        simulate(net(), toys(), rounds=1, resume=True)


def test_an_algorithm_of_ones_own(tmp_path):
    plain = make_algorithm("fedbcgd", blocks=2, lr=0.1, **{k: QUICK[k] for k in ("batch_size", "local_steps")})
    own = replace(plain, name="slow", local=type("Slow", (type(plain.local),), {})(**plain.local.model_dump()))
    options = {name: QUICK[name] for name in ("rounds", "cohort", "workers")}
    data = houses(7)
    result = simulate(nn.Linear(5, 1), data[:-1], own, loss=absolute_error, test=data[-1], out=tmp_path, **options)
    assert result.algorithm == "slow"
    assert tomllib.loads((tmp_path / "config.toml").read_text())["algorithm"]["local"] == "Slow"
    assert len(hours(tmp_path, "4g")) == 3


def test_labels_are_counted_and_named(tmp_path, net, toys):
    clients = toys()
    simulate(net(), clients[1:], "fedavg", test=clients[0], out=tmp_path, **QUICK)
    counts = json.loads((tmp_path / "label_counts.json").read_text())
    assert counts["counts"] == [[int((y == label).sum()) for label in range(3)] for _, y in clients[1:]]
    assert model_info(tmp_path).class_names == ("0", "1", "2")


def test_regression_has_no_label_counts(tmp_path):
    regression(tmp_path)
    assert not (tmp_path / "label_counts.json").exists()
