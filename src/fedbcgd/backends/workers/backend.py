"""Worker processes on this machine: the default backend. One per core, one thread each.

Tasks go out as workers come free, in the order of the plan but the longest first among the next few, so that no core waits
long at the end of a round; and no further ahead than there are upload slots. Where tasks are short a worker has its next one
before it has done the last, so that nobody waits for words. A worker that dies is replaced and its task run again: every
draw comes from (seed, round, client), so the result is the same.
"""

import contextlib
import logging
import math
import mmap
import os
import pickle
import select
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from torch import Tensor

from fedbcgd.backends.workers.memory import RoundMemory, upload_room
from fedbcgd.backends.workers.processes import Forkserver, Worker, start
from fedbcgd.backends.workers.shared import freeze, nameless
from fedbcgd.core.messages import Plan, Task, Upload
from fedbcgd.core.server import Server
from fedbcgd.engine.client_state import StateStore
from fedbcgd.engine.clock import Clock
from fedbcgd.engine.evaluation import Batch, combine, spans
from fedbcgd.engine.job import Job
from fedbcgd.engine.signals import uninterrupted
from fedbcgd.errors import UserError, WorkerLost, shortage

log = logging.getLogger("fedbcgd")

AHEAD = 1 << 28  # bytes of uploads that may wait for earlier ones
TRIES = 3  # workers that one task may take down before the run gives up
FEW = 256  # clients of a task whose words and answers fit into the line together, whoever reads first
SHORT = 0.02  # seconds of a task that is worth handing out before it can be begun


def room(job: Job) -> int:
    """Bytes of an upload while it waits: in its slot, or decoded."""
    return max(upload_room(job.algorithm, job.layout), job.layout.size * job.layout.dtype.itemsize)


class _Queue(Protocol):
    """Words for workers, as they come free."""

    def next(self) -> tuple[Any, ...] | None: ...

    def ahead(self, workers: int) -> bool:
        """Whether to hand out more than one at a time."""

    def again(self, words: tuple[Any, ...]) -> None:
        """A worker died of them, or with them."""

    def done(self, *answer: Any) -> None: ...


class _Round:
    """The tasks of a plan, the longest of the next few first."""

    def __init__(self, backend: "Workers", server: Server, plan: Plan, places: int):
        self._backend = backend
        self._server = server
        self._plan = plan
        self._epoch = plan.broadcast.epoch
        units = backend.job.units(plan.tasks, server.expects)  # nearly always of one task each
        self._wanted = [p for unit in units for p in unit]
        self._rank = {p: k for k, p in enumerate(self._wanted)}
        self._left = len(units)
        self._todo = deque(units)
        self._near: set[tuple[int, ...]] = set()  # the next few
        self._length = {unit: sum(backend.job.examples(plan.tasks[p].client) for p in unit) for unit in units}
        self._window = places
        self._places = list(range(places))
        self._held: dict[int, int] = {}  # position → the upload slot that the server may still read
        self._reserved: dict[int, int | None] = {}  # position → the slot for the new client state

    @property
    def finished(self) -> bool:
        return not self._left

    def ahead(self, workers: int) -> bool:
        # The last ones go to whoever is free: one that waits behind another would make a round longer.
        small = (self._backend.job.together or 1) <= FEW
        return small and self._backend.lately < SHORT and len(self._todo) + len(self._near) >= workers

    def next(self) -> tuple[Any, ...] | None:
        # A slot is held until all earlier uploads are in: within this window there is one for everybody.
        end = bisect_left(self._wanted, self._server.settled) + self._window
        while self._todo and self._rank[self._todo[0][-1]] < end:
            self._near.add(self._todo.popleft())
        if not self._near:
            return None
        unit = max(self._near, key=lambda u: (self._length[u], -u[0]))
        self._near.remove(unit)
        store, epoch = self._backend.store, self._epoch
        for position in unit:
            if position not in self._reserved:
                self._reserved[position] = store.reserve()
        tasks = tuple(self._plan.tasks[position] for position in unit)
        old = [store.slot(task.client, epoch) for task in tasks]
        return "fit", unit, tasks, epoch, [self._places.pop() for _ in unit], old, [self._reserved[p] for p in unit]

    def again(self, words: tuple[Any, ...]) -> None:
        self._near.add(words[1])
        self._places.extend(words[4])

    def done(self, unit: tuple[int, ...], used: list[int], said: Any, seconds: dict[str, float]) -> None:
        backend, server = self._backend, self._server
        for position, place, (where, told) in zip(unit, used, said, strict=True):
            task = self._plan.tasks[position]
            with backend.clock.timing("sums"):
                accepted = server.receive(backend.upload(task, where, told), task.client).accepted
            if accepted:
                backend.store.accept(task.client, self._reserved[position], self._epoch)
            else:
                backend.store.discard(self._reserved[position])
            self._held[position] = place
        self._places.extend(self._held.pop(p) for p in list(self._held) if p < server.settled)
        self._left -= 1
        backend.lately = sum(seconds.values())
        backend.clock.add(seconds)


