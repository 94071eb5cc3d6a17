"""What goes wrong on a real SuperLink with three SuperNodes: the line that tells the operator, and how the run goes on."""

import contextlib
import json
import os
import re
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the extra flower is not installed")

from fedbcgd.engine.checkpoint import Checkpoints

from .test_deployment import ROOT, loopback

APP = Path(__file__).parent / "faulty_app"
NODES = 3

pytestmark = pytest.mark.slow


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    return tmp_path


@contextlib.contextmanager
def started(place, secure=False, options=(), port=None, **faults):
    """A federation; `faults` says by "node_2" what goes wrong on that node."""
    federation = loopback.Federation(place, secure)
    try:
        federation.superlink(*options)
        for client in range(NODES):
            if secure:
                federation.register(f"node-{client}")
            federation.supernode(client, NODES, port=port and port(federation), FAULT=faults.get(f"node_{client}", ""))
        yield federation
    finally:
        federation.stop()


def begin(federation, place, **config):
    given = {"folder": f'"{place / "out"}"', **{key.replace("_", "-"): value for key, value in config.items()}}
    return federation.run(APP, " ".join(f"{key}={value}" for key, value in given.items()))


def train(federation, place, seconds=400, **config):
    process = begin(federation, place, **config)
    try:
        process.wait(seconds)
    finally:
        process.kill()


def rows(place):
    path = place / "out" / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def summary(place):
    return json.loads((place / "out" / "summary.json").read_text())


def runs(federation):
    return json.loads(federation.flwr("list", "loopback", "--format", "json"))["runs"]


def saved_round(place):
    """The round of the last checkpoint; 0 if there is none. It is written after the round's row of metrics."""
    folder = place / "out" / "checkpoint"
    saved = Checkpoints(folder, 1).load() if folder.exists() else None
    return 0 if saved is None else saved[1]["round"]


def wait_for(ready, seconds=300):
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.2)


