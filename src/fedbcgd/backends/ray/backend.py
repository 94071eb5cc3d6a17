"""Ray actors, on this machine or on a cluster: one CPU and one thread each, alive for the whole run.

The job is sent once, the broadcast is put into Ray's store once a round, and an upload is only its block. Actors get tasks
as they become free, in the order of the plan, but the longest of the next few first. An actor that is lost is replaced and
its tasks run again: every draw comes from (seed, round, client), so the result is the same. `state_cache.py` describes where
client state is kept.
"""

import contextlib
import logging
import mmap
import os
import signal
import sys
import time
from bisect import insort
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from fedbcgd.backends.ray import cluster
from fedbcgd.backends.ray.protocol import (
    EvaluateRequest,
    FitReply,
    FitRequest,
    NotPublished,
    Ready,
    Reply,
    Request,
    as_bytes,
)
from fedbcgd.backends.ray.state_cache import CacheIndex
from fedbcgd.backends.workers.backend import MAX_ATTEMPTS
from fedbcgd.backends.workers.processes import ENVIRONMENT, LivenessMonitor, cores
from fedbcgd.backends.workers.protocol import EvaluateReply, Failed
from fedbcgd.backends.workers.shared import pickle_to_memory
from fedbcgd.core.messages import Plan
from fedbcgd.engine.backend import Inbox, NewState, Timings
from fedbcgd.engine.client_state import StateStore
from fedbcgd.engine.evaluation import Batch, combine, spans
from fedbcgd.engine.job import Job
from fedbcgd.errors import UserError, WorkerLost

log = logging.getLogger("fedbcgd")

BACKLOG = 2  # tasks that an actor has at once, so that it need not wait for the next one
PATIENCE = 30.0  # seconds after which a warning says that actors could not be started
START = -1  # stands for the position of a task while an actor is starting


@dataclass(eq=False)
class _Actor:
    """What the driver knows of an actor."""

    number: int
    handle: Any
    calls: dict[Any, int] = field(default_factory=dict)  # reference to a reply → position of the task, the oldest first
    ready: bool = False
    publication: int = 0  # the last one sent to it
    place: str = "not started"
    pid: int = 0
    liveness: LivenessMonitor | None = None  # only if Ray was started here, so that the actor is on this machine


