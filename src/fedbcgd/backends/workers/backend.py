"""Worker processes on this machine: the default backend. One per core, one thread each.

Tasks go out as workers come free, in the order of the plan but the longest first among the next few, so that no core waits
long at the end of a round; and no further ahead than there are upload slots. Where tasks are short a worker has its next one
before it has done the last, so that nobody waits for a message. A worker that dies is replaced and its task run again: every
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

from fedbcgd.backends.new_state import NewState
from fedbcgd.backends.workers.memory import RoundMemory, StoredUpload, upload_room
from fedbcgd.backends.workers.processes import Forkserver, Worker, start
from fedbcgd.backends.workers.protocol import (
    Assignment,
    EvaluateReply,
    EvaluateRequest,
    Failed,
    FitReply,
    FitRequest,
    Ready,
    Reply,
    Request,
)
from fedbcgd.backends.workers.shared import freeze, nameless
from fedbcgd.core.messages import Plan, Upload
from fedbcgd.engine.backend import Inbox
from fedbcgd.engine.client_state import StateStore
from fedbcgd.engine.clock import Clock
from fedbcgd.engine.evaluation import Batch, combine, spans
from fedbcgd.engine.job import Job
from fedbcgd.engine.signals import uninterrupted
from fedbcgd.errors import UserError, WorkerLost, shortage

log = logging.getLogger("fedbcgd")

AHEAD = 1 << 28  # bytes of uploads that may wait for earlier ones
TRIES = 3  # workers that one task may take down before the run gives up
FEW = 256  # clients of a request that fits into the line together with its reply, whoever reads first
SHORT = 0.02  # seconds of a task that is worth handing out before it can be begun


def room(job: Job) -> int:
    """Bytes of an upload while it waits: in its slot, or decoded."""
    return max(upload_room(job.algorithm, job.layout), job.layout.size * job.layout.dtype.itemsize)


class _Queue(Protocol):
    """Requests for workers, as they come free."""

    def next(self) -> Request | None: ...

    def ahead(self, workers: int) -> bool:
        """Whether to hand out more than one at a time."""

    def again(self, request: Any) -> None:
        """Requeue a request after its worker died."""

    def done(self, request: Any, reply: Any) -> None: ...


_Queues = dict[type[Request], _Queue | None]


class _Round:
    """The tasks of a plan, the longest of the next few first."""

    def __init__(self, backend: "Workers", inbox: Inbox, plan: Plan, places: int):
        self._backend = backend
        self._inbox = inbox
        self._plan = plan
        self._epoch = plan.broadcast.epoch
        units = backend.job.units(plan.tasks, inbox.expects)  # nearly always of one task each
        self._wanted = [p for unit in units for p in unit]
        self._rank = {p: k for k, p in enumerate(self._wanted)}
        self._left = len(units)
        self._todo = deque(units)
        self._near: set[tuple[int, ...]] = set()  # the next few
        self._length = {unit: sum(backend.job.examples(plan.tasks[p].client) for p in unit) for unit in units}
        self._window = places
        self._places = list(range(places))
        self._held: dict[int, int] = {}  # position → the upload slot that the server may still read
        self._new_states: dict[int, NewState] = {}  # by position

    @property
    def finished(self) -> bool:
        return not self._left

    def ahead(self, workers: int) -> bool:
        # The last ones go to whoever is free: one that waits behind another would make a round longer.
        small = (self._backend.job.batch_clients or 1) <= FEW
        return small and self._backend.lately < SHORT and len(self._todo) + len(self._near) >= workers

    def next(self) -> FitRequest | None:
        # A slot is held until all earlier uploads are in: within this window there is one for everybody.
        end = bisect_left(self._wanted, self._inbox.settled) + self._window
        while self._todo and self._rank[self._todo[0][-1]] < end:
            self._near.add(self._todo.popleft())
        if not self._near:
            return None
        unit = max(self._near, key=lambda u: (self._length[u], -u[0]))
        self._near.remove(unit)
        return FitRequest(self._epoch, tuple(self._assign(position) for position in unit))

    def _assign(self, position: int) -> Assignment:
        task = self._plan.tasks[position]
        if position not in self._new_states:
            self._new_states[position] = NewState(self._backend.store, task.client, self._epoch)
        state = self._new_states[position]
        return Assignment(position, task, self._places.pop(), state.old, state.new)

    def again(self, request: FitRequest) -> None:
        self._near.add(tuple(a.position for a in request.assignments))
        self._places.extend(a.upload_slot for a in request.assignments)

    def done(self, request: FitRequest, reply: FitReply) -> None:
        backend, inbox = self._backend, self._inbox
        for assignment, stored in zip(request.assignments, reply.uploads, strict=True):
            with backend.clock.timing("sums"):
                self._new_states[assignment.position].hand_in(inbox, backend.upload(stored))
            self._held[assignment.position] = assignment.upload_slot
        self._places.extend(self._held.pop(p) for p in list(self._held) if p < inbox.settled)
        self._left -= 1
        backend.lately = sum(reply.seconds.values())
        backend.clock.add(reply.seconds)


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

    def next(self) -> EvaluateRequest | None:
        if not self._todo:
            return None
        index, (start, stop) = self._todo.popleft()
        return EvaluateRequest(index, start, stop)

    def again(self, request: EvaluateRequest) -> None:
        self._todo.appendleft((request.index, (request.start, request.stop)))

    def done(self, request: EvaluateRequest, reply: EvaluateReply) -> None:
        self._results[request.index] = reply.batch

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
        self._places = max(4 * workers * (job.batch_clients or 1), min(cohort, AHEAD // room(job)))
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
            self._descriptors = [job_fd, self._fds[0], *([] if store.file is None else [store.file.fd])]
            self._job_bytes = job_size, job_length
            for _ in range(workers):
                self._workers.append(self._start())
        except BaseException:
            self.close()
            raise

    def _start(self) -> Worker:
        worker = start()
        worker.prepare(*self._job_bytes, self._descriptors)
        return worker

    def upload(self, stored: StoredUpload) -> Upload:
        """The upload that a worker has put into a slot."""
        return self._memory.get(stored)

    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    # -- a round ------------------------------------------------------------------------------------------------------

    def carry(self, inbox: Inbox, plan: Plan) -> None:
        # Of a round that was broken off nobody may still read the broadcast or write into a slot.
        self._work(None, lambda: not any(isinstance(r, FitRequest) for w in self._workers for r in w.pending), None)
        self._memory.publish(plan.broadcast)
        todo = _Round(self, inbox, plan, self._places)
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
        queues: _Queues = {FitRequest: round, EvaluateRequest: self._evaluation}
        while not finished():
            self._hand_out(queues)
            at = {worker.line.fileno(): k for k, worker in enumerate(self._workers)}
            if at.keys() != self._watched:
                self._watch(at.keys())
            with self.clock.timing(waiting) if waiting else contextlib.nullcontext():
                heard = self._poll.poll(1000 * min((worker.pulse.every for worker in self._workers), default=1.0))
            trained: list[tuple[Request, Reply]] = []
            for k in [at[fd] for fd, _ in heard]:
                worker = self._workers[k]
                try:
                    reply: Ready | Reply | Failed = worker.line.recv()
                except (EOFError, OSError):
                    self._replace(k, queues, worker.how_it_ended())
                    continue
                worker.pulse.clear()
                if isinstance(reply, Failed):
                    reply.reraise()
                if isinstance(reply, Ready):
                    worker.ready = True
                    continue
                request = worker.pending.popleft()
                if isinstance(reply, FitReply):
                    trained.append((request, reply))
                elif (queue := queues[type(request)]) is not None:
                    queue.done(request, reply)
            if round is not None and trained:
                self._hand_out(queues)  # nobody waits while uploads are checked and summed
                for request, reply in trained:
                    round.done(request, reply)
            for k, worker in enumerate(self._workers):
                if worker.ready and not worker.pending:
                    worker.pulse.clear()
                elif why := worker.pulse.lost():
                    self._replace(k, queues, why)

    def _hand_out(self, queues: _Queues) -> None:
        for held in (0, 1):  # first whoever has nothing to do
            for worker in self._workers:
                pending = worker.pending
                if worker.ready and len(pending) == held and not (held and isinstance(pending[0], EvaluateRequest)):
                    open_ones = (
                        q for q in queues.values() if q is not None and (not held or q.ahead(len(self._workers)))
                    )
                    request = next((request for queue in open_ones if (request := queue.next())), None)
                    if request is not None:
                        worker.send(request)

    def _watch(self, descriptors: Iterable[int]) -> None:
        """Who is listened to from now on."""
        self._poll = select.poll()
        for fd in descriptors:
            self._poll.register(fd, select.POLLIN)
        self._watched = set(descriptors)

    def _replace(self, k: int, queues: _Queues, ended: str) -> None:
        """Another worker in the place of one that ended or is silent; what it had to do is done again."""
        worker = self._workers[k]
        for request in worker.pending:
            if (queue := queues[type(request)]) is not None:
                queue.again(request)
        current = worker.pending[0] if worker.pending else None
        cause: Any  # equal for one that is tried again
        match current:
            case None:
                cause = what = "while idle" if worker.ready else "while starting"
            case FitRequest():
                cause = tuple(a.task for a in current.assignments)
                what = f"while client {', '.join(str(task.client) for task in cause)} trained"
            case EvaluateRequest():
                cause, what = current, "while evaluating"
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
        again = "" if current is None else " and its task runs again"
        log.warning("worker %d (pid %d) %s %s; it is replaced%s", k, worker.pid, ended, what, again)
        self._workers[k] = self._start()

    def close(self) -> None:
        with uninterrupted():
            for worker in self._workers:
                worker.end()
            self._workers = []
            for fd in self._fds:
                os.close(fd)
            self._fds = []
