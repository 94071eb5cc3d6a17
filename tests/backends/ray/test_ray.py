"""Ray: the same bits as in one process, whatever dies. One local Ray with two CPUs serves all tests of a process."""

import contextlib
import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("ray", reason="the extra `ray` is not installed")

from fedbcgd import UserError, make_algorithm, simulate
from fedbcgd.backends.inprocess import InProcess
from fedbcgd.backends.ray import cluster
from fedbcgd.backends.ray.actor import begin
from fedbcgd.backends.ray.backend import Ray, _pickle_job
from fedbcgd.backends.ray.protocol import ZERO, FitReply, FitRequest, InitialState, NotPublished, Ready, as_bytes
from fedbcgd.backends.workers.protocol import Failed
from fedbcgd.core.messages import Task
from fedbcgd.engine.assemble import make_job, make_server
from fedbcgd.engine.client_state import StateStore
from fedbcgd.engine.loop import Loop, Stop
from fedbcgd.engine.threads import threads
from fedbcgd.errors import WorkerLost
from fedbcgd.runs import config as configuration
from fedbcgd.runs.execute import execute

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the job travels in a memory file")


@pytest.fixture(scope="module", autouse=True)
def one_ray():
    cluster.join(None, 2)
    yield
    cluster.leave()


STRANGER = """
import sys
from ray._raylet import GcsClient
from ray.exceptions import AuthenticationError
try:
    GcsClient(address=sys.argv[1]).get_all_node_info()
except AuthenticationError:
    print("refused")
else:
    print("let in")
"""


def test_a_ray_that_is_started_here_listens_on_loopback_alone_and_wants_its_token(net, toys):
    import psutil
    import ray

    go(net, toys, "fedavg", workers=2, backend="ray")
    me = psutil.Process()
    listening = []
    for process in (me, *me.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            found = process.net_connections(kind="inet")
            listening += [(process.name(), c.laddr.ip) for c in found if c.status == psutil.CONN_LISTEN]
    assert any(name.startswith("gcs_server") for name, _ in listening), listening
    assert {ip.removeprefix("::ffff:") for _, ip in listening} <= {"127.0.0.1", "::1"}, listening
    assert "RAY_AUTH_TOKEN" not in os.environ
    address = ray.get_runtime_context().gcs_address
    done = subprocess.run([sys.executable, "-c", STRANGER, address], capture_output=True, text=True, timeout=60)
    assert done.stdout == "refused\n", done.stdout + done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="processor time of another process")
