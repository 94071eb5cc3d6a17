"""What main process, forkserver and workers send to each other: pickled messages; memory travels as descriptors.

This module imports no torch: the main process starts the forkserver before it imports torch itself. The messages have no
`slots`: of frozen dataclasses those without pickle in half the time, and small models take thousands of messages a second.
"""

import pickle
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from fedbcgd.backends.workers.memory import StoredUpload
    from fedbcgd.core.messages import Task
    from fedbcgd.engine.evaluation import Batch

# -- main process and forkserver --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ForkRequest:
    """Make a worker. Descriptors follow: the worker's end of its line, and one for each of `streams`."""

    environment: dict[str, str]
    folder: str
    streams: tuple[int, ...]  # standard output and error, as far as they are open


@dataclass(frozen=True)
class ForkReply:
    pid: int


@dataclass(frozen=True)
class ForkRefused:
    reason: str


@dataclass(frozen=True)
class ExitCodeRequest:
    pid: int


@dataclass(frozen=True)
class ExitCodeReply:
    code: int | None  # as subprocess has them; None: it did not end


# -- main process and worker ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JobRequest:
    """Prepare a job: the first message to a worker. Descriptors follow: the frozen job, the memory of a round, and the slots
    of client state if there are any."""

    path: list[str]  # sys.path, so that the user's modules are found
    buffer_bytes: int  # of the frozen job: its tensors and arrays,
    pickle_bytes: int  # and its pickle
    descriptors: int


@dataclass(frozen=True)
class Ready:
    pass


@dataclass(frozen=True)
class Assignment:
    """One client of a FitRequest."""

    position: int  # of the task in the plan
    task: "Task"
    upload_slot: int
    old_state: int | None  # slots of client state: before the task,
    new_state: int | None  # and after it


@dataclass(frozen=True)
class FitRequest:
    """Train these clients, as one unit."""

    epoch: int
    assignments: tuple[Assignment, ...]


@dataclass(frozen=True)
class FitReply:
    """The uploads of a FitRequest, in its order."""

    uploads: tuple["StoredUpload", ...]
    seconds: dict[str, float]  # by part of the work


@dataclass(frozen=True)
class EvaluateRequest:
    """Evaluate test examples from `start` to `stop`: batch `index` of the evaluation."""

    index: int
    start: int
    stop: int


@dataclass(frozen=True)
class EvaluateReply:
    batch: "Batch"


@dataclass(frozen=True)
class Failed:
    """A request raised an error, in most cases in a user's code."""

    error: bytes  # pickled; empty if it cannot be pickled
    text: str  # its traceback

    @classmethod
    def of(cls, error: BaseException) -> "Failed":
        import cloudpickle

        text = "".join(traceback.format_exception(error))
        try:
            body = cloudpickle.dumps(error)
            pickle.loads(body)  # some errors can be pickled but not loaded
        except Exception:
            body = b""
        return cls(body, text)

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
