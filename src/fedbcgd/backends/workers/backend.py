"""Worker processes on this machine: the default backend. One per core, one thread each.

A worker that becomes free gets the longest of the next few tasks of the plan, so that no core is idle for long at the end of
a round. No task is handed out for which there is no upload slot. If tasks are short, a worker gets several at a time, and
the next before it has finished the last, so that it need not wait for a message. A worker that dies is replaced and its
tasks run again: every draw comes from (seed, round, client), so the result is the same.
"""

import contextlib
import logging
import math
import mmap
import os
import select
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, Protocol

from torch import Tensor

from fedbcgd.backends.workers.memory import RoundMemory, slot_bytes
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
from fedbcgd.backends.workers.shared import anonymous_memory, pickle_to_memory
from fedbcgd.core.messages import Plan
from fedbcgd.engine.backend import Inbox, NewState, Timings
from fedbcgd.engine.client_state import StateStore
from fedbcgd.engine.evaluation import Batch, combine, spans
from fedbcgd.engine.job import Job
from fedbcgd.engine.signals import uninterrupted
from fedbcgd.errors import UserError, WorkerLost, shortage

log = logging.getLogger("fedbcgd")

MAX_WAITING_BYTES = 1 << 28  # of memory for upload slots; more if the workers alone need more
MAX_ATTEMPTS = 3  # the run ends when this many workers were lost with one task
# A worker that is still busy gets no request for more clients than this: request and reply must fit into the buffers of the
# socket, or both ends would block.
MAX_QUEUED_CLIENTS = 256
SHORT_TASK = 0.02  # seconds: if tasks take less, a worker gets its next one early, and several up to this time at once


def _waiting_bytes(job: Job) -> int:
    """Return the bytes that one waiting upload takes: those of its slot or, if more, those of its decoded values."""
    return max(slot_bytes(job.algorithm, job.layout), job.layout.size * job.layout.dtype.itemsize)


class _Queue(Protocol):
    """Requests for workers."""

    def next(self, workers: int, early: bool = False) -> Request | None:
        """Return the next request, of those that this many workers share; None if there is none at present.

        Args:
            workers: their number.
            early: whether the worker that gets it has yet to finish its last one.
        """

    def requeue(self, request: Any) -> None:
        """Take back a request whose worker died."""

    def done(self, request: Any, reply: Any) -> None:
        """Take the reply to a request."""


# By the type of its requests; None: nothing of that kind is under way, so a late reply is dropped.
_Queues = dict[type[Request], _Queue | None]


class _Round:
    """Hands out the tasks of a plan: the longest of the next few first."""

    def __init__(self, backend: "Workers", inbox: Inbox, plan: Plan, slots: int):
        self._backend = backend
        self._inbox = inbox
        self._plan = plan
        self._epoch = plan.broadcast.epoch
        units = backend.job.units(plan.tasks, inbox.expects)  # of one task each, unless clients are batched
        self._positions = [p for unit in units for p in unit]  # in the plan
        self._rank = {p: k for k, p in enumerate(self._positions)}  # position → its place in the order of the units
        self._unfinished = len(units)
        self._beyond_window = deque(units)
        self._ready: list[tuple[int, tuple[int, ...]]] = []  # a heap of (−examples, unit)
        self._examples = {unit: sum(backend.job.examples(plan.tasks[p].client) or 1 for p in unit) for unit in units}
        self._examples_left = sum(self._examples.values())  # of the units that no worker has
        # True after a worker died: requests then have one unit each, so that the next death has a known task as its cause.
        self._one_by_one = False
        self._window = slots
        self._free_slots = list(range(slots))
        self._used_slots: dict[int, int] = {}  # position → its upload slot, which the server may still read
        self._new_states: dict[int, NewState] = {}  # by position

    @property
    def finished(self) -> bool:
        return not self._unfinished

    @property
    def _are_short(self) -> bool:
        small = (self._backend.job.batch_clients or 1) <= MAX_QUEUED_CLIENTS
        return small and self._backend.last_seconds < SHORT_TASK

    def next(self, workers: int, early: bool = False) -> FitRequest | None:
        # The last units only go to idle workers: queued behind another unit they would prolong the round.
        if early and not (self._are_short and len(self._beyond_window) + len(self._ready) >= workers):
            return None
        # A slot is free again only when all earlier tasks are settled. So tasks at most this far ahead are sure to get one.
        end = bisect_left(self._positions, self._inbox.settled) + self._window
        while self._beyond_window and self._rank[self._beyond_window[0][-1]] < end:
            self._push(self._beyond_window.popleft())
        chosen: list[tuple[int, ...]] = []
        # Each worker gets a share of what is left. So requests become shorter towards the end of the round, and uploads are
        # checked while others are computed.
        share = self._examples_left / (workers + 1)
        while self._ready and (not chosen or (share > 0 and self._fits(chosen))):
            _, unit = heappop(self._ready)
            chosen.append(unit)
            share -= self._examples[unit]
            self._examples_left -= self._examples[unit]
        return FitRequest(self._epoch, tuple(tuple(map(self._assign, unit)) for unit in chosen)) if chosen else None

    def _fits(self, chosen: list[tuple[int, ...]]) -> bool:
        """Whether a request may hold another unit."""
        if self._one_by_one or not self._are_short:
            return False
        seconds = (len(chosen) + 1) * self._backend.last_seconds
        return seconds < SHORT_TASK and (len(chosen) + 1) * (self._backend.job.batch_clients or 1) <= MAX_QUEUED_CLIENTS

    def _push(self, unit: tuple[int, ...]) -> None:
        heappush(self._ready, (-self._examples[unit], unit))

    def _assign(self, position: int) -> Assignment:
        task = self._plan.tasks[position]
        if position not in self._new_states:
            self._new_states[position] = NewState(self._backend.store, task.client, self._epoch)
        state = self._new_states[position]
        return Assignment(position, task, self._free_slots.pop(), state.old, state.new)

    def requeue(self, request: FitRequest) -> None:
        self._one_by_one = True
        for assignments in request.units:
            unit = tuple(a.position for a in assignments)
            self._push(unit)
            self._examples_left += self._examples[unit]
        self._free_slots.extend(a.upload_slot for a in request.assignments)

    def done(self, request: FitRequest, reply: FitReply) -> None:
        backend, inbox = self._backend, self._inbox
        with backend.timings.measure("sums"):
            for assignment, stored in zip(request.assignments, reply.uploads, strict=True):
                self._new_states[assignment.position].hand_in(inbox, backend.memory.get(stored))
                self._used_slots[assignment.position] = assignment.upload_slot
        self._free_slots.extend(self._used_slots.pop(p) for p in list(self._used_slots) if p < inbox.settled)
        self._unfinished -= len(request.units)
        backend.last_seconds = sum(reply.seconds.values()) / len(request.units)
        backend.timings.add(reply.seconds)


