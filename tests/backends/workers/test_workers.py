"""Worker processes: the same bits as in one process, whatever dies."""

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedbcgd
from fedbcgd import UserError, simulate
from fedbcgd.backends.placement import Placement
from fedbcgd.backends.registry import make_backend
from fedbcgd.backends.workers import backend as workers_module
from fedbcgd.backends.workers import processes
from fedbcgd.backends.workers.protocol import EvaluateRequest, FitRequest
from fedbcgd.engine.assemble import make_job, make_server
from fedbcgd.engine.client_state import StateStore
from fedbcgd.engine.loop import Loop, Stop
from fedbcgd.errors import WorkerLost
from fedbcgd.models import Logistic
from fedbcgd.network.simulator import NetworkSimulator
from tests.backends.going import go, same, state


@pytest.mark.parametrize(("name", "precision"), [("scaffold", "fp32"), ("scaffold", "bf16"), ("fedbcgd+", "bf16")])
def test_the_same_rows_on_any_number_of_workers(net, toys, name, precision):
    """Metrics too: batches of the evaluation are summed in their order, whoever did them."""

    def rows(result):
        return [{k: v for k, v in row.items() if k != "seconds"} for row in result.rows]

    alone = go(net, toys, name, workers=0, precision=precision)
    for workers in (1, 2):
        spread = go(net, toys, name, workers=workers, precision=precision)
        assert same(state(spread), state(alone))
        assert rows(spread) == rows(alone)


