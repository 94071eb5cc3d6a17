"""What a compromised client can and cannot do: a test for each sentence of that section of docs/flower.md."""

import json
import tracemalloc

import pytest
import torch

pytest.importorskip("flwr", reason="the extra flower is not installed")

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

import fedbcgd.flower
from fedbcgd import UserError
from fedbcgd.backends.flower import roster, wire
from fedbcgd.backends.flower.exchange import exchange
from fedbcgd.backends.flower.roster import Roster, read_roster
from fedbcgd.engine.checkpoint import Checkpoints

from .fuzz import through_protobuf
from .grids import LocalGrid
from .test_federation import CLIENTS, LOCAL, M, app, make_model, start

NAN, INF = float("nan"), float("inf")
BAD = 2  # the compromised client


def edit(reply, **values):
    reply.content[wire.VALUES] = ConfigRecord({**reply.content[wire.VALUES], **values})
    return reply


def kind(message):
    return message.metadata.message_type


def index(grid, message):
    return grid.nodes[message.metadata.dst_node_id].node_config["partition-id"]


def attacked(of, change, load_test=True):
    """A grid on which the compromised client's replies of one kind are changed, and pass through Flower's protobuf."""
    grid = LocalGrid(app(load_test=lambda client: CLIENTS[client]) if load_test else app(), M)

    def lose(message, reply):
        bad = kind(message) == of and index(grid, message) == BAD
        return through_protobuf(change(message, reply) if bad else reply)

    grid.lose = lose
    return grid


# -- it cannot end the run, or spoil more than its own message ---------------------------------------------------------

ODD = [INF, -INF, NAN, 1e300, -1, 2**64 - 1, "abc", "", [3], [NAN], b"x", True]


@pytest.mark.parametrize(
    "field", ["round", "client", "block", "examples", "steps", "gradient_evaluations", "train_loss"]
)
def test_a_training_reply_of_any_values_is_refused_alone(field):
    for value in (v for v in ODD if not (field == "train_loss" and isinstance(v, (float, int)) and abs(v) < INF)):
        grid = attacked("train", lambda m, r, value=value: edit(r, **{field: value}))
        federation, result = start("fedavg", grid, rounds=1, cohort=None, weighting="examples")
        report = federation.server.last
        assert report.accepted == M - 1, value
        assert len(report.refused) == 1
        assert f"client {BAD}" in report.refused[0]
        assert all(v.isfinite().all() for v in result.arrays.to_torch_state_dict().values())


@pytest.mark.parametrize("field", ["client", "of", "examples", "more"])
def test_a_greeting_of_any_values_is_refused_alone(field, caplog):
    for value in ODD:
        grid = attacked(wire.HELLO, lambda m, r, value=value: edit(r, **{field: value}))
        federation, _ = start("fedavg", grid, rounds=1, cohort=None, clients=M, weighting="examples")
        assert federation.server.last.accepted == M - 1, value
        assert "cannot take part" in caplog.text


EVALUATIONS = {
    "no examples": {"accuracy": 1.0},
    "infinite examples": {"accuracy": 1.0, "examples": INF},
    "a list": {"accuracy": [1.0, 2.0], "examples": 12},
    "NaN": {"accuracy": NAN, "examples": 12},
    "no metrics": {"examples": 12},
    "long names": {"a" * 101: 1.0, "examples": 12},
    "control characters": {"\x1b[2J": 1.0, "examples": 12},
    "many metrics": {**{str(k): 1.0 for k in range(101)}, "examples": 12},
}


@pytest.mark.parametrize("how", EVALUATIONS)
def test_an_evaluation_of_any_values_is_refused_alone(how, caplog):
    def change(message, reply):
        reply.content[wire.METRICS] = MetricRecord(EVALUATIONS[how])
        return reply

    federation, _ = start("fedavg", attacked("evaluate", change), rounds=1, evaluate_clients=1.0)
    assert f"client {BAD} did not evaluate" in caplog.text
    honest, _ = start("fedavg", attacked("evaluate", _failed), rounds=1, evaluate_clients=1.0)
    keys = ("clients_loss", "clients_accuracy")
    assert {k: v for k, v in federation.rows[0].items() if k.startswith("clients_")} == {
        key: honest.rows[0][key] for key in keys
    }


def _failed(message, reply):
    return Message(wire_with_token(reply, failed="no"), reply_to=message)


