"""Ray actors, on this machine or on a cluster: one CPU and one thread each, alive for the whole run.

The job travels once, the broadcast is put into Ray's store once a round, and an upload is only its block. Tasks go out as
actors come free, in the order of the plan but the longest first among the next few. An actor that is lost is replaced and
its tasks run again: every draw comes from (seed, round, client), so the result is the same. Client state is described in
`state_cache`.
"""

import contextlib
import logging
import mmap
import os
import pickle
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

from fedbcgd.backends.new_state import NewState
from fedbcgd.backends.ray import cluster
from fedbcgd.backends.ray.protocol import (
    EvaluateReply,
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
from fedbcgd.backends.workers.backend import TRIES
from fedbcgd.backends.workers.processes import ENVIRONMENT, Pulse, cores
from fedbcgd.backends.workers.protocol import Failed
from fedbcgd.backends.workers.shared import freeze
from fedbcgd.core.messages import Plan
from fedbcgd.engine.backend import Inbox
from fedbcgd.engine.client_state import StateStore
from fedbcgd.engine.clock import Clock
from fedbcgd.engine.evaluation import Batch, combine, spans
from fedbcgd.engine.job import Job
from fedbcgd.errors import UserError, WorkerLost

log = logging.getLogger("fedbcgd")

BACKLOG = 2  # tasks an actor has at once: the next one is there when one is done
PATIENCE = 30.0  # seconds before it is said that the cluster has no room
START = -1  # what an actor is doing before its first task


@dataclass(eq=False)
class _Actor:
    number: int
    handle: Any
    calls: dict[Any, int] = field(default_factory=dict)  # reference to a reply → position of its task, the oldest first
    ready: bool = False
    publication: int = 0  # the last one that was sent to it
    place: str = "not started"
    pid: int = 0
    pulse: Pulse | None = None  # of an actor in a Ray that was started here


class Ray:
    """`workers`: how many actors; by default as many as the cluster has CPUs (and GPUs) for, at most the cohort."""

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
        self.job = job
        self.store = store
        self.clock = Clock()
        self._ray = cluster.package()
        self._gpus = gpus if gpus is not None else float(device.startswith("cuda"))
        self._device = device
        self._actors: list[_Actor] = []
        self._losses: Counter[int] = Counter()
        self._caches = CacheIndex(store)
        self._publication = 0  # counts what goes to every actor
        self._vectors: Any = None  # the last of it, in Ray's store
        frozen, self._size = _frozen(job)
        cluster.join(address, min(workers or cores(), cohort))
        self._joined = True
        try:
            count = min(workers or self._room(), cohort)
            self._window = 4 * count  # how far ahead of the uploads that are settled tasks go out
            self._job = self._ray.put(frozen)
            self._actor_class = _actor_class(self._ray, self._gpus)
            self._actors = [self._start(number) for number in range(count)]
            self._began = time.monotonic()
        except BaseException:
            self.close()
            raise

    def _room(self) -> int:
        resources = self._ray.cluster_resources()
        room = resources.get("CPU", 1)
        return max(1, int(min(room, resources.get("GPU", 0) / self._gpus) if self._gpus else room))

    def _start(self, number: int) -> _Actor:
        actor = _Actor(number, self._actor_class.remote())
        path = [os.path.abspath(place) for place in sys.path]  # an empty one is the folder we are in
        actor.calls[actor.handle.begin.remote(path, self._job, self._size, self._device)] = START
        return actor

    def pids(self) -> list[int]:
        """Of the actors that have started; on their own machines."""
        return [actor.pid for actor in self._actors if actor.ready]

    # -- a round ------------------------------------------------------------------------------------------------------

    def carry(self, inbox: Inbox, plan: Plan) -> None:
        broadcast, tasks, count = plan.broadcast, plan.tasks, len(self._actors)
        self._publish(broadcast.x, *broadcast.controls.values())
        todo = [position for position, task in enumerate(tasks) if inbox.expects(task)]
        length = [self.job.examples(task.client) for task in tasks]

        def choose(actor: _Actor) -> int | None:
            """The longest of the next few; where clients have state, of its share, or else it helps another."""
            near = [position for position in todo if position < inbox.settled + self._window]
            if self.store.file is not None:
                own = [position for position in near if tasks[position].client % count == actor.number]
                near = own or ([] if actor.calls else near)
            return max(near, key=lambda position: (length[position], -position), default=None)

        def request(actor: _Actor, position: int) -> FitRequest:
            task = tasks[position]
            state = self._caches.assign(actor.number, task.client, broadcast.epoch)
            return FitRequest(self._publication, broadcast.epoch, task, state)

        def done(actor: _Actor, position: int, reply: Reply) -> None:
            assert isinstance(reply, FitReply)
            client = tasks[position].client
            with self.clock.timing("sums"):
                state = NewState(self.store, client, broadcast.epoch)
                if state.hand_in(inbox, reply.as_upload(), reply.as_update(self.job.layout.dtype)):
                    self._caches.accepted(actor.number, client, state.new)
            self.clock.add(reply.seconds)

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
        """Put what goes to every actor into Ray's store, once."""
        self._publication += 1
        self._vectors = self._ray.put([as_bytes(vector) for vector in vectors])

    def _send(self, actor: _Actor, request: Request) -> Any:
        """Send a request, and the publication before the first one that needs it; as part of each it would cost more.

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
        what: Callable[[int], str],
        waiting: str | None,
    ) -> None:
        """Keep every actor busy until all that is to do is done."""
        self._losses.clear()
        for actor in self._actors:  # replies to what an interrupt cut off do not count
            actor.calls = {ref: position for ref, position in actor.calls.items() if position == START}
        left = len(todo)
        while left:
            self._hand_out(todo, choose, request)
            calls = {ref: actor for actor in self._actors for ref in actor.calls}
            with self.clock.timing(waiting) if waiting else contextlib.nullcontext():
                every = min((actor.pulse.every for actor in self._actors if actor.pulse), default=PATIENCE)
                ready, _ = self._ray.wait(list(calls), num_returns=1, timeout=every)
            self._say_if_short()
            for ref in ready:
                actor = calls[ref]
                if ref not in actor.calls:
                    continue  # it was lost just now, with all its calls
                try:
                    reply: Ready | Reply | NotPublished | Failed = self._ray.get(ref)
                except self._ray.exceptions.RayTaskError as error:  # ours are replies: this one is of Ray itself
                    raise UserError(
                        f"an actor cannot work ({cluster.first_line(error.cause)}): every machine of the cluster needs "
                        "fedbcgd and what the model and the data need, in the same versions as here"
                    ) from error
                except self._ray.exceptions.RayError as error:
                    self._replace(actor, error, todo, what)
                    continue
                if isinstance(reply, NotPublished):
                    self._replace(actor, RuntimeError("the model of the round did not reach it"), todo, what)
                    continue
                position = actor.calls.pop(ref)
                if isinstance(reply, Failed):
                    reply.reraise()
                elif isinstance(reply, Ready):
                    actor.ready = True
                    actor.pid, actor.place = reply.pid, reply.host
                    actor.pulse = Pulse(actor.pid) if cluster.started_here() else None
                else:
                    done(actor, position, reply)
                    left -= 1
            self._replace_silent(todo, what)

    def _hand_out(
        self,
        todo: list[int],
        choose: Callable[[_Actor], int | None],
        request: Callable[[_Actor, int], Request],
    ) -> None:
        for depth in range(1, BACKLOG + 1):
            for actor in self._actors:
                # The last ones are given out one by one: nobody has two while another has none.
                if actor.ready and len(actor.calls) < depth and (depth == 1 or len(todo) > len(self._actors)):
                    chosen = choose(actor)
                    if chosen is not None:
                        todo.remove(chosen)
                        actor.calls[self._send(actor, request(actor, chosen))] = chosen

    def _replace(self, actor: _Actor, error: Exception, todo: list[int], what: Callable[[int], str]) -> None:
        current = next(iter(actor.calls.values()))  # the oldest is what it was at
        during = "it started" if current == START else what(current)
        self._losses[current] += 1
        if self._losses[current] >= TRIES:
            raise WorkerLost(
                f"{TRIES} Ray actors in a row were lost while {during} (the last one: {_why(error)}). Out of memory? "
                "Fewer workers need less; without backend = 'ray' and with workers = 0 errors show directly"
            ) from error
        place = f"pid {actor.pid} on {actor.place}" if actor.ready else actor.place
        again = [position for position in actor.calls.values() if position != START]
        log.warning(
            "actor %d (%s) was lost while %s: %s; it is replaced%s",
            *(actor.number, place, during, _why(error), " and its task runs again" if again else ""),
        )
        for position in again:
            insort(todo, position)
        self._end(actor)
        self._actors[actor.number] = self._start(actor.number)

    def _replace_silent(self, todo: list[int], what: Callable[[int], str]) -> None:
        """Ray notices machines that are gone and processes that end, but not a process that is stopped."""
        for actor in list(self._actors):
            if actor.pulse is None:
                continue
            if not actor.calls:
                actor.pulse.clear()
            elif why := actor.pulse.lost():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(actor.pid, signal.SIGKILL)  # Ray would ask it to end
                self._replace(actor, RuntimeError(f"it {why}"), todo, what)

    def _say_if_short(self) -> None:
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
        with contextlib.suppress(Exception):  # it, or all of Ray, may be gone
            self._ray.kill(actor.handle, no_restart=True)

    def close(self) -> None:
        for actor in self._actors:
            self._end(actor)
        self._actors = []
        self._job = self._vectors = None
        if self._joined:
            self._joined = False
            cluster.leave()


def _actor_class(ray: Any, gpus: float) -> Any:
    """The class of the actors. Made in a function it travels by value, so the path is set before anything is imported."""

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


def _frozen(job: Job) -> tuple[np.ndarray, int]:
    """The job as bytes: first the memory of its tensors and arrays, of the second number's length, then its pickle."""
    try:
        fd, size, length = freeze(job)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise UserError(
            f"the model, the loss or the data cannot be sent to Ray's actors ({error}); with backend = 'workers' and "
            "workers=0 they stay"
        ) from error
    try:
        return np.frombuffer(mmap.mmap(fd, size + length), np.uint8), size
    finally:
        os.close(fd)


def _why(error: Exception) -> str:
    """The one sentence of Ray's explanation that says how it ended."""
    text = str(error)
    _, found, detail = text.partition("Worker exit detail: ")
    return (detail if found else cluster.first_line(error)).partition(" Some common causes")[0].strip().rstrip(".")
