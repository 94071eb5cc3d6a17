"""What a backend must do."""

from typing import Protocol, runtime_checkable

from torch import Tensor

from fedbcgd.core.messages import Plan, Receipt, Task, Upload
from fedbcgd.engine.client_state import StateStore
from fedbcgd.engine.clock import Clock


class Inbox(Protocol):
    """Receives the answers of a round from a backend: the server, or a wrapper around it such as `FaultInjector`."""

    @property
    def settled(self) -> int:
        """How many tasks, counted from the first of the plan without a gap, are answered, refused or lost."""

    def expects(self, task: Task) -> bool:
        """Whether the client of this task of the open round has not answered yet and was not given up."""

    def receive(self, upload: Upload, sender: int | None = None) -> Receipt:
        """Check an upload and, if it is accepted, count it in. Backends call it through `NewState.hand_in`."""

    def lost(self, task: Task, why: str) -> None:
        """Record that the client of this task will not answer."""


class Backend(Protocol):
    """Runs the tasks of a round, and evaluates models."""

    store: StateStore
    clock: Clock

    def run_round(self, inbox: Inbox, plan: Plan) -> None:
        """Do the tasks that `inbox.expects`.

        Call for each one `NewState(store, client, epoch).hand_in(inbox, upload, update)`, which also keeps the
        client's new state if the upload is accepted, or `inbox.lost(task, why)` if there is no upload.
        """

    def evaluate(self, x: Tensor) -> dict[str, float]:
        """Return the metrics of the model x on the test data; {} if there is no test data."""

    def close(self) -> None:
        """Release all resources; safe to call twice, and in the middle of a round."""


@runtime_checkable
class OverlappingBackend(Backend, Protocol):
    """A backend that can evaluate while the next round is trained."""

    def begin_evaluation(self, x: Tensor) -> None:
        """Copy the model x; workers evaluate it whenever they have no task."""

    def finish_evaluation(self) -> dict[str, float]:
        """Finish the evaluation that was begun, and return its metrics."""
