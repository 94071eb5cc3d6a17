"""A worker process: does clients' work as it is told, one task at a time, with one thread.

Started by `carriers.workers` as a fresh interpreter. What it needs comes through inherited descriptors: the job (frozen),
the memory shared with the server (broadcast and upload slots), the slots of client state, and a connection for words.
"""

import contextlib
import mmap
import os
import pickle
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # blocked already; ignored also by whatever a user's code starts
    parent, connection_fd, job_fd, job_size, job_length, shared_fd, state_fd = map(int, sys.argv[1:])
    _die_with(parent)
    connection = Connection(connection_fd)
    try:
        desk = _Desk(job_fd, job_size, job_length, shared_fd, state_fd, connection.recv())
        connection.send(("ready",))
    except BaseException as error:
        connection.send(failure(error))
        return
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone: so are we
        while True:
            word, *arguments = connection.recv()
            try:
                answer = (word, *getattr(desk, word)(*arguments))
            except BaseException as error:
                answer = failure(error)
            connection.send(answer)


class _Desk:
    """The job thawed, and the shared memory laid out as the parent has it."""

    def __init__(self, job_fd: int, job_size: int, job_length: int, shared_fd: int, state_fd: int, path: list[str]):
        sys.path[:] = path  # the user's modules are found as in the parent
        import torch

        torch.set_num_threads(1)
        from fedbcgd.carriers.desk import Memory
        from fedbcgd.carriers.shared import thaw
        from fedbcgd.state import SlotFile

        self.job = thaw(job_fd, job_size, job_length)
        layout = self.job.layout
        self.memory = Memory(mmap.mmap(shared_fd, 0), self.job.algorithm, layout)
        self.state = (
            SlotFile(state_fd, self.job.algorithm.state_names, layout.dim, layout.dtype) if state_fd >= 0 else None
        )
        self.job.client  # noqa: B018  (build the flat model now, not within the first task)

    def fit(self, unit: Any, tasks: Any, epoch: int, places: Any, old: Any, new: Any) -> tuple[Any, ...]:
        """Train the clients of a unit; for each a place for its upload, and the slots of its state before and after."""
        slots = [self.memory.slot(place) for place in places]
        states = [self.state.open(k) if self.state is not None and k is not None else {} for k in old]
        broadcast = self.memory.broadcast(tasks[0].round, epoch)
        made = self.job.fit_unit(broadcast, tasks, states, [slot.lend for slot in slots])
        said = []
        for slot, (upload, update), before, after in zip(slots, made, old, new, strict=True):
            if self.state is not None and after is not None:
                self.state.write(after, before, update)
            told = (upload.examples, upload.steps, upload.gradient_evaluations, upload.train_loss)
            said.append((slot.put(upload), told))
        return unit, places, said, dict(self.job.client.seconds)

    def evaluate(self, index: int, start: int, stop: int) -> tuple[Any, ...]:
        return index, self.job.evaluate(self.memory.evaluated, start, stop)


def failure(error: BaseException) -> tuple[str, bytes, str]:
    """The error itself where it can travel, and how it came about as text."""
    import cloudpickle

    text = "".join(traceback.format_exception(error))
    try:
        body = cloudpickle.dumps(error)
        pickle.loads(body)  # some errors only fail on arrival
    except Exception:
        body = b""
    return "failed", body, text


def _die_with(parent: int) -> None:
    """End at once when the parent does, however it ends (Linux; elsewhere the closed connection tells, after the task)."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        sys.exit(1)


if __name__ == "__main__":
    main()
