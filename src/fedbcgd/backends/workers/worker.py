"""A worker process: it answers one request at a time, with one thread. The forkserver runs this module too.

`processes.py` starts a worker as a fork of the forkserver or as a new interpreter. It gets as descriptors: the pickled job,
the memory shared with the main process (broadcast and upload slots), and the slots of client state.
"""

import contextlib
import gc
import mmap
import os
import signal
import socket
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING

from fedbcgd.backends.workers.processes import MessageConnection
from fedbcgd.backends.workers.protocol import (
    EvaluateReply,
    ExitCodeReply,
    ExitCodeRequest,
    Failed,
    FitReply,
    FitRequest,
    ForkRefused,
    ForkReply,
    JobRequest,
    Ready,
    Reply,
    Request,
    Unit,
)
from fedbcgd.errors import shortage
from fedbcgd.outputs import protect_streams

if TYPE_CHECKING:
    from fedbcgd.backends.workers.memory import StoredUpload


def main() -> None:
    """Run a process that `processes.py` has started."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # blocked already; processes that a user's code starts inherit this
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the parent handles a closed terminal
    protect_streams()  # so that a print in a user's code cannot end a task
    # If the parent ignores SIGCHLD this process does too, and could not wait for forks.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    parent, descriptor, how = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    _exit_with_parent(parent)
    connection = MessageConnection(socket.socket(fileno=descriptor))
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent ended
        serve(connection if how == ["standalone"] else serve_forks(connection, float(how[1])))


def prepare() -> None:
    """Import what a worker needs."""
    import torch

    torch.set_num_threads(1)
    import fedbcgd.backends.workers.memory
    import fedbcgd.backends.workers.shared
    import fedbcgd.engine.client_state  # noqa: F401


def serve_forks(connection: MessageConnection, idle: float) -> MessageConnection:
    """Fork this process on request; end it after `idle` seconds without forks and requests.

    Returns:
        Only in a fork: the connection on which it gets its messages.
    """
    gc.collect()
    gc.freeze()  # so that collections in the forks do not touch, and copy, the shared memory
    mine = os.getpid()
    forks: set[int] = set()
    while True:
        if not connection.poll(idle):
            if forks:
                continue
            sys.exit()
        request = connection.recv()
        if isinstance(request, ExitCodeRequest):
            forks.discard(request.pid)
            connection.send(ExitCodeReply(_wait_for(request.pid)))
            continue
        descriptor, *outputs = connection.recv_descriptors(1 + len(request.streams))
        try:
            fork = os.fork()
        except OSError as error:
            fork = -1
            connection.send(ForkRefused(shortage(error) or f"cannot fork: {error.strerror}"))
        if not fork:
            _exit_with_parent(mine)
            connection.close()
            for stream, output in zip(request.streams, outputs, strict=True):
                os.dup2(output, stream)
                os.close(output)
            _adopt_environment(request.environment, request.folder)
            return MessageConnection(socket.socket(fileno=descriptor))
        for received in (descriptor, *outputs):
            os.close(received)
        if fork > 0:
            forks.add(fork)
            connection.send(ForkReply(fork))


def _wait_for(fork: int, seconds: float = 10) -> int | None:
    """Return the exit code of a fork, as in `subprocess`; None if it does not end in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(fork, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    return None


def _adopt_environment(environment: dict[str, str], folder: str) -> None:
    import numpy as np

    os.environ.clear()
    os.environ.update(environment)
    with contextlib.suppress(OSError):
        os.chdir(folder)
    np.random.seed()  # noqa: NPY002  (for users' code: otherwise all forks would draw the same)


def serve(connection: MessageConnection) -> None:
    """Prepare the job, then answer requests until the connection is closed."""
    request: JobRequest = connection.recv()
    descriptors = connection.recv_descriptors(request.descriptors)
    try:
        handler = RequestHandler(request, *descriptors)
        connection.send(Ready())
    except BaseException as error:
        connection.send(Failed.of(error))
        return
    while True:
        connection.send(handler.reply(connection.recv()))


class RequestHandler:
    """Answers FitRequest and EvaluateRequest in a worker, with the job and the shared memory.

    Args:
        request: describes the pickled job.
        job_fd: the descriptor of the pickled job.
        shared_fd: the descriptor of the memory of a round (`RoundMemory`).
        state_fd: the descriptor of the slots of client state; None: clients keep no state.
    """

    def __init__(self, request: JobRequest, job_fd: int, shared_fd: int, state_fd: int | None = None):
        sys.path[:] = request.path  # the user's modules are found as in the parent
        import torch

        torch.set_num_threads(1)
        from fedbcgd.backends.workers.memory import RoundMemory
        from fedbcgd.backends.workers.shared import unpickle_from_memory
        from fedbcgd.engine.client_state import SlotFile

        self.job = unpickle_from_memory(job_fd, request.buffer_bytes, request.pickle_bytes)
        layout, names = self.job.layout, self.job.algorithm.state_names
        self.memory = RoundMemory(mmap.mmap(shared_fd, 0), self.job.algorithm, layout)
        self.state = None if state_fd is None else SlotFile(state_fd, names, layout.dim, layout.dtype)
        self.job.client  # noqa: B018  (build the flat model now, not within the first task)

    def reply(self, request: Request) -> Reply | Failed:
        """Return the reply to a request."""
        try:
            if isinstance(request, FitRequest):
                return self._fit(request)
            return EvaluateReply(self.job.evaluate(self.memory.evaluated, request.start, request.stop))
        except BaseException as error:  # also a sys.exit in a user's code, which must not end this process
            return Failed.of(error)

    def _fit(self, request: FitRequest) -> FitReply:
        uploads: list[StoredUpload] = []
        seconds: Counter[str] = Counter()
        for unit in request.units:
            uploads += self._fit_unit(unit, request.epoch)
            seconds.update(self.job.client.seconds)
        return FitReply(tuple(uploads), dict(seconds))

    def _fit_unit(self, unit: Unit, epoch: int) -> "list[StoredUpload]":
        """Train the clients of a unit, and write their uploads and new states into their slots."""
        file = self.state
        tasks = [a.task for a in unit]
        slots = [self.memory.slot(a.upload_slot) for a in unit]
        states = [file.open(a.old_state) if file is not None and a.old_state is not None else {} for a in unit]
        broadcast = self.memory.broadcast(tasks[0].round, epoch)
        results = self.job.fit_unit(broadcast, tasks, states, [slot.allocate for slot in slots])
        stored = []
        for assignment, slot, (upload, update) in zip(unit, slots, results, strict=True):
            if file is not None and assignment.new_state is not None:
                file.write(assignment.new_state, assignment.old_state, update)
            stored.append(slot.put(upload))
        return stored


def _exit_with_parent(parent: int) -> None:
    """Have Linux kill this process when its parent ends. Elsewhere it ends after its task, as the connection is closed."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        sys.exit(1)
