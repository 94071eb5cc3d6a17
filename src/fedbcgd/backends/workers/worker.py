"""A worker process: does clients' work as it is told, one task at a time, with one thread.

Started by `processes.py`, as a fork of the forkserver, which is this module too, or as an interpreter of its own. What it
needs comes as descriptors: the job (frozen), the memory shared with the server (broadcast and upload slots), and the slots
of client state.
"""

import contextlib
import gc
import mmap
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from typing import Any

from fedbcgd.backends.workers.processes import Line
from fedbcgd.errors import shortage
from fedbcgd.outputs import make_lasting


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # blocked already; ignored also by whatever a user's code starts
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a closed terminal, too, is the parent's to handle
    make_lasting()  # what a user's code prints ends no task
    # A parent that ignores it hands that down, and forks could not be waited for.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    parent, descriptor, how = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    _die_with(parent)
    line = Line(socket.socket(fileno=descriptor))
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone: so are we
        serve(line if how == ["alone"] else serve_forks(line, float(how[1])))


def prepare() -> None:
    """Import all that a worker needs."""
    import torch

    torch.set_num_threads(1)
    import fedbcgd.backends.workers.memory
    import fedbcgd.backends.workers.shared
    import fedbcgd.engine.client_state  # noqa: F401


def serve_forks(line: Line, idle: float) -> Line:
    """Make forks of this process when asked to. It returns in each of them, with the line to listen to."""
    gc.collect()
    gc.freeze()  # what is there now stays, and stays shared
    mine = os.getpid()
    forks: set[int] = set()
    while True:
        if not line.heard(idle):
            if forks:
                continue
            sys.exit()
        said = line.recv()
        if said[0] == "ended":
            forks.discard(said[1])
            line.send(_ended(said[1]))
            continue
        (_, environment, folder, streams), (descriptor, *there) = said
        try:
            fork = os.fork()
        except OSError as error:
            fork = -1
            line.send(shortage(error) or f"a process cannot be made: {error.strerror}")
        if not fork:
            _die_with(mine)
            line.close()
            for stream, now in zip(streams, there, strict=True):
                os.dup2(now, stream)
                os.close(now)
            _as_the_parent(environment, folder)
            return Line(socket.socket(fileno=descriptor))
        for each in (descriptor, *there):
            os.close(each)
        if fork > 0:
            forks.add(fork)
            line.send(fork)


def _ended(fork: int, seconds: float = 10) -> int | None:
    """The exit code of a fork, as subprocess has them; None if it does not end."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(fork, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    return None


def _as_the_parent(environment: dict[str, str], folder: str) -> None:
    import numpy as np

    os.environ.clear()
    os.environ.update(environment)
    with contextlib.suppress(OSError):
        os.chdir(folder)
    np.random.seed()  # noqa: NPY002  (for users' code: forks would draw the same)


def serve(line: Line) -> None:
    (path, sizes), descriptors = line.recv()
    try:
        desk = JobServer(path, *sizes, *descriptors)
        line.send(("ready",))
    except BaseException as error:
        line.send(failure(error))
        return
    while True:
        word, *arguments = line.recv()
        try:
            answer = (word, *getattr(desk, word)(*arguments))
        except BaseException as error:
            answer = failure(error)
        line.send(answer)


class JobServer:
    """The job thawed, and the shared memory laid out as the parent has it."""

    def __init__(
        self, path: list[str], job_size: int, job_length: int, job_fd: int, shared_fd: int, state_fd: int | None = None
    ):
        sys.path[:] = path  # the user's modules are found as in the parent
        import torch

        torch.set_num_threads(1)
        from fedbcgd.backends.workers.memory import RoundMemory
        from fedbcgd.backends.workers.shared import thaw
        from fedbcgd.engine.client_state import SlotFile

        self.job = thaw(job_fd, job_size, job_length)
        layout, names = self.job.layout, self.job.algorithm.state_names
        self.memory = RoundMemory(mmap.mmap(shared_fd, 0), self.job.algorithm, layout)
        self.state = None if state_fd is None else SlotFile(state_fd, names, layout.dim, layout.dtype)
        self.job.client  # noqa: B018  (build the flat model now, not within the first task)

    def fit(self, unit: Any, tasks: Any, epoch: int, places: Any, old: Any, new: Any) -> tuple[Any, ...]:
        """Train the clients of a unit; for each a place for its upload, and the slots of its state before and after."""
        slots = [self.memory.slot(place) for place in places]
        states = [self.state.open(k) if self.state is not None and k is not None else {} for k in old]
        broadcast = self.memory.broadcast(tasks[0].round, epoch)
        made = self.job.fit_unit(broadcast, tasks, states, [slot.allocate for slot in slots])
        said = []
        for slot, (upload, update), before, after in zip(slots, made, old, new, strict=True):
            if self.state is not None and after is not None:
                self.state.write(after, before, update)
            told = (upload.examples, upload.steps, upload.gradient_evaluations, upload.train_loss)
            said.append((slot.put(upload), told))
        return unit, places, said, dict(self.job.client.seconds)

    def evaluate(self, index: int, start: int, stop: int) -> tuple[Any, ...]:
        return index, self.job.evaluate(self.memory.evaluated, start, stop)


def failure(error: BaseException) -> tuple[str, bytes, str]:
    """The error itself where it can travel, and how it came about as text."""
    import cloudpickle

    text = "".join(traceback.format_exception(error))
    try:
        body = cloudpickle.dumps(error)
        pickle.loads(body)  # some errors only fail on arrival
    except Exception:
        body = b""
    return "failed", body, text


def _die_with(parent: int) -> None:
    """End at once when the parent does, however it ends (Linux; elsewhere the closed connection tells, after the task)."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        sys.exit(1)
