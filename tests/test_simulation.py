"""simulate(): three lines for a user's own model and data."""

import dataclasses
import math

import pytest
import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

import fedbcgd
from fedbcgd import UserError, simulate, supervised
from fedbcgd.engine.threads import threads
from fedbcgd.models import Logistic


def go(net, toys, algorithm="fedbcgd", **kwargs):
    settings = {"rounds": 3, "workers": 0, "batch_size": 3, "blocks": 2, "cohort": 4} | kwargs
    if algorithm != "fedbcgd":
        del settings["blocks"]
    clients = settings.pop("clients", None) or toys()
    return simulate(net(), clients, algorithm, **settings)


def test_three_lines(net, toys):
    model, clients, test = net(), toys(), toys((50,))[0]
    before = {k: v.clone() for k, v in model.state_dict().items()}
    result = fedbcgd.simulate(model, clients, algorithm="fedbcgd", blocks=2, test=test, rounds=3, workers=0)
    assert len(result.rows) == 3
    assert set(result.rows[0]) == {
        "round",
        "test_accuracy",
        "test_loss",
        "train_loss",
        "upload_d",
        "upload_bytes",
        "upload_max_bytes",
        "upload_wait_bytes",
        "download_bytes",
        "gradient_evaluations",
        "seconds",
    }
    assert [row["round"] for row in result.rows] == [1, 2, 3]
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())  # the user's model is not touched
    assert any(not torch.equal(before[k], v) for k, v in result.module.state_dict().items())
    assert type(result.module) is type(model)
    with torch.no_grad():
        x, y = test
        accuracy = (result.module(x).argmax(1) == y).float().mean()
    assert result.final["test_accuracy"] == pytest.approx(float(accuracy))


def test_the_module_that_comes_back_is_ordinary(net, toys):
    """Each parameter has memory of its own: it can be saved and trained on like any other."""
    module = go(net, toys).module
    assert len({p.untyped_storage().data_ptr() for p in module.parameters()}) == len(list(module.parameters()))


def test_it_learns(net):
    g = torch.Generator().manual_seed(0)
    centres = torch.randn(3, 4, generator=g) * 3
    clients = []
    for _ in range(8):
        y = torch.randint(3, (30,), generator=g)
        clients.append((centres[y] + torch.randn(30, 4, generator=g), y))
    result = simulate(net(), clients[1:], "fedbcgd", blocks=2, lr=0.1, test=clients[0], rounds=20, workers=0)
    assert result.rows[0]["test_accuracy"] < result.final["test_accuracy"] > 0.9


def forms(toys):
    pairs = toys()
    yield "pairs", pairs
    yield "lists", [[x, y] for x, y in pairs]
    yield "numpy", [(x.numpy(), y.numpy()) for x, y in pairs]
    yield "tensor data sets", [TensorDataset(x, y) for x, y in pairs]
    whole = TensorDataset(torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs]))
    ends = torch.tensor([len(x) for x, _ in pairs]).cumsum(0).tolist()
    yield "subsets", [Subset(whole, range(b - len(x), b)) for b, (x, _) in zip(ends, pairs, strict=True)]
    yield "items", [[(a, int(b)) for a, b in zip(x, y, strict=True)] for x, y in pairs]


def test_every_form_of_data_gives_the_same_model(net, toys):
    finals = {name: go(net, toys, clients=clients).module.state_dict() for name, clients in forms(toys)}
    first = finals.pop("pairs")
    for name, state in finals.items():
        assert all(torch.equal(first[k], v) for k, v in state.items()), name


def test_batches_may_be_dictionaries(net, toys):
    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch["features"]), batch["label"])

    def metrics(model, batch):
        return {"right": (model(batch["features"]).argmax(1) == batch["label"]).double().mean()}

    clients = [{"features": x, "label": y} for x, y in toys()]
    result = go(net, toys, clients=clients, loss=loss, metrics=metrics, test=clients[0])
    assert {"test_right", "test_loss"} <= set(result.final)
    assert "test_accuracy" not in result.final
    pairs = go(net, toys)
    assert all(torch.equal(v, pairs.module.state_dict()[k]) for k, v in result.module.state_dict().items())


def test_a_loss_of_ones_own(toys):
    clients = [(x, x.sum(1, keepdim=True)) for x, _ in toys()]
    for loss in (supervised(nn.functional.mse_loss), nn.MSELoss()):
        result = simulate(nn.Linear(4, 1), clients, "fedavg", loss=loss, test=clients[0], lr=0.02, rounds=80, workers=0)
        assert result.final["test_loss"] < 0.1 * result.rows[0]["test_loss"]
        assert "test_accuracy" not in result.final


