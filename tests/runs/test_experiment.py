"""What is built from a configuration: data sets from the store and from a user's loader, models, partitions."""

import json
import sys
import textwrap

import numpy as np
import pytest
import torch

from fedbcgd import UserError
from fedbcgd.data import store
from fedbcgd.data.raw import Raw, Split
from fedbcgd.runs.config import check
from fedbcgd.runs.execute import execute
from fedbcgd.runs.experiment import make_experiment, partition_data


def made_up(n=120, test=30, side=16, seed=0, groups=False):
    rng = np.random.default_rng(seed)
    sides = [
        Split(rng.integers(0, 256, (k, side, side, 3), dtype=np.uint8), np.arange(k, dtype=np.int64) % 4)
        for k in (n, test)
    ]
    sides[0].groups = np.arange(n) // 6 if groups else None
    return Raw(*sides, ("ant", "bee", "cat", "dog"))


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """A cache folder with one small data set of images."""
    monkeypatch.setenv("FEDBCGD_DATA", str(tmp_path / "shelf"))
    store.save("small", made_up(groups=True), "made up")
    return tmp_path


def config(data=None, model=None, **run):
    raw = {
        "data": {"name": "small", "clients": 6, **(data or {})},
        "model": {"name": "lenet5", "width": 0.05, **(model or {})},
        "algorithm": {"name": "fedbcgd", "blocks": 2, "batch_size": 10},
        "run": {"rounds": 1, "cohort": 3, "workers": 0, **run},
    }
    return check(raw, "test")


def test_model_and_data_fit_together(shelf):
    task = make_experiment(config())
    assert task.model.fc3.out_features == 4
    assert task.model.conv1.in_channels == 3
    assert task.classes == ("ant", "bee", "cat", "dog")
    assert sum(map(len, task.clients)) == 120
    assert len(task.test) == 30
    assert task.counts.sum() == 120
    assert "6 clients of 20 examples" in task.notes[-1]


@pytest.mark.parametrize("kind", ["dirichlet", "dirichlet-unequal", "iid", "shards", "quantity", "group"])
def test_every_partition_from_a_configuration(shelf, kind):
    handed = partition_data(config({"partition": kind}))
    assert np.array_equal(np.sort(np.concatenate(handed.parts)), np.arange(120))
    if kind == "group":
        assert all(len(part) % 6 == 0 for part in handed.parts)


def test_validation_is_held_out_and_not_augmented(shelf):
    task = make_experiment(config({"validation": 0.25, "augment": True}))
    assert task.prefix == "validation"
    assert len(task.test) == 30
    assert not task.test.augment
    assert all(client.augment for client in task.clients)
    validation, training = set(task.test.rows.tolist()), {int(r) for c in task.clients for r in c.rows}
    assert not validation & training
    assert validation | training == set(range(120))


def test_one_class_against_the_others(shelf):
    task = make_experiment(config({"positive": 2}, {"name": "binary-logistic", "width": None}))
    assert task.classes == ("others", "cat")
    assert task.counts.sum(0).tolist() == [90, 30]
    assert task.test.labels.sum() == 7  # of 0 … 29, those that are 2 modulo 4
    assert task.loss is not None
    whole = make_experiment(config())
    assert whole.counts.shape[1] == 4  # nothing was changed for the next


@pytest.mark.parametrize("name", ["binary-logistic", "binary-sigmoid"])
def test_a_binary_problem_runs_and_learns(shelf, tmp_path, name):
    settings = config({"positive": 0, "partition": "iid"}, {"name": name, "width": None}, rounds=15)
    outcome = execute(settings, tmp_path / "run")
    assert outcome.rows[-1]["train_loss"] < outcome.rows[0]["train_loss"]


def test_resize_and_crop_reach_the_model(shelf):
    task = make_experiment(config({"resize": 40, "crop": 32}, {"name": "vit-small", "width": None}))
    assert task.model.shape == (3, 32, 32)
    with pytest.raises(UserError, match=r"data\.crop: expected at most .* got 50"):
        make_experiment(config({"crop": 50}))


@pytest.mark.parametrize(
    ("data", "model", "message"),
    [
        ({"name": "smal"}, {}, "got 'smal'. Did you mean 'small'"),
        ({"name": "cifar10"}, {}, "fedbcgd data get cifar10"),
        ({}, {"name": "lenet"}, "Did you mean 'lenet5'"),
        ({"positive": 4}, {}, "data.positive: expected a label from 0 to 3, got 4"),
        ({"options": {"a": 1}}, {}, "loader of your own"),
        ({"name": "embedded", "partition": "group"}, {}, "expected a data set with groups, got embedded"),
        ({"clients": 30, "partition": "group"}, {}, "expected at most 20, one for each group, got 30"),
        ({"validation": 0.001}, {}, "leaves examples to both training and validation"),
        ({}, {"width": None, "norm": "group"}, "norm: expected an option of lenet5"),
    ],
)
def test_mistakes(shelf, data, model, message):
    with pytest.raises(UserError, match=message):
        make_experiment(config(data, model))


