"""The messages between main process, forkserver and workers. They are pickled; memory is sent as descriptors.

This module does not import torch: the main process starts the forkserver before it imports torch itself. The dataclasses
have no `slots`: without them they pickle in half the time, and small models take thousands of messages a second.
"""

import pickle
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from fedbcgd.errors import hides_callers, users_frames

if TYPE_CHECKING:
    from fedbcgd.backends.workers.memory import StoredUpload
    from fedbcgd.core.messages import Task
    from fedbcgd.engine.evaluation import Batch

# -- main process and forkserver --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ForkRequest:
    """Fork a worker.

    After this message file descriptors are sent: the worker's end of its socket, and one for each of `streams`.
    """

    environment: dict[str, str]
    folder: str  # the working directory
    streams: tuple[int, ...]  # those of 1 and 2, standard output and error, that are open


@dataclass(frozen=True)
class ForkReply:
    """The worker is started."""

    pid: int


@dataclass(frozen=True)
class ForkRefused:
    """No worker can be started."""

    reason: str


@dataclass(frozen=True)
class ExitCodeRequest:
    """Wait for a worker to end."""

    pid: int


@dataclass(frozen=True)
class ExitCodeReply:
    """How a worker ended."""

    code: int | None  # as in `subprocess`; None: it did not end


# -- main process and worker ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JobRequest:
    """Prepare a job: the first message to a worker.

    After it file descriptors are sent: the pickled job, the memory of a round, and the slots of client state if the
    algorithm has any.
    """

    path: list[str]  # sys.path, so that the user's modules are found
    buffer_bytes: int  # of the tensors and arrays of the pickled job
    pickle_bytes: int  # of its pickle
    descriptors: int  # how many file descriptors follow


@dataclass(frozen=True)
class Ready:
    """The job is prepared."""


@dataclass(frozen=True)
class Assignment:
    """One client of a FitRequest."""

    position: int  # of the task in the plan
    task: "Task"
    upload_slot: int
    old_state: int | None  # slot of the client's state before the task; None: zero
    new_state: int | None  # slot of its state after the task; None: the algorithm keeps none


Unit = tuple[Assignment, ...]  # one client, or several that are trained in one batch


@dataclass(frozen=True)
class FitRequest:
    """Train these clients, unit by unit. There are several units if a task takes hardly longer than a message."""

    epoch: int
    units: tuple[Unit, ...]

    @property
    def assignments(self) -> list[Assignment]:
        """The assignments of all units."""
        return [assignment for unit in self.units for assignment in unit]


@dataclass(frozen=True)
class FitReply:
    """The uploads of a FitRequest, in its order."""

    uploads: tuple["StoredUpload", ...]
    seconds: dict[str, float]  # by part of the work: "local", "codec"


@dataclass(frozen=True)
class EvaluateRequest:
    """Evaluate the test examples from `start` to `stop`, which are span `index` of the evaluation."""

    index: int
    start: int
    stop: int


@dataclass(frozen=True)
class EvaluateReply:
    """The metrics of an EvaluateRequest."""

    batch: "Batch"


@dataclass(frozen=True)
class Failed:
    """The reply to a request that raised an error, in most cases in a user's code."""

    error: bytes  # pickled; empty if it cannot be pickled
    text: str  # its traceback

    @classmethod
    def of(cls, error: BaseException) -> "Failed":
        """Make the reply to a request that raised this error."""
        import cloudpickle

        text = "".join(traceback.format_exception(error.with_traceback(users_frames(error.__traceback__))))
        try:
            body = cloudpickle.dumps(error)
            pickle.loads(body)  # some errors can be pickled but not loaded
        except Exception:
            body = b""
        return cls(body, text)

    @hides_callers
    def reraise(self) -> NoReturn:
        """Raise the same error here, with the worker's traceback as a note."""
        error: BaseException
        error = pickle.loads(self.error) if self.error else RuntimeError(self.text.strip().splitlines()[-1])
        if not isinstance(error, Exception):  # such as SystemExit, which must not end this process
            error = RuntimeError(f"the work ended with {error!r}")
        error.add_note(f"In a worker process:\n{self.text}")
        raise error


Request = FitRequest | EvaluateRequest
Reply = FitReply | EvaluateReply
