"""Real SuperLinks and SuperNodes on loopback, by the example's own script: insecure, with TLS and node authentication."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("flwr", reason="the extra flower is not installed")

ROOT = Path(__file__).parents[3]
APP = ROOT / "examples" / "flower-cifar10"
NODES = 3


def script():
    spec = importlib.util.spec_from_file_location("loopback", APP / "loopback.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


loopback = script()


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder for keys and logs; no data set is here, so the embedded images are used."""
    monkeypatch.setenv("FEDBCGD_DATA", str(tmp_path / "no-data"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    return tmp_path


def config(out, **values):
    given = {"clients": NODES, "min-clients": NODES, "rounds": 1, "examples": 20, "folder": f'"{out}"', "timeout": 120}
    return " ".join(f"{k}={v}" for k, v in (given | values).items())


def train(federation, out, seconds=240, **values):
    process = federation.run(APP, config(out, **values))
    try:
        assert process.wait(seconds) == 0
    finally:
        process.kill()
    return finished(federation, out)


def finished(federation, out):
    summary = out / "summary.json"
    assert summary.exists(), (federation.folder / "superlink.log").read_text()[-3000:]
    return json.loads(summary.read_text())


def simulated(name, rounds, **options):
    """The same federation in one process."""
    from fedbcgd import simulate
    from fedbcgd.data import dirichlet, fashion_mnist, split
    from fedbcgd.models import LeNet5

    train_set, _ = fashion_mnist()
    train_set = train_set.shown_as(augment=True)
    parts = [part[:20] for part in dirichlet(train_set.labels.numpy(), NODES, 0.6, 0)]
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = LeNet5(10, (1, 28, 28))
    result = simulate(
        model, split(train_set, parts), name, rounds=rounds, cohort=NODES, lr=0.1, batch_size=50, workers=0, **options
    )
    return result


def ties(out):
    """Which key is which client, as kept with the checkpoint."""
    from fedbcgd.engine.checkpoint import Checkpoints

    _, values = Checkpoints(out / "checkpoint", 1).load()
    return values["roster"]["ties"]


def key_of(path):
    """The key of a public key's file, as a roster reads it."""
    from fedbcgd.backends.flower.roster import Entry, Roster

    return Roster({0: Entry(key=path.read_text())}).owners[0]


def check_same(out, reference):
    found = load_file(out / "model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in reference.module.state_dict().items())


def test_a_round_on_a_real_federation(place):
    with loopback.federation(place, NODES, secure=False) as federation:
        summary = train(federation, place / "out")
    reference = simulated("fedbcgd", 1, blocks=5)
    check_same(place / "out", reference)
    ledger = summary["ledger"]
    assert ledger["upload_bytes"] == reference.ledger.upload_bytes
    assert ledger["upload_bytes"] < ledger["wire_bytes"] <= ledger["upload_bytes"] * 1.01 + NODES * 2048
    assert summary["final"]["clients_accuracy"] >= 0
    assert len(set(ties(place / "out").values())) == NODES
    assert all(who.startswith("key ") for who in ties(place / "out").values())
    assert all(process.poll() is not None for process in federation.processes.values())


@pytest.mark.slow
def test_the_same_bits_over_tls_with_authenticated_nodes(place):
    """Three rounds each of four algorithms, two of them with state on the clients, in one federation."""
    with loopback.federation(place, NODES, secure=True) as federation:
        for name in ("fedavg", "fedbcgd", "fedbcgd+", "qsgd+fedbcgd"):
            blocks = {"blocks": 5} if "fedbcgd" in name else {}
            out = place / name
            values = {"algorithm": f'"{name}"', "blocks": blocks.get("blocks", 0), "rounds": 3}
            summary = train(federation, out, 400, **values)
            assert summary["ledger"]["lost"] == summary["ledger"]["refused"] == 0
            check_same(out, simulated(name, 3, **blocks))
            assert ties(out) == {str(k): key_of(place / f"node-{k}.pub") for k in range(NODES)}


@pytest.mark.slow
def test_an_authenticated_node_keeps_its_key_and_so_its_index(place, capfd):
    """Also after a restart; a registered node that names another's index is left out."""
    with loopback.federation(place, NODES, secure=True) as federation:
        train(federation, place / "out")
        before = ties(place / "out")
        node = federation.processes["node-1"]
        os.killpg(node.pid, signal.SIGTERM)
        node.wait(30)
        federation.register("thief")
        federation.supernode(0, NODES, "thief")
        federation.supernode(1, NODES)
        summary = train(federation, place / "out", rounds=2)
    log = capfd.readouterr().out  # of `flwr run --stream`
    assert summary["rounds"] == 2
    assert ties(place / "out") == before
    assert "cannot take part: it says that it is client 0" in log


@pytest.mark.slow
def test_strangers_are_refused(place):
    """A node whose key nobody registered, and one that trusts another authority, get nowhere; the run does not mind."""
    with loopback.federation(place, NODES, secure=True) as federation:
        loopback.make_node_key(place, "stranger")
        stranger = federation.supernode(1, NODES, "stranger")
        other = place / "other"
        other.mkdir()
        loopback.make_certificates(other)
        how = ["--root-certificates", str(other / "ca.pem"), "--max-wait-time", "10"]
        key = ["--auth-supernode-private-key", str(place / "node-0.key")]
        where = ["--superlink", f"127.0.0.1:{federation.port}", "--port", str(loopback.free_port())]
        fooled = federation.start("fooled", "flower-supernode", *how, *key, *where)
        asked = subprocess.run(
            [Path(sys.executable).parent / "flwr", "list", "wrong"],
            env={**federation.environment, "FLWR_HOME": str(_home(other, federation.port))},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert asked.returncode != 0
        summary = train(federation, place / "out")
        assert summary["ledger"]["lost"] == 0
        deadline = time.monotonic() + 60
        while (stranger.poll() is None or fooled.poll() is None) and time.monotonic() < deadline:
            time.sleep(0.5)
        nodes = federation.flwr("supernode", "list", "loopback", "--format", "json")
    assert nodes.count('"online"') == NODES, nodes
    assert stranger.poll() not in (None, 0), (place / "stranger.log").read_text()
    log = (place / "fooled.log").read_text().lower()
    assert "certificate" in log or "ssl" in log, log


def _home(folder, port):
    home = folder / "home"
    home.mkdir()
    certificate = folder / "ca.pem"
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "wrong"\n\n[superlink.wrong]\naddress = "127.0.0.1:{port}"\n'
        f'root-certificates = "{certificate}"\n'
    )
    return home


@pytest.mark.slow
def test_a_node_killed_in_the_middle_of_a_round_is_survived(place):
    """Its upload is counted as lost, the round closes without it; restarted, it takes part again with its state.

    The derived form of FedBCGD+: with three clients the published one falls back after a few rounds, killed nodes or not.
    """
    with loopback.federation(place, NODES, secure=False) as federation:
        values = {
            "min-clients": 2,
            "rounds": 6,
            "algorithm": '"fedbcgd+derived"',
            "timeout": 60,
            "examples": 500,
            "lr": 0.02,
        }
        process = federation.run(APP, config(place / "out", **values))
        try:
            metrics = place / "out" / "metrics.jsonl"
            _wait(lambda: metrics.exists() and metrics.read_text().count("\n") >= 1, 200)
            os.killpg(federation.processes["node-1"].pid, signal.SIGKILL)
            _wait(lambda: metrics.read_text().count("\n") >= 3, 200)
            federation.supernode(1, NODES)
            assert process.wait(400) == 0
        finally:
            process.kill()
        summary = finished(federation, place / "out")
    assert summary["rounds"] == 6
    assert summary["ledger"]["lost"] >= 1
    assert summary["final"]["test_accuracy"] > 0.3
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [row["round"] for row in rows] == [1, 2, 3, 4, 5, 6]


def _wait(ready, seconds):
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.2)


@pytest.mark.slow
def test_the_example_as_a_simulation(place):
    """`flwr run .` with no SuperLink of one's own."""
    home = place / "home"
    home.mkdir()
    binaries = Path(sys.executable).parent
    environment = {
        **os.environ,
        **loopback.QUIET,
        "FLWR_HOME": str(home),
        "PATH": os.pathsep.join([str(binaries), os.environ["PATH"]]),
    }
    try:
        done = subprocess.run(
            [binaries / "flwr", "run", APP, "--stream", "--run-config", config(place / "out"),
             "--federation-config", f"num-supernodes={NODES}"],
            env=environment, capture_output=True, text=True, timeout=280,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert "round 1:" in done.stdout
        check_same(place / "out", simulated("fedbcgd", 1, blocks=5))
    finally:
        for process in Path("/proc").glob("[0-9]*/cmdline"):  # the SuperLink that Flower started for itself stays
            try:
                if str(home).encode() in process.read_bytes():
                    os.kill(int(process.parent.name), signal.SIGTERM)
            except (OSError, ProcessLookupError):
                continue