class _Evaluation:
    """Hands out the spans of an evaluation, in order."""

    def __init__(self, examples: int):
        self._todo = deque(enumerate(spans(examples)))
        self._results: list[Batch | None] = [None] * len(self._todo)

    @property
    def finished(self) -> bool:
        return None not in self._results

    def next(self, workers: int, early: bool = False) -> EvaluateRequest | None:
        if early or not self._todo:
            return None
        index, (start, stop) = self._todo.popleft()
        return EvaluateRequest(index, start, stop)

    def requeue(self, request: EvaluateRequest) -> None:
        self._todo.appendleft((request.index, (request.start, request.stop)))

    def done(self, request: EvaluateRequest, reply: EvaluateReply) -> None:
        self._results[request.index] = reply.batch

    def metrics(self) -> dict[str, float]:
        return combine([result for result in self._results if result is not None])


class Workers:
    """Train the clients in worker processes."""

    def __init__(self, job: Job, store: StateStore, workers: int, cohort: int = 0):
        """Start the workers.

        Args:
            job: model, data and algorithm.
            store: the clients' state.
            workers: how many processes.
            cohort: clients of a round, for the number of upload slots.

        Raises:
            UserError: the job cannot be sent to other processes, or there is too little memory.
            WorkerLost: no process can be started.
        """
        if os.name != "posix":
            raise UserError(f"workers: expected 0 on this system, since worker processes need POSIX, got {workers}")
        self.job = job
        self.store = store
        self.timings = Timings()
        self.last_seconds = math.inf  # of the last unit of tasks
        self._slots = max(4 * workers * (job.batch_clients or 1), min(cohort, MAX_WAITING_BYTES // _waiting_bytes(job)))
        self._fds: list[int] = []
        self._workers: list[Worker] = []
        self._deaths: Counter[Any] = Counter()  # by cause
        self._lost_forkservers: set[Forkserver | None] = set()
        self._evaluation: _Evaluation | None = None
        try:
            try:
                size = RoundMemory.size(job.algorithm, job.layout, self._slots)
                self._fds.append(anonymous_memory(size))
                self.memory = RoundMemory(mmap.mmap(self._fds[0], size), job.algorithm, job.layout)
                job_fd, job_size, job_length = pickle_to_memory(job)
            except OSError as error:
                reason = shortage(error) or error.strerror
                raise UserError(
                    f"workers: expected memory to share with worker processes, got none: {reason}; fewer workers need less, "
                    "workers=0 needs none"
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

    def pids(self) -> list[int]:
        """Return the process ids of the workers."""
        return [worker.pid for worker in self._workers]

    # -- a round ------------------------------------------------------------------------------------------------------

    def run_round(self, inbox: Inbox, plan: Plan) -> None:
        # Workers of a round that was interrupted may still read the broadcast or write into a slot: wait for them.
        self._work(None, lambda: not any(isinstance(r, FitRequest) for w in self._workers for r in w.pending), None)
        self.memory.publish(plan.broadcast)
        tasks = _Round(self, inbox, plan, self._slots)
        self._work(tasks, lambda: tasks.finished, "waiting")

    # -- an evaluation ------------------------------------------------------------------------------------------------

    def evaluate(self, x: Tensor) -> dict[str, float]:
        self.begin_evaluation(x)
        return self.finish_evaluation()

    def begin_evaluation(self, x: Tensor) -> None:
        self._evaluation = None
        if self.job.test is not None:
            self.memory.evaluated.copy_(x)
            self._evaluation = _Evaluation(len(self.job.test))

    def finish_evaluation(self) -> dict[str, float]:
        evaluation = self._evaluation
        if evaluation is None:
            return {}
        self._work(None, lambda: evaluation.finished, None)
        self._evaluation = None
        return evaluation.metrics()

    # -- work of any kind ---------------------------------------------------------------------------------------------

    def _work(self, tasks: _Queue | None, finished: Callable[[], bool], waiting: str | None) -> None:
        """Keep every worker busy until `finished`: with tasks and, if there is none, with the evaluation.

        Args:
            tasks: the queue of fit requests; None: only the evaluation, if one was begun.
            finished: asked before each wait.
            waiting: the name in `timings` for the time spent waiting; None: it is not counted.
        """
        self._deaths.clear()
        self._lost_forkservers.clear()
        queues: _Queues = {FitRequest: tasks, EvaluateRequest: self._evaluation}
        self._poll = select.poll()
        for worker in self._workers:
            self._poll.register(worker.connection.fileno(), select.POLLIN)
        while not finished():
            if not all(worker.pending for worker in self._workers):
                self._hand_out(queues)
            with self.timings.measure(waiting) if waiting else contextlib.nullcontext():
                readable = self._poll.poll(1000 * min((worker.liveness.every for worker in self._workers), default=1.0))
            by_descriptor = {worker.connection.fileno(): worker for worker in self._workers}
            replies: list[tuple[Request, Reply]] = []
            for worker in [by_descriptor[fd] for fd, _ in readable]:
                try:
                    reply: Ready | Reply | Failed = worker.connection.recv()
                except (EOFError, OSError):
                    self._replace(worker, queues, worker.exit_reason())
                    continue
                worker.liveness.clear()
                if isinstance(reply, Failed):
                    reply.reraise()
                if isinstance(reply, Ready):
                    worker.ready = True
                    continue
                replies.append((worker.pending.popleft(), reply))
            if replies:
                self._hand_out(queues)  # so that no worker waits while uploads are checked and summed
            for request, reply in replies:
                if (queue := queues[type(request)]) is not None:
                    queue.done(request, reply)
            for worker in list(self._workers):
                if worker.ready and not worker.pending:
                    worker.liveness.clear()
                elif reason := worker.liveness.lost():
                    self._replace(worker, queues, reason)

    def _hand_out(self, queues: _Queues) -> None:
        usable = [queue for queue in queues.values() if queue is not None]
        for early in (False, True):  # idle workers first, then those with one request, unless it is an evaluation
            free = [worker for worker in self._workers if worker.ready and len(worker.pending) == int(early)]
            for worker in sorted(free, key=_pending_units):
                if early and isinstance(worker.pending[0], EvaluateRequest):
                    continue
                for queue in usable:
                    if (request := queue.next(len(self._workers), early)) is not None:
                        worker.send(request)
                        break

    def _replace(self, worker: Worker, queues: _Queues, reason: str) -> None:
        """Replace a worker that ended or hangs, and requeue its requests."""
        for request in worker.pending:
            if (queue := queues[type(request)]) is not None:
                queue.requeue(request)
        current = worker.pending[0] if worker.pending else None
        cause: Any  # identifies the request, also when it is repeated
        match current:
            case None:
                cause = activity = "while idle" if worker.ready else "while starting"
            case FitRequest():
                cause = tuple([a.task for a in current.assignments])
                activity = f"while client {', '.join(str(task.client) for task in cause)} trained"
            case EvaluateRequest():
                cause, activity = current, "while evaluating"
        if worker.orphaned:  # all workers of a forkserver end with it, and no task is the cause
            cause = "forkserver"
            self._lost_forkservers.add(worker.forkserver)
            self._deaths[cause] = len(self._lost_forkservers)
        else:
            self._deaths[cause] += 1
        self._poll.unregister(worker.connection.fileno())
        worker.end()
        if self._deaths[cause] >= MAX_ATTEMPTS:
            raise WorkerLost(
                f"{MAX_ATTEMPTS} worker processes were lost {activity} (the last one {reason}). Out of memory? Fewer "
                "workers need less; workers=0 computes in this process and shows errors directly"
            )
        again = "" if current is None else " and its task runs again"
        k = self._workers.index(worker)
        log.warning("worker %d (pid %d) %s %s; it is replaced%s", k, worker.pid, reason, activity, again)
        self._workers[k] = self._start()
        self._poll.register(self._workers[k].connection.fileno(), select.POLLIN)

    def close(self) -> None:
        """End the workers and release the shared memory; safe to call twice."""
        with uninterrupted():
            for worker in self._workers:
                worker.end()
            self._workers = []
            for fd in self._fds:
                os.close(fd)
            self._fds = []


def _pending_units(worker: Worker) -> int:
    return sum(len(request.units) for request in worker.pending if isinstance(request, FitRequest))
