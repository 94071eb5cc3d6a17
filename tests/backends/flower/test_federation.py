"""The Flower strategy and ClientApp, message by message, on a grid in this process."""

import contextlib
import json
import re
import subprocess
import sys
import threading
from dataclasses import fields

import pytest
import torch
from torch import nn

pytest.importorskip("flwr", reason="the extra flower is not installed")

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import Strategy

import fedbcgd
import fedbcgd.flower
from fedbcgd import UserError, algorithm_names, simulate
from fedbcgd.backends.flower import folder, wire
from fedbcgd.backends.flower.memory import ContextStorage
from fedbcgd.backends.flower.options import Options
from fedbcgd.engine.run_folder import exclusive_lock
from fedbcgd.models import LeNet5

from .grids import LocalGrid

M = 6


def make_model():
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def data(seed=1):
    g = torch.Generator().manual_seed(seed)
    return [(torch.randn(12, 4, generator=g), torch.randint(3, (12,), generator=g)) for _ in range(M)]


CLIENTS = data()
LOCAL = {"batch_size": 4, "lr": 0.1}


def app(**more):
    return fedbcgd.flower.client_app(make_model, lambda client: CLIENTS[client], **more)


def start(name, grid, rounds=3, cohort=4, **options):
    options = ({"blocks": 2} if "fedbcgd" in name else {}) | LOCAL | options
    federation = fedbcgd.flower.strategy(name, make_model(), cohort=cohort, seed=3, **options)
    return federation, federation.start(grid, num_rounds=rounds, timeout=0.05)


def same(arrays, module):
    found = arrays.to_torch_state_dict()
    return all(torch.equal(found[name], value) for name, value in module.state_dict().items())


@pytest.mark.parametrize("name", [n for n in algorithm_names() if n not in ("central", "fedbcgd-matched")])
def test_every_algorithm_gives_the_bits_of_a_simulation(name):
    federation, result = start(name, LocalGrid(app(), M), test=CLIENTS[0])
    blocks = {"blocks": 2} if "fedbcgd" in name else {}
    reference = simulate(
        make_model(), CLIENTS, name, rounds=3, cohort=4, seed=3, workers=0, test=CLIENTS[0], **blocks, **LOCAL
    )
    assert same(result.arrays, reference.module)
    drop = ("seconds",)
    plain = [{k: v for k, v in row.items() if k not in drop} for row in federation.rows]
    assert plain == [{k: v for k, v in row.items() if k not in drop} for row in reference.rows]
    ours, theirs = federation.server.ledger.totals(), reference.ledger.totals()
    assert ours | {"wire_bytes": 0} == theirs


def test_a_model_with_convolutions_and_buffers():
    def conv():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3))

    g = torch.Generator().manual_seed(0)
    clients = [(torch.randn(8, 1, 8, 8, generator=g), torch.randint(3, (8,), generator=g)) for _ in range(4)]
    reference = simulate(conv(), clients, "fedbcgd", blocks=2, cohort=4, rounds=2, workers=0, **LOCAL)
    for options in ({"test": clients[0]}, {"channels_last": True}):
        federation = fedbcgd.flower.strategy("fedbcgd", conv(), blocks=2, cohort=4, **options, **LOCAL)
        grid = LocalGrid(fedbcgd.flower.client_app(conv, lambda k: clients[k]), 4)
        result = federation.start(grid, num_rounds=2)
        assert federation.job.channels_last
        assert same(result.arrays, reference.module)


class Viewing(nn.Module):
    """`.view` after a convolution: it cannot compute in channels_last."""

    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 4, 3), nn.Linear(4 * 36, 3)

    def forward(self, x):
        return self.fc(self.conv(x).view(len(x), -1))


