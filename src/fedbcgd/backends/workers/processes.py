"""Starts worker processes, each with one thread. They share no memory with this process but what it passes to them.

A worker would spend most of its start-up importing torch. So one process, the forkserver, imports it once, and workers are
forks of that process, made in milliseconds. It is a new interpreter that never computes and never runs a user's code. It is
started as soon as a run is certain (`start_early`), serves later runs too, and ends after a while without requests. On
systems where forks are not safe (macOS) every worker is a new interpreter.
"""

import atexit
import contextlib
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any
from weakref import WeakSet

from fedbcgd.backends.workers.protocol import (
    ExitCodeReply,
    ExitCodeRequest,
    ForkRefused,
    ForkReply,
    ForkRequest,
    JobRequest,
    Request,
)
from fedbcgd.errors import UserError, WorkerLost, shortage

FORKS = sys.platform == "linux"
IDLE_SECONDS = 30.0  # without workers and requests, after which a forkserver ends

TIMEOUT_VARIABLE = "FEDBCGD_WORKER_TIMEOUT"  # replaces the next two, in seconds; 0: wait for ever
STOPPED_SECONDS = 60.0  # after which a process that is stopped counts as lost
SILENT_SECONDS = 600.0  # after which one that is not stopped but uses no processor time does; it may wait for something

# One thread; and glibc keeps the memory of activations instead of mapping and unmapping it at every step.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_PROC_BIND": "false",  # otherwise every worker would run on the first core
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
    "MALLOC_TOP_PAD_": "268435456",
}


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class LivenessMonitor:
    """Watches whether a process still uses processor time.

    Time is counted in checks, not on a clock: if this process is stopped as well (Ctrl-Z, a suspended machine), it makes no
    checks, and no process counts as lost.
    """

    def __init__(self, pid: int):
        self._pid = pid
        self._stopped, self._silent = _timeouts()
        self.every = min(5.0, self._stopped / 10, self._silent / 10)  # seconds between two checks
        self._due = time.monotonic()
        self.clear()

    def clear(self) -> None:
        """Start counting again: the process has replied, or has nothing to do."""
        self._used: float | None = None
        self._seconds = 0.0

    def lost(self) -> str:
        """Return why the process counts as lost; empty if it does not. It checks at most once in `every` seconds."""
        if time.monotonic() < self._due:
            return ""
        self._due = time.monotonic() + self.every
        used = _processor_time(self._pid)
        self._seconds = self._seconds + self.every if used is not None and used == self._used else 0.0
        self._used = used
        if self._seconds >= self._stopped and _is_stopped(self._pid):
            return f"has been stopped for {self._seconds:.3g} s"
        if self._seconds >= self._silent:
            return f"has used no processor time for {self._seconds:.3g} s ({TIMEOUT_VARIABLE} sets the limit)"
        return ""


def _timeouts() -> tuple[float, float]:
    text = os.environ.get(TIMEOUT_VARIABLE)
    if text is None:
        return STOPPED_SECONDS, SILENT_SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds >= 0:
        raise UserError(f"{TIMEOUT_VARIABLE}: expected seconds, at least 0 (which waits for ever), got {text!r}")
    return (seconds or math.inf,) * 2


def _processor_time(pid: int) -> float | None:
    """Return the processor time of all threads of a process, in seconds; None if it is unknown."""
    if sys.platform != "linux":
        return None
    try:
        return time.clock_gettime((~pid << 3) | 2)  # what clock_getcpuclockid(3) gives
    except OSError:
        return None