def wire_with_token(reply, **told):
    return RecordDict({wire.VALUES: ConfigRecord({wire.TOKEN: reply.content[wire.VALUES][wire.TOKEN], **told})})


RECORDS = {
    "no records": RecordDict(),
    "another kind": RecordDict({wire.UPLOAD: MetricRecord({"a": 1.0})}),
    "another name": RecordDict({"other": ArrayRecord()}),
    "no arrays": RecordDict({wire.UPLOAD: ArrayRecord()}),
    "thousands": RecordDict({str(k): ConfigRecord({"a": 1}) for k in range(3000)}),
}


@pytest.mark.parametrize("how", RECORDS)
@pytest.mark.parametrize("of", ["train", "evaluate", wire.HELLO])
def test_records_that_were_not_asked_for_are_refused_alone(of, how, caplog):
    def change(message, reply):
        told = {wire.VALUES: reply.content[wire.VALUES]} if of == "train" or how != "no records" else {}
        return Message(RecordDict({**told, **RECORDS[how]}), reply_to=message)

    federation, _ = start("fedavg", attacked(of, change), rounds=1, cohort=None, clients=M, evaluate_clients=1.0)
    assert federation.server.last.accepted == (M if of == "evaluate" else M - 1)
    assert ("3 records, got 3,001" in caplog.text) == (how == "thousands")


def test_bytes_that_flower_cannot_read_are_refused_alone():
    grid = attacked("train", lambda m, r: r)
    through = grid.lose
    grid.lose = lambda m, r: ValueError("no message") if kind(m) == "train" and index(grid, m) == BAD else through(m, r)
    federation, _ = start("fedavg", grid, rounds=1, cohort=None)
    assert federation.server.last.accepted == M - 1
    assert "cannot be read" in federation.server.last.lost[0]


# -- it cannot fill memory, log or checkpoint --------------------------------------------------------------------------


@pytest.mark.parametrize("through", ["a failure", "an error of Flower"])
def test_a_failure_of_100_megabytes_is_cut_before_it_goes_anywhere(through, tmp_path, caplog):
    text = "y" * 101_000_000

    def change(message, reply):
        if through == "a failure":
            return Message(wire_with_token(reply, failed=text, state_lost=True), reply_to=message)
        return Message(Error(code=2, reason=text), reply_to=message)

    federation, _ = start("scaffold", attacked("train", change), rounds=1, cohort=None, folder=tmp_path)
    assert len(federation.server.last.lost[0]) < 1000
    assert len(caplog.text) < 10_000
    assert sum(file.stat().st_size for file in tmp_path.rglob("*") if file.suffix != ".png") < 100_000


def test_a_greeting_that_fails_with_many_words_is_cut_too(caplog):
    def change(message, reply):
        return Message(wire_with_token(reply, failed="y" * 1_000_000), reply_to=message)

    start("fedavg", attacked(wire.HELLO, change), rounds=1, clients=M)
    assert "cannot take part: yyy" in caplog.text
    assert len(caplog.text) < 10_000


def test_an_upload_that_is_too_long_is_refused_before_it_is_copied():
    federation = fedbcgd.flower.strategy("fedavg", make_model(), clients=M, **LOCAL)
    grid = LocalGrid(app(), M)
    replies = list(exchange(grid, federation.configure_train(1, None, None, grid), 0))
    for a in replies[0].content[wire.UPLOAD].values():
        a.data = bytes(200_000_000)
        a.shape = (len(a.data),)
    tracemalloc.start()
    try:
        federation.rounds.take(replies[0])
        assert tracemalloc.get_traced_memory()[1] < 1e6
    finally:
        tracemalloc.stop()
    assert federation.server.commit().accepted == 0
    assert "got 200,000,000" in federation.server.last.lost[0]


def test_a_node_that_cannot_say_who_it_is_is_asked_less_and_less(caplog, monkeypatch):
    grid = attacked(wire.HELLO, lambda m, r: edit(r, of="abc"))
    now = [0.0]
    monkeypatch.setattr(roster.time, "monotonic", lambda: now[0])
    book = Roster()
    attempts = []
    for second in range(600):
        now[0] = float(second)
        book.refresh(grid)
        attempts.append(caplog.text.count("cannot take part"))
    assert attempts[0] == 1
    assert attempts[-1] == 9  # after 2, 4, 8 … 256 s
    assert sorted(book.nodes) == [0, 1, 3, 4, 5]


# -- it cannot be somebody else ----------------------------------------------------------------------------------------