@pytest.mark.parametrize("test", [None, "images", "of another kind"])
def test_channels_last_is_chosen_only_after_a_trial(test):
    """Without test data, or with such as the server's loss does not take, nothing was tried."""
    g = torch.Generator().manual_seed(0)
    clients = [(torch.randn(8, 1, 8, 8, generator=g), torch.randint(3, (8,), generator=g)) for _ in range(4)]
    data = {None: None, "images": clients[0], "of another kind": {"pixels": clients[0][0], "digit": clients[0][1]}}
    federation = fedbcgd.flower.strategy(
        "fedbcgd", Viewing(), blocks=2, cohort=4, test=data[test], metrics=lambda m, b: {"loss": torch.tensor(0.0)},
        **LOCAL,
    )  # fmt: skip
    federation.start(LocalGrid(fedbcgd.flower.client_app(Viewing, lambda k: clients[k]), 4), num_rounds=2)
    assert not federation.job.channels_last
    assert federation.server.last.accepted == 4


@pytest.mark.parametrize("name", ["fedavg", "fedbcgd", "fedbcgd+", "qsgd+fedbcgd"])
def test_clients_follow_the_servers_precision(name):
    """The bits of a simulation in bfloat16, evaluation on server and clients too, though the clients were not told of it."""
    grid = LocalGrid(app(load_test=lambda client: CLIENTS[client]), M)
    federation, result = start(name, grid, precision="bf16", test=CLIENTS[0], evaluate_clients=1.0)
    options = {"test": CLIENTS[0], **LOCAL} | ({"blocks": 2} if "fedbcgd" in name else {})
    bf16, fp32 = (
        simulate(make_model(), CLIENTS, name, rounds=3, cohort=4, seed=3, workers=0, precision=precision, **options)
        for precision in ("bf16", "fp32")
    )
    assert same(result.arrays, bf16.module)
    assert not same(result.arrays, fp32.module)
    assert [row["test_loss"] for row in federation.rows] == [row["test_loss"] for row in bf16.rows]
    _, other = start(name, LocalGrid(app(load_test=lambda client: CLIENTS[client]), M), evaluate_clients=1.0)
    assert federation.rows[-1]["clients_loss"] != other.evaluate_metrics_clientapp[3]["loss"]


def test_a_training_function_of_a_clients_own_takes_no_precision(caplog):
    federation, _ = start("fedavg", LocalGrid(app(train=lambda *_: None), M), rounds=1, precision="bf16")
    assert federation.server.ledger.lost == 4
    assert "precision: expected 'fp32' with train" in caplog.text


def test_a_server_that_does_not_name_a_precision_means_fp32():
    federation, _ = start("fedavg", LocalGrid(app(), M), rounds=1, precision="bf16")
    task = fedbcgd.core.messages.Task(0, 0, 0)
    (message,) = federation.rounds.questions(
        [task], federation.server.plan().broadcast, "train", federation.settings
    ).messages
    assert wire.TaskRequest.read(message.content).precision == "bf16"
    del message.content[wire.TASK]["precision"]
    assert wire.TaskRequest.read(message.content).precision == "fp32"


def test_nodes_come_back_under_other_ids_with_a_folder_for_their_state(tmp_path):
    """A SuperNode restarted before every round has a new id and an empty context; its folder has the rest."""
    grid = LocalGrid(app(folder=tmp_path), M)

    def restart(info):
        for client in range(M):
            grid.join(client, M)

    _, result = start("fedbcgd+", grid, callbacks=[restart])
    reference = simulate(make_model(), CLIENTS, "fedbcgd+", rounds=3, cohort=4, seed=3, workers=0, blocks=2, **LOCAL)
    assert same(result.arrays, reference.module)
    assert len(list(tmp_path.glob("client-*.safetensors"))) == M


def controls(federation, grid, name="c"):
    """c_i of every client as its next task would find it."""
    server = federation.server
    rows = torch.zeros(server.clients, server.layout.dim)
    for context in grid.nodes.values():
        client = context.node_config["partition-id"]
        memory = ContextStorage(context.state, server.layout.dtype).load()
        request = wire.TaskRequest(
            fedbcgd.core.messages.Task(server.round, client, 0), server.epoch, federation.rounds.accepted.get(client, -1),
            federation.rounds.run_id, 0, "", False, federation.algorithm,
        )  # fmt: skip
        assert memory.settle(request, server.layout.dim, server.layout.dtype)
        if name in memory.vectors:
            rows[client] = memory.vectors[name]
    return rows


