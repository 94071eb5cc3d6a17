"""An existing Flower app with our strategy: its own training function, whole models at its end, blocks on the wire."""

import contextlib
import difflib
import importlib
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("flwr", reason="the extra flower is not installed")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, arrays_size_mod, fixedclipping_mod
from flwr.server import LegacyContext, ServerAppComponents, ServerConfig
from flwr.server import strategy as legacy_strategies
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
    Strategy,
)

import fedbcgd
import fedbcgd.flower
from fedbcgd import UserError, simulate
from fedbcgd.backends.flower import plain, wire
from fedbcgd.backends.flower.exchange import exchange
from fedbcgd.backends.flower.memory import ContextStorage
from fedbcgd.backends.flower.options import Options

from .fuzz import Mutator, fuzz, through_protobuf
from .grids import LocalGrid
from .test_federation import CLIENTS, LOCAL, M, make_model, same, start
from .test_federation import app as rule_app

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "flower-dropin"
NAN, INF = float("nan"), float("inf")
BAD = 2  # the compromised client

LR = 0.1
PLAIN = {"lr": LR, "lr_decay": 1.0, "weight_decay": 0.0, "local_steps": 1, "batch_size": 12}  # one step on all data


def step(module, client, lr):
    """One step of plain gradient descent."""
    x, y = CLIENTS[client]
    loss = nn.functional.cross_entropy(module(x), y)
    loss.backward()
    with torch.no_grad():
        for p in module.parameters():
            p -= lr * p.grad
    return float(loss.detach())


def train_message(message, context, make=make_model):
    """What an app of Flower's template does."""
    module = make()
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    client = context.node_config["partition-id"]
    loss = step(module, client, message.content["config"].get("lr", LR))
    metrics = MetricRecord({"train_loss": loss, "client": float(client), "num-examples": 10 + client})
    content = RecordDict({"arrays": ArrayRecord(module.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)


def evaluate_message(message, context):
    module = make_model()
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = CLIENTS[context.node_config["partition-id"]]
    metrics = {"accuracy": int((module(x).argmax(1) == y).sum()) / len(y), "num-examples": len(y)}
    return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)


def dropin(function=train_message, evaluate=evaluate_message, app_mods=None, **options):
    app = ClientApp(mods=app_mods)
    fedbcgd.flower.train(app, **options)(function)
    if evaluate is not None:
        app.evaluate()(evaluate)
    return app


def strategy(name="fedbcgd", **options):
    options = ({"blocks": 2} if "fedbcgd" in name else {}) | {"seed": 3} | options
    return fedbcgd.flower.strategy(name, make_model(), **options)


def run(name="fedbcgd", grid=None, rounds=2, train_config=None, initial_arrays=None, **options):
    federation = strategy(name, **options)
    config = ConfigRecord(train_config or {})
    grid = LocalGrid(dropin(), M) if grid is None else grid
    return federation, federation.start(grid, initial_arrays, rounds, timeout=0.05, train_config=config)


def state(arrays):
    return arrays.to_torch_state_dict()


def close(a, b, atol=2e-6):
    return all(torch.allclose(a[name], b[name], atol=atol) for name in a)


# -- the example: two lines --------------------------------------------------------------------------------------------


def diffs():
    """The diff that the documentation shows, by file."""
    text = (ROOT / "docs" / "flower.md").read_text()
    block = re.search(r"```diff\n(.*?)```", text, re.S).group(1)
    files = re.split(r"^--- before/(\S+)\n\+\+\+ after/\S+\n", block, flags=re.M)[1:]
    return dict(zip(files[::2], files[1::2], strict=True))


def test_the_diff_of_the_documentation_makes_one_example_of_the_other():
    changed = diffs()
    names = {path.relative_to(EXAMPLE / "before") for path in (EXAMPLE / "before").rglob("*") if path.is_file()}
    names = {name for name in names if "__pycache__" not in name.parts}
    for name in names:
        text = (EXAMPLE / "before" / name).read_text()
        for hunk in re.split(r"^@@.*\n", changed.get(str(name), ""), flags=re.M)[1:]:
            lines = hunk.splitlines()
            old = "\n".join(line[1:] for line in lines if not line.startswith("+"))
            new = "\n".join(line[1:] for line in lines if not line.startswith("-"))
            assert text.count(old) == 1
            text = text.replace(old, new)
        assert text == (EXAMPLE / "after" / name).read_text(), name
    assert set(changed) == {"images_app/client_app.py", "images_app/server_app.py"}


@pytest.mark.parametrize("name", ["client_app.py", "server_app.py"])
def test_one_line_changes_in_each_file_beside_imports(name):
    before, after = ((EXAMPLE / side / "images_app" / name).read_text().splitlines() for side in ("before", "after"))
    changes = [line for line in difflib.ndiff(before, after) if line[:2] in ("+ ", "- ")]
    beside = [line for line in changes if not line[2:].startswith(("import ", "from "))]
    assert [line[0] for line in beside] == ["-", "+"]


RUN = {"num-server-rounds": 2, "fraction-train": 1.0, "local-epochs": 3, "lr": 0.1, "batch-size": 32, "examples": 200}


@contextlib.contextmanager
def example(side, tmp_path, monkeypatch):
    """The example's two apps, and what they are started with."""
    folder = shutil.copytree(EXAMPLE / side, tmp_path / side)
    monkeypatch.syspath_prepend(folder)
    modules = [importlib.import_module(f"images_app.{name}") for name in ("server_app", "client_app", "task")]
    config = RUN | {"output": str(tmp_path / f"{side}.pt")}
    try:
        yield modules, config
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "images_app"]:
            del sys.modules[name]