def test_it_cannot_answer_for_another_client():
    """Neither by the sender that it writes into Flower's metadata, nor by the client that it names."""
    grid = attacked("train", lambda m, r: r)
    through = grid.lose

    def lose(message, reply):
        if kind(message) == "train" and index(grid, message) == BAD:
            victim = next(node for node, context in grid.nodes.items() if context.node_config["partition-id"] == 0)
            reply.metadata.__dict__["_src_node_id"] = victim
            edit(reply, client=0)
        return through(message, reply)

    grid.lose = lose
    federation, _ = start("fedavg", grid, rounds=1, cohort=None)
    assert federation.server.last.accepted == M - 1
    assert [entry.client for entry in federation.server.ledger.entries if not entry.accepted] == [BAD]


def test_it_cannot_answer_twice():
    federation = fedbcgd.flower.strategy("fedavg", make_model(), clients=M, **LOCAL)
    grid = LocalGrid(app(), M)
    for reply in exchange(grid, federation.configure_train(1, None, None, grid), 0):
        federation.rounds.take(reply)
        federation.rounds.take(reply)
    report = federation.server.commit()
    assert (report.accepted, report.refused, report.lost) == (M, (), ())


def two_nodes_one_index(grid):
    """A node beside the others that says that it is client 0."""
    node = grid.join(M, M, key=b"thief")
    grid.nodes[node].node_config["partition-id"] = 0
    return node


def keyed():
    grid = LocalGrid(app(), 0)
    for client in range(M):
        grid.join(client, M, key=f"key {client}".encode())
    return grid


def test_it_cannot_take_the_index_of_a_node_that_is_connected(caplog):
    grid = keyed()
    federation, _ = start("fedavg", grid, rounds=1)
    honest = federation.roster.nodes[0]
    two_nodes_one_index(grid)
    federation.start(grid, num_rounds=2, timeout=1)
    assert federation.roster.nodes[0] == honest
    assert "that one is connected with another key" in caplog.text


def without(grid, client):
    grid.nodes = {n: c for n, c in grid.nodes.items() if c.node_config["partition-id"] != client}


@pytest.mark.parametrize("authenticated", [False, True])
def test_an_index_whose_node_is_gone_is_free_unless_nodes_are_authenticated(authenticated, tmp_path, caplog):
    """Also after a restart of the server: the keys are kept with the checkpoint."""
    grid = keyed()
    options = {"authenticated": authenticated, "folder": tmp_path, "cohort": None}
    start("fedavg", grid, rounds=1, **options)
    without(grid, 0)
    thief = two_nodes_one_index(grid)
    federation, _ = start("fedavg", grid, rounds=2, **options)
    assert federation.server.clients == M
    assert federation.roster.nodes.get(0) == (None if authenticated else thief)
    assert ("comes back as node" in caplog.text) != authenticated
    without(grid, 0)
    grid.join(0, M, key=b"key 0")  # the honest node, restarted with its key
    federation, _ = start("fedavg", grid, rounds=3, **options)
    assert (0 in federation.roster.nodes) is True
    assert federation.server.last.accepted == M


def test_a_node_cannot_have_two_indices(caplog):
    grid = keyed()
    federation, _ = start("fedavg", grid, rounds=1)
    without(grid, 1)
    without(grid, 0)
    node = grid.join(0, M, key=b"key 0")
    grid.nodes[node].node_config["partition-id"] = 1
    federation.start(grid, num_rounds=2, timeout=1)
    assert 1 not in federation.roster.nodes
    assert "its key is that of client 0" in caplog.text


def public_key(number):
    key = ec.derive_private_key(number + 7, ec.SECP384R1()).public_key()
    text = key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return text, key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def write_roster(folder, clients=M, more=""):
    lines = []
    for client in range(clients):
        text, _ = public_key(client)
        (folder / f"node-{client}.pub").write_bytes(text)
        lines.append(f'[clients.{client}]\nkey = "node-{client}.pub"\n{more}')
    (folder / "roster.toml").write_text("\n".join(lines))
    return folder / "roster.toml"


def test_with_a_roster_only_the_named_keys_take_part_each_as_its_index(tmp_path, caplog):
    grid = LocalGrid(app(), 0)
    for client in range(M):
        grid.join(client, M, key=public_key(client)[1])
    without(grid, 0)
    two_nodes_one_index(grid)  # a key that is not in the roster
    without(grid, 1)
    swapped = grid.join(1, M, key=public_key(5)[1])  # one that is, for another index
    without(grid, 5)
    federation, _ = start("fedavg", grid, rounds=1, cohort=None, roster=write_roster(tmp_path))
    assert federation.server.clients == M
    assert sorted(federation.roster.nodes) == [2, 3, 4]
    assert "it is not in the roster" in caplog.text
    assert (
        f"node {swapped} cannot take part: it says that it is client 1, but its key is that of client 5" in caplog.text
    )