@pytest.mark.parametrize("name", ["fedbcgd+", "scaffold", "qsgd+fedbcgd+", "feddc"])
def test_c_is_the_mean_of_the_c_i_when_replies_are_lost(name):
    """A lost reply left new state pending on its client; the next task tells that it was not accepted."""
    count = iter(range(10_000))
    grid = LocalGrid(app(), M, lose=lambda m, r: None if _is_train(m) and next(count) % 3 == 1 else r)
    federation, _ = start(name, grid, rounds=8)
    assert federation.server.ledger.lost >= 8
    assert federation.server.epoch == 0
    mean = controls(federation, grid).mean(0)
    assert torch.allclose(mean, federation.server.controls["c"], atol=1e-6)
    assert mean.abs().max() > 0


def test_a_client_that_lost_its_state_biases_nothing():
    """Without a folder a restarted node has forgotten c_i: c begins again from zero, in a new epoch, and the run goes on."""
    grid = LocalGrid(app(), M)
    federation, _ = start("fedbcgd+", grid, rounds=3, cohort=M)
    assert federation.server.epoch == 0
    grid.join(2, M)
    federation.start(grid, num_rounds=4)
    server = federation.server
    assert server.epoch == 1
    assert server.ledger.lost == 1
    assert not server.controls["c"].any()
    federation.start(grid, num_rounds=7)
    assert server.epoch == 1
    assert server.ledger.lost == 1
    assert torch.allclose(controls(federation, grid).mean(0), server.controls["c"], atol=1e-6)
    assert server.controls["c"].any()


def test_a_residual_that_is_lost_is_only_lost():
    """Error feedback biases no c: the client goes on from zero."""
    grid = LocalGrid(app(), M)
    federation, _ = start("topk", grid, rounds=2, cohort=M)
    grid.join(1, M)
    federation.start(grid, num_rounds=4)
    assert federation.server.ledger.lost == 0
    assert federation.server.epoch == 0


def _is_train(message):
    return message.metadata.message_type == "train"


def spoil(change):
    """A lose() that spoils the reply of the first client asked in each round."""
    seen = set()

    def lose(message, reply):
        if _is_train(message) and message.metadata.group_id not in seen:
            seen.add(message.metadata.group_id)
            return change(message, reply)
        return reply

    return lose


def _edit(reply, **values):
    reply.content[wire.VALUES] = ConfigRecord({**reply.content[wire.VALUES], **values})
    return reply


