"""Worker processes on this machine: the default carrier. One per core, one thread each, started as fresh interpreters.

Tasks go out as workers come free, in the order of the plan but the longest first among the next few, so that no core waits
long at the end of a round; and no further ahead than there are upload slots. A worker that dies is replaced and its task run
again: every draw comes from (seed, round, client), so the result is the same.
"""

import contextlib
import logging
import mmap
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections import Counter, deque
from multiprocessing.connection import Connection, wait
from typing import Any

from torch import Tensor

from fedbcgd.carriers.desk import Memory
from fedbcgd.carriers.shared import freeze, nameless
from fedbcgd.clock import Clock
from fedbcgd.errors import UserError, WorkerLost
from fedbcgd.evaluation import Batch, combine, spans
from fedbcgd.job import Job
from fedbcgd.messages import Plan, Upload
from fedbcgd.server import Server
from fedbcgd.state import StateStore

log = logging.getLogger("fedbcgd")

TRIES = 3  # workers that one task may take down before the run gives up

# One thread; and glibc keeps the memory of activations instead of mapping and unmapping it at every step.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
    "MALLOC_TOP_PAD_": "268435456",
}


def cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Worker:
    """One process and the connection to it. `doing` is what it was last told to do."""

    def __init__(self, number: int, arguments: list[int], fds: list[int]):
        self.number = number
        self.doing: tuple[Any, ...] | None = None
        ours, theirs = socket.socketpair()
        # Ctrl-C is the parent's to handle: it is blocked in the child from its first moment on.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        with theirs, contextlib.ExitStack() as stack:
            stack.callback(signal.pthread_sigmask, signal.SIG_SETMASK, blocked)
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "fedbcgd.carriers.worker"]
                + [str(n) for n in (os.getpid(), theirs.fileno(), *arguments)],
                pass_fds=[theirs.fileno(), *fds],
                env={**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
                stdin=subprocess.DEVNULL,
            )
        self.connection = Connection(ours.detach())
        self.ready = False
        self.connection.send(sys.path)

    def tell(self, *words: Any) -> None:
        self.doing = words
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a dead one shows when its answer is read
            self.connection.send(words)

    def end(self) -> None:
        self.connection.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def how_it_ended(self) -> str:
        try:
            code = self.process.wait(10)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        if code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return f"left with exit code {code}"