def test_rosters_by_node_id_and_in_json(tmp_path):
    entries = {str(k): {"node": 100 + k, "examples": 5} for k in range(2)}
    (tmp_path / "roster.json").write_text(json.dumps({"clients": entries}))
    found = read_roster(tmp_path / "roster.json")
    assert Roster(found).owners == {0: "node 100", 1: "node 101"}
    text = public_key(1)[0].decode()
    (tmp_path / "r.toml").write_text(f'[clients.0]\nkey = "{text}"\n[clients.1]\nnode = 7\n')
    assert Roster(read_roster(tmp_path / "r.toml")).owners[0] == roster.identity_of_key(public_key(1)[1])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("clients = 3", "clients"),
        ("[clients.1]\nnode = 5", "each index from 0"),
        ("[clients.0]\nnode = 5\n[clients.1]\nnode = 5", "a different key or node for each index"),
        ("[clients.0]\nnode = 5\nkey = 'a'", "either key or node"),
        ("[clients.0]\nkey = 'none.pub'", "none.pub cannot be read"),
        ("[clients.0]\nkey = 'ecdsa-sha2-nistp384 AAAA'", "roster.toml"),
        ("[clients.0]\nnode = 5\nexample = 3", "example"),
        ("[clients.0]\nnode = 5\nexamples = 0", "examples"),
        ("[clients", "roster.toml"),
    ],
)
def test_a_roster_that_is_none_is_told(text, words, tmp_path):
    (tmp_path / "roster.toml").write_text(text)
    with pytest.raises(UserError, match=words):
        fedbcgd.flower.strategy("fedavg", make_model(), roster=tmp_path / "roster.toml")


# -- it cannot change the federation -----------------------------------------------------------------------------------


def test_it_cannot_change_the_number_of_clients(caplog):
    grid = attacked(wire.HELLO, lambda m, r: edit(r, of=1000))
    federation, _ = start("fedavg", grid, rounds=1)
    assert federation.server.clients == M
    assert "nodes report 1000" in caplog.text
    grid = attacked(wire.HELLO, lambda m, r: edit(r, client=10**6))
    federation, _ = start("fedavg", grid, rounds=1)
    assert federation.server.clients == M
    assert federation.server.last.accepted == 4
    assert "is not asked" in caplog.text


def test_the_number_of_clients_is_kept_with_the_checkpoint(tmp_path):
    grid = LocalGrid(app(), M)
    start("fedavg", grid, rounds=1, folder=tmp_path)
    without(grid, 5)
    federation, _ = start("fedavg", grid, rounds=2, folder=tmp_path)
    assert federation.server.clients == M


def test_it_names_its_weight_once(tmp_path):
    """What it says when it first comes holds, also after a restart of the server."""
    grid = attacked("train", lambda m, r: edit(r, examples=10**6))
    options = {"cohort": None, "weighting": "examples", "folder": tmp_path}
    federation, _ = start("fedavg", grid, rounds=1, **options)
    honest, _ = start("fedavg", LocalGrid(app(), M), rounds=1, cohort=None, weighting="examples")
    assert torch.equal(federation.server.x, honest.server.x)
    grid.lose = lambda m, r: edit(r, examples=10**6) if kind(m) == wire.HELLO and index(grid, m) == BAD else r
    grid.join(BAD, M)
    federation, _ = start("fedavg", grid, rounds=2, **options)
    assert federation.roster.limits["examples"][BAD] == 12


def test_the_operator_limits_weights(tmp_path):
    grid = attacked(wire.HELLO, lambda m, r: edit(r, examples=10**6))
    federation, _ = start("fedavg", grid, rounds=1, weighting="examples", max_examples=20)
    assert federation.roster.limits["examples"] == {client: 20 if client == BAD else 12 for client in range(M)}
    grid = LocalGrid(app(), 0)
    for client in range(M):
        grid.join(client, M, key=public_key(client)[1])
    path = write_roster(tmp_path, more="examples = 7\ntest_examples = 3")
    federation, _ = start(
        "fedavg", grid, rounds=1, weighting="examples", roster=path, evaluate_clients=1.0, cohort=None
    )
    assert set(federation.roster.limits["examples"].values()) == {7}
    assert set(federation.server.examples.values()) == {7}