def _nan(message, reply):
    key = next(iter(reply.content[wire.UPLOAD]))
    n = len(reply.content[wire.UPLOAD][key].data)
    reply.content[wire.UPLOAD][key] = wire.array(torch.full((n // 4,), float("nan")))
    return reply


def _cut(message, reply):
    key = next(iter(reply.content[wire.UPLOAD]))
    a = reply.content[wire.UPLOAD][key]
    reply.content[wire.UPLOAD][key] = Array("uint8", (3,), "fedbcgd", a.data[:3])
    return reply


SPOILT = {
    "Flower's own error": (lambda m, r: Message(Error(code=0, reason="out of memory"), reply_to=m), "lost"),
    "nothing of ours": (lambda m, r: Message(RecordDict({"x": MetricRecord({"a": 1})}), reply_to=m), "lost"),
    "another client's": (lambda m, r: _edit(r, client=(r.content[wire.VALUES]["client"] + 1) % M), "refused"),
    "another round's": (lambda m, r: _edit(r, round=99), "refused"),
    "another block": (lambda m, r: _edit(r, block=1 - r.content[wire.VALUES]["block"]), "refused"),
    "no steps": (lambda m, r: _edit(r, steps=0), "refused"),
    "text for a number": (lambda m, r: _edit(r, steps="many"), "refused"),
    "NaN": (_nan, "refused"),
    "cut short": (_cut, "refused"),
    "late": (lambda m, r: None, "lost"),
}


@pytest.mark.parametrize("how", SPOILT)
def test_spoilt_replies_are_counted_and_survived(how):
    change, counted = SPOILT[how]
    grid = LocalGrid(app(), M, lose=spoil(change))
    federation, result = start("fedbcgd", grid, rounds=2)
    ledger = federation.server.ledger
    assert getattr(ledger, counted) == 2
    assert federation.server.round == 2
    assert all(v.isfinite().all() for v in result.arrays.to_torch_state_dict().values())
    assert result.train_metrics_clientapp[2][counted] == 1
    assert result.train_metrics_clientapp[2]["accepted"] == 3


def test_only_those_online_are_asked():
    grid = LocalGrid(app(), M)
    grid.leave(0)
    grid.leave(5)
    federation, _ = start("fedbcgd", grid, rounds=3, clients=M)
    asked = {r.content[wire.VALUES]["client"] for r in grid.replies if wire.UPLOAD in r.content}
    assert asked == {1, 2, 3, 4}
    assert federation.server.clients == M
    assert federation.server.ledger.lost == 0


def test_a_minimum_of_clients_is_waited_for():
    grid = LocalGrid(app(), M)
    for client in range(1, M):
        grid.leave(client)
    with pytest.raises(UserError, match=r"expected at least 3 clients online.*got 1"):
        start("fedavg", grid, min_clients=3, patience=0.01)


def test_a_node_without_an_index_is_left_out(caplog):
    grid = LocalGrid(app(), M)
    stranger = grid.join(5, M)
    grid.nodes[stranger].node_config.pop("partition-id")
    grid.leave = None
    federation, _ = start("fedavg", grid, rounds=1, cohort=None, clients=M)
    assert federation.server.last.accepted == M - 1
    assert "partition-id" in caplog.text


def test_a_client_with_another_model_says_so():
    other = fedbcgd.flower.client_app(lambda: nn.Linear(4, 3), lambda client: CLIENTS[client])
    federation, _ = start("fedavg", LocalGrid(other, M), rounds=1)
    assert federation.server.last.accepted == 0
    assert "the server's model has trained parameter '0.weight'" in federation.server.last.lost[0]


def test_a_client_whose_code_fails_is_lost_with_its_words():
    def load(client):
        if client == 1:
            raise OSError("disk on fire")
        return CLIENTS[client]

    federation, _ = start("fedavg", LocalGrid(fedbcgd.flower.client_app(make_model, load), M), rounds=1, cohort=M)
    assert federation.server.last.accepted == M - 1
    assert "disk on fire" in federation.server.last.lost[0]


def test_evaluation_on_the_server_and_on_the_clients():
    grid = LocalGrid(app(load_test=lambda client: CLIENTS[client]), M)
    seen = []

    def evaluate(round, arrays):
        seen.append(round)
        return MetricRecord({"own": float(round)})

    federation = fedbcgd.flower.strategy(
        "fedbcgd", make_model(), blocks=2, cohort=4, test=CLIENTS[0], evaluate_clients=1.0, **LOCAL
    )
    result = federation.start(grid, num_rounds=2, evaluate_fn=evaluate)
    assert seen == [0, 1, 2]
    module = make_model()
    module.load_state_dict(result.arrays.to_torch_state_dict())
    x, y = (torch.cat([c[k] for c in CLIENTS]) for k in (0, 1))
    accuracy = int((module(x).argmax(1) == y).sum()) / len(y)
    assert result.evaluate_metrics_clientapp[2]["accuracy"] == accuracy  # exactly: correct answers over all clients
    assert set(result.evaluate_metrics_serverapp[2]) == {"own", "test_loss", "test_accuracy"}
    assert federation.rows[-1]["clients_accuracy"] == accuracy


def test_it_is_an_ordinary_strategy_too():
    """Flower's own loop, with its four hooks, ends in the same model."""
    federation = fedbcgd.flower.strategy("fedbcgd", make_model(), blocks=2, cohort=4, seed=3, **LOCAL)
    weights = ArrayRecord(make_model().state_dict())
    result = Strategy.start(federation, LocalGrid(app(), M), weights, num_rounds=3, timeout=5)
    reference = simulate(make_model(), CLIENTS, "fedbcgd", rounds=3, cohort=4, seed=3, workers=0, blocks=2, **LOCAL)
    assert same(result.arrays, reference.module)
    assert result.train_metrics_clientapp[3]["upload_d"] == pytest.approx(reference.ledger.upload_d)


def test_initial_arrays_replace_the_models_weights():
    weights = {name: torch.ones_like(value) for name, value in make_model().state_dict().items()}
    federation = fedbcgd.flower.strategy("fedavg", make_model(), lr=1e-12)
    result = federation.start(LocalGrid(app(), M), ArrayRecord(weights), num_rounds=1)
    assert torch.allclose(result.arrays.to_torch_state_dict()["0.weight"], torch.ones(8, 4))


@pytest.mark.parametrize("name", ["fedbcgd", "fedbcgd+"])
@pytest.mark.parametrize("moment", ["between rounds", "in a round"])
def test_a_server_that_comes_back_goes_on_to_the_same_bits(name, moment, tmp_path):
    """Flower begins at round 1 again; rounds are counted as a whole all the same."""
    grid = LocalGrid(app(), M)
    straight, wanted = start(name, LocalGrid(app(), M), rounds=5, test=CLIENTS[0])
    if moment == "between rounds":
        start(name, grid, rounds=2, folder=tmp_path, test=CLIENTS[0])
    else:

        class Gone(Exception):
            pass

        trained = iter(range(100))

        def crash(message, reply):
            if (
                _is_train(message) and next(trained) == 10
            ):  # the third reply of the third round: two are pending already
                raise Gone
            return reply

        grid.lose = crash
        with pytest.raises(Gone):
            start(name, grid, rounds=5, folder=tmp_path, test=CLIENTS[0])
        grid.lose = lambda message, reply: reply
    federation, result = start(name, grid, rounds=5, folder=tmp_path, test=CLIENTS[0])
    assert same(result.arrays, _module(wanted))
    assert sorted(result.train_metrics_clientapp) == [3, 4, 5]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [1, 2, 3, 4, 5]
    assert [row["test_loss"] for row in rows] == [row["test_loss"] for row in straight.rows]
    assert federation.server.epoch == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["rounds"] == 5
    assert summary["ledger"]["wire_bytes"] > summary["ledger"]["upload_bytes"]
    assert (tmp_path / "model.safetensors").exists()


def _module(result):
    module = make_model()
    module.load_state_dict(result.arrays.to_torch_state_dict())
    return module


def test_a_server_older_than_its_clients_begins_c_again(tmp_path):
    """Checkpoints every other round, a crash after round 3: clients may be ahead of the checkpoint of round 2."""
    grid = LocalGrid(app(), M)

    class Gone(Exception):
        pass

    def crash(info):
        if info.server.round == 3:
            raise Gone

    with pytest.raises(Gone):
        start("fedbcgd+", grid, rounds=9, cohort=M, folder=tmp_path, checkpoint_every=2, callbacks=[crash])
    federation, _ = start("fedbcgd+", grid, rounds=6, cohort=M, folder=tmp_path, checkpoint_every=2)
    assert federation.server.epoch == 1
    assert federation.server.ledger.lost == 0
    assert torch.allclose(controls(federation, grid).mean(0), federation.server.controls["c"], atol=1e-6)


def test_a_folder_of_another_federation_is_refused(tmp_path):
    start("fedbcgd", LocalGrid(app(), M), rounds=1, folder=tmp_path)
    with pytest.raises(UserError, match=r"folder: expected a run with momentum = 0\.1 .* begun with momentum = 0\.8;"):
        start("fedbcgd", LocalGrid(app(), M), rounds=2, folder=tmp_path, momentum=0.1)


def test_the_end_of_another_process_in_the_folder_is_waited_for(tmp_path, monkeypatch, caplog):
    with contextlib.ExitStack() as stack:
        stack.enter_context(exclusive_lock(tmp_path))
        threading.Timer(0.5, stack.close).start()
        federation, _ = start("fedavg", LocalGrid(app(), M), rounds=1, folder=tmp_path)
    assert federation.server.round == 1
    assert caplog.text.count("another process uses") == 1
    monkeypatch.setattr(folder, "LOCK_SECONDS", 0.0)
    with exclusive_lock(tmp_path), pytest.raises(UserError, match="expected a folder that no other process uses"):
        start("fedavg", LocalGrid(app(), M), rounds=2, folder=tmp_path)


def test_another_precision_is_refused_and_the_same_goes_on_to_the_same_bits(tmp_path):
    _, wanted = start("fedbcgd+", LocalGrid(app(), M), rounds=4, precision="bf16")
    grid = LocalGrid(app(), M)
    start("fedbcgd+", grid, rounds=2, folder=tmp_path, precision="bf16")
    with pytest.raises(UserError, match=r"expected a run with precision = 'fp32' .* begun with precision = 'bf16'"):
        start("fedbcgd+", grid, rounds=4, folder=tmp_path)
    _, result = start("fedbcgd+", grid, rounds=4, folder=tmp_path, precision="bf16")
    assert same(result.arrays, _module(wanted))
    assert json.loads((tmp_path / "summary.json").read_text())["precision"] == "bf16"


def test_another_algorithm_is_told_as_such(tmp_path):
    start("fedbcgd+", LocalGrid(app(), M), rounds=1, folder=tmp_path)
    with pytest.raises(
        UserError, match=r"expected a run with algorithm = 'fedavg' .* begun with algorithm = 'fedbcgd\+'"
    ):
        start("fedavg", LocalGrid(app(), M), rounds=2, folder=tmp_path)


def test_the_package_is_found_by_its_name_alone():
    """As in the documentation: `import fedbcgd`, then fedbcgd.flower."""
    script = "import fedbcgd; print(fedbcgd.flower.strategy.__name__)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "strategy", done.stderr


def upload_bytes(name, **options):
    """Flower's own count for each upload, and the codec's."""

    def lenet():
        torch.manual_seed(0)
        return LeNet5(10, (1, 28, 28))

    g = torch.Generator().manual_seed(0)
    clients = [(torch.randn(2, 1, 28, 28, generator=g), torch.randint(10, (2,), generator=g)) for _ in range(5)]
    grid = LocalGrid(fedbcgd.flower.client_app(lenet, lambda k: clients[k]), 5)
    federation = fedbcgd.flower.strategy(name, lenet(), cohort=5, **options)
    federation.start(grid, num_rounds=1)
    return federation, [wire.counted(r) for r in grid.replies if wire.UPLOAD in r.content]


def test_flower_adds_next_to_nothing_and_a_block_is_a_fifth():
    whole, big = upload_bytes("fedavg")
    blocks, small = upload_bytes("fedbcgd", blocks=5)
    for federation, counts in ((whole, big), (blocks, small)):
        encoded = [entry.upload_bytes for entry in federation.server.ledger.entries]
        assert sorted(counts)[-1] <= sorted(encoded)[-1] * 1.01 + 2048
        assert sum(counts) == federation.server.ledger.wire_bytes
    layout = blocks.layout
    shared = layout.dim - layout.bounds[-1]
    wanted = layout.dim / (layout.bounds[-1] / 5 + shared)
    assert sum(big) / sum(small) == pytest.approx(wanted, rel=0.02)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: fedbcgd.flower.strategy("central", make_model()), "one whose clients upload, got 'central'"),
        (lambda: fedbcgd.flower.strategy("fedbcdg", make_model()), "Did you mean 'fedbcgd'"),
        (
            lambda: fedbcgd.flower.strategy("fedavg", make_model(), blocks=3),
            "blocks: expected only with the uplink 'blocks'",
        ),
        (lambda: fedbcgd.flower.strategy("fedavg", make_model, cohort=2), "nn.Module"),
        (lambda: fedbcgd.flower.strategy("fedavg", make_model(), min_clients=0), "min_clients"),
        (lambda: fedbcgd.flower.strategy("fedavg", make_model(), evaluate_clients=3), "evaluate_clients"),
    ],
)
def test_mistakes(call, words):
    with pytest.raises(UserError, match=words):
        call()


