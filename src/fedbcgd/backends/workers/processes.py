"""Worker processes: one thread each, with nothing of this process in them but the job that they are given.

Most of a worker's start would be the import of torch. So one process, the forkserver, has imported it, and workers are
forks of it, made in milliseconds, that share its memory. It is a fresh interpreter which never computes and sees no code
of a user's. It is started early where that can be foreseen (`start_early`), serves the runs that follow, and leaves when
nobody has asked for anything for a while. Where forks are not safe (macOS) every worker is an interpreter of its own.
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
IDLE = 30.0  # seconds after which a forkserver without workers leaves

TIMEOUT = "FEDBCGD_WORKER_TIMEOUT"  # a variable: seconds in the place of both of these; 0 waits for ever
STOPPED = 60.0  # seconds after which a process that is stopped counts as lost
SILENT = 600.0  # one that is not, but uses no processor time: it waits for something that may still come

# One thread; and glibc keeps the memory of activations instead of mapping and unmapping it at every step.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_PROC_BIND": "false",  # or every worker would sit on the first core
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
    "MALLOC_TOP_PAD_": "268435456",
}


def cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Pulse:
    """Whether a process still uses processor time.

    Silence is counted in looks, not on a clock: where this process is stopped as well (Ctrl-Z, a suspended machine), nobody
    looks, and nothing is lost.
    """

    def __init__(self, pid: int):
        self._pid = pid
        self._stopped, self._silent = _timeouts()
        self.every = min(5.0, self._stopped / 10, self._silent / 10)  # seconds between two looks
        self._due = time.monotonic()
        self.clear()

    def clear(self) -> None:
        """It has nothing to do, or has replied."""
        self._used: float | None = None
        self._seconds = 0.0

    def lost(self) -> str:
        """Why the process counts as lost; empty as long as it does not. To be called as often as one likes."""
        if time.monotonic() < self._due:
            return ""
        self._due = time.monotonic() + self.every
        used = _processor_time(self._pid)
        self._seconds = self._seconds + self.every if used is not None and used == self._used else 0.0
        self._used = used
        if self._seconds >= self._stopped and _is_stopped(self._pid):
            return f"has been stopped for {self._seconds:.3g} s"
        if self._seconds >= self._silent:
            return f"has used no processor time for {self._seconds:.3g} s ({TIMEOUT} sets how long is waited)"
        return ""


def _timeouts() -> tuple[float, float]:
    text = os.environ.get(TIMEOUT)
    if text is None:
        return STOPPED, SILENT
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds >= 0:
        raise UserError(f"{TIMEOUT}: expected seconds, at least 0 (which waits for ever), got {text!r}")
    return (seconds or math.inf,) * 2


def _processor_time(pid: int) -> float | None:
    """Of all threads of a process, in seconds; None where it cannot be known."""
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


class Line:
    """A connection for messages (see `protocol`) that also carries descriptors."""

    def __init__(self, end: socket.socket):
        end.setblocking(True)  # whatever the default timeout of this process is
        self._socket = end
        self._connection = Connection(os.dup(end.fileno()))

    def send(self, message: Any, descriptors: Sequence[int] = ()) -> None:
        # As Connection.send, but without its pickler, made anew for each message, that takes longer than the rest.
        self._connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
        if descriptors:
            socket.send_fds(self._socket, [b"."], list(descriptors))

    def recv(self) -> Any:
        return self._connection.recv()

    def recv_descriptors(self, count: int) -> list[int]:
        """The descriptors that follow the last message, which says how many they are."""
        return socket.recv_fds(self._socket, 1, count)[1]

    def poll(self, seconds: float) -> bool:
        """Wait for a message, at most so long; whether there is one."""
        return self._connection.poll(seconds)

    def fileno(self) -> int:
        return self._connection.fileno()

    def close(self) -> None:
        self._connection.close()
        self._socket.close()


class Worker:
    """One process and the line to it. `pending` are the requests that it has not answered yet, in order."""

    def __init__(self, pid: int, end: socket.socket, wait: Callable[[], int | None], forkserver: "Forkserver | None"):
        self.pid = pid
        self.line = Line(end)
        self.pending: deque[Request] = deque()
        self.ready = False
        self.forkserver = forkserver
        self.pulse = Pulse(pid)
        self._wait = wait
        self._code: int | None = None

    def prepare(self, buffer_bytes: int, pickle_bytes: int, descriptors: Sequence[int]) -> None:
        """Send the job, as descriptors of memory. It answers when it is ready for work."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a dead one shows when its reply is read
            self.line.send(JobRequest(sys.path, buffer_bytes, pickle_bytes, len(descriptors)), descriptors)

    def send(self, request: Request) -> None:
        self.pending.append(request)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.line.send(request)

    @property
    def orphaned(self) -> bool:
        """Whether it went because the forkserver did."""
        return self.forkserver is not None and not self.forkserver.there

    def end(self) -> None:
        self.line.close()
        if self._code is None and not self.orphaned:  # until it was waited for, its number is nobody else's
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self._code = self._wait()

    def how_it_ended(self) -> str:
        self._code = None if self.orphaned else self._wait()
        if self._code is None:
            return "ended with the process that made it" if self.orphaned else "closed its connection"
        if self._code < 0:
            return f"was ended by {signal.Signals(-self._code).name}"
        return f"left with exit code {self._code}"