@pytest.mark.parametrize("side", ["before", "after"])
def test_the_example_runs(side, tmp_path, monkeypatch):
    with example(side, tmp_path, monkeypatch) as ((server, client, task), config):
        grid = LocalGrid(client.app, 3)
        for context in grid.nodes.values():
            context.run_config = config
        server.app(grid, Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=config))
        torch.manual_seed(0)
        first, last = task.Net(), task.Net()
        last.load_state_dict(torch.load(config["output"]))
        training, _ = task.load_data(0, 3, 32, 200)
        assert task.test(last, training, "cpu")[0] < task.test(first, training, "cpu")[0] - 0.01
    sizes = [wire.counted(reply) for reply in grid.replies if reply.content.array_records]
    d = sum(p.numel() for p in last.parameters())
    assert len(sizes) == 6
    assert sum(sizes) / len(sizes) < 4 * d * (0.5 if side == "after" else 1.1)
    assert sum(sizes) / len(sizes) > 4 * d * (0.3 if side == "after" else 1.0)
    # The app's own evaluation was reached on every client, with whole models.
    evaluations = [reply for reply in grid.replies if reply.metadata.message_type == "evaluate"]
    assert len(evaluations) == 6
    assert all("eval_acc" in reply.content["metrics"] for reply in evaluations)


# -- the same model as elsewhere ---------------------------------------------------------------------------------------


def test_fedavg_equals_flowers_own():
    """On the same app, weighted by examples, with clients of unequal weight."""
    app = ClientApp()
    app.train()(train_message)
    app.evaluate()(evaluate_message)
    weights, config = ArrayRecord(make_model().state_dict()), ConfigRecord({"lr": 0.3})
    theirs = FedAvg().start(LocalGrid(app, M), weights, num_rounds=3, train_config=config)
    _, ours = run("fedavg", rounds=3, train_config={"lr": 0.3}, weighted_by_key="num-examples", fraction_evaluate=1.0)
    assert close(state(ours.arrays), state(theirs.arrays))
    assert not close(state(ours.arrays), make_model().state_dict(), 1e-2)
    for round in (1, 2, 3):
        for name in ("train_loss", "client"):
            assert ours.train_metrics_clientapp[round][name] == pytest.approx(
                theirs.train_metrics_clientapp[round][name], rel=1e-5
            )
        accuracy = theirs.evaluate_metrics_clientapp[round]["accuracy"]
        assert ours.evaluate_metrics_clientapp[round]["accuracy"] == pytest.approx(accuracy)


FREE = ["fedavg", "fedavgm", "fedadam", "fedyogi", "fedbcgd", "fedpaq", "topk", "qsgd+fedbcgd"]


@pytest.mark.parametrize("name", FREE)
def test_an_app_that_steps_as_our_rule_ends_where_a_simulation_does(name):
    federation, result = run(name, LocalGrid(dropin(), M), rounds=3, fraction_train=0.7, **PLAIN)
    blocks = {"blocks": 2} if "fedbcgd" in name else {}
    reference = simulate(make_model(), CLIENTS, name, rounds=3, cohort=4, seed=3, workers=0, **blocks, **PLAIN)
    assert close(state(result.arrays), reference.module.state_dict())
    ours, theirs = federation.server.ledger, reference.ledger
    assert (ours.upload_bytes, ours.upload_floats) == (theirs.upload_bytes, theirs.upload_floats)
    assert ours.lost == ours.refused == 0


@pytest.mark.parametrize("name", ["fedavg", "fedbcgd", "topk", "qsgd+fedbcgd"])
def test_an_app_gives_the_bits_of_its_function_in_a_simulation(name):
    """The same function as simulate(train=…), with draws of its own."""

    def noisy_step(module, client):
        loss = step(module, client, 0.05)
        with torch.no_grad():
            for p in module.parameters():
                p += 0.01 * torch.randn_like(p)
        return loss

    def function(message, context):
        module, client = make_model(), context.node_config["partition-id"]
        module.load_state_dict(state(message.content["arrays"]))
        metrics = {"train_loss": noisy_step(module, client), "num-examples": 12}
        content = RecordDict({"arrays": ArrayRecord(module.state_dict()), "metrics": MetricRecord(metrics)})
        return Message(content, reply_to=message)

    federation, result = run(name, LocalGrid(dropin(function), M), rounds=3, fraction_train=0.7)
    blocks = {"blocks": 2} if "fedbcgd" in name else {}
    reference = simulate(
        make_model(), CLIENTS, name, rounds=3, cohort=4, seed=3, workers=0, **blocks,
        train=lambda module, data, config: noisy_step(module, config.client),
    )  # fmt: skip
    assert same(result.arrays, reference.module)
    assert [row["train_loss"] for row in federation.rows] == [row["train_loss"] for row in reference.rows]


def test_convolutions_buffers_and_what_is_not_trained():
    """Frozen weights and counters come from initial_arrays; statistics are averaged; memory formats do not matter."""

    def make():
        torch.manual_seed(0)
        module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3))
        module[4].bias.requires_grad_(False)
        return module

    g = torch.Generator().manual_seed(0)
    data = [(torch.randn(8, 1, 8, 8, generator=g), torch.randint(3, (8,), generator=g)) for _ in range(4)]
    seen = []

    def function(message, context):
        module = make()
        given = state(message.content["arrays"])
        seen.append(given)
        module.load_state_dict(given)
        x, y = data[context.node_config["partition-id"]]
        nn.functional.cross_entropy(module(x), y).backward()
        with torch.no_grad():
            for p in (p for p in module.parameters() if p.requires_grad):
                p -= 0.1 * p.grad
        metrics = MetricRecord({"num-examples": 8})
        content = RecordDict({"arrays": ArrayRecord(module.state_dict()), "metrics": metrics})
        return Message(content, reply_to=message)

    weights = make().state_dict()
    weights["4.bias"] = torch.tensor([1.0, 2.0, 3.0])
    weights["1.num_batches_tracked"] = torch.tensor(7)
    federation = fedbcgd.flower.strategy("fedavg", make(), channels_last=True)
    result = federation.start(LocalGrid(dropin(function, None), 4), ArrayRecord(weights), num_rounds=2)
    assert federation.job.channels_last
    assert list(seen[0]) == list(weights)
    assert all(torch.equal(seen[0][name], value) for name, value in weights.items())
    assert all(torch.equal(given["4.bias"], weights["4.bias"]) for given in seen)
    app = ClientApp()
    app.train()(function)
    theirs = FedAvg(fraction_evaluate=0.0).start(LocalGrid(app, 4), ArrayRecord(weights), num_rounds=2)
    names = [name for name in weights if name != "1.num_batches_tracked"]
    assert close({n: state(result.arrays)[n] for n in names}, state(theirs.arrays))
    assert not torch.equal(state(result.arrays)["1.running_mean"], weights["1.running_mean"])