def test_an_actor_that_is_stopped_is_named_and_replaced(net, toys, tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("FEDBCGD_WORKER_TIMEOUT", "1")
    flag = str(tmp_path / "flag")

    def loss(model, batch):
        with contextlib.suppress(FileExistsError):
            os.close(os.open(flag, os.O_CREAT | os.O_EXCL))
            os.kill(os.getpid(), signal.SIGSTOP)
        return F.cross_entropy(model(batch[0]), batch[1])

    with caplog.at_level(logging.WARNING, "fedbcgd"):
        disturbed = go(net, toys, "scaffold", workers=2, backend="ray", loss=loss)
    assert "was lost while client" in caplog.text
    assert "it has been stopped for" in caplog.text
    assert same(disturbed.module, go(net, toys, "scaffold", workers=0).module)


def rows(result):
    return [{k: v for k, v in row.items() if k != "seconds"} for row in result.rows]


def same(a, b):
    return all(torch.equal(p, q) for p, q in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def go(net, toys, name, **where):
    """A lambda as the loss: code travels too."""
    loss = where.pop("loss", lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))
    test = toys((700,))[0]
    return simulate(net(), toys(), name, rounds=3, cohort=5, batch_size=3, test=test, seed=1, loss=loss, **where)


def test_who_is_late_or_gone_is_the_same_as_in_one_process(net, toys):
    """28 of 40 clients are asked and many of them given up before the round begins; the window is four tasks."""
    network = {"profile": "4g", "oversample": 1.4, "dropout": 0.3, "corrupt": 0.2, "deadline": 2.0}
    common = {"rounds": 3, "cohort": 20, "batch_size": 3, "seed": 1, "network": network}
    clients = toys(tuple(range(1, 41)))
    alone = simulate(net(), clients, "scaffold", workers=0, **common)
    spread = simulate(net(), clients, "scaffold", workers=1, backend="ray", **common)
    assert same(alone.module, spread.module)
    assert rows(alone) == rows(spread)
    assert alone.ledger.lost > 10
    assert alone.ledger.refused > 3


@pytest.mark.parametrize(
    ("name", "precision"),
    [*((name, "fp32") for name in ("fedavg", "fedbcgd", "fedbcgd+", "qsgd+fedbcgd")), ("fedbcgd+", "bf16")],
)
def test_the_same_bits_as_in_one_process(net, toys, name, precision):
    alone = go(net, toys, name, workers=0, precision=precision)
    spread = go(net, toys, name, workers=2, backend="ray", precision=precision)
    assert same(spread.module, alone.module)
    assert rows(spread) == rows(alone)
    assert spread.ledger.totals() == alone.ledger.totals()


class Parts:
    """A run with every part open to look at."""

    def __init__(self, net, toys, name, backend, **options):
        algorithm = make_algorithm(name, batch_size=3, **options)
        self.job = make_job(net(), toys(), algorithm, None, 1)
        self.server = make_server(self.job, 4, Stop(rounds=1))
        self.store = StateStore(algorithm.state_names, self.job.layout.dim, self.job.layout.dtype)
        self.backend = backend(self.job, self.store)
        self.loop = Loop(self.server, self.backend, Stop(rounds=6))

    def controls(self):
        rows = torch.zeros(self.server.clients, self.job.layout.dim)
        for i in self.store.clients():
            rows[i] = self.store.load(i, self.server.epoch)["c"]
        return rows


def two_actors(job, store):
    return Ray(job, store, 4, 2)


def at_uploads(parts, hook):
    """`hook(count, upload)` gives what the server sees of each upload."""
    receive, count = parts.server.receive, 0

    def hooked(upload, sender):
        nonlocal count
        count += 1
        return receive(hook(count, upload), sender)

    parts.server.receive = hooked


def killer(backend, moment):
    def hook(count, upload):
        if count == moment:
            os.kill(backend.pids()[0], signal.SIGKILL)
        return upload

    return hook


def check_killed(net, toys, caplog, name):
    alone = Parts(net, toys, name, InProcess)
    alone.loop.run()
    ray = Parts(net, toys, name, two_actors)
    try:
        at_uploads(ray, killer(ray.backend, moment=10))  # the second of the third round
        with caplog.at_level(logging.WARNING, "fedbcgd"):
            ray.loop.run()
    finally:
        ray.backend.close()
    assert "was lost while client" in caplog.text
    assert "it is replaced" in caplog.text
    assert torch.equal(ray.server.x, alone.server.x)
    assert ray.server.ledger.totals() == alone.server.ledger.totals()
    return ray, alone


def test_an_actor_killed_in_the_middle_of_a_round_changes_nothing(net, toys, caplog):
    ray, alone = check_killed(net, toys, caplog, "fedbcgd+")
    assert ray.store.clients() == alone.store.clients()
    assert torch.equal(ray.controls(), alone.controls())
    torch.testing.assert_close(ray.server.controls["c"], ray.controls().mean(0))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "fedbcgd", "qsgd+fedbcgd", "scaffold", "topk"])
def test_an_actor_killed_under_other_algorithms(net, toys, caplog, name):
    check_killed(net, toys, caplog, name)


def test_state_of_refused_uploads_and_of_interrupted_rounds_does_not_hold(net, toys):
    """An upload comes damaged; Ctrl-C in the midst of the fourth round abandons it, and the same actors go on."""

    def run(backend):
        interrupts = [KeyboardInterrupt()]

        def hook(count, upload):
            if (upload.round, upload.client) == (1, 4):
                broken = {channel: [torch.full_like(p, 255) for p in sent] for channel, sent in upload.payload.items()}
                return dataclasses.replace(upload, payload=broken)
            if count == 14 and interrupts:
                raise interrupts.pop()
            return upload

        parts = Parts(net, toys, "scaffold", backend)
        try:
            at_uploads(parts, hook)
            with pytest.raises(KeyboardInterrupt):
                parts.loop.run()
            assert parts.server.round == 3
            parts.loop.run()
        finally:
            parts.backend.close()
        return parts

    alone, ray = run(InProcess), run(two_actors)
    assert ray.server.ledger.totals()["refused"] == 1
    assert torch.equal(ray.server.x, alone.server.x)
    assert torch.equal(ray.controls(), alone.controls())
    torch.testing.assert_close(ray.server.controls["c"], ray.controls().mean(0))


