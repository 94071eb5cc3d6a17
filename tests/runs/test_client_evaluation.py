"""The model on each client's own held-out examples: worked by hand, from a configuration, on workers, resumed."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fedbcgd import ClientCsv, UserError, compare, make_algorithm, simulate
from fedbcgd.display.metrics import falls
from fedbcgd.engine.client_evaluation import spread
from fedbcgd.runs import config as configuration
from fedbcgd.runs.config import Config
from fedbcgd.runs.execute import execute
from fedbcgd.runs.experiment import partition_data
from tests.runs.test_execute import rows_of, stop_after

HAND = {"lr": 0.5, "lr_decay": 1, "weight_decay": 0, "batch_size": 1, "local_steps": 1, "momentum": 0, "blocks": 1}
QUICK = {"rounds": 4, "cohort": 3, "workers": 0, "batch_size": 4, "local_steps": 2}


def distance(model, batch):
    return {"mae": (model.w - batch[0]).abs().mean()}


def of_clients(row):
    return {name: value for name, value in row.items() if name.startswith("clients_")}


def test_spread_by_hand():
    """Of 8 values 1 … 8 the worst tenth is one client, the worst quarter two; the variance is (64 − 1)/12."""
    values = [3.0, 1, 2, 8, 7, 6, 5, 4]
    found = spread(values)
    assert found == {"mean": 4.5, "std": math.sqrt(63 / 12), "worst_tenth": 1, "lowest_quarter": 1.5}
    assert spread(values, falls=True) == {**found, "worst_tenth": 8, "lowest_quarter": 7.5}
    of_eleven = spread([*range(11)])  # rounded up: two clients, and three
    assert (of_eleven["worst_tenth"], of_eleven["lowest_quarter"]) == (0.5, 1)
    assert all(map(math.isnan, spread([1, math.nan, 2, 3, 4]).values()))  # a client without a number is the worst


def test_metrics_by_hand(point, pull_loss, at_point):
    """Clients hold 0, 0, 8; ∇f_i(w; a) = w − a; x = 4, η = ½, one step; their tests are at 1, −2 and 6.

    Steps end at 2, 2, 6, so x = 10/3: distances 7/3, 16/3 and 8/3. One personal step ends at 5/3, 5/3 and 17/3: distances
    2/3, 11/3 and 1/3. A client without a test does not count.
    """
    options = dict(HAND, loss=pull_loss, metrics=distance, rounds=1, cohort=3, workers=0, metric="mae", progress=False)
    data, tests = [at_point(0), at_point(0), at_point(8)], [at_point(1), at_point(-2), at_point(6)]
    row = simulate(point(4.0), data, client_tests=tests, personal=1, **options).final
    for kind, values in (("", (7 / 3, 16 / 3, 8 / 3)), ("personal_", (2 / 3, 11 / 3, 1 / 3))):
        mean = sum(values) / 3
        deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / 3)
        expected = {"mean": mean, "std": deviation, "worst_tenth": max(values), "lowest_quarter": max(values)}
        for part, value in expected.items():
            assert row.pop(f"clients_{kind}mae_{part}") == pytest.approx(value, rel=1e-6)
    assert not of_clients(row)
    row = simulate(point(4.0), data, client_tests=[None, None, tests[2]], **options).final
    assert row["clients_mae_mean"] == pytest.approx(8 / 3, rel=1e-6)
    assert "clients_personal_mae_mean" not in row


def clients_of(count, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(11 + k, 5, generator=g), torch.randint(3, (11 + k,), generator=g)) for k in range(count)
    ]  # fmt: skip


def noisy_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6, momentum=None), nn.Dropout(0.3), nn.Linear(6, 3))


@pytest.mark.parametrize("algorithm", ["scaffold", "fedbcgd", "central"])
def test_the_run_keeps_its_bits(algorithm):
    data = clients_of(7)
    tests = [(x[:3], y[:3]) for x, y in data]
    without = simulate(noisy_net(), data, algorithm, test=data[0], **QUICK)
    measured = simulate(noisy_net(), data, algorithm, test=data[0], client_tests=tests, personal=2, **QUICK)
    for name, value in without.module.state_dict().items():
        assert torch.equal(value, measured.module.state_dict()[name])
    for one, other in zip(without.rows, measured.rows, strict=True):
        assert len(of_clients(other)) == 8
        assert {**one, "seconds": 0} == {k: v for k, v in {**other, "seconds": 0}.items() if k not in of_clients(other)}


@pytest.mark.parametrize("backend", ["workers", "inprocess"])
def test_the_same_rows_on_workers_and_after_an_interruption(backend, tmp_path):
    where = {"workers": 2} if backend == "workers" else {"backend": backend, "workers": None}
    options = {**QUICK, "held_out": 0.3, "personal": 2, "evaluate_every": 2, "rounds": 6}
    reference = simulate(noisy_net(), clients_of(7), "scaffold", out=tmp_path / "whole", **options)
    options |= where
    cut = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        simulate(noisy_net(), clients_of(7), "scaffold", out=cut, callbacks=[stop_after(3)], **options)
    simulate(noisy_net(), clients_of(7), "scaffold", out=cut, resume=True, **options)
    assert rows_of(cut) == rows_of(tmp_path / "whole")
    assert [row["round"] for row in reference.rows] == [2, 4, 6]
    assert all(len(of_clients(row)) == 8 for row in reference.rows)
    with pytest.raises(UserError, match=r"data\.held_out: 0\.3 → 0\.2"):
        simulate(noisy_net(), clients_of(7), "scaffold", out=cut, resume=True, **{**options, "held_out": 0.2})


def test_held_out_examples_are_not_trained_on():
    raw = {"data": {"clients": 9, "dirichlet": 0.3}, "model": {"name": "logistic"}, "run": {"rounds": 1, "cohort": 3}}
    whole = partition_data(configuration.check(raw, "test"))
    raw["data"]["held_out"] = 0.2
    split = partition_data(configuration.check(raw, "test"))
    for rows, kept, held in zip(whole.parts, split.parts, split.held_out, strict=True):
        assert sorted([*kept, *held]) == sorted(rows)
        assert len(held) == round(len(rows) * 0.2)
    assert split.counts.sum() == sum(map(len, split.parts))


CLIENTS = """
import torch
from torch import nn