def start() -> Worker:
    """A worker, that waits for its job."""
    try:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                return _worker(ours, theirs)
            except BaseException:
                ours.close()
                raise
    except (Gone, OSError) as error:
        why = shortage(error) or getattr(error, "strerror", None) or error
        raise WorkerLost(f"no worker process could be started: {why}; workers=0 computes in this one") from None


def _worker(ours: socket.socket, theirs: socket.socket) -> Worker:
    if not FORKS:
        process = _spawn(theirs, "alone")
        return Worker(process.pid, ours, lambda: _within(process, 10), None)
    try:
        forkserver = _forkserver()
        pid = forkserver.make(theirs)
    except Gone:  # it may have left just as it was asked: so once more
        forkserver = _forkserver()
        pid = forkserver.make(theirs)
    return Worker(pid, ours, lambda: forkserver.ended(pid), forkserver)


def start_early() -> None:
    """There will be workers: have their imports done meanwhile."""
    if FORKS:
        with contextlib.suppress(OSError):  # whoever needs them will be told
            _forkserver()


class Gone(Exception):
    pass


class Forkserver:
    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = _spawn(theirs, "forkserver", str(IDLE), streams=subprocess.DEVNULL)
        self._owner = os.getpid()
        self.circumstances = _circumstances()
        self._line = Line(ours)
        self._lock = threading.Lock()

    @property
    def there(self) -> bool:
        return self._owner == os.getpid() and self._process.poll() is None

    def make(self, end: socket.socket) -> int:
        """A fork that listens to this end of a line: its process number. It writes to where this process writes."""
        environment = {**os.environ, **_environment()}
        streams = tuple(fd for fd in (1, 2) if _open(fd))
        reply = self._ask(ForkRequest(environment, _folder(), streams), [end.fileno(), *streams])
        if isinstance(reply, ForkRefused):
            raise ChildProcessError(reply.reason)  # asking again would not help
        assert isinstance(reply, ForkReply)
        return reply.pid

    def ended(self, pid: int) -> int | None:
        """The exit code of a fork; None if it does not end."""
        try:
            reply = self._ask(ExitCodeRequest(pid))
        except Gone:
            return None
        assert isinstance(reply, ExitCodeReply)
        return reply.code

    def _ask(
        self, request: ForkRequest | ExitCodeRequest, descriptors: Sequence[int] = ()
    ) -> ForkReply | ForkRefused | ExitCodeReply:
        with self._lock:
            try:
                self._line.send(request, descriptors)
                pulse = Pulse(self._process.pid)
                while not self._line.poll(pulse.every):
                    if why := pulse.lost():
                        self.end()
                        raise Gone(f"the process that makes them {why}")
                reply: ForkReply | ForkRefused | ExitCodeReply = self._line.recv()
                return reply
            except (EOFError, OSError) as error:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(10)
                code = self._process.poll()
                self.end()
                raise Gone(f"the process that makes them left with exit code {code}") from error
            except BaseException:  # interrupted: the reply would be taken for that to the next request
                self.end()
                raise

    def end(self) -> None:
        if self._owner == os.getpid():
            self._line.close()
            self._process.kill()
            self._process.wait()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.end()


# One for each thread: a process started by a thread is ended by the system when that thread ends.
_mine = threading.local()
_all: WeakSet[Forkserver] = WeakSet()


def _forkserver() -> Forkserver:
    found: Forkserver | None = getattr(_mine, "forkserver", None)
    if found is not None and found.there and found.circumstances != _circumstances():
        found.end()  # its forks would not have those of this process
    if found is None or not found.there:
        found = _mine.forkserver = Forkserver()
        _all.add(found)
    return found


@atexit.register
def _end_all() -> None:
    for forkserver in list(_all):
        forkserver.end()


def _circumstances() -> Any:
    """What a process has from its parent, and could not be told."""
    import resource  # not everywhere

    limits = [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")]
    umask = ""
    with contextlib.suppress(OSError), open("/proc/self/status") as status:
        umask = next((line for line in status if line.startswith("Umask")), "")
    bound = "OMP_PROC_BIND" in os.environ  # then the cores are what PyTorch left to this thread, not what there is
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") and not bound else None
    return limits, umask, cpus, os.getpriority(os.PRIO_PROCESS, 0)


def _spawn(theirs: socket.socket, *how: str, streams: int | None = None) -> "subprocess.Popen[bytes]":
    # Ctrl-C is the parent's to handle: it is blocked in the child from its first moment on.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-c", BEGIN, str(os.getpid()), str(theirs.fileno()), *how],
            pass_fds=[theirs.fileno()],
            env={**os.environ, **_environment()},
            stdin=subprocess.DEVNULL,
            stdout=streams,
            stderr=streams,
            cwd=None if _folder() else "/",  # in one that was deleted torch cannot be imported
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


BEGIN = "from fedbcgd.backends.workers.processes import begin; begin()"


def begin() -> None:
    """What a process that was spawned here does first. If it cannot import what it needs, it says why when it is asked."""
    try:
        from fedbcgd.backends.workers.worker import main, prepare

        prepare()
    except Exception as error:
        if sys.argv[3] == "forkserver":
            line = Line(socket.socket(fileno=int(sys.argv[2])))
            line.recv()
            line.send(ForkRefused(shortage(error) or f"{type(error).__name__}: {error}"))
        raise
    main()


def _folder() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was deleted
        return ""


def _environment() -> dict[str, str]:
    return {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


def _within(process: "subprocess.Popen[bytes]", seconds: float) -> int | None:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def _open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