def test_an_actor_does_not_work_with_the_model_of_another_round(net, toys):
    """What was published and did not arrive is missed, not replaced by what was there before."""
    algorithm = make_algorithm("fedavg", batch_size=3)
    job = make_job(net(), toys(), algorithm, None, 1)
    with threads(1):
        actor, first = begin(*_pickle_job(job), "cpu")
    assert first == Ready(os.getpid(), os.uname().nodename)
    x = as_bytes(make_server(job, 4, Stop(rounds=1)).x)

    def request(publication, client):
        return FitRequest(publication, 0, Task(0, client, 0), InitialState(ZERO))

    assert actor.reply(request(1, 2)) == NotPublished()
    actor.publish(1, [x])
    assert isinstance(actor.reply(request(1, 2)), FitReply)
    assert actor.reply(request(2, 2)) == NotPublished()
    assert isinstance(actor.reply(request(1, 99)), Failed)
    assert isinstance(begin(as_bytes(torch.zeros(9)), 4, "cpu")[1], Failed)


@pytest.mark.slow
def test_a_missed_model_is_published_again(net, toys, monkeypatch, caplog):
    """As when a machine could not fetch it: the actor is replaced, and the task runs again."""
    original, seen = Ray._send, []

    def send(self, actor, request):
        if not seen:
            seen.append(actor.number)
            actor.publication = self._publication  # believed, but never sent
        return original(self, actor, request)

    monkeypatch.setattr(Ray, "_send", send)
    spread = go(net, toys, "fedbcgd", workers=1, backend="ray")
    assert "it did not get the model of the round; it is replaced and its task runs again" in caplog.text
    assert same(spread.module, go(net, toys, "fedbcgd", workers=0).module)


def test_an_error_in_the_users_code_comes_back_as_itself(net, toys):
    class Mine(Exception):
        pass

    def loss(model, batch):
        raise Mine("from an actor")

    with pytest.raises(Mine, match="from an actor") as error:
        go(net, toys, "fedavg", workers=1, backend="ray", loss=loss)
    notes = "\n".join(error.value.__notes__)
    assert "trained in round 1" in notes
    assert "in loss" in notes  # the actor's own traceback


def test_what_cannot_be_sent_is_said_so(net, toys):
    import threading

    lock = threading.Lock()

    def loss(model, batch):
        with lock:
            return F.cross_entropy(model(batch[0]), batch[1])

    with pytest.raises(UserError, match="expected model, loss and data that can be pickled"):
        go(net, toys, "fedavg", workers=1, backend="ray", loss=loss)


IMAGES: dict = {}
QUADRATICS = {"data": {"name": "quadratics"}, "model": {"name": "point"}}


def make(problem, name, **where):
    run = {"rounds": 6, "cohort": 3, "evaluate_every": 2} | where
    return configuration.check(
        {"algorithm": {"name": name, "local_steps": 1, "batch_size": 4}, "run": run, **problem}, "test"
    )


def stop_after(rounds):
    def callback(info):
        if info.server.round >= rounds:
            raise KeyboardInterrupt

    return callback


def kept_rows(path):
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in ("seconds", "crc")} for row in lines]


def check_resume(tmp_path, problem, name, legs):
    """A run that is interrupted and goes on elsewhere, leg by leg."""
    execute(make(problem, name, workers=0), tmp_path / "whole")
    for stop, where in legs:
        callbacks = [stop_after(stop)] if stop else []
        with pytest.raises(KeyboardInterrupt) if stop else open(os.devnull):
            execute(make(problem, name, **where), tmp_path / "cut", resume=True, callbacks=callbacks)
    assert (tmp_path / "cut/model.safetensors").read_bytes() == (tmp_path / "whole/model.safetensors").read_bytes()
    assert kept_rows(tmp_path / "cut") == kept_rows(tmp_path / "whole")


RAY, WORKERS = {"backend": "ray", "workers": 2}, {"workers": 2}


def test_begun_in_one_process_gone_on_with_on_ray_and_finished_on_workers(tmp_path):
    check_resume(tmp_path, QUADRATICS, "scaffold", [(1, {"workers": 0}), (4, RAY), (None, WORKERS)])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "fedbcgd", "fedbcgd+", "qsgd+fedbcgd", "feddc", "topk"])
def test_begun_on_ray_and_finished_on_ray_with_workers_between(tmp_path, name):
    check_resume(tmp_path, IMAGES, name, [(2, RAY), (4, WORKERS), (None, RAY)])


@pytest.mark.slow
def test_a_task_that_ends_every_actor_ends_the_run(net, toys):
    def loss(model, batch):
        os._exit(3)

    with pytest.raises(WorkerLost, match=r"3 Ray actors were lost while client \d+ trained.*inprocess"):
        go(net, toys, "fedavg", workers=1, backend="ray", loss=loss)