def test_a_layout_travels_small_and_whole():
    models = {
        "conv": nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 3)).to(
            memory_format=torch.channels_last
        ),
        "deep": nn.Sequential(*[nn.Linear(8, 8) for _ in range(200)]),
    }
    for model in models.values():
        layout = fedbcgd.make_algorithm("fedbcgd", blocks=2).uplink.layout(model)
        packed = plain.pack_layout(layout)
        content = RecordDict({plain.FORM: ConfigRecord({"layout": packed})})
        assert plain.read_layout(content, layout.digest) == layout
        assert len(packed) < 3000
        with pytest.raises(UserError, match="layout: expected the server's"):
            plain.read_layout(content, "0" * 16)


# -- what the function sees --------------------------------------------------------------------------------------------


def test_the_function_gets_an_ordinary_message():
    seen = []

    def function(message, context):
        seen.append({name: dict(record) for name, record in message.content.items()})
        message.content["arrays"], message.content["config"] = message.content["model"], message.content["settings"]
        return train_message(message, context)

    grid = LocalGrid(dropin(function, None), M)
    run("fedbcgd", grid, 2, {"lr": 0.2, "anything": [1, 2]}, arrayrecord_key="model", configrecord_key="settings")
    assert all(set(content) == {"model", "settings"} for content in seen)
    assert list(seen[0]["model"]) == list(make_model().state_dict())
    assert seen[0]["settings"] == {"lr": 0.2, "anything": [1, 2], "server-round": 1}
    assert seen[-1]["settings"]["server-round"] == 2


