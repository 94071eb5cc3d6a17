"""What a new user runs into first is refused with the remedy, or works."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from fedbcgd import Diverged, UserError, simulate, supervised
from fedbcgd.runs import config as configuration
from fedbcgd.runs.experiment import make_experiment
from tests.command import fedbcgd as command

QUICK = {"rounds": 1, "cohort": 2, "workers": 0, "batch_size": 4, "local_steps": 1}
X, Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3


def go(model, data, **options):
    return simulate(model, [data] * 3, "fedavg", **{**QUICK, "test": data, **options})


@pytest.mark.parametrize(
    ("model", "y"),
    [
        (nn.Linear(4, 1), torch.ones(8, 1)),
        (nn.Linear(4, 1), torch.randn(8)),
        (nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)), torch.randn(8)),
    ],
    ids=["a column", "a vector", "both vectors"],
)
def test_regression_with_the_default_loss(model, y):
    """It was taken for classification: the accuracy was 1."""
    with pytest.raises(
        UserError, match=r"for regression pass loss=fedbcgd\.supervised\(torch\.nn\.functional\.mse_loss"
    ):
        go(model, (X, y))
    if y.ndim == 2:
        assert "test_accuracy" not in go(model, (X, y), loss=supervised(F.mse_loss)).final


def test_several_labels_of_an_example_with_the_default_loss():
    with pytest.raises(UserError, match=r"do not sum to 1; for several labels .*binary_cross_entropy_with_logits"):
        go(nn.Linear(4, 3), (X, torch.ones(8, 3)))
    assert go(nn.Linear(4, 3), (X, torch.full((8, 3), 1 / 3))).final["test_loss"] > 0


@pytest.mark.parametrize("norm", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_normalised_weights_train_on_workers(norm):
    torch.manual_seed(0)
    model = norm(nn.Linear(4, 3))
    states = [go(model, (X, Y), workers=workers).module.state_dict() for workers in (0, 2)]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_the_earlier_form_of_weight_norm_is_refused_with_the_remedy():
    """It cannot be copied at all, which PyTorch says at length."""
    with pytest.warns(FutureWarning):
        model = nn.utils.weight_norm(nn.Linear(4, 3))
    with pytest.raises(UserError, match=r"use torch\.nn\.utils\.parametrizations\.weight_norm"):
        go(model, (X, Y))


def unequal():
    return [(torch.zeros(4 + k % 2), 0) for k in range(8)]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            (X.double(), Y),
            r"type of the model's parameters, float32, got another one; convert the data \(x\.float\(\)\)",
        ),
        (unequal(), "items of equal shape, .*got items of unequal length; pad them"),
        ({"a": X, "b": Y}, r"expected \(x, y\) with the default loss, got a dictionary .*pass loss=f\(model, batch\)"),
    ],
    ids=["float64", "unequal items", "a dictionary"],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_data_that_does_not_fit_is_explained_in_one_message(data, said, workers, tmp_path):
    with pytest.raises(UserError, match=said):
        go(nn.Linear(4, 3), data, workers=workers, test=None)
    with pytest.raises(UserError, match=said):
        go(nn.Linear(4, 3), data, workers=workers, test=None, out=tmp_path / "run")


def test_lists_of_numbers_are_data():
    """They were taken for a data set of two items."""
    model = nn.Linear(4, 3)
    of_lists, of_tensors = (go(model, data) for data in ((X.tolist(), Y.tolist()), (X, Y)))
    assert of_lists.final["test_loss"] == of_tensors.final["test_loss"]


def test_nan_gives_few_warnings_before_the_message_that_matters(caplog):
    data = [(X, Y)] * 10
    with pytest.raises(Diverged, match="The usual cause is"):
        simulate(nn.Linear(4, 3), data, "fedavg", loss=nan_loss, **{**QUICK, "rounds": 9, "cohort": 10})
    assert len(caplog.messages) <= 13  # three rounds of ten uploads


def nan_loss(model, batch):
    return model(batch[0]).sum() * float("nan")


def test_regression_data_of_ones_own_has_no_labels(tmp_path, monkeypatch):
    (tmp_path / "own_prices.py").write_text(
        "import torch\n\ndef load():\n    x = torch.randn(40, 4)\n    return (x, x.sum(1)), (x, x.sum(1))\n"
    )
    monkeypatch.chdir(tmp_path)
    raw = {"model": {"name": "torch.nn:Linear", "options": {"in_features": 4, "out_features": 1}}, "run": {"rounds": 1}}
    data = {"name": "own_prices.py:load", "clients": 10}
    for kind in ("dirichlet", "dirichlet-unequal", "shards"):
        with pytest.raises(UserError, match=r"data\.partition: expected iid, quantity or group with data that has no"):
            make_experiment(configuration.check({**raw, "data": {**data, "partition": kind}}, "test"))
    experiment = make_experiment(configuration.check({**raw, "data": {**data, "partition": "iid"}}, "test"))
    assert experiment.counts is None
    assert not any("label" in note for note in experiment.notes)


def test_resume_wants_a_run_that_is_there(tmp_path):
    (tmp_path / "run.toml").write_text('[model]\nname = "logistic"\n[run]\nrounds = 1\n')
    done = command("run", "run.toml", "--out", "nowhere", "--resume", cwd=tmp_path, check=2)
    assert "--resume: expected the folder of a run, got nowhere" in done.stderr
    assert not (tmp_path / "nowhere").exists()


def test_a_run_is_said_to_have_started_after_the_checks(tmp_path):
    (tmp_path / "run.toml").write_text('[data]\nname = "nosuch"\n[run]\nrounds = 1\n')
    done = command("run", "run.toml", "--out", "out", cwd=tmp_path, check=2)
    assert "nosuch" in done.stderr
    assert "started" not in done.stderr + done.stdout


def test_an_unknown_command_has_one_suggestion():
    assert command("runn", check=2).stderr.count("Did you mean") == 1


def test_sections_are_named_in_the_help_of_compare():
    text = command("compare", "--help").stdout
    assert "[algorithm]" in text
    assert "[compare.NAME]" in text


def test_messages_count_rounds_from_one(caplog):
    with pytest.raises(Diverged, match="round 3, client"):
        go(nn.Linear(4, 3), (X, Y), loss=nan_loss, rounds=9)
    assert "round 1, client" in caplog.text
    assert "round 0" not in caplog.text