@pytest.mark.slow
def test_sys_exit_in_a_loss_does_not_end_anything_else(net, toys):
    def loss(model, batch):
        sys.exit(3)

    with pytest.raises(RuntimeError, match="SystemExit"):
        go(net, toys, "fedavg", workers=1, backend="ray", loss=loss)


@pytest.mark.slow
def test_more_actors_than_the_cluster_has_room_for(net, toys, monkeypatch, caplog):
    """Those that found no room are waited for, but the others do the work, with state sent along."""
    from fedbcgd.backends.ray import backend as backend

    monkeypatch.setattr(backend, "PATIENCE", 0.0)
    with caplog.at_level(logging.WARNING, "fedbcgd"):
        spread = go(net, toys, "scaffold", workers=4, backend="ray")
    assert same(spread.module, go(net, toys, "scaffold", workers=0).module)
    assert "have not started yet: each needs one CPU" in caplog.text


# -- as users run it, in processes of their own --------------------------------------------------------------------------


TOML = """
[algorithm]
local_steps = 1
batch_size = 4

[run]
rounds = 2
cohort = 3
evaluate_every = 100
"""
TWO_LINES = 'backend = "ray"\nworkers = 2\n'


def fedbcgd(*args, cwd):
    done = subprocess.run(
        [sys.executable, "-m", "fedbcgd", *args], capture_output=True, text=True, cwd=cwd, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done


@pytest.mark.slow
def test_run_compare_and_sweep_need_two_lines(tmp_path):
    (tmp_path / "plain.toml").write_text(TOML + "workers = 0\n")
    (tmp_path / "ray.toml").write_text(TOML + TWO_LINES)
    models = {}
    for kind in ("plain", "ray"):
        done = fedbcgd("run", f"{kind}.toml", "--out", f"{kind}-run", "--json", cwd=tmp_path)
        assert [json.loads(line) for line in done.stdout.splitlines()][-1]["stopped"] == "rounds"
        assert done.stderr == ""
        names = ("--algorithms", "fedavg,scaffold", "--budget", "4", "--seeds", "1")
        fedbcgd("compare", f"{kind}.toml", *names, "--out", f"{kind}-compare", cwd=tmp_path)
        fedbcgd("sweep", f"{kind}.toml", "--grid", "lr=0.01,0.1", "--out", f"{kind}-sweep", cwd=tmp_path)
        found = sorted(tmp_path.glob(f"{kind}-*/**/model.safetensors"))
        models[kind] = {str(path.relative_to(tmp_path)).replace(kind, "", 1): path.read_bytes() for path in found}
    assert len(models["ray"]) >= 5
    assert models["ray"] == models["plain"]


NODE_LOST = """
    import sys, torch, logging
    from ray.cluster_utils import Cluster
    from torch import nn
    from fedbcgd import simulate

    logging.basicConfig(level=logging.WARNING)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    second = cluster.add_node(num_cpus=1)
    generator = torch.Generator().manual_seed(0)
    clients = [
        (torch.randn(6, 4, generator=generator), torch.randint(3, (6,), generator=generator)) for _ in range(8)
    ]
    torch.manual_seed(0)
    model = nn.Linear(4, 3)

    def lose(info):
        if info.server.round == 2:
            cluster.remove_node(second)

    def go(**where):
        return simulate(model, clients, "scaffold", rounds=5, cohort=6, batch_size=2, **where).module.weight

    spread = go(backend="ray", workers=2, address=cluster.address, callbacks=[lose])
    cluster.shutdown()
    assert torch.equal(spread, go(workers=0))
    print("the same")
"""


@pytest.mark.slow
def test_a_lost_node_of_a_cluster(tmp_path):
    """A real cluster of two nodes of which one goes: its actor finds no other room, and the run goes on without it."""
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(NODE_LOST))
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=250, check=False)
    assert done.stdout.endswith("the same\n"), done.stdout + done.stderr
    assert "was lost while" in done.stderr


def test_a_users_own_training_gives_the_bits_of_one_process(net, toys):
    def train(model, data, config):
        optimizer = config.optimizer(model.parameters())
        for rows in torch.randperm(len(data[0])).split(config.batch_size):
            optimizer.zero_grad()
            F.cross_entropy(model(data[0][rows]), data[1][rows]).backward()
            optimizer.step()
        return {"drawn": torch.rand(())}

    options = {"rounds": 2, "cohort": 4, "batch_size": 3, "train": train}
    here, there = (
        simulate(net(), toys(), "scaffold", **options, **w) for w in ({"workers": 0}, {"backend": "ray", "workers": 2})
    )
    assert all(map(torch.equal, here.module.state_dict().values(), there.module.state_dict().values()))
    assert here.final["train_drawn"] == there.final["train_drawn"]