def test_the_same_seed_gives_the_same_draws_to_the_function():
    drawn = []

    def function(message, context):
        drawn.append(
            (message.content["config"]["server-round"], context.node_config["partition-id"], float(torch.rand(1)))
        )
        return train_message(message, context)

    for _ in range(2):
        run("fedavg", LocalGrid(dropin(function), 3))
    assert drawn[: len(drawn) // 2] == drawn[len(drawn) // 2 :]
    assert len({x for _, _, x in drawn}) == 6


def test_mods_of_the_function_see_models_and_mods_of_the_app_what_is_sent():
    seen = {"inner": [], "outer": []}

    def mod(where):
        def watch(message, context, call_next):
            reply = call_next(message, context)
            if reply.metadata.message_type == "train":
                seen[where].append({name: len(record) for name, record in reply.content.array_records.items()})
            return reply

        return watch

    app = dropin(app_mods=[mod("outer"), arrays_size_mod], mods=[mod("inner")])
    federation, _ = run(grid=LocalGrid(app, M))
    assert seen["inner"][0] == {"arrays": 4}
    assert set(seen["outer"][0]) == {wire.UPLOAD}
    assert federation.server.last.accepted == M


def test_local_noise_around_the_function_reaches_the_upload():
    """LocalDpMod clips and adds noise to the whole model before its block is cut out."""
    noisy = LocalDpMod(clipping_norm=1e-6, sensitivity=1e-2, epsilon=1.0, delta=1e-5)
    _, result = run("fedavg", LocalGrid(dropin(mods=[noisy]), M), rounds=1, max_norm="off")
    change = state(result.arrays)["0.weight"] - make_model().state_dict()["0.weight"]
    expected = 1e-2 * (2 * torch.tensor(1.25e5).log()).sqrt() / M**0.5
    assert float(change.std()) == pytest.approx(float(expected), rel=0.5)


# -- what goes wrong on a client ---------------------------------------------------------------------------------------


def reply_with(**records):
    return lambda message, context: Message(RecordDict(records), reply_to=message)


def whole():
    return ArrayRecord(make_model().state_dict())


def renamed():
    return ArrayRecord({f"module.{name}": Array(value.numpy()) for name, value in make_model().state_dict().items()})


def reshaped():
    return ArrayRecord({name: Array(value.numpy().ravel()) for name, value in make_model().state_dict().items()})


def raise_error(message, context):
    raise OSError("disk on fire")


WRONG = {
    "no message": (lambda message, context: None, "expected it to return a Message"),
    "an error": (lambda m, c: Message(Error(code=1, reason="out of memory"), reply_to=m), "out of memory"),
    "an exception": (raise_error, "disk on fire"),
    "no model": (reply_with(metrics=MetricRecord({"num-examples": 1})), "expected one ArrayRecord"),
    "two models": (reply_with(a=whole(), b=whole()), "expected one ArrayRecord"),
    "other names": (reply_with(arrays=renamed()), "expected a model with '0.weight'"),
    "other shapes": (reply_with(arrays=reshaped()), r"expected '0.weight' of shape \(8, 4\)"),
    "no examples": (reply_with(arrays=whole()), "expected 'num-examples' among its metrics"),
    "NaN": (reply_with(arrays=ArrayRecord({n: Array((v * NAN).numpy()) for n, v in make_model().state_dict().items()}),
                       metrics=MetricRecord({"num-examples": 1})), "NaN or infinity"),
}  # fmt: skip


@pytest.mark.parametrize("how", WRONG)
def test_a_function_that_goes_wrong_is_lost_with_its_words(how):
    function, words = WRONG[how]

    def one_is_wrong(message, context):
        wrong = context.node_config["partition-id"] == BAD
        return function(message, context) if wrong else train_message(message, context)

    federation, result = run("fedavg", LocalGrid(dropin(one_is_wrong), M), rounds=1, weighting="examples")
    report = federation.server.last
    assert report.accepted == M - 1
    assert re.search(words, (*report.lost, *report.refused)[0])
    assert all(value.isfinite().all() for value in state(result.arrays).values())


def test_training_that_diverges_does_not_name_a_rate_that_is_not_used():
    """Rates are the app's; only clients that train by the algorithm's rule use its lr."""
    nan = ArrayRecord({name: Array((value * NAN).numpy()) for name, value in make_model().state_dict().items()})
    with pytest.raises(fedbcgd.Diverged, match="too high in the clients' own training"):
        run("fedavg", LocalGrid(dropin(reply_with(arrays=nan)), M), rounds=3)
    with pytest.raises(fedbcgd.Diverged, match=r"too high \(0\.498 in this round, lr = 0\.5\)"):
        run("fedavg", LocalGrid(rule_app(loss=lambda m, b: NAN * m(b[0]).sum()), M), rounds=3, lr=0.5)


def test_metrics_that_are_no_numbers_stay_on_the_client(caplog):
    def function(message, context):
        reply = train_message(message, context)
        reply.content["metrics"] = MetricRecord({"num-examples": 3, "f1": NAN, "curve": [1.0, 2.0], "fine": 2.0})
        return reply

    federation, result = run("fedavg", LocalGrid(dropin(function), M), rounds=1)
    assert federation.server.last.accepted == M
    assert result.train_metrics_clientapp[1]["fine"] == 2.0
    assert not {"f1", "curve"} & set(result.train_metrics_clientapp[1])
    assert "'f1' is not sent" in caplog.text


def test_an_app_that_reports_nothing_but_its_model():
    """Without metrics clients count alike, and the loss is not known."""
    app = dropin(lambda m, c: Message(RecordDict({"a": train_message(m, c).content["arrays"]}), reply_to=m))
    federation, result = run("fedavg", LocalGrid(app, M), rounds=1)
    assert federation.server.last.accepted == M
    assert result.train_metrics_clientapp[1]["train_loss"] != result.train_metrics_clientapp[1]["train_loss"]


def test_a_residual_is_kept_until_it_is_accepted():
    """Top-k: what a lost upload left out is not kept, and a folder has it after a restart."""
    lost = []

    def lose(message, reply):
        if message.metadata.message_type == "train" and message.metadata.group_id == "1" and not lost:
            lost.append(message.metadata.dst_node_id)
            return None
        return reply

    grid = LocalGrid(dropin(), M, lose=lose)
    federation, _ = run("topk", grid, rounds=2, fraction=0.2)
    assert federation.server.ledger.lost == 1
    memory = ContextStorage(grid.nodes[lost[0]].state, torch.float32).load()
    client = grid.nodes[lost[0]].node_config["partition-id"]
    assert (memory.version, federation.rounds.accepted[client]) == (0, 0)  # the first round; the second was lost
    assert memory.pending_round == 1
    federation.start(grid, num_rounds=3)
    memory = ContextStorage(grid.nodes[lost[0]].state, torch.float32).load()
    assert (memory.version, memory.pending_round) == (0, 2)


def test_a_residual_survives_a_restart_in_a_folder(tmp_path):
    grid = LocalGrid(dropin(folder=tmp_path), M)

    def restart(info):
        for client in range(M):
            grid.join(client, M)

    _, result = run("topk", grid, rounds=3, callbacks=[restart], fraction=0.2)
    _, straight = run("topk", LocalGrid(dropin(), M), rounds=3, fraction=0.2)
    assert all(torch.equal(value, state(straight.arrays)[name]) for name, value in state(result.arrays).items())
    assert len(list(tmp_path.glob("client-*.safetensors"))) == M


# -- algorithms that correct gradients ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["scaffold", "feddc", "fedprox", "fedbcgd+", "fedbcgd+derived", "fedbcgd-frozen"])
def test_what_corrects_gradients_is_refused_at_the_start(name):
    with pytest.raises(
        UserError,
        match=r"algorithm: expected one that needs only the trained model .* corrects every gradient.*config\.optimizer",
    ):
        run(name)


@pytest.mark.parametrize("options", [{"clip_norm": 1.0}, {"client_momentum": 0.9}])
def test_options_of_our_own_steps_are_refused(options):
    with pytest.raises(UserError, match=f"{next(iter(options))}: expected none"):
        run("fedavg", **options)


def test_a_single_client_that_says_so_cannot_end_the_run():
    """Most clients train by the rule; the one with an app of its own is lost, with the reason."""
    theirs, own = dropin(), rule_app()

    def app(message, context):
        return (theirs if context.node_config["partition-id"] == BAD else own)(message, context)

    federation, _ = run("scaffold", LocalGrid(app, M), rounds=1, **LOCAL)
    assert federation.server.last.accepted == M - 1
    assert "corrects every gradient" in federation.server.last.lost[0]


# -- hostile clients ---------------------------------------------------------------------------------------------------


def attacked(of, change):
    grid = LocalGrid(dropin(), M)

    def lose(message, reply):
        client = grid.nodes[message.metadata.dst_node_id].node_config["partition-id"]
        bad = message.metadata.message_type == of and client == BAD
        return through_protobuf(change(message, reply) if bad else reply)

    grid.lose = lose
    return grid


TRAIN_METRICS = {
    "text for a record": ConfigRecord({"a": "b"}),
    "NaN": MetricRecord({"a": NAN}),
    "infinity": MetricRecord({"a": -INF}),
    "a list": MetricRecord({"a": [1.0, 2.0]}),
    "33 names": MetricRecord({str(k): 1.0 for k in range(33)}),
    "a long name": MetricRecord({"a" * 101: 1.0}),
    "no name": MetricRecord({"": 1.0}),
    "control characters": MetricRecord({"\x1b[2J": 1.0}),
}


@pytest.mark.parametrize("how", TRAIN_METRICS)
def test_training_metrics_of_another_form_are_refused_alone(how):
    def change(message, reply):
        reply.content[wire.METRICS] = TRAIN_METRICS[how]
        return reply

    federation, result = run("fedavg", attacked("train", change), rounds=1)
    report = federation.server.last
    assert report.accepted == M - 1
    assert f"client {BAD}" in (*report.refused, *report.lost)[0]
    assert result.train_metrics_clientapp[1]["client"] == pytest.approx(
        sum(c * (10 + c) for c in range(M) if c != BAD) / sum(10 + c for c in range(M) if c != BAD)
    )


def test_a_metric_that_one_client_alone_has_is_left_out():
    def change(message, reply):
        reply.content[wire.METRICS] = MetricRecord({"own": 1.0, "accepted": 99.0})
        return reply

    _, result = run("fedavg", attacked("train", change), rounds=1)
    assert "own" not in result.train_metrics_clientapp[1]
    assert result.train_metrics_clientapp[1]["accepted"] == M


def test_clients_cannot_change_the_counts_of_the_server():
    """Even if all of them report metrics of these names."""

    def lose(message, reply):
        if message.metadata.message_type == "train":
            reply.content[wire.METRICS] = MetricRecord({"accepted": 99.0, "upload_d": -1.0})
        return reply

    _, result = run("fedavg", LocalGrid(dropin(), M, lose=lose), rounds=1)
    assert result.train_metrics_clientapp[1]["accepted"] == M
    assert result.train_metrics_clientapp[1]["upload_d"] == 1.0


EVALUATIONS = {
    "no metrics": RecordDict({"metrics": ConfigRecord({"a": 1})}),
    "nothing": RecordDict(),
    "two records": RecordDict({n: MetricRecord({"accuracy": 0.0, "num-examples": 1}) for n in "ab"}),
    "many records": RecordDict({str(k): ConfigRecord({"a": 1}) for k in range(3000)}),
    "no examples": RecordDict({"metrics": MetricRecord({"accuracy": 0.0})}),
    "a list of examples": RecordDict({"metrics": MetricRecord({"accuracy": 0.0, "num-examples": [1]})}),
    "half an example": RecordDict({"metrics": MetricRecord({"accuracy": 0.0, "num-examples": 0.5})}),
    "NaN examples": RecordDict({"metrics": MetricRecord({"accuracy": 0.0, "num-examples": NAN})}),
    "negative examples": RecordDict({"metrics": MetricRecord({"accuracy": 0.0, "num-examples": -3})}),
    "too many examples": RecordDict({"metrics": MetricRecord({"accuracy": 0.0, "num-examples": 1e300})}),
    "NaN": RecordDict({"metrics": MetricRecord({"accuracy": NAN, "num-examples": 12})}),
    "only lists": RecordDict({"metrics": MetricRecord({"accuracy": [0.0], "num-examples": 12})}),
    "many metrics": RecordDict({"metrics": MetricRecord({**{str(k): 1.0 for k in range(101)}, "num-examples": 12})}),
    "a long name": RecordDict({"metrics": MetricRecord({"a" * 101: 1.0, "num-examples": 12})}),
}


@pytest.mark.parametrize("how", EVALUATIONS)
def test_an_evaluation_of_another_form_is_refused_alone(how, caplog):
    grid = attacked("evaluate", lambda message, reply: Message(EVALUATIONS[how], reply_to=message))
    _, result = run("fedavg", grid, rounds=1, fraction_evaluate=1.0)
    assert f"client {BAD} did not evaluate" in caplog.text
    module = make_model()
    module.load_state_dict(state(result.arrays))
    honest = [CLIENTS[client] for client in range(M) if client != BAD]
    right = sum(int((module(x).argmax(1) == y).sum()) for x, y in honest)
    assert result.evaluate_metrics_clientapp[1] == {"accuracy": right / (12 * len(honest))}


def test_an_evaluation_cannot_answer_for_another_client(caplog):
    """Its question is known by the group of the message, which is random."""

    def change(message, reply):
        reply.metadata.__dict__["_group_id"] = "1"
        return reply

    run("fedavg", attacked("evaluate", change), rounds=1, fraction_evaluate=1.0)
    assert "answers no open question" in caplog.text
    groups = set()
    grid = LocalGrid(dropin(), M, lose=lambda m, r: groups.add(m.metadata.group_id) or r)
    run("fedavg", grid, rounds=1, fraction_evaluate=1.0)
    assert len({group for group in groups if len(group) == 32}) == M


def test_an_evaluation_cannot_raise_its_weight_later():
    reports = iter([12, 12_000_000])

    def change(message, reply):
        accuracy = 0.0 if (count := next(reports)) == 12 else 1.0
        return Message(RecordDict({"m": MetricRecord({"accuracy": accuracy, "num-examples": count})}), reply_to=message)

    federation, _ = run("fedavg", attacked("evaluate", change), rounds=2, fraction_evaluate=1.0)
    assert federation.roster.limits["test_examples"][BAD] == 12
    assert federation.rows[-1]["clients_accuracy"] < 1


@pytest.mark.parametrize("value", [3, "", "anything", True, ["app"], 1.5])
def test_a_greeting_with_another_way_to_train_is_refused_alone(value, caplog):
    def change(message, reply):
        reply.content[wire.VALUES] = ConfigRecord({**reply.content[wire.VALUES], "trains": value})
        return reply

    federation, _ = run("fedavg", attacked(wire.HELLO, change), rounds=1, clients=M)
    assert federation.server.last.accepted == M - 1
    assert "cannot take part" in caplog.text


def test_damaged_messages():
    federation = strategy("topk", clients=M, fraction_evaluate=1.0, min_clients=1, max_norm="off", weighting="examples")
    cost = fuzz(federation, LocalGrid(dropin(), M), Mutator(0), 40, (1, 3, 4), M)
    assert cost.bytes < 100e6


# -- options of Flower's strategies ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({}, M),
        ({"fraction_train": 0.5}, 3),
        ({"fraction_train": 0.34}, 2),
        ({"fraction_train": 0.1}, 1),
        ({"fraction_train": 0.1, "min_train_nodes": 4}, 4),
        ({"fraction_train": 1.0, "min_train_nodes": 2, "min_available_nodes": M}, M),
    ],
)
def test_how_many_train(options, asked):
    federation, _ = run("fedavg", rounds=1, **options)
    assert federation.server.last.accepted == asked


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({}, 0),
        ({"fraction_evaluate": 0.0, "min_evaluate_nodes": 2}, 0),
        ({"fraction_evaluate": 0.5}, 3),
        ({"fraction_evaluate": 0.1, "min_evaluate_nodes": 4}, 4),
        ({"evaluate_clients": 1.0}, M),
    ],
)
def test_how_many_evaluate(options, asked):
    grid = LocalGrid(dropin(), M)
    run("fedavg", grid, rounds=1, **options)
    assert sum(reply.metadata.message_type == "evaluate" for reply in grid.replies) == asked