def test_every_option_is_in_the_help():
    named = set(re.findall(r"[a-z_]+", fedbcgd.flower.strategy.__doc__))
    assert {field.name for field in fields(Options)} - named == set()


def test_without_the_extra_it_says_which(monkeypatch):
    for name in [n for n in sys.modules if n == "flwr" or n.startswith("flwr.")]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=r"fedbcgd\[flower\]"):
        fedbcgd.flower.__getattr__("strategy")


@pytest.mark.parametrize("place", [-1, 40, 400])
def test_damaged_state_of_a_client_is_lost_state(tmp_path, place, caplog):
    """One bit of its file is flipped: the state is not trained on, and all controls begin again."""
    grid = LocalGrid(app(folder=tmp_path), M)
    federation = fedbcgd.flower.strategy("scaffold", make_model(), seed=3, **LOCAL)
    federation.start(grid, num_rounds=2, timeout=5)
    assert federation.server.epoch == 0
    (file,) = tmp_path.glob("client-2.*")
    damaged = bytearray(file.read_bytes())
    damaged[place] ^= 1
    file.write_bytes(damaged)
    federation.start(grid, num_rounds=3, timeout=5)
    assert federation.server.epoch == 1
    assert "the client's state is lost" in caplog.text


@pytest.mark.parametrize(("options", "wanted"), [({}, 3), ({"clients": 4, "cohort": 2}, 2), ({"blocks": 5}, 5)])
def test_without_a_number_of_blocks_there_are_no_more_than_clients(options, wanted, tmp_path):
    """Also where the clients are counted only when the run begins; a run that goes on keeps its number."""
    for rounds in (1, 2):
        federation = fedbcgd.flower.strategy("fedbcgd", make_model(), folder=tmp_path, **LOCAL, **options)
        federation.start(LocalGrid(app(), 3), num_rounds=rounds, timeout=5)
        assert federation.server.round == rounds
        assert (
            federation.layout.blocks == federation.server.layout.blocks == federation.algorithm.uplink.blocks == wanted
        )
        assert federation.server.last.accepted == min(3, options.get("cohort", 3))


