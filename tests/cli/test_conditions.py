"""Runs whose output nobody reads, whose terminal is closed, or that have too little of something: as real processes."""

import errno
import json
import os
import pty
import shlex
import signal
import subprocess
import sys
import time

import pytest

from fedbcgd.display.terminal import terminable
from fedbcgd.engine.signals import HungUp
from fedbcgd.errors import shortage

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals, limits and descriptors of POSIX")

COMMAND = shlex.join([sys.executable, "-m", "fedbcgd"])
QUICK = """
[algorithm]
local_steps = 1
batch_size = 4

[model]
name = "logistic"

[run]
rounds = 6
cohort = 3
workers = 2
evaluate_every = 1
"""
TALKS = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(784, 10)

    def forward(self, x):
        print("a model that talks", flush=True)
        return self.fc(x.flatten(1))
"""


def shell(script, cwd, **more):
    done = subprocess.run(["bash", "-c", script], cwd=cwd, capture_output=True, text=True, timeout=120, **more)
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture
def place(tmp_path):
    (tmp_path / "run.toml").write_text(QUICK)
    return tmp_path


def check_finished(out, rounds=6):
    assert json.loads((out / "summary.json").read_text())["rounds"] == rounds
    assert (out / "curve.png").exists()
    assert len((out / "metrics.jsonl").read_text().splitlines()) == rounds


def test_a_broken_pipe_does_not_end_a_run(place):
    """Neither what the command writes, nor what a user's code prints in a worker."""
    (place / "own.py").write_text(TALKS)
    run = f"{COMMAND} run run.toml --out out --json --set model.name=own:Net"
    done = shell(f"set -o pipefail; {run} | head -1", place, env={**os.environ, "PYTHONPATH": _path(place)})
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1
    check_finished(place / "out")


def _path(place):
    return os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")])


def test_closed_standard_streams_do_not_end_a_run(place):
    assert shell(f"{COMMAND} run run.toml --out out <&- >&- 2>&-", place).returncode == 0
    check_finished(place / "out")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_output_that_finds_no_room_is_said_once(place):
    done = shell(f"{COMMAND} run run.toml --out out --json > /dev/full", place)
    assert done.stderr == "fedbcgd: standard output cannot be written: No space left on device; going on without it\n"
    assert done.returncode == 1
    check_finished(place / "out")


@pytest.mark.skipif(sys.platform != "linux", reason="limits as Linux has them")
@pytest.mark.parametrize(
    ("limit", "words"),
    [
        ("-n 16", "too many open files"),
        ("-v 200000", "out of memory"),
        ("-f 50", "a file became too large: raise the limit (ulimit -f)"),
    ],
)
def test_too_little_of_something_is_one_message(place, limit, words):
    done = shell(f"ulimit {limit}; exec {COMMAND} run run.toml --out out --quiet", place)
    assert done.returncode in (1, 2)
    assert words in done.stderr.lower()
    assert done.stderr.startswith("fedbcgd: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "out of memory"),
        (OSError(errno.ENOMEM, "x"), "out of memory"),
        (BlockingIOError(errno.EAGAIN, "x"), "ulimit -u"),
        (OSError(errno.ENOSPC, "x", "there/file"), "no space left on the disk (there/file)"),
        (RuntimeError("can't start new thread"), "ulimit -u"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: …"), "out of memory"),
        (ImportError("libx.so: failed to map segment from shared object"), "libx.so"),
        (SystemError("error return without exception set"), "out of memory"),
        (FileNotFoundError(errno.ENOENT, "x"), ""),
        (RuntimeError("unsupported memory format"), ""),
        (ValueError("out of memory"), ""),
    ],
)
def test_which_errors_are_shortages(error, words):
    assert words in shortage(error)
    assert bool(shortage(error)) == bool(words)


def test_a_closed_terminal_writes_a_checkpoint(place):
    """A real one: the kernel sends SIGHUP to everybody in its foreground, and whoever writes to it gets an error."""
    sets = ["run.rounds=1000000", "run.checkpoint_every=1000000"]
    arguments = [word for item in sets for word in ("--set", item)]
    child, terminal = pty.fork()
    if not child:
        os.chdir(place)
        os.execv(sys.executable, [sys.executable, "-m", "fedbcgd", "run", "run.toml", "--out", "out", *arguments])
    try:
        deadline = time.monotonic() + 60
        metrics = place / "out" / "metrics.jsonl"
        while not (metrics.exists() and len(metrics.read_bytes().splitlines()) > 2):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert not list((place / "out" / "checkpoint").glob("*.safetensors"))
    finally:
        os.close(terminal)
        deadline = time.monotonic() + 60
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.02)
    assert os.waitstatus_to_exitcode(ended[1]) == 129
    assert list((place / "out" / "checkpoint").glob("*.safetensors"))


def test_which_signals_end_a_run(monkeypatch):
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    with pytest.raises(KeyboardInterrupt) as stopped, terminable():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)
    assert not isinstance(stopped.value, HungUp)
    with pytest.raises(HungUp, match="whole"), terminable():
        try:
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(1)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("whole") from None
    assert {number: signal.getsignal(number) for number in before} == before


def test_a_run_under_nohup_goes_on():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with terminable():
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.01)
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