class Workers:
    def __init__(self, job: Job, store: StateStore, workers: int):
        if os.name != "posix":
            raise UserError("worker processes need a POSIX system; use workers=0 to compute in this process")
        self.job = job
        self.store = store
        self.clock = Clock()
        self._places = 4 * workers * (job.together or 1)
        size = Memory.size(job.algorithm, job.layout, self._places)
        self._fds = [nameless(size)]
        self._memory = Memory(mmap.mmap(self._fds[0], size), job.algorithm, job.layout)
        self._workers: list[_Worker] = []
        self._deaths: Counter[Any] = Counter()
        try:
            try:
                job_fd, job_size, job_length = freeze(job)
            except (pickle.PicklingError, TypeError, AttributeError) as error:
                raise UserError(
                    f"the model, the loss or the data cannot be sent to worker processes ({error}); with workers=0 they stay"
                ) from error
            self._fds.append(job_fd)
            state = [] if store.file is None else [store.file.fd]
            self._arguments = [job_fd, job_size, job_length, self._fds[0], *(state or [-1])]
            self._inherited = [*self._fds, *state]
            for number in range(workers):
                self._workers.append(self._start(number))
        except BaseException:
            self.close()
            raise

    def _start(self, number: int) -> _Worker:
        return _Worker(number, self._arguments, self._inherited)

    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers]

    # -- a round ------------------------------------------------------------------------------------------------------

    def carry(self, server: Server, plan: Plan) -> None:
        self._memory.publish(plan.broadcast)
        epoch = plan.broadcast.epoch
        units = self.job.units(plan.tasks, server.expects)  # nearly always of one task each
        todo = deque(units)
        near: set[tuple[int, ...]] = set()  # the next few
        length = {unit: sum(self.job.examples(plan.tasks[p].client) for p in unit) for unit in units}
        places = list(range(self._places))
        held: dict[int, int] = {}  # position → the upload slot that the server may still read
        reserved: dict[int, int | None] = {}  # position → the slot for the new client state

        def next_words() -> tuple[Any, ...] | None:
            # A slot is held until all earlier uploads are in: within this window there is one for everybody.
            while todo and todo[0][-1] < server.settled + self._places:
                near.add(todo.popleft())
            if not near:
                return None
            unit = max(near, key=lambda u: (length[u], -u[0]))
            near.remove(unit)
            for position in unit:
                if position not in reserved:
                    reserved[position] = self.store.reserve()
            tasks = tuple(plan.tasks[position] for position in unit)
            old = [self.store.slot(task.client, epoch) for task in tasks]
            return "fit", unit, tasks, epoch, [places.pop() for _ in unit], old, [reserved[p] for p in unit]

        def again(words: tuple[Any, ...]) -> None:
            near.add(words[1])
            places.extend(words[4])

        def done(unit: tuple[int, ...], used: list[int], said: Any, seconds: dict[str, float]) -> None:
            for position, place, (where, told) in zip(unit, used, said, strict=True):
                task = plan.tasks[position]
                with self.clock.timing("sums"):
                    payload = self._memory.get(where)
                    accepted = server.receive(Upload(task.round, task.client, task.block, payload, *told)).accepted
                if accepted:
                    self.store.accept(task.client, reserved[position], epoch)
                else:
                    self.store.discard(reserved[position])
                held[position] = place
            places.extend(held.pop(p) for p in list(held) if p < server.settled)
            self.clock.add(seconds)

        self._work(next_words, again, done, len(units), "waiting")

    def evaluate(self, x: Tensor) -> dict[str, float]:
        if self.job.test is None:
            return {}
        self._memory.x.copy_(x)
        batches = spans(len(self.job.test))
        todo = deque(enumerate(batches))
        results: dict[int, Batch] = {}

        def next_words() -> tuple[Any, ...] | None:
            if not todo:
                return None
            index, span = todo.popleft()
            return "evaluate", index, *span

        self._work(
            next_words, lambda words: todo.appendleft((words[1], words[2:])), results.__setitem__, len(batches), None
        )
        return combine([results[k] for k in range(len(batches))])

    def _work(self, next_words: Any, again: Any, done: Any, count: int, waiting: str | None) -> None:
        """Keep every worker busy until `count` answers are in."""
        self._deaths.clear()
        while count:
            for worker in self._workers:
                if worker.ready and worker.doing is None and (words := next_words()) is not None:
                    worker.tell(*words)
            open_now = {worker.connection: k for k, worker in enumerate(self._workers)}
            with self.clock.timing(waiting) if waiting else contextlib.nullcontext():
                ready = wait(list(open_now))
            for connection in ready:
                k = open_now[connection]  # type: ignore[index]
                worker = self._workers[k]
                try:
                    word, *answer = worker.connection.recv()
                except (EOFError, OSError):
                    if worker.doing is not None:
                        again(worker.doing)
                    self._replace(k, worker.doing)
                    continue
                if word == "failed":
                    self.raise_here(*answer)
                elif word == "ready":
                    worker.ready = True
                else:
                    worker.doing = None
                    done(*answer)
                    count -= 1

    def _replace(self, k: int, doing: tuple[Any, ...] | None) -> None:
        worker = self._workers[k]
        what = "while idle" if worker.ready else "while starting"
        if doing is not None:
            clients = ", ".join(str(task.client) for task in doing[2]) if doing[0] == "fit" else ""
            what = f"while client {clients} trained" if clients else "while evaluating"
        ended = worker.how_it_ended()
        pid = worker.process.pid
        self._deaths[doing[:3] if doing else what] += 1
        worker.end()
        if self._deaths[doing[:3] if doing else what] >= TRIES:
            raise WorkerLost(
                f"{TRIES} worker processes in a row ended {what} (the last one {ended}). Out of memory? "
                "Fewer workers need less; workers=0 computes in this process and shows errors directly"
            )
        log.warning("worker %d (pid %d) %s %s; it is replaced%s", k, pid, ended, what, _redone(doing))
        self._workers[k] = self._start(k)

    @staticmethod
    def raise_here(body: bytes, text: str) -> None:
        """A user's code failed in a worker: the same error here, with the worker's traceback as a note."""
        error: BaseException = pickle.loads(body) if body else RuntimeError(text.strip().splitlines()[-1])
        if not isinstance(error, Exception):  # such as SystemExit: not this process's to follow
            error = RuntimeError(f"the work ended with {error!r}")
        error.add_note(f"In a worker process:\n{text}")
        raise error

    def close(self) -> None:
        for worker in self._workers:
            worker.end()
        self._workers = []
        for fd in self._fds:
            os.close(fd)
        self._fds = []


def _redone(doing: tuple[Any, ...] | None) -> str:
    return " and its task runs again" if doing else ""