def test_nodes_are_asked_for_their_numbers_only_where_they_are_needed():
    def asked(**options):
        grid = LocalGrid(app(load_test=lambda client: CLIENTS[client]), M)
        start("fedavg", grid, rounds=1, **options)
        hello = next(r for r in grid.replies if kind(r) == wire.HELLO)
        return set(hello.content[wire.VALUES]) & {"examples", "test_examples"}

    assert asked() == set()
    assert asked(weighting="examples") == {"examples"}
    assert asked(evaluate_clients=0.5) == {"test_examples"}


def test_it_cannot_weigh_more_in_an_evaluation_than_it_registered():
    def change(message, reply):
        reply.content[wire.METRICS] = MetricRecord({"accuracy": 1e6, "loss": 0.0, "own": 1.0, "examples": 10**12})
        return reply

    federation, _ = start("fedavg", attacked("evaluate", change), rounds=1, evaluate_clients=1.0, cohort=None)
    row = federation.rows[0]
    assert row["clients_accuracy"] == pytest.approx(1e6 / M, abs=1)
    assert "clients_own" not in row  # a metric of its own: the others do not have it


def test_it_cannot_make_an_evaluation_infinite():
    def change(message, reply):
        reply.content[wire.METRICS] = MetricRecord({"accuracy": 1.7e308, "loss": 0.0, "examples": 12})
        return reply

    federation, _ = start("fedavg", attacked("evaluate", change), rounds=1, evaluate_clients=1.0)
    assert federation.rows[0]["clients_accuracy"] < INF


def test_it_cannot_end_a_run_by_leaving_out_the_targets_metric():
    """Even where it is half of the federation."""

    def change(message, reply):
        reply.content[wire.METRICS] = MetricRecord({"own": 1.0, "examples": 12})
        return reply

    grid = attacked("evaluate", change)
    for client in (0, 1, 4, 5):
        without(grid, client)
    federation, _ = start("fedavg", grid, clients=M, rounds=2, evaluate_clients=1.0, target=("clients_accuracy", 2.0))
    assert federation.outcome.stopped == "rounds"


def test_it_can_reset_the_controls_only_now_and_then(tmp_path, caplog):
    """Once, then after 10 rounds, 20, 40 …; kept with the checkpoint. Otherwise only its own upload is lost."""

    def change(message, reply):
        return Message(wire_with_token(reply, failed="state lost", state_lost=True), reply_to=message)

    grid = attacked("train", change, load_test=False)
    options = {"cohort": None, "folder": tmp_path}
    federation, _ = start("scaffold", grid, rounds=6, **options)
    assert federation.server.epoch == 1
    federation, _ = start("scaffold", grid, rounds=9, **options)
    assert federation.server.epoch == 1
    federation, _ = start("scaffold", grid, rounds=35, **options)
    assert federation.server.epoch == 3  # in rounds 1, 11 and 31
    assert federation.server.ledger.lost == 35
    assert federation.server.last.accepted == M - 1
    assert federation.server.controls["c"].any()
    assert "controls are kept" in caplog.text