class _Evaluation:
    """The batches of an evaluation, in order."""

    def __init__(self, examples: int):
        self._todo = deque(enumerate(spans(examples)))
        self._results: list[Batch | None] = [None] * len(self._todo)

    @property
    def finished(self) -> bool:
        return None not in self._results

    def ahead(self, workers: int) -> bool:
        return False

    def next(self) -> tuple[Any, ...] | None:
        if not self._todo:
            return None
        index, span = self._todo.popleft()
        return "evaluate", index, *span

    def again(self, words: tuple[Any, ...]) -> None:
        self._todo.appendleft((words[1], words[2:]))

    def done(self, index: int, result: Batch) -> None:
        self._results[index] = result

    def metrics(self) -> dict[str, float]:
        return combine([result for result in self._results if result is not None])


class Workers:
    def __init__(self, job: Job, store: StateStore, workers: int, cohort: int = 0):
        if os.name != "posix":
            raise UserError("worker processes need a POSIX system; use workers=0 to compute in this process")
        self.job = job
        self.store = store
        self.clock = Clock()
        self.lately = math.inf  # seconds that the last task took
        self._places = max(4 * workers * (job.together or 1), min(cohort, AHEAD // room(job)))
        self._fds: list[int] = []
        self._workers: list[Worker] = []
        self._watched: set[int] = set()
        self._deaths: Counter[Any] = Counter()
        self._lost: set[Forkserver | None] = set()
        self._evaluation: _Evaluation | None = None
        try:
            try:
                size = RoundMemory.size(job.algorithm, job.layout, self._places)
                self._fds.append(nameless(size))
                self._memory = RoundMemory(mmap.mmap(self._fds[0], size), job.algorithm, job.layout)
                job_fd, job_size, job_length = freeze(job)
            except OSError as error:
                why = shortage(error) or error.strerror
                raise UserError(
                    f"workers: memory to share with worker processes cannot be had: {why}; workers=0 needs none"
                ) from error
            except (pickle.PicklingError, TypeError, AttributeError) as error:
                raise UserError(
                    f"the model, the loss or the data cannot be sent to worker processes ({error}); with workers=0 they stay"
                ) from error
            self._fds.append(job_fd)
            self._given = [job_fd, self._fds[0], *([] if store.file is None else [store.file.fd])]
            self._sizes = job_size, job_length
            for _ in range(workers):
                self._workers.append(self._start())
        except BaseException:
            self.close()
            raise

    def _start(self) -> Worker:
        worker = start()
        worker.give(self._sizes, self._given)
        return worker

    def upload(self, task: Task, where: Any, told: Any) -> Upload:
        """What a worker has put into a slot, where it is."""
        return Upload(task.round, task.client, task.block, self._memory.get(where), *told)

    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    # -- a round ------------------------------------------------------------------------------------------------------

    def carry(self, server: Server, plan: Plan) -> None:
        # Of a round that was broken off nobody may still read the broadcast or write into a slot.
        self._work(None, lambda: not any(words[0] == "fit" for w in self._workers for words in w.doing), None)
        self._memory.publish(plan.broadcast)
        todo = _Round(self, server, plan, self._places)
        self._work(todo, lambda: todo.finished, "waiting")

    # -- an evaluation ------------------------------------------------------------------------------------------------

    def evaluate(self, x: Tensor) -> dict[str, float]:
        self.begin_evaluation(x)
        return self.finish_evaluation()

    def begin_evaluation(self, x: Tensor) -> None:
        self._evaluation = None
        if self.job.test is not None:
            self._memory.evaluated.copy_(x)
            self._evaluation = _Evaluation(len(self.job.test))

    def finish_evaluation(self) -> dict[str, float]:
        evaluation = self._evaluation
        if evaluation is None:
            return {}
        self._work(None, lambda: evaluation.finished, None)
        self._evaluation = None
        return evaluation.metrics()

    # -- work of any kind ---------------------------------------------------------------------------------------------

    def _work(self, round: "_Queue | None", finished: Callable[[], bool], waiting: str | None) -> None:
        """Keep every worker busy until it is finished: with the round, and with the evaluation when that has nothing."""
        self._deaths.clear()
        self._lost.clear()
        queues: dict[str, _Queue | None] = {"fit": round, "evaluate": self._evaluation}
        while not finished():
            self._hand_out(queues)
            at = {worker.line.fileno(): k for k, worker in enumerate(self._workers)}
            if at.keys() != self._watched:
                self._watch(at.keys())
            with self.clock.timing(waiting) if waiting else contextlib.nullcontext():
                heard = self._poll.poll(1000 * min((worker.pulse.every for worker in self._workers), default=1.0))
            trained = []
            for k in [at[fd] for fd, _ in heard]:
                worker = self._workers[k]
                try:
                    word, *answer = worker.line.recv()
                except (EOFError, OSError):
                    self._replace(k, queues, worker.how_it_ended())
                    continue
                worker.pulse.clear()
                if word == "failed":
                    self.raise_here(*answer)
                elif word == "ready":
                    worker.ready = True
                else:
                    worker.doing.popleft()
                    if word == "fit":
                        trained.append(answer)
                    elif (queue := queues[word]) is not None:
                        queue.done(*answer)
            if round is not None and trained:
                self._hand_out(queues)  # nobody waits while uploads are checked and summed
                for answer in trained:
                    round.done(*answer)
            for k, worker in enumerate(self._workers):
                if worker.ready and not worker.doing:
                    worker.pulse.clear()
                elif why := worker.pulse.lost():
                    self._replace(k, queues, why)

    def _hand_out(self, queues: dict[str, _Queue | None]) -> None:
        for held in (0, 1):  # first whoever has nothing to do
            for worker in self._workers:
                if worker.ready and len(worker.doing) == held and not (held and worker.doing[0][0] == "evaluate"):
                    given = (q for q in queues.values() if q is not None and (not held or q.ahead(len(self._workers))))
                    words = next((w for queue in given if (w := queue.next())), None)
                    if words is not None:
                        worker.tell(*words)

    def _watch(self, descriptors: Iterable[int]) -> None:
        """Who is listened to from now on."""
        self._poll = select.poll()
        for fd in descriptors:
            self._poll.register(fd, select.POLLIN)
        self._watched = set(descriptors)

    def _replace(self, k: int, queues: dict[str, _Queue | None], ended: str) -> None:
        """Another worker in the place of one that ended or is silent; what it had to do is done again."""
        worker = self._workers[k]
        for words in worker.doing:
            if (queue := queues[words[0]]) is not None:
                queue.again(words)
        doing = worker.doing[0] if worker.doing else None
        what = "while idle" if worker.ready else "while starting"
        if doing is not None:
            clients = ", ".join(str(task.client) for task in doing[2]) if doing[0] == "fit" else ""
            what = f"while client {clients} trained" if clients else "while evaluating"
        cause: Any = doing[:3] if doing else what
        if worker.orphaned:  # all go at once, and none of them is the cause
            cause = "forkserver"
            self._lost.add(worker.forkserver)
            self._deaths[cause] = len(self._lost) - 1
        self._deaths[cause] += 1
        worker.end()
        if self._deaths[cause] >= TRIES:
            raise WorkerLost(
                f"{TRIES} worker processes in a row were lost {what} (the last one {ended}). Out of memory? "
                "Fewer workers need less; workers=0 computes in this process and shows errors directly"
            )
        log.warning("worker %d (pid %d) %s %s; it is replaced%s", k, worker.pid, ended, what, _redone(doing))
        self._workers[k] = self._start()

    @staticmethod
    def raise_here(body: bytes, text: str) -> None:
        """A user's code failed in a worker: the same error here, with the worker's traceback as a note."""
        error: BaseException = pickle.loads(body) if body else RuntimeError(text.strip().splitlines()[-1])
        if not isinstance(error, Exception):  # such as SystemExit: not this process's to follow
            error = RuntimeError(f"the work ended with {error!r}")
        error.add_note(f"In a worker process:\n{text}")
        raise error

    def close(self) -> None:
        with uninterrupted():
            for worker in self._workers:
                worker.end()
            self._workers = []
            for fd in self._fds:
                os.close(fd)
            self._fds = []


def _redone(doing: tuple[Any, ...] | None) -> str:
    return " and its task runs again" if doing else ""