FAULTS = {
    "body": ("frozen parameter '0.weight' has other values than on the server", {}),
    "loader": ("OSError: the disk of this node is gone", {}),
    "slow": ("late: enough uploads of each block were in after", {"close_at": 0.6, "timeout": 3000}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_one_bad_node_is_named_and_the_others_go_on(fault, place, capfd):
    """A foreign body, a loader that raises, a node that is slow for ever (its round would wait 50 minutes)."""
    line, config = FAULTS[fault]
    with started(place, node_2=fault) as federation:
        train(federation, place, rounds=2, min_clients=3, **config)
        assert federation.completed()
    log = capfd.readouterr().out
    assert f"round 1: client 2 is lost: {line}" in log.replace(
        "make_model: expected the server's model, got another one: ", ""
    )
    assert "round 2: train_loss" in log
    found = summary(place)
    assert found["rounds"] == 2
    assert found["ledger"]["lost"] == (1 if fault == "slow" else 2)  # who is at work is not asked again


def test_a_run_in_which_nothing_works_fails(place, capfd):
    with started(place, node_0="loader", node_1="loader", node_2="body") as federation:
        train(federation, place, rounds=9)
        (run,) = runs(federation)
    log = capfd.readouterr().out
    assert run["status"] == "finished:failed"
    assert "no upload was accepted in the last 2 rounds, so the run stops after round 2" in run["status-details"]
    assert "the disk of this node is gone" in run["status-details"]
    assert "NothingAccepted: no upload was accepted in the last 2 rounds" in log
    assert not (place / "out" / "model.safetensors").exists()


def test_of_twins_one_is_left_out(place, capfd):
    """Two nodes with one index: the first to come has it."""
    with started(place) as federation:
        federation.supernode(1, NODES, "twin")
        train(federation, place, rounds=2, min_clients=3)
        assert federation.completed()
    log = capfd.readouterr().out
    assert re.search(
        r"node \d+ cannot take part: it says that it is client 1, but that one is connected with another key; "
        r"it is asked again in 2 s",
        log,
    )
    assert summary(place)["ledger"]["lost"] == 0


def test_a_node_that_is_killed_and_comes_back(place, capfd):
    with started(place) as federation:
        process = begin(federation, place, rounds=5, timeout=40)
        try:
            wait_for(lambda: rows(place) >= 1)
            os.killpg(federation.processes["node-1"].pid, signal.SIGKILL)
            wait_for(lambda: rows(place) >= 3)
            federation.supernode(1, NODES)
            process.wait(400)
        finally:
            process.kill()
        assert federation.completed()
    log = capfd.readouterr().out
    assert re.search(r"round \d: client 1 is lost: (no answer within \d+ s|Flower reports: )", log)
    assert summary(place)["rounds"] == 5


def serverapp(federation):
    """The process of the ServerApp, which the SuperLink started."""
    home = f"FLWR_HOME={federation.environment['FLWR_HOME']}".encode()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (
                b"flwr-serverapp" in path.joinpath("cmdline").read_bytes()
                and home in path.joinpath("environ").read_bytes()
            ):
                return int(path.name)
    return None


def test_a_serverapp_that_is_killed_goes_on_when_it_is_run_again(place, capfd):
    with started(place) as federation:
        process = begin(federation, place, rounds=4, algorithm='"fedbcgd+"')
        try:
            wait_for(lambda: saved_round(place) >= 1)
            os.kill(serverapp(federation), signal.SIGKILL)
            killed = time.monotonic()
            wait_for(lambda: runs(federation)[0]["status"] == "finished:failed")
            seconds = time.monotonic() - killed
        finally:
            process.kill()
        done = saved_round(place)
        train(federation, place, rounds=4, algorithm='"fedbcgd+"')
        assert federation.completed()
    log = capfd.readouterr().out
    print(f"Flower noticed after {seconds:.0f} s")
    assert f"going on after round {done}, from {place / 'out'}" in log
    assert summary(place)["rounds"] == 4
    assert rows(place) == 4


def test_a_superlink_that_is_killed_keeps_its_registrations_in_the_database(place, capfd):
    """The nodes connect again by themselves, and nobody registers them again."""
    database = ("--database", str(place / "superlink.db"))
    with started(place, secure=True, options=database) as federation:
        process = begin(federation, place, rounds=3)
        try:
            wait_for(lambda: saved_round(place) >= 1)
            os.killpg(federation.processes["superlink"].pid, signal.SIGKILL)  # with its ServerApp
            federation.processes["superlink"].wait(30)
        finally:
            process.kill()
        federation.superlink(*database)
        done = saved_round(place)
        train(federation, place, rounds=3, min_clients=3)
        assert federation.completed()
    log = capfd.readouterr().out
    assert f"going on after round {done}, from {place / 'out'}" in log
    assert summary(place)["rounds"] == 3
    assert summary(place)["ledger"]["lost"] == 0


class CountingProxy:
    """A TCP proxy in front of the SuperLink that counts what nodes send and get."""

    def __init__(self, port):
        self.up = self.down = 0
        self._target = port
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._listener.accept()
                there = socket.create_connection(("127.0.0.1", self._target))
                threading.Thread(target=self._copy, args=(here, there, "up"), daemon=True).start()
                threading.Thread(target=self._copy, args=(there, here, "down"), daemon=True).start()

    def _copy(self, source, sink, way):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                with self._lock:
                    setattr(self, way, getattr(self, way) + len(data))
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def close(self):
        self._listener.close()


def test_the_wire_carries_hardly_more_than_the_ledger_counts(place):
    """FedBCGD with d = 800,000, three blocks: all that nodes send, heartbeats and questions for work included."""
    proxies = []

    def port(federation):
        proxies.append(CountingProxy(federation.port))
        return proxies[-1].port

    with started(place, port=port) as federation:
        wait_for(
            lambda: federation.flwr("supernode", "list", "loopback", "--format", "json").count('"online"') == NODES
        )
        before = sum(proxy.up for proxy in proxies)
        train(federation, place, rounds=3, min_clients=3, hidden=19500, algorithm='"fedbcgd"')
        assert federation.completed()
        up = sum(proxy.up for proxy in proxies) - before
    for proxy in proxies:
        proxy.close()
    ledger = summary(place)["ledger"]
    print(f"d = {ledger['dim']:,}: {up:,} bytes on the wire, {ledger['upload_bytes']:,} in the ledger")
    assert 790_000 <= ledger["dim"] <= 810_000
    assert ledger["lost"] == ledger["refused"] == 0
    assert ledger["upload_bytes"] < up <= 1.05 * ledger["upload_bytes"]