LOADER = """
    import torch

    def load(n=40, seed=0):
        g = torch.Generator().manual_seed(seed)
        x, y = torch.randn(n, 6, generator=g), torch.randint(3, (n,), generator=g)
        return (x, y), (x[:10], y[:10])

    def grouped():
        return (*load(), list("abcdefgh") * 5)

    def words():
        x = torch.arange(24).view(12, 2) % 5
        data = {"input_ids": x, "labels": x[:, 0] % 2}
        return data, data

    def wrong():
        return 7

    class Net(torch.nn.Sequential):
        def __init__(self, shape, classes):
            super().__init__(torch.nn.Linear(shape[2], 5), torch.nn.ReLU(), torch.nn.Linear(5, classes))
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "my_data.py").write_text(textwrap.dedent(LOADER))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("my_data", None)


def own(data, **run):
    return config({"name": f"my_data:{data}", "clients": 4}, {"name": "my_data:Net", "width": None}, **run)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_and_a_model_of_ones_own_on_both_carriers(mine, workers, figures):
    outcome = execute(own("load", workers=workers, rounds=2), mine / "run")
    assert 0 <= outcome.final["test_accuracy"] <= 1
    assert outcome.ledger.refused == 0
    assert (mine / "run" / "label_counts.png").exists()


def test_a_mistake_in_a_users_model_is_reported_before_anything_is_written(mine):
    (mine / "broken_net.py").write_text(
        "from torch import nn\n\n\nclass Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.fc = nn.Linear(7, 3)\n\n    def forward(self, x):\n        return self.fc(x)\n"
    )
    settings = config({"name": "my_data:load", "clients": 4}, {"name": "broken_net.py:Net", "width": None})
    with pytest.raises(
        UserError, match=r"got an error on the first batch: RuntimeError: mat1.*broken_net\.py, line 10"
    ):
        execute(settings, mine / "run")
    assert not (mine / "run").exists()


def test_a_run_that_failed_before_its_first_round_does_not_keep_its_folder(mine, monkeypatch):
    def fail(self):
        raise RuntimeError("no luck")

    with monkeypatch.context() as patch:
        patch.setattr("fedbcgd.engine.loop.Loop.run", fail)
        with pytest.raises(RuntimeError):
            execute(own("load"), mine / "run")
    assert (mine / "run" / "config.toml").exists()
    assert execute(own("load", seed=5), mine / "run").rounds == 1


def test_loaders_of_other_kinds(mine):
    grouped = check(own("grouped").model_dump() | {"data": {"name": "my_data:grouped", "clients": 2, "partition": "group"},
                    "run": {"rounds": 1, "cohort": 2}, "quadratics": None}, "test")  # fmt: skip
    assert sorted(map(len, partition_data(grouped).parts)) == [20, 20]
    counts = partition_data(own("words")).counts
    assert counts.shape == (4, 2)
    with pytest.raises(UserError, match=r"to return .* got int"):
        make_experiment(own("wrong"))
    with pytest.raises(UserError, match=r"data\.augment"):
        make_experiment(config({"name": "my_data:load", "augment": True}))


def test_a_run_says_how_unequal_clients_are(shelf, tmp_path):
    said = []
    execute(config(), tmp_path / "run", say=said.append)
    assert any("heterogeneity" in line for line in said)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["notes"] == said


def test_a_run_does_not_go_on_with_other_data_of_the_same_name(shelf, tmp_path):
    execute(config(rounds=1), tmp_path / "run")
    store.save("small", made_up(seed=1), "made up again")
    with pytest.raises(UserError, match="got other data named 'small'"):
        execute(config(rounds=2), tmp_path / "run", resume=True)
    store.save("small", made_up(groups=True), "the first again")
    assert execute(config(rounds=2), tmp_path / "run", resume=True).rounds == 2


def test_augmentation_changes_training_and_nothing_else(shelf, tmp_path):
    plain, moved = (execute(config({"augment": a}), tmp_path / str(a)) for a in (False, True))
    assert plain.final["train_loss"] != moved.final["train_loss"]
    tests = [make_experiment(config({"augment": a})).test for a in (False, True)]
    one, two = (test.gather(torch.arange(5), np.random.default_rng(0)) for test in tests)
    assert torch.equal(one[0], two[0])