def test_enough_nodes_are_waited_for():
    for options in ({"min_available_nodes": 5}, {"fraction_train": 0.1, "min_train_nodes": 5}):
        with pytest.raises(UserError, match=r"expected at least 5 clients online.*got 3"):
            run("fedavg", LocalGrid(dropin(), 3), patience=0.01, **options)


def test_another_key_weighs_the_clients():
    def function(message, context):
        reply = train_message(message, context)
        count = reply.content["metrics"].pop("num-examples")
        reply.content["metrics"]["images"] = float(count)
        return reply

    _, result = run("fedavg", LocalGrid(dropin(function), M), rounds=2, weighted_by_key="images")
    _, wanted = run("fedavg", rounds=2, weighting="examples")
    assert close(state(result.arrays), state(wanted.arrays), 0)
    assert "images" not in result.train_metrics_clientapp[1]


REFUSED = {
    "train_metrics_aggr_fn": (max, "weighted by examples"),
    "evaluate_metrics_aggr_fn": (max, "weighted by examples"),
    "fraction_fit": (0.5, "fraction_train"),
    "min_fit_clients": (2, "min_train_nodes"),
    "min_available_clients": (2, "min_available_nodes"),
    "on_fit_config_fn": (dict, "train_config"),
    "evaluate_fn": (max, r"strategy.start.*, which needs a ServerApp with @app.main\(\)"),
    "initial_parameters": ([], "initial_arrays"),
    "eta": (0.1, "server_lr"),
    "fraction_train": (0, "above 0"),
    "fraction_evaluate": (1.5, "from 0 to 1"),
    "min_train_nodes": (2.5, "an integer"),
    "weighted_by_key": ("", "a name"),
    "arrayrecord_key": ("task", "two names other than"),
    "configrecord_key": ("arrays", "two names other than"),
    "fraction_trains": (1.0, "fraction_trains"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_options_are_refused_with_a_hint(name):
    value, words = REFUSED[name]
    with pytest.raises(UserError, match=words):
        strategy("fedavg", **{name: value})


@pytest.mark.parametrize(
    "options",
    [
        {"fraction_train": 0.5, "cohort": 3},
        {"min_available_nodes": 2, "min_clients": 2},
        {"fraction_evaluate": 0.5, "evaluate_clients": 0.5},
    ],
)
def test_two_names_for_the_same_are_refused(options):
    with pytest.raises(UserError, match="got both, which mean the same"):
        strategy("fedavg", **options)


def test_flowers_options_are_taken_out():
    options = {"fraction_train": 0.5, "lr": 0.1, "min_train_nodes": 3, "min_clients": 1}
    assert Options.read(options) == (Options(fraction_train=0.5, min_train_nodes=3, min_clients=3), {"lr": 0.1})


# -- settings of the training ------------------------------------------------------------------------------------------


def test_settings_reach_the_function():
    _, slow = run("fedavg", train_config={"lr": 0.0})
    assert close(state(slow.arrays), make_model().state_dict(), 0)


@pytest.mark.parametrize("name", ["lr", "local-epochs", "batch_size"])
def test_settings_that_our_rule_does_not_follow_are_refused(name):
    with pytest.raises(
        UserError, match=rf"train_config: expected {name} = .*, got 7; say .*strategy\(…, {name.replace('-', '_')}=7"
    ):
        run("fedavg", LocalGrid(rule_app(), M), train_config={name: 7}, **LOCAL)


def test_settings_that_say_the_same_are_taken_and_unknown_ones_are_told_of(caplog):
    settings = {"lr": 0.1, "batch-size": 4, "server-round": 3, "flavour": "sour"}
    federation, _ = run("fedavg", LocalGrid(rule_app(), M), train_config=settings, **LOCAL)
    assert federation.server.last.accepted == 6
    assert "'flavour' has no effect" in caplog.text
    assert "batch-size" not in caplog.text


def test_settings_reach_a_function_of_client_app():
    """client_app(train=…): nothing is refused, since the function may read anything."""
    seen = []

    def train(module, data, config):
        seen.append((config.round, config["lr"], config["flavour"], config["server-round"]))
        return {"loss": 1.0, "accuracy": 0.5}

    app = fedbcgd.flower.client_app(make_model, lambda client: CLIENTS[client], train=train)
    _, result = run("fedavg", LocalGrid(app, 3), 2, {"lr": 7.0, "flavour": "sour"}, **LOCAL)
    assert seen == [(1, 7.0, "sour", 1)] * 3 + [(2, 7.0, "sour", 2)] * 3
    metrics = result.train_metrics_clientapp[2]
    assert (metrics["train_loss"], metrics["train_accuracy"], metrics["accuracy"]) == (1.0, 0.5, 0.5)


def test_evaluate_fn_is_in_log_result_and_rows(tmp_path, caplog):
    caplog.set_level("INFO", logger="flwr.fedbcgd")
    calls = []

    def evaluate(round, arrays):
        calls.append(round)
        return MetricRecord({"score": round / 2, "accuracy": 0.25, "list": [1.0]}) if round != 3 else None

    federation = strategy("fedavg", folder=tmp_path, evaluate_every=2, test=CLIENTS[0])
    result = federation.start(LocalGrid(dropin(), M), num_rounds=4, evaluate_fn=evaluate)
    assert calls == [0, 1, 2, 3, 4]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["round"], row["test_score"]) for row in rows] == [(2, 1.0), (4, 2.0)]
    # The test data has an accuracy, too: both are there.
    assert all(row["test_evaluate_fn_accuracy"] == 0.25 for row in rows)
    x, y = CLIENTS[0]
    module = make_model()
    module.load_state_dict(state(result.arrays))
    assert rows[-1]["test_accuracy"] == int((module(x).argmax(1) == y).sum()) / 12
    assert dict(result.evaluate_metrics_serverapp[1]) == {"score": 0.5, "accuracy": 0.25, "list": [1.0]}
    assert set(result.evaluate_metrics_serverapp[2]) == {"score", "accuracy", "list", "test_accuracy", "test_loss"}
    assert 3 not in result.evaluate_metrics_serverapp
    for line in ("round 0: score 0.0000, accuracy 0.2500", "round 1: score 0.5000", "score 2.0000"):
        assert line in caplog.text


