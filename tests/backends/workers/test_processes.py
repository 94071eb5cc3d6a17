"""Where worker processes come from."""

import errno
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch

from fedbcgd import simulate
from fedbcgd.backends.workers import processes
from fedbcgd.errors import WorkerLost

linux = pytest.mark.skipif(sys.platform != "linux", reason="forks are for Linux")


def gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def soon(what, seconds=15.0):
    deadline = time.monotonic() + seconds
    while not what() and time.monotonic() < deadline:
        time.sleep(0.02)
    return what()


def weights(result):
    return torch.cat([p.detach().flatten() for p in result.module.parameters()])


@pytest.fixture
def fresh(monkeypatch):
    """No forkserver from an earlier test."""
    monkeypatch.setattr(processes, "_of_this_thread", threading.local())


def go(net, toys, **options):
    return simulate(net(), toys(), "scaffold", rounds=2, cohort=5, batch_size=3, **{"workers": 2} | options)


@pytest.mark.parametrize("forks", [pytest.param(True, marks=linux), False])
def test_forks_and_interpreters_give_the_same_bits(net, toys, monkeypatch, forks):
    monkeypatch.setattr(processes, "FORKS", forks)
    assert torch.equal(weights(go(net, toys)), weights(go(net, toys, workers=0)))


@pytest.mark.parametrize("forks", [pytest.param(True, marks=linux), False])
def test_how_a_worker_ended_is_known(monkeypatch, forks):
    monkeypatch.setattr(processes, "FORKS", forks)
    killed, left = processes.start(), processes.start()
    os.kill(killed.pid, signal.SIGKILL)
    assert killed.exit_reason() == "was killed by SIGKILL"
    left.connection.close()  # it hears nothing more
    assert left.exit_reason() == "exited with code 0"
    for worker in (killed, left):
        worker.end()
        assert gone(worker.pid)


@linux
def test_one_forkserver_serves_several_runs_and_its_workers_are_all_gone(net, toys, fresh, monkeypatch):
    pids, started = [], []
    start, spawn = processes.start, processes._spawn
    monkeypatch.setattr("fedbcgd.backends.workers.backend.start", lambda: pids.append(start()) or pids[-1])
    monkeypatch.setattr(processes, "_spawn", lambda *a, **k: started.append(spawn(*a, **k)) or started[-1])
    for _ in range(3):
        go(net, toys)
    assert (len(pids), len(started)) == (6, 1)
    assert all(gone(worker.pid) for worker in pids)
    children = Path(f"/proc/{started[0].pid}/task/{started[0].pid}/children").read_text()
    assert children == "", "nothing waits to be asked how it ended"


@linux
def test_a_forkserver_that_nobody_asks_leaves(net, toys, fresh, monkeypatch):
    monkeypatch.setattr(processes, "IDLE_SECONDS", 0.2)
    first = processes._forkserver()
    assert soon(lambda: not first.alive)
    assert torch.equal(weights(go(net, toys)), weights(go(net, toys, workers=0))), "another one is started"


@linux
def test_a_forkserver_that_is_killed_in_the_middle_of_a_run(net, toys, fresh, caplog):
    """Its workers go with it; new ones come from a new one, and no task is blamed."""
    killed = []

    def kill(info):
        if not killed:
            forkserver = processes._of_this_thread.forkserver
            killed.append(forkserver._process.pid)
            os.kill(killed[0], signal.SIGKILL)
            forkserver._process.wait()

    disturbed = go(net, toys, callbacks=[kill], workers=4)
    assert killed
    assert "ended with its forkserver" in caplog.text
    assert torch.equal(weights(disturbed), weights(go(net, toys, workers=0)))