def clients(seed):
    g = torch.Generator().manual_seed(0)
    return [(torch.randn(10, 5, generator=g), torch.randint(3, (10,), generator=g)) for _ in range(6)]

def with_tests(seed):
    return clients(seed), None, [*clients(seed)[1:], None]

def net():
    torch.manual_seed(0)
    return nn.Linear(5, 3)
"""


@pytest.mark.parametrize("loader", ["clients", "with_tests"])
def test_the_same_rows_from_a_configuration(loader, tmp_path, monkeypatch):
    (tmp_path / "own_parts.py").write_text(CLIENTS)
    monkeypatch.syspath_prepend(tmp_path)
    import own_parts

    share = {"held_out": 0.3} if loader == "clients" else {}
    raw = {
        "data": {"clients_from": f"own_parts:{loader}", **share},
        "model": {"name": "own_parts:net"},
        "algorithm": {"name": "fedavg", "batch_size": 4, "local_steps": 2},
        "run": {"rounds": 4, "cohort": 3, "workers": 0, "personal": 2},
    }
    execute(configuration.check(raw, "test"), tmp_path / "configured")
    given = share or {"client_tests": own_parts.with_tests(0)[2]}
    simulate(own_parts.net(), own_parts.clients(0), "fedavg", out=tmp_path / "given", personal=2, **given, **QUICK)
    assert rows_of(tmp_path / "configured") == rows_of(tmp_path / "given")
    assert len(of_clients(rows_of(tmp_path / "given")[-1])) == 8
    models = [load_file(tmp_path / name / "model.safetensors") for name in ("configured", "given")]
    assert all(torch.equal(value, models[1][name]) for name, value in models[0].items())


def test_images_of_a_configuration(tmp_path):
    raw = {
        "data": {"clients": 9, "held_out": 0.2, "augment": True},
        "model": {"name": "logistic"},
        "run": {"rounds": 2, "cohort": 3, "workers": 0, "personal": 2},
    }
    execute(configuration.check(raw, "test"), tmp_path)
    row = rows_of(tmp_path)[-1]
    assert (
        0 < row["clients_accuracy_worst_tenth"] <= row["clients_accuracy_lowest_quarter"] < row["clients_accuracy_mean"]
    )
    assert json.loads((tmp_path / "label_counts.json").read_text())
    assert Config(**raw).text().count("held_out") == 1
    assert "held_out" not in Config().text()


def test_metrics_of_each_client_in_a_file(tmp_path):
    """Also where Ctrl-C comes after a commit, in the evaluation, and where every second round is evaluated."""
    stop = 0

    def metrics(model, batch):
        if stop and calls.count(0) == stop:
            raise KeyboardInterrupt
        calls.append(0)
        return {"mean": batch[0].mean()}

    def run(folder, **options):
        options = {
            **QUICK,
            "held_out": 0.3,
            "personal": 1,
            "evaluate_every": 2,
            "rounds": 6,
            "metric": "mean",
        } | options
        callbacks = [ClientCsv()]
        simulate(noisy_net(), clients_of(7), "fedavg", out=folder, metrics=metrics, callbacks=callbacks, **options)

    calls = []
    run(tmp_path / "whole")
    lines = (tmp_path / "whole" / "clients_metrics.csv").read_text().splitlines()
    assert lines[0] == "round,client,loss,mean,personal_loss,personal_mean"
    assert [line.split(",")[:2] for line in lines[1:]] == [[r, str(k)] for r in "246" for k in range(7)]
    for stop in (20, 33):  # the first evaluation has calls 1 to 14 after that of the trial
        calls = []
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / str(stop))
        calls, stop_before, stop = [], stop, 0
        run(tmp_path / str(stop_before), resume=True)
        for name in ("clients.csv", "clients_metrics.csv"):
            assert (tmp_path / str(stop_before) / name).read_text() == (tmp_path / "whole" / name).read_text()


def test_what_is_held_out_with_other_seeds_is_the_same_data(tmp_path):
    compare(noisy_net(), clients_of(7), ["fedavg"], seeds=2, out=tmp_path, held_out=0.3, **QUICK)
    folders = [tmp_path / "fedavg" / f"seed-{seed}" for seed in range(2)]
    digests = [configuration.read_table(folder / "config.toml")["origin"]["data"] for folder in folders]
    assert digests[0] == digests[1] != ""
    assert rows_of(folders[0]) != rows_of(folders[1])


def test_tables_and_targets(tmp_path):
    runs = compare(noisy_net(), clients_of(7), ["fedavg", "fedbcgd"], out=tmp_path, held_out=0.3, personal=1, **QUICK)
    text = str(runs)
    assert "on each client's own held-out examples" in text
    assert all(word in text for word in ("worst tenth", "lowest quarter", "personal accuracy"))
    assert "clients_personal_accuracy_lowest_quarter" in (tmp_path / "compare.csv").read_text()
    reached = simulate(noisy_net(), clients_of(7), held_out=0.3, target={"clients_accuracy_mean": 1e-9}, **QUICK)
    assert reached.stopped == "target"
    assert "clients_accuracy_mean" in repr(reached)
    assert falls("clients_score_worst_tenth", "score", "min")
    assert not falls("clients_accuracy_mean")
    assert falls("clients_score_std", "score", "max")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"personal": 2}, "personal: expected held_out"),
        ({"personal": 0, "held_out": 0.2}, "personal: expected an integer ≥ 1"),
        ({"held_out": 1.0}, "held_out: expected a share > 0 and < 1, got 1.0"),
        ({"held_out": 0.2, "client_tests": [None] * 7}, "held_out: expected none with client_tests"),
        ({"client_tests": [None] * 7}, "client_tests: expected examples of at least one client"),
        ({"client_tests": []}, "client_tests: expected a list with the data of each of 7 clients, got 0"),
        ({"held_out": 0.2, "train": lambda model, data, config: None}, "held_out: expected none with train"),
        (
            {"personal": 1, "client_tests": clients_of(7), "train": lambda model, data, config: None},
            "personal: expected none with train",
        ),
    ],
)
def test_what_is_refused(options, said):
    with pytest.raises(UserError, match=said):
        simulate(noisy_net(), clients_of(7), "fedavg", rounds=1, workers=0, **options)


def test_flower_refuses_them():
    from fedbcgd.flower import strategy

    with pytest.raises(UserError, match="held_out"):
        strategy("fedavg", nn.Linear(2, 2), held_out=0.2)


def test_quadratics_have_nothing_to_hold_out():
    raw = {"data": {"name": "quadratics", "held_out": 0.2}, "model": {"name": "point"}, "run": {"rounds": 1}}
    with pytest.raises(UserError, match=r"data\.held_out: expected none with quadratics"):
        configuration.check(raw, "test")


def test_the_personal_rate_is_that_of_the_next_round(point, pull_loss, at_point):
    """From x = 4 the round ends at 2; a personal step at rate ½·½ then ends at 2 − ¼·2 = 1.5, which is measured at 0."""
    options = dict(HAND, lr_decay=0.5, loss=pull_loss, metrics=distance, rounds=1, workers=0)
    row = simulate(point(4.0), [at_point(0)], client_tests=[at_point(0)], personal=1, **options).final
    assert (row["clients_mae_mean"], row["clients_personal_mae_mean"]) == (2, 1.5)
    assert make_algorithm("fedavg").local.lr_decay < 1