def test_an_evaluate_fn_without_values_has_no_line(caplog):
    caplog.set_level("INFO", logger="flwr.fedbcgd")
    strategy("fedavg").start(LocalGrid(dropin(), M), num_rounds=1, evaluate_fn=lambda round, arrays: None)
    assert "round 1:" in caplog.text
    assert "round 0:" not in caplog.text


def test_a_target_may_be_a_value_of_evaluate_fn():
    federation = strategy("fedavg", target=("test_score", 3))
    federation.start(LocalGrid(dropin(), M), num_rounds=9, evaluate_fn=lambda r, a: MetricRecord({"score": float(r)}))
    assert (federation.server.round, federation.outcome.stopped) == (3, "target")


# -- mods, privacy, secure aggregation ---------------------------------------------------------------------------------


def test_mods_of_our_client_app():
    seen = []

    def watch(message, context, call_next):
        reply = call_next(message, context)
        seen.append((message.metadata.message_type, set(reply.content)))
        return reply

    app = fedbcgd.flower.client_app(make_model, lambda client: CLIENTS[client], mods=[watch])
    _, result = start("fedbcgd", LocalGrid(app, M), rounds=1)
    reference = simulate(make_model(), CLIENTS, "fedbcgd", rounds=1, cohort=4, seed=3, workers=0, blocks=2, **LOCAL)
    assert same(result.arrays, reference.module)
    assert (wire.HELLO, {wire.VALUES}) in seen
    assert ("train", {wire.VALUES, wire.UPLOAD}) in seen