def _is_stopped(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except OSError:
        return False


class MessageConnection:
    """A connection for messages (see `protocol`) that also carries descriptors."""

    def __init__(self, end: socket.socket):
        end.setblocking(True)  # also if this process has a default timeout
        self._socket = end
        self._connection = Connection(os.dup(end.fileno()))

    def send(self, message: Any, descriptors: Sequence[int] = ()) -> None:
        # Connection.send would make a new pickler for each message, which takes most of the time.
        self._connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
        if descriptors:
            socket.send_fds(self._socket, [b"."], list(descriptors))

    def recv(self) -> Any:
        return self._connection.recv()

    def recv_descriptors(self, count: int) -> list[int]:
        """Return the descriptors that follow the last message; the message itself says how many there are."""
        return socket.recv_fds(self._socket, 1, count)[1]

    def poll(self, seconds: float) -> bool:
        """Wait for a message, at most this long, and return whether there is one."""
        return self._connection.poll(seconds)

    def fileno(self) -> int:
        return self._connection.fileno()

    def close(self) -> None:
        self._connection.close()
        self._socket.close()


class Worker:
    """One process and the connection to it.

    Attributes:
        pending: the requests that it has not answered yet, in order.
        ready: whether it has prepared the job.
    """

    def __init__(self, pid: int, end: socket.socket, wait: Callable[[], int | None], forkserver: "Forkserver | None"):
        self.pid = pid
        self.connection = MessageConnection(end)
        self.pending: deque[Request] = deque()
        self.ready = False
        self.forkserver = forkserver
        self.liveness = LivenessMonitor(pid)
        self._wait = wait
        self._code: int | None = None

    def prepare(self, buffer_bytes: int, pickle_bytes: int, descriptors: Sequence[int]) -> None:
        """Send the job. The worker replies when it is ready.

        Args:
            buffer_bytes: the bytes of the pickled job's buffers, see `shared.pickle_to_memory`.
            pickle_bytes: the bytes of its pickle.
            descriptors: those of the job, of the memory of a round and, if clients keep state, of the slots of state.
        """
        # A dead worker is noticed when its reply is read.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send(JobRequest(sys.path, buffer_bytes, pickle_bytes, len(descriptors)), descriptors)

    def send(self, request: Request) -> None:
        self.pending.append(request)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send(request)

    @property
    def orphaned(self) -> bool:
        """Whether it ended because its forkserver did."""
        return self.forkserver is not None and not self.forkserver.alive

    def end(self) -> None:
        """Kill the process and close the connection; safe to call twice."""
        self.connection.close()
        if self._code is None and not self.orphaned:  # until it is waited for, the system does not reuse its pid
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self._code = self._wait()

    def exit_reason(self) -> str:
        """Return how the process ended, as a verb phrase such as "was killed by SIGKILL"."""
        self._code = None if self.orphaned else self._wait()
        if self._code is None:
            return "ended with its forkserver" if self.orphaned else "closed its connection"
        if self._code < 0:
            return f"was killed by {signal.Signals(-self._code).name}"
        return f"exited with code {self._code}"


def start() -> Worker:
    """Start a worker, which waits for its job.

    Raises:
        WorkerLost: no process can be started.
    """
    try:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                return _start_worker(ours, theirs)
            except BaseException:
                ours.close()
                raise
    except (ForkserverGone, OSError) as error:
        reason = shortage(error) or getattr(error, "strerror", None) or error
        raise WorkerLost(
            f"workers: expected worker processes to start, got: {reason}; workers=0 computes in this process"
        ) from None


def _start_worker(ours: socket.socket, theirs: socket.socket) -> Worker:
    if not FORKS:
        process = _spawn(theirs, "standalone")
        return Worker(process.pid, ours, lambda: _wait_for(process, 30), None)
    try:
        forkserver = _forkserver()
        pid = forkserver.fork(theirs)
    except ForkserverGone:  # it may have ended just before the request: try once more
        forkserver = _forkserver()
        pid = forkserver.fork(theirs)
    return Worker(pid, ours, lambda: forkserver.exit_code(pid), forkserver)


def start_early() -> None:
    """Start the forkserver, so that it imports torch while this process does other things."""
    if FORKS:
        with contextlib.suppress(OSError):  # `start` reports it
            _forkserver()


class ForkserverGone(Exception):
    """The forkserver ended or hangs."""


class Forkserver:
    """The process that makes workers by forking itself."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = _spawn(theirs, "forkserver", str(IDLE_SECONDS), streams=subprocess.DEVNULL)
        self._owner = os.getpid()
        self.inherited = _inherited()
        self._connection = MessageConnection(ours)
        self._lock = threading.Lock()

    @property
    def alive(self) -> bool:
        """Whether it can be used by this process."""
        return self._owner == os.getpid() and self._process.poll() is None

    def fork(self, end: socket.socket) -> int:
        """Fork a worker that listens on this socket; its output goes to this process's standard streams.

        Returns:
            Its process id.
        """
        environment = {**os.environ, **_environment()}
        streams = tuple(fd for fd in (1, 2) if _is_open(fd))
        reply = self._request(ForkRequest(environment, _folder(), streams), [end.fileno(), *streams])
        if isinstance(reply, ForkRefused):
            raise ChildProcessError(reply.reason)  # another attempt would not help
        assert isinstance(reply, ForkReply)
        return reply.pid

    def exit_code(self, pid: int) -> int | None:
        """Wait for a worker to end and return its exit code; None if it does not end."""
        try:
            reply = self._request(ExitCodeRequest(pid))
        except ForkserverGone:
            return None
        assert isinstance(reply, ExitCodeReply)
        return reply.code

    def _request(
        self, request: ForkRequest | ExitCodeRequest, descriptors: Sequence[int] = ()
    ) -> ForkReply | ForkRefused | ExitCodeReply:
        with self._lock:
            try:
                self._connection.send(request, descriptors)
                liveness = LivenessMonitor(self._process.pid)
                while not self._connection.poll(liveness.every):
                    if reason := liveness.lost():
                        self.end()
                        raise ForkserverGone(f"the forkserver {reason}")
                reply: ForkReply | ForkRefused | ExitCodeReply = self._connection.recv()
                return reply
            except (EOFError, OSError) as error:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(10)
                code = self._process.poll()
                self.end()
                raise ForkserverGone(f"the forkserver exited with code {code}") from error
            except BaseException:  # interrupted: this reply would be taken for the reply to the next request
                self.end()
                raise

    def end(self) -> None:
        """Kill the process and close the connection; safe to call twice."""
        if self._owner == os.getpid():
            self._connection.close()
            self._process.kill()
            self._process.wait()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.end()


# One for each thread: the system ends a process when the thread that started it ends (PR_SET_PDEATHSIG).
_of_this_thread = threading.local()
_all: WeakSet[Forkserver] = WeakSet()


def _forkserver() -> Forkserver:
    forkserver: Forkserver | None = getattr(_of_this_thread, "forkserver", None)
    if forkserver is not None and forkserver.alive and forkserver.inherited != _inherited():
        forkserver.end()  # its forks would inherit values that this process no longer has
    if forkserver is None or not forkserver.alive:
        forkserver = _of_this_thread.forkserver = Forkserver()
        _all.add(forkserver)
    return forkserver


@atexit.register
def _end_all() -> None:
    for forkserver in list(_all):
        forkserver.end()


def _inherited() -> Any:
    """Return what a fork inherits from its forkserver, and a ForkRequest does not set: limits, umask, cores, priority."""
    import resource  # missing on some systems

    limits = [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")]
    umask = ""
    with contextlib.suppress(OSError), open("/proc/self/status") as status:
        umask = next((line for line in status if line.startswith("Umask")), "")
    bound = "OMP_PROC_BIND" in os.environ  # then OpenMP has bound this thread to some cores of the process
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") and not bound else None
    return limits, umask, cpus, os.getpriority(os.PRIO_PROCESS, 0)


def _spawn(theirs: socket.socket, *how: str, streams: int | None = None) -> "subprocess.Popen[bytes]":
    # The parent handles Ctrl-C: block it in the child before the child starts.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-c", STARTUP_CODE, str(os.getpid()), str(theirs.fileno()), *how],
            pass_fds=[theirs.fileno()],
            env={**os.environ, **_environment()},
            stdin=subprocess.DEVNULL,
            stdout=streams,
            stderr=streams,
            cwd=None if _folder() else "/",  # torch cannot be imported in a deleted folder
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


STARTUP_CODE = "from fedbcgd.backends.workers.processes import begin; begin()"


def begin() -> None:
    """Run a spawned process. If the forkserver cannot import what it needs, it says why in reply to its first request."""
    try:
        from fedbcgd.backends.workers.worker import main, prepare

        prepare()
    except Exception as error:
        if sys.argv[3] == "forkserver":
            connection = MessageConnection(socket.socket(fileno=int(sys.argv[2])))
            connection.recv()
            connection.send(ForkRefused(shortage(error) or f"{type(error).__name__}: {error}"))
        raise
    main()


def _folder() -> str:
    try:
        return os.getcwd()
    except OSError:  # the folder was deleted
        return ""


def _environment() -> dict[str, str]:
    return {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


def _wait_for(process: "subprocess.Popen[bytes]", seconds: float) -> int | None:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