class Ray:
    """Train the clients in Ray actors."""

    def __init__(
        self,
        job: Job,
        store: StateStore,
        cohort: int,
        workers: int | None = None,
        address: str | None = None,
        gpus: float | None = None,
        device: str = "cpu",
    ):
        """Connect to Ray or start it, and start the actors.

        Args:
            job: model, data and algorithm.
            store: the clients' state.
            cohort: clients of a round; more actors than that are not started.
            workers: how many actors; by default as many as the cluster has CPUs and GPUs for.
            address: of the cluster; None: start Ray on this machine.
            gpus: share of a GPU for each actor; by default 1 with a CUDA device, otherwise 0.
            device: of the actors.

        Raises:
            UserError: Ray is missing or does not start, or the job cannot be sent to other processes.
        """
        self.job = job
        self.store = store
        self.timings = Timings()
        self._ray = cluster.package()
        self._gpus = gpus if gpus is not None else float(device.startswith("cuda"))
        self._device = device
        self._actors: list[_Actor] = []
        self._losses: Counter[int] = Counter()
        self._caches = CacheIndex(store)
        self._publication = 0  # number of the vectors that all actors need
        self._vectors: Any = None  # Ray's reference to them
        pickled, self._size = _pickle_job(job)
        cluster.join(address, min(workers or cores(), cohort))
        self._joined = True
        try:
            count = min(workers or self._capacity(), cohort)
            self._window = 4 * count  # how many tasks after the last settled upload may be handed out
            self._job = self._ray.put(pickled)
            self._actor_class = _actor_class(self._ray, self._gpus)
            self._actors = [self._start(number) for number in range(count)]
            self._began = time.monotonic()
        except BaseException:
            self.close()
            raise

    def _capacity(self) -> int:
        """Return how many actors the cluster has CPUs and GPUs for."""
        resources = self._ray.cluster_resources()
        cpus = resources.get("CPU", 1)
        return max(1, int(min(cpus, resources.get("GPU", 0) / self._gpus) if self._gpus else cpus))

    def _start(self, number: int) -> _Actor:
        actor = _Actor(number, self._actor_class.remote())
        path = [os.path.abspath(folder) for folder in sys.path]  # an empty entry is the current folder
        actor.calls[actor.handle.begin.remote(path, self._job, self._size, self._device)] = START
        return actor

    def pids(self) -> list[int]:
        """Return the process ids of the actors that have started, each on its own machine."""
        return [actor.pid for actor in self._actors if actor.ready]

    # -- a round ------------------------------------------------------------------------------------------------------

    def run_round(self, inbox: Inbox, plan: Plan) -> None:
        broadcast, tasks, count = plan.broadcast, plan.tasks, len(self._actors)
        self._publish(broadcast.x, *broadcast.controls.values())
        todo = [position for position, task in enumerate(tasks) if inbox.expects(task)]
        length = [self.job.examples(task.client) for task in tasks]

        def choose(actor: _Actor) -> int | None:
            """Return the longest of the next few tasks: if clients have state, of the actor's own clients if possible."""
            next_few = [position for position in todo if position < inbox.settled + self._window]
            if self.store.file is not None:
                own = [position for position in next_few if tasks[position].client % count == actor.number]
                next_few = own or ([] if actor.calls else next_few)
            return max(next_few, key=lambda position: (length[position], -position), default=None)

        def request(actor: _Actor, position: int) -> FitRequest:
            task = tasks[position]
            state = self._caches.assign(actor.number, task.client, broadcast.epoch)
            return FitRequest(self._publication, broadcast.epoch, task, state)

        def done(actor: _Actor, position: int, reply: Reply) -> None:
            assert isinstance(reply, FitReply)
            client = tasks[position].client
            with self.timings.measure("sums"):
                state = NewState(self.store, client, broadcast.epoch)
                if state.hand_in(inbox, reply.as_upload(), reply.as_update(self.job.layout.dtype)):
                    self._caches.accepted(actor.number, client, state.new)
            self.timings.add(reply.seconds)

        self._work(todo, choose, request, done, lambda position: f"client {tasks[position].client} trained", "waiting")

    def evaluate(self, x: Tensor) -> dict[str, float]:
        if self.job.test is None:
            return {}
        self._publish(x)
        batches = spans(len(self.job.test))
        results: dict[int, Batch] = {}
        todo = list(range(len(batches)))

        def done(actor: _Actor, k: int, reply: Reply) -> None:
            assert isinstance(reply, EvaluateReply)
            results[k] = reply.batch

        self._work(
            todo,
            lambda actor: next(iter(todo), None),
            lambda actor, k: EvaluateRequest(self._publication, *batches[k]),
            done,
            lambda k: "it evaluated",
            None,
        )
        return combine([results[k] for k in range(len(batches))])

    def _publish(self, *vectors: Tensor) -> None:
        """Put vectors that all actors need into Ray's store, once."""
        self._publication += 1
        self._vectors = self._ray.put([as_bytes(vector) for vector in vectors])

    def _send(self, actor: _Actor, request: Request) -> Any:
        """Send a request, and before the first one of a publication the publication itself.

        Returns:
            Ray's reference to the reply.
        """
        if actor.publication != self._publication:
            actor.handle.publish.remote(self._publication, self._vectors)
            actor.publication = self._publication
        return actor.handle.reply.remote(request)

    def _work(
        self,
        todo: list[int],
        choose: Callable[[_Actor], int | None],
        request: Callable[[_Actor, int], Request],
        done: Callable[[_Actor, int, Reply], None],
        describe: Callable[[int], str],
        waiting: str | None,
    ) -> None:
        """Keep every actor busy until all tasks are done.

        Args:
            todo: positions of the tasks.
            choose: returns the next task for an actor; None: none at present.
            request: makes the request for a task.
            done: takes the reply to a task.
            describe: says what an actor does with a task, for messages.
            waiting: the name in `timings` for the time spent waiting; None: it is not counted.
        """
        self._losses.clear()
        for actor in self._actors:  # ignore replies to tasks of a round that was interrupted
            actor.calls = {ref: position for ref, position in actor.calls.items() if position == START}
        left = len(todo)
        while left:
            self._hand_out(todo, choose, request)
            calls = {ref: actor for actor in self._actors for ref in actor.calls}
            with self.timings.measure(waiting) if waiting else contextlib.nullcontext():
                every = min((actor.liveness.every for actor in self._actors if actor.liveness), default=PATIENCE)
                ready, _ = self._ray.wait(list(calls), num_returns=1, timeout=every)
            self._warn_if_actors_are_missing()
            for ref in ready:
                actor = calls[ref]
                if ref not in actor.calls:
                    continue  # the actor was lost in this loop, with all its calls
                try:
                    reply: Ready | Reply | NotPublished | Failed = self._ray.get(ref)
                except self._ray.exceptions.RayTaskError as error:
                    # Errors in our code are replies, so this one is Ray's.
                    raise UserError(
                        f"backend 'ray': expected actors to start, got {cluster.first_line(error.cause)}; every machine of "
                        "the cluster needs fedbcgd and the packages of model and data, in the same versions as here"
                    ) from error
                except self._ray.exceptions.RayError as error:
                    self._replace(actor, error, todo, describe)
                    continue
                if isinstance(reply, NotPublished):
                    self._replace(actor, RuntimeError("it did not get the model of the round"), todo, describe)
                    continue
                position = actor.calls.pop(ref)
                if isinstance(reply, Failed):
                    reply.reraise()
                elif isinstance(reply, Ready):
                    actor.ready = True
                    actor.pid, actor.place = reply.pid, reply.host
                    actor.liveness = LivenessMonitor(actor.pid) if cluster.started_here() else None
                else:
                    done(actor, position, reply)
                    left -= 1
            self._replace_silent(todo, describe)

    def _hand_out(
        self, todo: list[int], choose: Callable[[_Actor], int | None], request: Callable[[_Actor, int], Request]
    ) -> None:
        for depth in range(1, BACKLOG + 1):
            for actor in self._actors:
                # The last tasks are handed out one by one: no actor has two while another has none.
                if actor.ready and len(actor.calls) < depth and (depth == 1 or len(todo) > len(self._actors)):
                    chosen = choose(actor)
                    if chosen is not None:
                        todo.remove(chosen)
                        actor.calls[self._send(actor, request(actor, chosen))] = chosen

    def _replace(self, actor: _Actor, error: Exception, todo: list[int], describe: Callable[[int], str]) -> None:
        """Replace a lost actor, and requeue its tasks."""
        current = next(iter(actor.calls.values()))  # the oldest call: what the actor was doing
        during = "it started" if current == START else describe(current)
        self._losses[current] += 1
        if self._losses[current] >= MAX_ATTEMPTS:
            raise WorkerLost(
                f"{MAX_ATTEMPTS} Ray actors were lost while {during} (the last one: {_exit_detail(error)}). Out of memory? "
                "Fewer workers need less; with backend = 'inprocess' errors show directly"
            ) from error
        place = f"pid {actor.pid} on {actor.place}" if actor.ready else actor.place
        again = [position for position in actor.calls.values() if position != START]
        log.warning(
            "actor %d (%s) was lost while %s: %s; it is replaced%s",
            *(actor.number, place, during, _exit_detail(error), " and its task runs again" if again else ""),
        )
        for position in again:
            insort(todo, position)
        self._end(actor)
        self._actors[actor.number] = self._start(actor.number)

    def _replace_silent(self, todo: list[int], describe: Callable[[int], str]) -> None:
        """Replace actors that are stopped or hang: Ray only notices machines and processes that have ended."""
        for actor in list(self._actors):
            if actor.liveness is None:
                continue
            if not actor.calls:
                actor.liveness.clear()
            elif reason := actor.liveness.lost():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(actor.pid, signal.SIGKILL)  # a stopped process would not react to Ray's request to end
                self._replace(actor, RuntimeError(f"it {reason}"), todo, describe)

    def _warn_if_actors_are_missing(self) -> None:
        if self._began and time.monotonic() - self._began > PATIENCE:
            missing = sum(not actor.ready for actor in self._actors)
            if missing:
                needs = "one CPU" + (f" and {self._gpus:g} GPU" if self._gpus else "")
                log.warning(
                    "%d of %d actors have not started yet: each needs %s of the cluster",
                    *(missing, len(self._actors), needs),
                )
            self._began = 0.0

    # -- the end ------------------------------------------------------------------------------------------------------

    def _end(self, actor: _Actor) -> None:
        actor.calls = {}
        self._caches.lost(actor.number)
        with contextlib.suppress(Exception):  # the actor or all of Ray may be gone
            self._ray.kill(actor.handle, no_restart=True)

    def close(self) -> None:
        """End the actors, and leave Ray; safe to call twice."""
        for actor in self._actors:
            self._end(actor)
        self._actors = []
        self._job = self._vectors = None
        if self._joined:
            self._joined = False
            cluster.leave()


