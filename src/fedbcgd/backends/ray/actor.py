"""What an actor of the Ray backend does: clients' work as it is told, one task at a time, with one thread."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbcgd.backends.ray.state_cache import Given, Shelf, as_bytes, as_tensor
from fedbcgd.backends.workers.shared import nameless, thaw
from fedbcgd.backends.workers.worker import failure
from fedbcgd.core.messages import Broadcast, Task
from fedbcgd.engine.job import Job


class Actor:
    """The job thawed; every method answers with a word and what goes with it, an error included."""

    def __init__(self, frozen: np.ndarray, size: int, device: str):
        torch.set_num_threads(1)
        self._device = torch.device(device)
        self._job = _thaw(frozen, size)
        self._job.move_to(self._device)
        self._job.client  # noqa: B018  (build the flat model now, not within the first task)
        layout = self._job.layout
        self._published: tuple[int, list[Tensor]] = (0, [])
        self._shelf = Shelf(self._job.algorithm.state_names, layout.dim, layout.dtype, self._device)

    def do(self, word: str, number: int, *arguments: Any) -> tuple[Any, ...]:
        """`number` says which of the driver's publications is meant."""
        try:
            if word == "publish":
                self._published = number, [self._vector(array) for array in arguments[0]]
                return (word,)
            if number != self._published[0]:
                return ("missed",)
            return word, *getattr(self, word)(*arguments)
        except BaseException as error:  # a user's sys.exit too is told, not followed
            return failure(error)

    def fit(self, epoch: int, task: Task, given: Given, drop: Sequence[int]) -> tuple[Any, ...]:
        x, *controls = self._published[1]
        named = dict(zip(self._job.algorithm.local.broadcasts, controls, strict=True))
        broadcast = Broadcast(task.round, epoch, x, named)
        upload, update = self._job.fit(broadcast, task, self._shelf.take(task.client, given, drop))
        self._shelf.made(update)
        payload = {channel: [as_bytes(piece) for piece in pieces] for channel, pieces in upload.payload.items()}
        values = {name: [(s.start, s.stop, as_bytes(v)) for s, v in pieces] for name, pieces in update.values.items()}
        told = (upload.examples, upload.steps, upload.gradient_evaluations, upload.train_loss)
        return payload, told, values, dict(self._job.client.seconds)

    def evaluate(self, start: int, stop: int) -> tuple[Any, ...]:
        return (self._job.evaluate(self._published[1][0], start, stop),)

    def _vector(self, array: np.ndarray) -> Tensor:
        return as_tensor(array, self._job.layout.dtype).to(self._device)


def begin(frozen: np.ndarray, size: int, device: str) -> tuple[Actor | None, tuple[Any, ...]]:
    """An actor, and what it says first: where it is, or why it cannot work."""
    try:
        return Actor(frozen, size, device), ("ready", os.getpid(), os.uname().nodename)
    except BaseException as error:
        return None, failure(error)


def _thaw(frozen: np.ndarray, size: int) -> Job:
    """In memory of this process's own: the store's is everybody's, and data sets may keep what they computed in arrays."""
    fd = nameless(len(frozen))
    try:
        view = frozen.data
        while view:
            view = view[os.write(fd, view) :]
        job: Job = thaw(fd, size, len(frozen) - size)
    finally:
        os.close(fd)
    return job
