"""A user's own training function on Flower: `client_app(…, train=my_train)`."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("flwr", reason="the extra flower is not installed")

from flwr.app import ConfigRecord, MetricRecord

import fedbcgd.flower
from fedbcgd import UserError, simulate
from fedbcgd.backends.flower import wire

from .grids import LocalGrid

M = 4


def make_model():
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))


def loaders():
    g = torch.Generator().manual_seed(1)
    sets = [TensorDataset(torch.randn(n, 4, generator=g), torch.randint(3, (n,), generator=g)) for n in (5, 12, 9, 7)]
    return [DataLoader(data, batch_size=4, shuffle=True) for data in sets]


LOADERS = loaders()


def my_train(model, loader, config):
    optimizer = config.optimizer(model.parameters())
    for x, y in loader:

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        loss = optimizer.step(closure)
    return {"loss": loss, "accuracy": (model(x).argmax(1) == y).float().mean(), "round": config.round}


def start(
    name, train=my_train, grid=None, rounds=3, load_data=lambda client: LOADERS[client], train_config=None, **options
):
    options |= {"blocks": 2, "shared": "none"} if "fedbcgd" in name else {}
    federation = fedbcgd.flower.strategy(name, make_model(), cohort=M, seed=3, **options)
    app = fedbcgd.flower.client_app(make_model, load_data, train=train)
    return federation, federation.start(
        grid or LocalGrid(app, M), num_rounds=rounds, timeout=0.05, train_config=train_config
    )


@pytest.mark.parametrize("name", ["fedavg", "fedbcgd", "topk", "scaffold", "feddc", "fedprox", "fedbcgd+"])
def test_the_bits_are_those_of_a_simulation(name):
    federation, result = start(name)
    blocks = {"blocks": 2, "shared": "none"} if "fedbcgd" in name else {}
    reference = simulate(
        make_model(), LOADERS, name, train=my_train, rounds=3, cohort=M, seed=3, workers=0, max_norm="20x", **blocks
    )
    found = result.arrays.to_torch_state_dict()
    assert all(torch.equal(found[key], value) for key, value in reference.module.state_dict().items())
    assert federation.server.ledger.totals() | {"wire_bytes": 0} == reference.ledger.totals()
    for ours, theirs in zip(federation.rows, reference.rows, strict=True):
        assert {k: v for k, v in ours.items() if k != "seconds"} == {k: v for k, v in theirs.items() if k != "seconds"}


def test_metrics_reach_rows_and_flowers_result():
    federation, result = start("fedavg")
    assert [row["train_round"] for row in federation.rows] == [1, 2, 3]
    assert result.train_metrics_clientapp[2]["train_round"] == 2
    assert 0 <= result.train_metrics_clientapp[3]["train_accuracy"] <= 1


def test_examples_of_a_loader_are_those_of_its_data_set():
    federation, _ = start("fedavg", weighting="examples")
    assert federation.server.examples == {0: 5, 1: 12, 2: 9, 3: 7}


def test_a_pair_of_loaders_as_in_flowers_template():
    def train(model, loaders, config):
        return my_train(model, loaders[0], config)

    federation, _ = start("fedavg", train, load_data=lambda k: (LOADERS[k], LOADERS[k]), weighting="examples")
    assert federation.server.examples[1] == 12


def test_the_values_of_train_config_reach_the_function():
    seen = []

    def train(model, loader, config):
        seen.append((config["lr"], config.lr, config["warmup"], config.get("other", "none"), config["batch_size"]))
        assert config["server-round"] == config.round

    start("fedavg", train, rounds=1, train_config=ConfigRecord({"lr": 0.05, "warmup": 3}), lr=0.1, batch_size=7)
    assert seen == [(0.05, 0.1, 3, "none", 7)] * M


def test_failures_tell_the_server_the_line_or_the_reason(caplog):
    def broken(model, loader, config):
        raise ZeroDivisionError("mine")

    def own_optimizer(model, loader, config):
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    federation, _ = start("fedavg", broken, rounds=1)
    assert federation.server.ledger.lost == M
    assert "ZeroDivisionError: mine" in federation.server.last.lost[0]
    assert "test_own_training.py, line" in federation.server.last.lost[0]
    of_node = next(record.message for record in caplog.records if record.message.startswith("Traceback"))
    assert "test_own_training.py" in of_node
    assert "/src/fedbcgd/" not in of_node
    federation, _ = start("scaffold", own_optimizer, rounds=1)
    assert "expected steps of config.optimizer(…)" in federation.server.last.lost[0]
    assert float(federation.server.controls["c"].abs().sum()) == 0


def test_what_cannot_be_a_training_function_is_refused_at_once():
    with pytest.raises(UserError, match="train: expected a function"):
        fedbcgd.flower.client_app(make_model, lambda client: LOADERS[client], train="my_train")


def damaged(change):
    """A grid whose first reply in each round is changed on its way."""

    def lose(message, reply):
        if message.metadata.message_type == "train" and reply.content[wire.VALUES]["client"] == 0:
            change(reply.content)
        return reply

    app = fedbcgd.flower.client_app(make_model, lambda client: LOADERS[client], train=my_train)
    return LocalGrid(app, M, lose=lose)


@pytest.mark.parametrize(
    "metrics",
    [
        {f"m{k}": 1.0 for k in range(33)},
        {"x" * 101: 1.0},
        {"": 1.0},
        {"a\nb": 1.0},
        {"accuracy": float("nan")},
        {"accuracy": float("inf")},
        {"accuracy": [1.0, 2.0]},
    ],
)
def test_metrics_are_read_strictly(metrics):
    def change(content):
        content[wire.METRICS] = MetricRecord(metrics)

    federation, _ = start("fedavg", grid=damaged(change), rounds=1)
    assert federation.server.last.accepted == M - 1


def test_a_client_cannot_replace_the_loss_or_add_columns():
    def change(content):
        content[wire.METRICS] = MetricRecord({"loss": 1e9, "mine": 1.0})

    federation, _ = start("fedavg", grid=damaged(change), rounds=1)
    assert federation.server.last.accepted == M
    assert federation.rows[0]["train_loss"] < 100
    assert "train_mine" not in federation.rows[0]