@pytest.mark.parametrize("mod", [secaggplus_mod, fixedclipping_mod, adaptiveclipping_mod])
def test_mods_that_need_whole_models_at_the_server_are_refused_everywhere(mod):
    for make in (
        lambda: fedbcgd.flower.client_app(make_model, CLIENTS.__getitem__, mods=[mod]),
        lambda: dropin(mods=[mod]),
        lambda: dropin(app_mods=[mod]),
        lambda: fedbcgd.flower.wrap(ClientApp(client_fn=client_fn, mods=[mod])),
    ):
        with pytest.raises(UserError, match=f"mods: expected none.*got {mod.__name__}"):
            make()


def test_local_noise_on_encoded_blocks_is_refused():
    mod = LocalDpMod(1.0, 1.0, 1.0, 1e-5)
    for make in (
        lambda: fedbcgd.flower.client_app(make_model, CLIENTS.__getitem__, mods=[mod]),
        lambda: dropin(app_mods=[mod]),
    ):
        with pytest.raises(UserError, match=r"LocalDpMod.*fedbcgd\.flower\.train\(app, mods="):
            make()


WRAPPERS = {
    "server fixed": lambda s: DifferentialPrivacyServerSideFixedClipping(s, 1.0, 1.0, M),
    "client fixed": lambda s: DifferentialPrivacyClientSideFixedClipping(s, 1.0, 1.0, M),
    "server adaptive": lambda s: DifferentialPrivacyServerSideAdaptiveClipping(s, 0.1, M),
    "client adaptive": lambda s: DifferentialPrivacyClientSideAdaptiveClipping(s, 0.1, M),
}


@pytest.mark.parametrize("how", WRAPPERS)
def test_differential_privacy_around_the_strategy_is_refused(how):
    wrapper, grid = WRAPPERS[how](strategy("fedavg")), LocalGrid(dropin(), M)
    weights = ArrayRecord(make_model().state_dict())
    with pytest.raises(UserError, match=r"around fedbcgd's strategy, got DifferentialPrivacy"):
        wrapper.start(grid, weights, num_rounds=1)
    with pytest.raises(UserError, match="around fedbcgd's strategy"):
        wrapper.configure_train(1, weights, ConfigRecord(), grid)
    assert grid.replies == []  # nobody was asked anything


def test_a_model_that_something_else_changes_between_rounds_is_refused():
    class Noise(Strategy):
        def __init__(self, inner):
            self.inner = inner
            self.summary, self.configure_train = inner.summary, inner.configure_train
            self.configure_evaluate, self.aggregate_evaluate = inner.configure_evaluate, inner.aggregate_evaluate

        configure_train = aggregate_evaluate = configure_evaluate = summary = None

        def aggregate_train(self, server_round, replies):
            arrays, metrics = self.inner.aggregate_train(server_round, replies)
            noisy = {name: value + 1 for name, value in arrays.to_torch_state_dict().items()}
            return ArrayRecord(noisy), metrics

    weights = ArrayRecord(make_model().state_dict())
    with pytest.raises(UserError, match="expected the model that aggregate_train returned"):
        Noise(strategy("fedavg")).start(LocalGrid(dropin(), M), weights, num_rounds=2)


def test_flowers_own_loop_runs_an_app_too():
    """With the four hooks instead of our start."""
    weights = ArrayRecord(make_model().state_dict())
    grids = LocalGrid(dropin(), M), LocalGrid(dropin(), M)
    config = ConfigRecord({"lr": 0.3})
    result = Strategy.start(strategy(fraction_evaluate=1.0), grids[0], weights, num_rounds=3, train_config=config)
    _, wanted = run("fedbcgd", grids[1], rounds=3, train_config={"lr": 0.3}, fraction_evaluate=1.0)
    assert all(torch.equal(value, state(wanted.arrays)[name]) for name, value in state(result.arrays).items())
    assert result.evaluate_metrics_clientapp[3] == wanted.evaluate_metrics_clientapp[3]