def test_warm_start(net, toys):
    trained = go(net, toys).module.state_dict()
    cold = simulate(net(7), toys(), "fedavg", rounds=1, weights=trained, lr=1e-30, workers=0)
    for key, value in cold.module.state_dict().items():
        torch.testing.assert_close(value, trained[key], rtol=0, atol=1e-9)
    with pytest.raises(UserError, match="weights"):
        simulate(net(), toys(), rounds=1, weights={"nope": torch.zeros(1)})


def test_budget(net, toys):
    """FedAvg costs 1 d a round: 3.5 d pay for three."""
    result = go(net, toys, "fedavg", rounds=None, budget=3.5)
    assert (result.rounds, result.stopped, result.ledger.upload_d) == (3, "budget", 3)
    exact = go(net, toys, "fedavg", rounds=None, budget=3)
    assert exact.rounds == 3
    blocks = go(net, toys, rounds=None, budget=3.5)
    assert blocks.rounds == 5  # (65/2 + 18)/83 = 0.608 d a round
    assert blocks.ledger.upload_d <= 3.5


def test_rounds_and_target_whichever_is_first(net, toys):
    test = toys((40,))[0]
    assert go(net, toys, rounds=2, budget=100).stopped == "rounds"
    reached = go(net, toys, rounds=50, target=0.0, test=test)
    assert (reached.stopped, reached.rounds) == ("target", 1)
    assert go(net, toys, rounds=50, target=("test_loss", 1e9), test=test).stopped == "target"
    assert go(net, toys, rounds=2, target=("test_loss", 0.0), test=test).stopped == "rounds"


def test_evaluate_every_and_the_last_round(net, toys):
    result = go(net, toys, rounds=7, evaluate_every=3)
    assert [row["round"] for row in result.rows] == [3, 6, 7]


def test_callbacks_see_every_round_and_may_stop(net, toys):
    seen = []

    def watch(info):
        seen.append((info.report.round, info.row is not None, round(info.progress, 3)))
        if info.report.round == 3:
            info.stop()

    result = go(net, toys, rounds=8, evaluate_every=2, callbacks=[watch])
    assert seen == [(0, False, 0.125), (1, True, 0.25), (2, False, 0.375), (3, True, 0.5)]
    assert result.stopped == "callback"


def test_ctrl_c_gives_what_was_finished(net, toys):
    def interrupt(info):
        if info.report.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as stopped:
        go(net, toys, rounds=8, callbacks=[interrupt])
    result = stopped.value.result
    assert (result.rounds, result.stopped, len(result.rows)) == (3, "interrupted", 3)
    undisturbed = go(net, toys, rounds=3)
    assert all(torch.equal(v, undisturbed.module.state_dict()[k]) for k, v in result.module.state_dict().items())


@pytest.mark.parametrize("cohort", [1, 3, 4, 5, 6])
@pytest.mark.parametrize("blocks", [1, 4, 5])
def test_any_cohort_with_any_number_of_blocks(net, toys, cohort, blocks):
    """S not a multiple of N, S < N, uneven client sizes and a client with one example (see `toys`)."""
    result = go(net, toys, cohort=cohort, blocks=blocks, rounds=6)
    assert result.rounds == 6
    assert result.ledger.refused == result.ledger.lost == 0
    assert all(math.isfinite(row["train_loss"]) for row in result.rows)


def test_a_bad_upload_does_not_end_the_run(net, toys):
    def spoil(upload):
        return dataclasses.replace(upload, round=-1) if upload.client == 2 else upload

    result = go(net, toys, cohort=6, transport=spoil)
    assert result.rounds == 3
    assert result.ledger.refused == 3


def test_a_learning_rate_that_is_too_high_is_said_so(net, toys):
    with pytest.raises(fedbcgd.Diverged, match="learning rate"):
        go(net, toys, lr=1e30, rounds=50)


def test_gradient_evaluations_are_counted(net, toys):
    """All six clients, B = 3, E = 5: 5·ceil(n/3) for n = 7, 5, 1, 9, 4, 6."""
    result = go(net, toys, cohort=6, rounds=1)
    assert result.ledger.gradient_evaluations == 5 * (3 + 2 + 1 + 3 + 2 + 2)


def test_threads_are_given_back(net, toys):
    seen = []
    with threads(2):
        go(net, toys, rounds=1, loss=lambda m, b: seen.append(torch.get_num_threads()) or m(b[0]).square().mean())
        assert set(seen) == {1}
        assert torch.get_num_threads() == 2