def test_a_folder_of_five_blocks_goes_on_with_five(tmp_path):
    """Earlier versions had five, whatever the cohort."""
    for options in ({"blocks": 5}, {}):
        federation = fedbcgd.flower.strategy("fedbcgd", make_model(), clients=3, folder=tmp_path, **LOCAL, **options)
        federation.start(LocalGrid(app(), 3), num_rounds=2 if options else 3, timeout=5)
    assert (federation.server.round, federation.layout.blocks) == (3, 5)


@pytest.mark.parametrize(("name", "epoch"), [("fedbcgd", 0), ("fedbcgd+", 1)])
def test_a_server_that_was_rolled_back_goes_on(name, epoch, tmp_path):
    """The clients are ahead of it: their controls begin again from zero, and nothing else is lost."""
    from fedbcgd.runs.rollback import roll_back

    grid = LocalGrid(app(), M)
    start(name, grid, rounds=3, cohort=M, folder=tmp_path)
    assert len(roll_back(tmp_path, 2)) == 2
    federation, _ = start(name, grid, rounds=5, cohort=M, folder=tmp_path)
    assert (federation.server.round, federation.server.epoch) == (5, epoch)
    assert federation.server.ledger.lost == 0
    if epoch:
        mean = controls(federation, grid).mean(0)
        assert torch.allclose(mean, federation.server.controls["c"], atol=1e-6)
        assert mean.any()
    rows = [json.loads(line) for line in (tmp_path / "traffic.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [1, 2, 3, 4, 5]