@pytest.mark.parametrize("name", ["fedavg", "fedadam", "fedyogi", "scaffold", "fedbcgd+"])
@pytest.mark.parametrize("value", [1e21, 3e38, INF, NAN])
def test_it_cannot_make_the_model_or_a_state_infinite(name, value):
    def change(message, reply):
        for a in reply.content[wire.UPLOAD].values():
            a.data = torch.full((len(a.data) // 4,), value).numpy().tobytes()
        return reply

    federation = fedbcgd.flower.strategy(
        name, make_model(), clients=M, seed=3, **LOCAL, **({"blocks": 2} if "fedbcgd" in name else {})
    )
    grid = attacked("train", change, load_test=False)
    federation.start(grid, num_rounds=4, timeout=0.05)
    server = federation.server
    assert server.last.accepted == M - 1
    for vector in (server.x, *server.controls.values(), *server.state.values()):
        assert vector.isfinite().all()


@pytest.mark.parametrize(("value", "rounds"), [(1e30, 0), (5.0, 8)])
def test_it_cannot_move_a_block_by_much_more_than_the_others(value, rounds):
    """1e30 is refused from the first round on; a change of 5 in each coordinate once there is a median to compare with."""
    now = 0

    def change(message, reply):
        if now >= rounds:
            for a in reply.content[wire.UPLOAD].values():
                a.data = torch.full((len(a.data) // 4,), value).numpy().tobytes()
        return reply

    def count(info):
        nonlocal now
        now = info.report.round + 1

    grid = attacked("train", change, load_test=False)
    federation, _ = start("fedbcgd", grid, rounds=rounds + 6, cohort=None, callbacks=[count])
    honest, _ = start("fedbcgd", LocalGrid(app(), M), rounds=rounds + 6, cohort=None)
    assert federation.server.ledger.refused == 6
    assert "expected a norm ≤" in federation.server.last.refused[0]
    assert honest.server.ledger.refused == 0
    assert (federation.server.x - honest.server.x).norm() < honest.server.x.norm()


def test_the_limit_can_be_set_and_switched_off():
    huge = attacked("train", lambda m, r: r, load_test=False)
    for limit, refused in (("off", 0), (1e-6, M), ("20x", 0), (None, 0)):
        federation, _ = start("fedavg", huge, rounds=1, cohort=None, max_norm=limit)
        assert federation.server.ledger.refused == refused
        assert federation.algorithm.max_norm == (limit or "20x")


# -- it can ------------------------------------------------------------------------------------------------------------


def test_it_can_send_a_wrong_block_whose_weight_is_one_in_k():
    """A finite change within the norm limit is counted like any other."""

    def shift(message, reply):
        for a in reply.content[wire.UPLOAD].values():
            values = torch.frombuffer(bytearray(a.data), dtype=torch.float32) + 0.01
            a.data = values.numpy().tobytes()
        return reply

    poisoned, _ = start("fedavg", attacked("train", shift), rounds=1, cohort=None)
    honest, _ = start("fedavg", LocalGrid(app(), M), rounds=1, cohort=None)
    difference = poisoned.server.x - honest.server.x
    assert torch.allclose(difference, torch.full_like(difference, 0.01 / M), atol=1e-6)


def test_it_can_keep_a_round_waiting_until_the_timeout():
    grid = attacked("train", lambda m, r: r)
    through = grid.lose
    grid.lose = lambda m, r: None if kind(m) == "train" and index(grid, m) == BAD else through(m, r)
    federation, _ = start("fedavg", grid, rounds=1, cohort=None)
    assert federation.server.last.accepted == M - 1
    assert len(federation.server.last.lost) == 1


def test_it_can_report_any_finite_metric_and_so_meet_a_target():
    def change(message, reply):
        reply.content[wire.METRICS] = MetricRecord({"accuracy": 1e9, "loss": 0.0, "examples": 1})
        return reply

    options = {"evaluate_clients": 1.0, "target": ("clients_accuracy", 2.0)}
    federation, _ = start("fedavg", attacked("evaluate", change), rounds=3, **options)
    assert federation.outcome.stopped == "target"


def test_it_can_take_an_index_that_is_free():
    grid = keyed()
    without(grid, 0)
    thief = two_nodes_one_index(grid)
    federation, _ = start("fedavg", grid, rounds=1)
    assert federation.roster.nodes[0] == thief


def test_it_sees_every_model_that_is_broadcast_to_it():
    seen = []

    def change(message, reply):
        seen.append(wire.tensor(message.content[wire.BROADCAST][wire.X], torch.float32))
        return reply

    federation, _ = start("fedavg", attacked("train", change), rounds=2, cohort=None)
    assert len(seen) == 2
    assert torch.equal(seen[0], federation.layout.vector(make_model().state_dict()))


def test_it_can_name_its_weight_when_it_first_comes():
    grid = attacked(wire.HELLO, lambda m, r: edit(r, examples=2**40))
    through = grid.lose
    grid.lose = lambda m, r: through(m, edit(r, examples=2**40) if kind(m) == "train" and index(grid, m) == BAD else r)
    federation, _ = start("fedavg", grid, rounds=1, cohort=None, weighting="examples")
    assert federation.server.examples[BAD] == 2**40


def test_what_ties_a_client_is_in_the_checkpoint(tmp_path):
    start("fedavg", keyed(), rounds=1, folder=tmp_path, weighting="examples")
    _, values = Checkpoints(tmp_path / "checkpoint", 1).load()
    assert values["roster"]["ties"] == {str(c): roster.identity_of_key(f"key {c}".encode()) for c in range(M)}
    assert values["roster"]["examples"] == {str(c): 12 for c in range(M)}
