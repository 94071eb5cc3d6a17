"""An actor of the Ray backend: it answers one request at a time, with one thread."""

import os
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedbcgd.backends.ray.protocol import FitReply, FitRequest, NotPublished, Ready, Reply, Request, as_tensor
from fedbcgd.backends.ray.state_cache import StateCache
from fedbcgd.backends.workers.protocol import EvaluateReply, Failed
from fedbcgd.backends.workers.shared import anonymous_memory, unpickle_from_memory
from fedbcgd.core.messages import Broadcast
from fedbcgd.engine.job import Job


class Actor:
    """Answers requests, with the job and its cache of client state. An error is a reply as well."""

    def __init__(self, pickled: np.ndarray, size: int, device: str):
        torch.set_num_threads(1)
        self._device = torch.device(device)
        self._job = _unpickle_job(pickled, size)
        self._job.move_to(self._device)
        self._job.client  # noqa: B018  (build the flat model now, not within the first task)
        layout = self._job.layout
        self._publication = 0
        self._vectors: list[Tensor] = []
        self._states = StateCache(self._job.algorithm.state_names, layout.dim, layout.dtype, self._device)

    def publish(self, publication: int, vectors: Sequence[np.ndarray]) -> None:
        """Take the vectors that all requests with this number need."""
        dtype = self._job.layout.dtype
        self._vectors = [as_tensor(array, dtype).to(self._device) for array in vectors]
        self._publication = publication

    def reply(self, request: Request) -> Reply | NotPublished | Failed:
        """Return the reply to a request."""
        if request.publication != self._publication:
            return NotPublished()
        try:
            if isinstance(request, FitRequest):
                return self._fit(request)
            return EvaluateReply(self._job.evaluate(self._vectors[0], request.start, request.stop))
        except BaseException as error:  # also a sys.exit in a user's code, which must not end this process
            return Failed.of(error)

    def _fit(self, request: FitRequest) -> FitReply:
        task = request.task
        x, *controls = self._vectors
        named = dict(zip(self._job.algorithm.local.broadcasts, controls, strict=True))
        broadcast = Broadcast(task.round, request.epoch, x, named)
        upload, update = self._job.fit(broadcast, task, self._states.load(task.client, request.state))
        self._states.add(update)
        return FitReply.of(upload, update, dict(self._job.client.seconds))


def begin(pickled: np.ndarray, size: int, device: str) -> tuple[Actor | None, Ready | Failed]:
    """Make an actor, and return it with its first message: where it runs, or why it cannot be made."""
    try:
        return Actor(pickled, size, device), Ready(os.getpid(), os.uname().nodename)
    except BaseException as error:
        return None, Failed.of(error)


def _unpickle_job(pickled: np.ndarray, size: int) -> Job:
    """Return the job in memory of this process: Ray's store is shared, and data sets may write into their arrays."""
    fd = anonymous_memory(len(pickled))
    try:
        view = pickled.data
        while view:
            view = view[os.write(fd, view) :]
        job: Job = unpickle_from_memory(fd, size, len(pickled) - size)
    finally:
        os.close(fd)
    return job