def test_a_client_app_that_was_not_changed_is_told_what_to_change(caplog):
    """Only the server's line was changed: Flower itself answers our first question, with an error."""
    app = ClientApp()
    app.train()(train_message)

    def of_flower(message, context):
        try:
            return app(message, context)
        except ValueError as error:  # as flwr.supernode.runtime.run_clientapp has it
            return Message(Error(code=2, reason=f"{type(error)}:<'{error}'>"), reply_to=message)

    with pytest.raises(UserError, match=r"expected at least . clients online.*got 0"):
        run("fedbcgd", LocalGrid(of_flower, M), patience=0.1)
    assert "say @fedbcgd.flower.train(app) instead of @app.train()" in caplog.text


# -- the older shape: client_fn and server_fn --------------------------------------------------------------------------


class NumPyApp(NumPyClient):
    def __init__(self, client):
        self.client = client

    def load(self, parameters):
        module = make_model()
        names = module.state_dict()
        module.load_state_dict({name: torch.tensor(p) for name, p in zip(names, parameters, strict=True)})
        return module

    def fit(self, parameters, config):
        module = self.load(parameters)
        loss = step(module, self.client, config.get("lr", LR))
        metrics = {"train_loss": loss, "client": float(self.client), "note": "text stays here"}
        return [value.numpy() for value in module.state_dict().values()], 10 + self.client, metrics

    def evaluate(self, parameters, config):
        module, (x, y) = self.load(parameters), CLIENTS[self.client]
        with torch.no_grad():
            scores = module(x)
        accuracy = int((scores.argmax(1) == y).sum()) / len(y)
        return float(nn.functional.cross_entropy(scores, y)), len(y), {"accuracy": accuracy}


def client_fn(context):
    return NumPyApp(context.node_config["partition-id"]).to_client()


def test_a_client_fn_gives_the_bits_of_the_message_api():
    grid = LocalGrid(fedbcgd.flower.wrap(ClientApp(client_fn=client_fn)), M)
    _, result = run("fedbcgd", grid, 3, {"lr": 0.3}, weighted_by_key="n", fraction_evaluate=1.0)
    _, wanted = run("fedbcgd", None, 3, {"lr": 0.3}, weighting="examples", fraction_evaluate=1.0)
    assert all(torch.equal(value, state(wanted.arrays)[name]) for name, value in state(result.arrays).items())
    ours, theirs = result.train_metrics_clientapp[3], wanted.train_metrics_clientapp[3]
    assert {name: ours[name] for name in ("train_loss", "client")} == {n: theirs[n] for n in ("train_loss", "client")}
    accuracy = wanted.evaluate_metrics_clientapp[3]["accuracy"]
    assert result.evaluate_metrics_clientapp[3]["accuracy"] == accuracy
    assert result.evaluate_metrics_clientapp[3]["loss"] > 0


def test_wrap_is_for_client_fn():
    with pytest.raises(UserError, match=r"@fedbcgd\.flower\.train\(app\)"):
        fedbcgd.flower.wrap(ClientApp())


def test_a_client_fn_whose_fit_goes_wrong_is_lost_with_its_words():
    class Wrong(NumPyApp):
        def fit(self, parameters, config):
            return parameters[:-1], 1, {}

    app = fedbcgd.flower.wrap(ClientApp(client_fn=lambda context: Wrong(0).to_client()))
    federation, _ = run("fedavg", LocalGrid(app, 3), rounds=1)
    assert "expected it to return 4 arrays" in federation.server.last.lost[0]


class LegacyGrid(LocalGrid):
    """With a run, which Flower's older server asks for."""

    class Run:
        run_id = 1

    run = Run()


def test_a_server_fn_with_our_strategy():
    """ServerAppComponents(strategy=…) as ever: each round of Flower's older server is one of ours."""
    federation = strategy("fedbcgd", fraction_evaluate=1.0)
    parts = ServerAppComponents(strategy=federation, config=ServerConfig(num_rounds=3))
    app = ServerApp(server_fn=lambda context: parts)
    grid = LegacyGrid(fedbcgd.flower.wrap(ClientApp(client_fn=client_fn)), M)
    app(grid, Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={}))
    _, wanted = run("fedbcgd", rounds=3)
    assert federation.server.round == 3
    assert all(torch.equal(value, federation.state_dict()[name]) for name, value in state(wanted.arrays).items())
    assert [row["round"] for row in federation.rows] == [1, 2, 3]
    assert "clients_accuracy" in federation.rows[-1]


def test_the_round_timeout_of_a_server_fn_is_ours():
    federation = strategy("fedavg")
    parts = ServerAppComponents(strategy=federation, config=ServerConfig(num_rounds=1, round_timeout=7.5))
    grid = LegacyGrid(fedbcgd.flower.wrap(ClientApp(client_fn=client_fn)), M)
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
    ServerApp(server_fn=lambda _: parts)(grid, context)
    assert federation.settings.timeout == 7.5


def test_older_privacy_and_secure_aggregation_are_refused():
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
    wrapper = legacy_strategies.DifferentialPrivacyServerSideFixedClipping(strategy("fedavg"), 1.0, 1.0, M)
    parts = ServerAppComponents(strategy=wrapper, config=ServerConfig(num_rounds=1))
    grid = LegacyGrid(fedbcgd.flower.wrap(ClientApp(client_fn=client_fn)), M)
    with pytest.raises(UserError, match="around fedbcgd's strategy"):
        ServerApp(server_fn=lambda _: parts)(grid, context)
    legacy = LegacyContext(context, config=ServerConfig(num_rounds=1), strategy=strategy("fedavg"))
    with pytest.raises(UserError, match="workflow of Flower's"):
        DefaultWorkflow(fit_workflow=SecAggPlusWorkflow(3, 2))(grid, legacy)
    assert grid.replies == []


# -- traffic -----------------------------------------------------------------------------------------------------------


def test_an_upload_of_an_app_is_as_small_as_one_of_ours():
    """By Flower's own count, in a round of each."""
    counts = []
    for app in (dropin(), rule_app()):
        federation = strategy(clients=M)
        grid = LocalGrid(app, M)
        replies = list(exchange(grid, federation.configure_train(1, None, None, grid), 0))
        counts.append(sum(wire.counted(reply) for reply in replies))
    assert counts[0] <= counts[1] + M * 100
