"""What an operator sees: lines in the log, a run that fails where nothing works, files that other commands read."""

import json
import logging
import re
import subprocess
import sys

import pytest
import torch
from torch import nn

pytest.importorskip("flwr", reason="the extra flower is not installed")

import fedbcgd.flower
from fedbcgd.backends.flower import exchange, monitor, roster
from fedbcgd.errors import NothingAccepted

from .grids import LocalGrid

M = 4
LOCAL = {"batch_size": 4, "lr": 0.1}


def make_model(dtype=torch.float32):
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).to(dtype)


def load(client, dtype=torch.float32):
    g = torch.Generator().manual_seed(client)
    return torch.randn(12, 4, generator=g).to(dtype), torch.randint(3, (12,), generator=g)


def grid(load_data=load, clients=M, **more):
    return LocalGrid(fedbcgd.flower.client_app(make_model, load_data), clients, **more)


def start(nodes, rounds=2, timeout=0.05, **options):
    federation = fedbcgd.flower.strategy("fedbcgd", make_model(), blocks=2, **{**LOCAL, **options})
    federation.start(nodes, num_rounds=rounds, timeout=timeout)
    return federation


def broken(client):
    if client:
        raise OSError(f"disk {client} on fire")
    return load(client)


def train(message):
    return message.metadata.message_type == "train"


def test_each_lost_client_has_a_line_with_its_reason(caplog):
    """One fails, one does not answer; rounds are counted from 1."""

    def lose(message, reply):
        return None if train(message) and reply.content["told"].get("client") == 2 else reply

    def fails(client):
        return broken(client) if client == 1 else load(client)

    start(grid(fails, lose=lose), rounds=2)
    lines = [r.getMessage() for r in caplog.records if "is lost" in r.getMessage()]
    for round in (1, 2):
        assert sum(line.startswith(f"round {round}: client 1 is lost: OSError: disk 1 on fire") for line in lines) == 1
        assert sum(line.startswith(f"round {round}: client 2 is lost: no answer within") for line in lines) == 1
    assert len(lines) == 4


def test_lines_about_lost_and_refused_clients_are_bounded(caplog, monkeypatch):
    monkeypatch.setattr(monitor, "MOST_LOGGED", 2)
    with pytest.raises(NothingAccepted):
        start(grid(lambda client: broken(1), clients=9), rounds=1, max_empty_rounds=1)
    assert caplog.text.count("is lost: OSError") == 2
    assert "round 1: and 7 more clients are lost" in caplog.text


def test_refusals_are_logged_one_by_one_up_to_a_bound(caplog, monkeypatch):
    from fedbcgd.core import refusals

    monkeypatch.setattr(refusals, "MAX_LOGGED", 2)
    book = refusals.Refusals()
    book.open_round()
    for client in range(5):
        book.add(f"round 1, client {client}: NaN", client)
    book.close_round(set(), range(5))
    assert caplog.text.count("upload refused") == 2
    assert "and 3 more uploads of this round were refused" in caplog.text


def test_progress_within_a_round(caplog, monkeypatch):
    """At intervals, while replies come and while nothing comes."""
    monkeypatch.setattr(exchange, "SHORTEST", 0.01)
    caplog.set_level(logging.INFO)

    def lose(message, reply):
        return None if train(message) and reply.content["told"]["client"] == 3 else reply

    start(grid(lose=lose), rounds=1, timeout=2, progress_seconds=0.0)
    assert re.search(r"round 1: 1 of 4 replies, 0\.0 MB, \d+ s", caplog.text)
    assert caplog.text.count("round 1: 3 of 4 replies") > 3
    caplog.clear()
    start(grid(), rounds=1, timeout=5)
    assert " of 4 replies" not in caplog.text


@pytest.mark.parametrize("most", [1, 3, None])
def test_a_run_in_which_nothing_is_accepted_fails_with_the_reasons(most, tmp_path):
    def go():
        start(grid(lambda client: broken(1)), rounds=5, folder=tmp_path, max_empty_rounds=most)

    if most is None:
        go()
        assert json.loads((tmp_path / "summary.json").read_text())["rounds"] == 5
        return
    with pytest.raises(NothingAccepted, match=rf"so the run stops after round {most}\. client \d: OSError: disk 1 on"):
        go()
    assert not (tmp_path / "summary.json").exists()
    assert not (tmp_path / "model.safetensors").exists()  # nobody takes it for a trained one


def test_one_good_round_begins_the_count_anew():
    empty = {0, 1, 3, 4}
    nodes = grid(lose=lambda m, r: None if train(m) and int(m.metadata.group_id) in empty else r)
    assert start(nodes, rounds=6).server.round == 6


def test_a_loop_of_ones_own_fails_too():
    federation = fedbcgd.flower.strategy("fedavg", make_model(), max_empty_rounds=1, **LOCAL)
    federation.configure_train(1, None, None, grid())
    with pytest.raises(NothingAccepted, match="no answer within"):
        federation.aggregate_train(1, [])