@linux
def test_a_forkserver_that_cannot_start_is_one_message(fresh, monkeypatch, tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit(7)")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(WorkerLost, match=r"expected worker processes to start.*code 7.*workers=0"):
        processes.start()


@linux
def test_a_forkserver_that_cannot_fork_is_one_message_too(fresh, monkeypatch, tmp_path):
    """It stays, for when there is room again."""
    (tmp_path / "sitecustomize.py").write_text(
        "import errno, os, sys\n"
        "def fork(made=os.fork):\n"
        f"    if os.path.exists({str(tmp_path / 'full')!r}):\n"
        "        raise BlockingIOError(errno.EAGAIN, 'no room')\n"
        "    return made()\n"
        "os.fork = fork\n"
    )
    (tmp_path / "full").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(WorkerLost, match=r"expected worker processes to start, got: too many processes .*workers=0"):
        processes.start()
    forkserver = processes._of_this_thread.forkserver
    assert len(os.listdir("/proc/self/fd")) <= before + 2, "the connection to the forkserver"
    (tmp_path / "full").unlink()
    worker = processes.start()
    assert worker.forkserver is forkserver
    worker.end()


@linux
def test_a_parent_that_ignores_its_children(fresh):
    """What it ignores its children would ignore too, and a forkserver waits for its forks."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        killed = processes.start()
        os.kill(killed.pid, signal.SIGKILL)
        assert killed.exit_reason() == "was killed by SIGKILL"
        assert killed.forkserver.alive
    finally:
        signal.signal(signal.SIGCHLD, before)
    killed.end()


@pytest.fixture
def impatient():
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(5)
    yield
    socket.setdefaulttimeout(before)


@pytest.mark.parametrize("forks", [pytest.param(True, marks=linux), False])
def test_a_timeout_for_sockets_is_not_for_ours(fresh, impatient, monkeypatch, forks):
    monkeypatch.setattr(processes, "FORKS", forks)
    worker = processes.start()
    assert os.get_blocking(worker.connection.fileno())
    time.sleep(0.3)  # it waits for its job
    worker.connection.close()
    assert worker.exit_reason() == "exited with code 0"


@linux
@pytest.mark.parametrize("early", [True, False])
def test_a_folder_that_is_deleted(net, toys, fresh, monkeypatch, tmp_path, early):
    if early:
        processes.start().end()
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    here.rmdir()
    assert torch.equal(weights(go(net, toys)), weights(go(net, toys, workers=0)))


@linux
@pytest.mark.parametrize("forks", [True, False])
def test_a_parent_that_cannot_make_processes_is_one_message(fresh, monkeypatch, forks):
    def refuse(*args, **options):
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(processes, "FORKS", forks)
    monkeypatch.setattr(processes.subprocess, "Popen", refuse)
    processes.start_early()
    with pytest.raises(
        WorkerLost,
        match=r"expected worker processes to start, got: too many processes .*ulimit -u\); workers=0 computes",
    ):
        processes.start()


def in_a_thread(what):
    """Affinity and niceness belong to a thread, and end with it."""
    failed = []

    def run():
        try:
            what()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    for error in failed:
        raise error


def lower_limit():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))


CHANGES = {
    "limits": (lower_limit, lambda pid: resource.prlimit(pid, resource.RLIMIT_NOFILE)),
    "umask": (
        lambda: os.umask(0o27),
        lambda pid: Path(f"/proc/{pid}/status").read_text().split("Umask:")[1].split()[0],
    ),
    "cores": (lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}), os.sched_getaffinity),
    "niceness": (lambda: os.nice(1), lambda pid: os.getpriority(os.PRIO_PROCESS, pid)),
}


@linux
@pytest.mark.parametrize("change", CHANGES)
def test_a_forkserver_that_began_in_other_circumstances_is_replaced(fresh, change):
    make, seen = CHANGES[change]
    if change == "cores" and processes.cores() == 1:
        pytest.skip("there is one core")
    limit, umask = resource.getrlimit(resource.RLIMIT_NOFILE), os.umask(0o22)

    def check():
        first = processes._forkserver()
        assert processes._forkserver() is first
        before = seen(first._process.pid)
        make()
        second = processes._forkserver()
        assert not first.alive
        assert processes._forkserver() is second
        mine = seen(threading.get_native_id())
        assert seen(second._process.pid) == mine != before
        second.end()

    try:
        in_a_thread(check)
    finally:
        os.umask(umask)
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)


@linux
def test_a_run_goes_on_when_its_forkserver_is_replaced(net, toys, fresh):
    """By another run within it, in other circumstances."""
    umask = os.umask(0o22)
    inner = []

    def callback(info):
        if not inner:
            os.umask(0o27)
            inner.append(weights(go(net, toys)))

    try:
        outer = weights(go(net, toys, callbacks=[callback]))
    finally:
        os.umask(umask)
    expected = weights(go(net, toys, workers=0))
    assert torch.equal(outer, expected)
    assert torch.equal(inner[0], expected)


@linux
def test_a_forkserver_does_not_hold_the_output_open(fresh):
    """Whoever reads it from a pipe sees its end when this process closes it, not when the forkserver leaves."""
    reading, writing = os.pipe()
    output = os.dup(1)
    os.dup2(writing, 1)
    try:
        forkserver = processes._forkserver()
    finally:
        os.dup2(output, 1)
        os.close(output)
        os.close(writing)
    try:
        assert forkserver.alive
        assert select.select([reading], [], [], 1)[0], "nobody writes any more"
        assert os.read(reading, 1) == b""
    finally:
        os.close(reading)
        forkserver.end()


@linux
def test_threads_have_forkservers_of_their_own(net, toys, fresh):
    """One that ends takes its processes with it, and nobody else's."""
    expected, results = weights(go(net, toys, workers=0)), []

    def run(made):
        results.append(weights(go(lambda: made, toys)))

    # Made here: torch's generator, that weights are drawn from, is one for all threads.
    threads = [threading.Thread(target=run, args=(net(),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(results) == 2
    assert all(torch.equal(r, expected) for r in results)


SCRIPT = """
    import os, sys, time, torch, fedbcgd, random, numpy
    from fedbcgd.backends.workers import processes
    os.environ["MINE"], where = "late", os.getcwd()
    processes.start_early()
    os.environ["MINE"] = "later"
    os.makedirs("inner"); os.chdir("inner")
    def loss(model, batch):
        drawn = random.random(), numpy.random.random()
        with open(f"{os.getpid()}", "w") as file:
            file.write(repr((os.environ["MINE"], os.getcwd().endswith("inner"), os.environ["OMP_NUM_THREADS"], *drawn)))
        print("said by a worker", flush=True)
        for _ in range(3000):  # until the other worker has had a task
            if len(os.listdir(".")) > 1:
                break
            time.sleep(0.01)
        return model(batch[0]).sum()
    clients = [(torch.randn(5, 4), torch.randint(3, (5,))) for _ in range(8)]
    fedbcgd.simulate(torch.nn.Linear(4, 3), clients, "fedavg", rounds=1, workers=2, cohort=8, loss=loss)
    os.fork() or os._exit(0)          # a fork of the user's leaves our processes alone
    os.wait()
    fedbcgd.simulate(torch.nn.Linear(4, 3), clients, "fedavg", rounds=1, workers=2, cohort=8)
    print(*(open(name).read() for name in sorted(os.listdir("."))), sep="\\n")
"""


@linux
def test_a_worker_is_where_its_parent_is_now(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT))
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    said = [line for line in done.stdout.splitlines() if line.startswith("(")]
    assert "said by a worker" in done.stdout
    seen = [eval(line) for line in said]
    assert [values[:3] for values in seen] == [("later", True, "1")] * 2
    assert len({values[3] for values in seen}) == len({values[4] for values in seen}) == 2, "draws of their own"


@linux
def test_nothing_is_left_when_the_parent_is_killed(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(
        "import time\nfrom fedbcgd.backends.workers import processes\nworker = processes.start()\n"
        "print(worker.pid, worker.forkserver._process.pid, flush=True)\ntime.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, path], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 2
    assert not any(map(gone, pids))
    process.kill()
    process.wait()
    assert soon(lambda: all(map(gone, pids)))