def _actor_class(ray: Any, gpus: float) -> Any:
    """Return the class of the actors.

    A class made in a function is pickled by value, so that the path is set before fedbcgd is imported.
    """

    class FedBCGD:
        def begin(self, path: list[str], *arguments: Any) -> Any:
            import sys

            sys.path[:] = dict.fromkeys([*path, *sys.path])  # the user's modules are found as in the driver
            from fedbcgd.backends.ray.actor import begin

            self.actor, reply = begin(*arguments)
            return reply

        def publish(self, publication: int, vectors: Any) -> None:
            assert self.actor is not None
            self.actor.publish(publication, vectors)

        def reply(self, request: Any) -> Any:
            assert self.actor is not None
            return self.actor.reply(request)

    return ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=0, runtime_env={"env_vars": ENVIRONMENT})(FedBCGD)


def _pickle_job(job: Job) -> tuple[np.ndarray, int]:
    """Return the job as bytes, and how many of the first bytes are the memory of its tensors and arrays."""
    fd, size, length = pickle_to_memory(job)
    try:
        return np.frombuffer(mmap.mmap(fd, size + length), np.uint8), size
    finally:
        os.close(fd)


def _exit_detail(error: Exception) -> str:
    """Return the sentence of Ray's message that says how an actor ended."""
    text = str(error)
    _, found, detail = text.partition("Worker exit detail: ")
    return (detail if found else cluster.first_line(error)).partition(" Some common causes")[0].strip().rstrip(".")