def parsed(text):
    """OpenMetrics by its grammar: each family once, its type and help first, samples with labels, the end marked."""
    assert text.endswith("\n# EOF\n")
    samples, kinds = {}, {}
    for line in text.removesuffix("# EOF\n").splitlines():
        if line.startswith("# "):
            _, what, name, rest = line.split(" ", 3)
            assert what in ("TYPE", "HELP")
            assert (name in kinds) == (what == "HELP")
            kinds.setdefault(name, rest)
            continue
        name, labels, value = re.fullmatch(r"(\w+)\{((?:\w+=\"[^\"\n\\]*\",?)+)\} (\S+)", line).groups()
        family = name.removesuffix("_total") if kinds[list(kinds)[-1]] == "counter" else name
        assert family == list(kinds)[-1]
        labels = dict(re.findall(r"(\w+)=\"([^\"]*)\"", labels))
        samples.setdefault(family, []).append((labels, float(value)))
    return samples


def test_openmetrics_after_each_round(tmp_path):
    path = tmp_path / "fedbcgd.prom"

    def fails(client):
        return broken(client) if client == 1 else load(client)

    federation = start(grid(fails), rounds=3, metrics_file=path, test=load(0), timeout=5)
    families = parsed(path.read_text())
    value = {name: samples[0][1] for name, samples in families.items()}
    assert value["fedbcgd_round"] == 3
    assert value["fedbcgd_clients"] == value["fedbcgd_clients_online"] == M
    assert value["fedbcgd_upload_bytes"] == federation.server.ledger.upload_bytes
    results = {labels["result"]: count for labels, count in families["fedbcgd_uploads"]}
    assert results == {"accepted": 9, "refused": 0, "lost": 3}
    metrics = {labels["name"]: v for labels, v in families["fedbcgd_metric"]}
    assert metrics["test_accuracy"] == federation.rows[-1]["test_accuracy"]
    assert all(labels["algorithm"] == "fedbcgd" for samples in families.values() for labels, _ in samples)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]  # no temporary files


def test_a_metrics_file_that_cannot_be_written_ends_nothing(tmp_path, caplog):
    start(grid(), rounds=2, metrics_file=tmp_path / "none" / "x.prom", timeout=5)
    assert caplog.text.count("metrics_file: ") == 2


def test_a_node_that_fails_its_hello_has_few_lines(caplog, monkeypatch):
    """It is asked again after 2 s, 4 s, 8 s …: 10 lines in the first half hour, however often the roster looks."""
    now = [1000.0]
    monkeypatch.setattr(roster.time, "monotonic", lambda: now[0])
    nodes = grid()
    stranger = next(node for node, c in nodes.nodes.items() if c.node_config["partition-id"] == 3)
    nodes.nodes[stranger].node_config.pop("partition-id")
    book = roster.Roster()
    for _ in range(1800 * 5):  # five looks a second
        book.refresh(nodes)
        now[0] += 0.2
    assert sorted(book.nodes) == [0, 1, 2]
    assert 8 <= len([r for r in caplog.records if "cannot take part" in r.getMessage()]) <= 11


def test_hours_and_report_read_the_folder(tmp_path):
    out = tmp_path / "run"
    start(grid(), rounds=2, folder=out, test=load(0), timeout=5)
    start(grid(), rounds=3, folder=out, test=load(0), timeout=5)  # it went on
    rows = [json.loads(line) for line in (out / "traffic.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [1, 2, 3]
    assert all(sorted(row["clients"]) == list(range(M)) and row["asked"] == M for row in rows)

    def fedbcgd_says(*arguments):
        done = subprocess.run(
            [sys.executable, "-m", "fedbcgd", *map(str, arguments)], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    found = [json.loads(line) for line in fedbcgd_says("hours", out, "--json").splitlines()]
    assert {row["network"] for row in found[:-1]} == {"4g", "broadband", "datacentre", "mix"}
    assert all(row["hours"] > 0 for row in found[:-1])
    page = tmp_path / "page.html"
    (out / "summary.json").unlink()  # as while it runs, or after a crash
    assert "says nowhere" not in fedbcgd_says("report", out, "--out", page)
    assert "fedbcgd" in page.read_text()
    assert "damaged" not in fedbcgd_says("check", out)


def test_bfloat16_models_finish(tmp_path):
    """NumPy, and so Flower, has no bfloat16: the result is float32."""
    half = torch.bfloat16
    app = fedbcgd.flower.client_app(lambda: make_model(half), lambda client: load(client, half))
    for name in ("fedbcgd", "fedbcgd+", "qsgd+fedbcgd"):
        federation = fedbcgd.flower.strategy(
            name, make_model(half), blocks=2, test=load(0, half), folder=tmp_path / name, **LOCAL
        )
        result = federation.start(LocalGrid(app, M), num_rounds=2, timeout=5, evaluate_fn=lambda round, arrays: None)
        assert federation.server.last.accepted == M, federation.server.last.lost
        model = make_model(half)
        model.load_state_dict(result.arrays.to_torch_state_dict())
        assert torch.equal(model[0].weight, federation.state_dict()["0.weight"])
        again = fedbcgd.flower.strategy(name, make_model(half), blocks=2, **LOCAL)
        again.start(LocalGrid(app, M), result.arrays, num_rounds=1, timeout=5)
        assert again.server.last.accepted == M