def kill_once(flag):
    """A loss that kills its own process the first time it is called."""

    def loss(model, batch):
        try:
            os.close(os.open(flag, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return F.cross_entropy(model(batch[0]), batch[1])
        os.kill(os.getpid(), signal.SIGKILL)

    return loss


def test_a_worker_killed_in_the_middle_of_a_round_changes_nothing(net, toys, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "fedbcgd"):
        disturbed = go(net, toys, loss=kill_once(str(tmp_path / "flag")))
    assert (tmp_path / "flag").exists()
    assert "killed by SIGKILL" in caplog.text
    assert "its task runs again" in caplog.text
    assert same(state(disturbed), state(go(net, toys, workers=0)))
    assert disturbed.ledger.lost == 0


def test_a_worker_killed_from_outside_or_while_idle(net, toys, caplog):
    from fedbcgd.backends.workers.backend import Workers

    victims = []
    original = Workers.run_round

    def run_round(self, server, plan):
        if server.round == 1:
            victims.append(self.pids()[0])
            os.kill(self.pids()[0], signal.SIGKILL)
        original(self, server, plan)

    Workers.run_round = run_round
    try:
        disturbed = go(net, toys)
    finally:
        Workers.run_round = original
    assert victims
    assert same(state(disturbed), state(go(net, toys, workers=0)))
    assert "replaced" in caplog.text


def test_a_task_that_ends_every_worker_ends_the_run(net, toys):
    def loss(model, batch):
        os._exit(3)

    with pytest.raises(WorkerLost, match=r"code 3.*workers=0"):
        go(net, toys, loss=loss)


def test_an_error_in_the_users_code_comes_back_as_itself(net, toys):
    class Mine(Exception):
        pass

    def loss(model, batch):
        raise Mine("from a worker")

    with pytest.raises(Mine, match="from a worker") as error:
        go(net, toys, loss=loss)
    notes = "\n".join(error.value.__notes__)
    assert "trained in round 1" in notes
    assert "in loss" in notes  # the worker's own traceback


def test_a_mistake_found_in_a_worker_is_a_users_error(net, toys):
    with pytest.raises(UserError, match="loss: expected one that depends"):
        go(net, toys, loss=lambda m, b: torch.zeros(()))


def test_what_cannot_be_sent_is_said_so_and_leaves_nothing(net, toys):
    import threading

    lock = threading.Lock()
    before = len(os.listdir("/proc/self/fd"))

    def loss(model, batch):
        with lock:
            return F.cross_entropy(model(batch[0]), batch[1])

    with pytest.raises(UserError, match=r"expected model, loss and data that can be pickled.*workers=0"):
        go(net, toys, loss=loss)
    assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_sys_exit_in_a_loss_does_not_end_the_parent(net, toys):
    def loss(model, batch):
        sys.exit(3)

    with pytest.raises(RuntimeError, match="SystemExit"):
        go(net, toys, loss=loss)


def test_transport_belongs_to_one_process(net, toys):
    with pytest.raises(UserError, match="workers=0"):
        go(net, toys, transport=lambda u: u)


SCRIPT = """
    import sys, torch, fedbcgd
    from torch import nn

    class Net(nn.Module):                       # a class, a lambda and data that only this script knows
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.fc = nn.Linear(4, 3)
        def forward(self, x):
            return self.fc(x)

    class Lazy:                                 # 100,000 clients, made when they are asked for
        def __len__(self): return 100_000
        def __getitem__(self, i):
            g = torch.Generator().manual_seed(i)
            return torch.randn(6, 4, generator=g), torch.randint(3, (6,), generator=g)

    result = fedbcgd.simulate(
        Net(), Lazy(), "scaffold", rounds=3, cohort=6, workers=int(sys.argv[1]), batch_size=2,
        loss=lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]),
    )
    print(result.module.fc.weight.double().sum().item().hex())
"""


def script(tmp_path, text=SCRIPT):
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(text))
    return str(path)


def test_code_of_a_script_reaches_the_workers(tmp_path):
    """No `if __name__ == "__main__"` is needed: workers are fresh interpreters that do not run the script."""
    path = script(tmp_path)
    outs = {
        subprocess.run([sys.executable, path, n], capture_output=True, text=True, check=True, timeout=120).stdout
        for n in ("0", "2")
    }
    assert len(outs) == 1
    assert outs.pop().startswith(("0x", "-0x"))


ENDLESS = """
    import os, sys, torch, fedbcgd
    from fedbcgd.backends.workers.backend import Workers
    original = Workers.__init__
    def init(self, *a):
        original(self, *a)
        print(*self.pids(), flush=True)
    Workers.__init__ = init
    clients = [(torch.randn(5, 4), torch.randint(3, (5,))) for _ in range(8)]
    def tell(info):
        print("round", flush=True)
        {what}
    fedbcgd.simulate(torch.nn.Linear(4, 3), clients, "scaffold", rounds=10**6, workers=2, cohort=4, callbacks=[tell])
"""


def gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc and /dev/shm")
@pytest.mark.parametrize("end", ["SIGKILL", "SIGTERM", "SIGINT", "error", "exit"])
def test_nothing_is_left_behind_after_an_exit_of_any_kind(tmp_path, end):
    before = set(os.listdir("/dev/shm"))
    what = {"error": "raise RuntimeError('x')", "exit": "os._exit(1)"}.get(end, "pass")
    path = script(tmp_path, ENDLESS.replace("{what}", what))
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, path], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    )
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 2
    assert process.stdout.readline() == "round\n"
    if end.startswith("SIG"):
        process.send_signal(getattr(signal, end))
    process.wait(30)
    deadline = time.monotonic() + 15
    while not all(map(gone, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert all(map(gone, pids))
    assert set(os.listdir("/dev/shm")) <= before
    assert os.listdir(tmp_path) == ["script.py"]


def test_of_many_clients_only_those_who_take_part_cost(tmp_path):
    """100,000 clients, 200 of which take part under SCAFFOLD with d = 100,000: state of the order of 200 vectors, and
    a table of 200 entries; the parent's memory does not grow with the federation."""
    import tracemalloc

    from fedbcgd.backends.inprocess import InProcess
    from fedbcgd.core.objective import objective
    from fedbcgd.core.server import Server
    from fedbcgd.engine.client_state import StateStore
    from fedbcgd.engine.job import Job

    class Lazy:
        def __len__(self):
            return 100_000

        def __getitem__(self, i):
            return torch.zeros(1, 100), torch.zeros(1).long()

    algorithm = fedbcgd.make_algorithm("scaffold", local_steps=1)
    model = nn.Linear(100, 1000, bias=False)
    layout = algorithm.uplink.layout(model)
    job = Job(algorithm, layout, model, objective(), 0, Lazy())
    server = Server(algorithm, layout, job.client.model.vector, 100_000, 20, 0)
    store = StateStore(("c",), layout.dim, layout.dtype, tmp_path / "clients.bin")
    backend = InProcess(job, store)
    tracemalloc.start()
    for _ in range(10):
        backend.run_round(server, server.plan())
        server.commit()
        store.commit()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 190 <= len(store.clients()) <= 200
    used = os.stat(tmp_path / "clients.bin").st_blocks * 512
    assert used <= 1.4 * 200 * 4 * layout.dim
    assert peak < 3e6


@pytest.fixture
def sent(monkeypatch):
    """What the workers are asked to do, in order: "evaluate", or the round of a task."""
    kinds = []
    send = workers_module.Worker.send

    def watched(worker, request):
        fit = isinstance(request, FitRequest)
        kinds.append(request.assignments[0].task.round if fit else "evaluate")
        send(worker, request)

    monkeypatch.setattr(workers_module.Worker, "send", watched)
    return kinds


def test_evaluation_goes_on_beside_the_next_round(net, toys, sent):
    """A worker with nothing left to train evaluates the model of the round before; rows are those of one process."""
    settings = {"rounds": 4, "evaluate_every": 2, "cohort": 3}
    beside = go(net, toys, **settings)
    begun = sent.index("evaluate")
    assert sent[:begun].count(2) == 3, "all of round 2 was handed out before round 1's model was evaluated"
    assert 3 in sent[begun:]
    assert [row["round"] for row in beside.rows] == [2, 4]
    alone = go(net, toys, workers=0, **settings)
    assert [{**row, "seconds": 0} for row in beside.rows] == [{**row, "seconds": 0} for row in alone.rows]


@pytest.mark.parametrize("options", [{"target": 0.99}, {"callbacks": [lambda info: None]}])
def test_evaluation_is_waited_for_where_something_depends_on_it(net, toys, sent, options):
    go(net, toys, **{"rounds": 2, "cohort": 3, **options})
    assert sent.index("evaluate") < sent.index(1)


def test_a_callback_sees_each_row_with_its_round(net, toys):
    seen = []
    go(net, toys, callbacks=[lambda info: seen.append((info.server.round, info.row["round"], len(info.rows)))])
    assert seen == [(1, 1, 1), (2, 2, 1), (3, 3, 1)]


def test_a_worker_killed_while_it_evaluates_beside_a_round(net, toys, monkeypatch, caplog):
    send, killed = workers_module.Worker.send, []

    def watched(worker, request):
        send(worker, request)
        if isinstance(request, EvaluateRequest) and not killed:
            killed.append(worker.pid)
            os.kill(worker.pid, signal.SIGKILL)

    monkeypatch.setattr(workers_module.Worker, "send", watched)
    with caplog.at_level(logging.WARNING, "fedbcgd"):
        disturbed = go(net, toys)
    assert "while evaluating" in caplog.text
    alone = go(net, toys, workers=0)
    assert same(state(disturbed), state(alone))
    assert [row["test_accuracy"] for row in disturbed.rows] == [row["test_accuracy"] for row in alone.rows]


def test_clients_computed_together_while_many_are_gone(monkeypatch):
    """Units of neighbours that still come span more of the plan than there are slots: nobody waits for ever."""
    monkeypatch.setattr(workers_module, "MAX_WAITING_BYTES", 0)  # so that the slots are few
    g = torch.Generator().manual_seed(0)
    clients = [(torch.randn(4, 1, 2, 2, generator=g), torch.randint(2, (4,), generator=g)) for _ in range(100)]
    ends = [
        simulate(
            Logistic(2, (1, 2, 2)), clients, "fedavg", rounds=3, cohort=100, batch_size=2, local_epochs=1, batch_clients=2,
            workers=workers, network={"profile": "datacentre", "dropout": 0.9},
        )
        for workers in (0, 1)
    ]  # fmt: skip
    assert same(*map(state, ends))
    assert ends[0].ledger.lost > 200


def test_answers_of_a_round_that_was_broken_off_do_not_count(net, toys):
    """The backend goes on after an error with other tasks, though a worker is still at an old one."""
    algorithm = fedbcgd.make_algorithm("scaffold", batch_size=3, local_epochs=1)
    job = make_job(net(), toys(), algorithm, None, 0)
    ends = []
    for broken in (False, True):
        store = StateStore(algorithm.state_names, job.layout.dim, job.layout.dtype)
        server = make_server(job, 5, Stop(rounds=9))
        backend = workers_module.Workers(job, store, 2, 5)
        try:
            if broken:
                plan = server.plan()
                backend.memory.publish(plan.broadcast)
                queue = workers_module._Round(backend, server, plan, 8)
                for worker in backend._workers:
                    while not worker.ready:
                        worker.connection.recv()
                        worker.ready = True
                    worker.send(queue.next(2))
            for _ in range(3):
                plan = server.plan()
                backend.run_round(server, plan)
                assert server.commit().accepted == 5
                store.commit()
        finally:
            backend.close()
            store.close()
        ends.append(server.x)
    assert torch.equal(*ends)


def test_ctrl_c_while_workers_are_ended_leaves_none(net, toys, monkeypatch):
    algorithm = fedbcgd.make_algorithm("fedavg")
    job = make_job(net(), toys(), algorithm, None, 0)
    store = StateStore((), job.layout.dim, job.layout.dtype)
    backend = workers_module.Workers(job, store, 2)
    pids, end = backend.pids(), workers_module.Worker.end

    def interrupted(self):
        os.kill(os.getpid(), signal.SIGINT)
        end(self)

    monkeypatch.setattr(workers_module.Worker, "end", interrupted)
    with pytest.raises(KeyboardInterrupt):
        backend.close()
    store.close()
    assert all(map(gone, pids))
    assert (backend._workers, backend._fds) == ([], [])


@pytest.mark.skipif(sys.platform != "linux", reason="processor time of another process")
@pytest.mark.parametrize("how", ["stopped", "silent"])
def test_a_worker_that_is_stopped_or_silent_is_named_and_replaced(net, toys, tmp_path, caplog, monkeypatch, how):
    monkeypatch.setenv("FEDBCGD_WORKER_TIMEOUT", "0.5")
    flag = str(tmp_path / "flag")

    def loss(model, batch):
        with contextlib.suppress(FileExistsError):
            os.close(os.open(flag, os.O_CREAT | os.O_EXCL))
            if how == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            else:
                threading.Event().wait()  # a deadlock
        return F.cross_entropy(model(batch[0]), batch[1])

    with caplog.at_level(logging.WARNING, "fedbcgd"):
        disturbed = go(net, toys, loss=loss)
    expected = "has been stopped" if how == "stopped" else "has used no processor time"
    assert re.search(rf"worker \d \(pid \d+\) {expected} for .* while client \d trained; .* runs again", caplog.text)
    assert same(state(disturbed), state(go(net, toys, workers=0)))


def test_a_worker_that_computes_is_not_silent_however_long_it_takes(net, toys, caplog, monkeypatch):
    """Over a second in one call that no other thread can interrupt, with a limit of a fifth of a second."""
    monkeypatch.setenv("FEDBCGD_WORKER_TIMEOUT", "0.2")
    slow = [True]

    def loss(model, batch):
        if slow:
            slow.pop()
            sum(range(10**8))
        return F.cross_entropy(model(batch[0]), batch[1])

    with caplog.at_level(logging.WARNING, "fedbcgd"):
        go(net, toys, loss=loss, rounds=1)
    assert "replaced" not in caplog.text


@pytest.mark.skipif(sys.platform != "linux", reason="processor time of another process")
def test_the_process_that_makes_workers_may_be_stopped_too(net, toys, monkeypatch):
    monkeypatch.setenv("FEDBCGD_WORKER_TIMEOUT", "0.5")
    go(net, toys, rounds=1)
    os.kill(processes._forkserver()._process.pid, signal.SIGSTOP)
    assert same(state(go(net, toys)), state(go(net, toys, workers=0)))


def test_a_task_that_every_worker_is_silent_over_ends_the_run(net, toys, monkeypatch):
    monkeypatch.setenv("FEDBCGD_WORKER_TIMEOUT", "0.2")
    with pytest.raises(WorkerLost, match=r"no processor time.*FEDBCGD_WORKER_TIMEOUT"):
        go(net, toys, loss=lambda model, batch: threading.Event().wait())


@pytest.mark.parametrize("text", ["", "-1", "nan", "soon"])
def test_a_limit_that_is_no_number_of_seconds(net, toys, monkeypatch, text):
    monkeypatch.setenv("FEDBCGD_WORKER_TIMEOUT", text)
    with pytest.raises(UserError, match="FEDBCGD_WORKER_TIMEOUT: expected seconds"):
        go(net, toys)


def test_time_in_which_nobody_looked_is_no_silence(monkeypatch):
    """Ctrl-Z stops the parent with its workers: when all go on, nobody was silent."""
    liveness = processes.LivenessMonitor(os.getpid())
    monkeypatch.setattr(processes, "_processor_time", lambda pid: 1.0)
    monkeypatch.setattr(processes, "_is_stopped", lambda pid: True)
    clock = [0.0]
    monkeypatch.setattr(processes.time, "monotonic", lambda: clock[0])
    liveness._due = 0.0
    for clock[0] in (0.0, 10_000.0, 10_001.0, 10_005.0, 30_000.0):
        assert liveness.lost() == ""
    for k in range(20):
        clock[0] = 40_000.0 + 6 * k
        liveness.lost()
    clock[0] = 50_000.0
    assert liveness.lost().startswith("has been stopped")


def test_what_was_sent_is_recorded_in_the_order_of_the_plan(net, toys):
    """The longest tasks go out first and come back in any order; the record is the same for any number of workers."""
    records = []
    for workers in (0, 1, 2):
        algorithm = fedbcgd.make_algorithm("fedbcgd", blocks=2, batch_size=3, local_epochs=1)
        job = make_job(net(), toys(), algorithm, None, 0)
        rounds = []
        network = NetworkSimulator(job, None)
        server = make_server(job, 5, Stop(rounds=3), network)
        store = StateStore(algorithm.state_names, job.layout.dim, job.layout.dtype)
        backend = make_backend(job, store, 5, Placement(workers=workers))
        try:
            on_commit = lambda sent=network, rounds=rounds: rounds.append(sent.sent.row())  # noqa: E731
            Loop(server, backend, Stop(rounds=3), hooks=network, on_commit=on_commit).run()
        finally:
            backend.close()
            store.close()
        records.append(rounds)
    assert [len(sent["clients"]) for sent in records[0]] == [5, 5, 5]
    assert records[0] == records[1] == records[2]