def test_an_error_in_the_users_loss_says_where_it_happened(net, toys):
    def loss(model, batch):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError) as error:
        go(net, toys, loss=loss)
    assert "trained in round 1" in error.value.__notes__[0]


def test_progress_lines_without_a_terminal(net, toys, capsys):
    go(net, toys, progress=True, test=toys((20,))[0])
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "fedbcgd: started"
    assert "round 3" in lines[-1]
    assert "accuracy" in lines[-1]
    assert " d " in lines[-1]
    assert "100%" in lines[-1]


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"rounds": None}, ["rounds: expected", "budget", "target"]),
        ({"rounds": True}, ["rounds: expected an integer ≥ 1, got True"]),
        ({"seed": True}, ["seed: expected an integer ≥ 0, got True"]),
        ({"budget": True}, ["budget: expected a positive number", "True"]),
        ({"callbacks": 3}, ["callbacks: expected a list of callables, got 3"]),
        ({"loss": 3}, ["loss: expected a function of (model, batch), got 3"]),
        ({"metrics": 3}, ["metrics: expected a function of (model, batch), got 3"]),
        ({"rounds": 0}, ["rounds", "≥ 1"]),
        ({"target": 0.5}, ["target", "test"]),
        (
            {"target": ("test_acuracy", 0.5), "test": (torch.zeros(2, 4), torch.zeros(2).long())},
            ["target", "accuracy, loss"],
        ),
        ({"budget": 0.1}, ["0.1 d", "fedbcgd", "one round"]),
        ({"cohort": 7}, ["cohort", "6", "7"]),
        ({"evaluate_every": 0}, ["evaluate_every"]),
        (
            {"clients": [(torch.zeros(2, 4), torch.zeros(3))]},
            ["client 0", "expected tensors of equal length", "2", "3"],
        ),
        ({"clients": [(torch.zeros(2, 4), torch.zeros(2)), "text"]}, ["client 1", "str"]),
        ({"clients": [torch.zeros(3, 4)]}, ["client 0", "Tensor", "pair"]),
        ({"clients": [(torch.zeros(0, 4), torch.zeros(0))]}, ["client 0", "expected at least one example"]),
        ({"test": 5}, ["test", "int"]),
        ({"clients": [{"a": torch.zeros(2, 4)}] * 4}, ["(x, y)", "'a'", "loss"]),
        ({"lrr": 0.1}, ["'lrr'", "'lr'"]),
        ({"patience": 3}, ["patience: ", "callbacks=[fedbcgd.EarlyStopping(patience=…)]"]),
        ({"metric": "mae"}, ["metric: expected data to measure 'mae' on, got none"]),
        (
            {"metric": "mae", "test": (torch.zeros(2, 4), torch.zeros(2).long())},
            ["metric: expected one of accuracy, loss"],
        ),
    ],
)
def test_mistakes_are_explained(net, toys, kwargs, words):
    with pytest.raises(UserError) as error:
        go(net, toys, **kwargs)
    for word in words:
        assert word in str(error.value)


def test_no_clients(net):
    with pytest.raises(UserError, match="got an empty list"):
        simulate(net(), [], rounds=1)


def test_options_beside_an_algorithm_are_refused(net, toys):
    with pytest.raises(UserError, match="lr"):
        simulate(net(), toys(), fedbcgd.make_algorithm("fedavg"), rounds=1, lr=0.1)


def test_the_earlier_name_of_batch_clients_still_works(caplog):
    x = torch.randn(8, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    clients = [(x[:4], torch.tensor([0, 1, 0, 1])), (x[4:], torch.tensor([1, 0, 1, 0]))]
    models = []
    for options in ({"batch_clients": 2}, {"together": 2}):
        result = simulate(Logistic(2, (1, 2, 2)), clients, "fedavg", rounds=1, workers=0, progress=False, **options)
        models.append(torch.cat([p.detach().flatten() for p in result.module.parameters()]))
    assert torch.equal(*models)
    assert "together: expected the new name, batch_clients" in caplog.text


def test_without_a_number_of_blocks_all_are_trained(net, toys, caplog):
    """Five blocks, or the cohort if that is smaller; who says five has five, and a warning."""
    three = simulate(net(), toys(), rounds=1, cohort=3, workers=0)
    assert len(three.ledger.block_bytes) == 3
    assert "blocks but" not in caplog.text
    five = simulate(net(), toys(), rounds=1, cohort=3, workers=0, blocks=5)
    assert len(five.ledger.block_bytes) == 5
    assert "5 blocks but 3 clients in a round, so at most 3 of the 5 are trained in it" in caplog.text
    assert len(simulate(net(), toys(), rounds=1, cohort=6, workers=0).ledger.block_bytes) == 5
