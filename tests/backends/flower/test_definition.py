"""Server and clients with other models, bodies or versions: refused, with what differs."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("flwr", reason="the extra flower is not installed")

from flwr.app import Context, RecordDict

import fedbcgd.flower
from fedbcgd import UserError
from fedbcgd.backends.flower import wire
from fedbcgd.backends.flower.definition import Definition

from .grids import LocalGrid

M = 3
LOCAL = {"batch_size": 4, "lr": 0.1}


def adapted(seed=0, body=8, frozen=True, dtype=torch.float32):
    """A frozen body, and a head that is trained."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, body), nn.ReLU(), nn.Linear(body, 3)).to(dtype)
    model[0].requires_grad_(not frozen)
    return model


def data(client):
    g = torch.Generator().manual_seed(client)
    return torch.randn(12, 4, generator=g), torch.randint(3, (12,), generator=g)


def run(make_model, rounds=1, model=None, grid=None, **options):
    federation = fedbcgd.flower.strategy("fedavg", model or adapted(), **LOCAL, **options)
    grid = grid or LocalGrid(fedbcgd.flower.client_app(make_model, data), M)
    federation.start(grid, num_rounds=rounds, timeout=5)
    return federation


@pytest.mark.parametrize(
    ("make_model", "words"),
    [
        (lambda: adapted(seed=1), "frozen parameter '0.weight' has other values than on the server"),
        (lambda: adapted(body=6), "'0.weight' has shape [6, 4] here, [8, 4] on the server"),
        (lambda: adapted(frozen=False), "'0.weight' is a trained parameter here, a frozen parameter on the server"),
        (lambda: adapted(dtype=torch.float64), "'0.weight' is of type float64 here, float32 on the server"),
        (lambda: adapted()[:1], "the server's model has trained parameter '2.weight', the other does not"),
    ],
)
def test_a_client_with_another_model_is_refused_with_the_difference(make_model, words, caplog):
    federation = run(make_model)
    assert federation.server.last.accepted == 0
    assert all(words in reason for reason in federation.server.last.lost)
    assert f"client 1 is lost: make_model: expected the server's model, got another one: {words}" in caplog.text


def test_trained_weights_and_counters_may_differ():
    """The first are replaced by the server's, the others are nobody's business."""

    def make(seed, count):
        model = nn.Sequential(adapted(), nn.BatchNorm1d(3))
        with torch.no_grad():
            model[0][2].weight.fill_(seed)
            model[1].num_batches_tracked.fill_(count)
        return model

    assert run(lambda: make(7, 1000), model=make(0, 0)).server.last.accepted == M


def test_quantised_bodies_are_compared_too():
    """Integer buffers of a saved body are not sent."""

    def make(value):
        model = adapted()
        model.register_buffer("quantised", torch.full((5,), value, dtype=torch.int8))
        return model

    assert Definition.of(make(1)).differences(Definition.of(make(1))) == ""
    assert "buffer 'quantised' has other values" in Definition.of(make(1)).differences(Definition.of(make(2)))


def test_a_definition_says_the_same_after_the_wire_and_names_few_differences():
    here, there = Definition.of(nn.ModuleList(adapted() for _ in range(4))), Definition.of(adapted())
    assert Definition.unpacked(here.packed) == here
    assert here.digest == Definition.unpacked(here.packed).digest != there.digest
    assert here.differences(here) == ""
    assert here.differences(there).endswith("; and 17 more")


@pytest.mark.parametrize("of", ["server", "client"])
def test_another_wire_format_is_refused_with_both_versions(of, caplog):
    app = fedbcgd.flower.client_app(adapted, data)
    grid = LocalGrid(app, M)
    app_of_grid, said = grid.app, wire.versions()

    def other(message, context):
        if of == "client":  # an earlier version, which does not say its own
            reply = app_of_grid(message, context)
            for name in said:
                reply.content[wire.VALUES].pop(name)
            return reply
        for name, value in {"wire_format": 9, "version": "7.0"}.items():
            message.content[wire.TASK][name] = value
        return app_of_grid(message, context)

    grid.app = other
    with pytest.raises(UserError, match=r"min_clients: expected at least . clients online.*got 0"):
        run(adapted, grid=grid, patience=0.05)
    if of == "server":
        assert "the server speaks wire format 9 (fedbcgd 7.0), this one 2 (fedbcgd" in caplog.text
    else:
        assert "client 1 speaks wire format 1 (an earlier fedbcgd), this one 2" in caplog.text


def test_a_folder_begun_with_another_body_is_refused(tmp_path):
    run(adapted, folder=tmp_path)
    with pytest.raises(UserError, match=r"a run of the same model .* begun with another"):
        run(lambda: adapted(1), model=adapted(1), folder=tmp_path, rounds=2)
    assert run(adapted, folder=tmp_path, rounds=2).server.round == 2


# -- the example ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def lora(tmp_path, monkeypatch):
    """The modules of `examples/flower-lora`."""
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "examples" / "flower-lora")
    monkeypatch.chdir(tmp_path)
    yield [importlib.import_module(f"lora_app.{name}") for name in ("server_app", "client_app", "task")]
    for name in [name for name in sys.modules if name.split(".")[0] == "lora_app"]:
        del sys.modules[name]


def test_of_the_example_only_adapters_are_sent_and_another_body_is_refused(lora, caplog):
    server, client, task = lora
    ours, other = task.make_body(), task.make_body()
    with torch.no_grad():
        other.blocks[1].mlp.fc1.weight.add_(0.01)
    torch.save(ours.state_dict(), "body.pt")
    torch.save(other.state_dict(), "other.pt")
    grid = LocalGrid(client.app, M)
    for context in grid.nodes.values():
        context.node_config["body"] = "other.pt" if context.node_config["partition-id"] == 2 else "body.pt"
    config = {"num-server-rounds": 2, "body": "body.pt", "output": "adapters.pt"}
    caplog.set_level("INFO")
    server.app(grid, Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=config))
    for round in (1, 2):
        assert (
            f"round {round}: client 2 is lost: make_model: expected the server's model, got another one: frozen parameter "
            "'blocks.1.mlp.fc1.layer.weight' has other values than on the server; install the same app on both"
        ) in caplog.text
    assert "round 2: train_loss" in caplog.text
    assert "2 uploads, 0 refused, 1 lost" in caplog.text
    adapters = torch.load("adapters.pt")
    assert {name.split(".")[-1] for name in adapters} == {"down", "up", "weight", "bias"}
    assert adapters["blocks.0.attn.qkv.up"].abs().max() > 0
    d = sum(t.numel() for t in adapters.values())
    uploads = [wire.counted(reply) for reply in grid.replies if wire.UPLOAD in reply.content]
    assert len(uploads) == 4
    assert max(uploads) < 4 * d < 4 * sum(p.numel() for p in ours.parameters()) / 3
