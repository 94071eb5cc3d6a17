"""What a backend must do."""

from typing import Protocol, runtime_checkable

from torch import Tensor

from fedbcgd.core.messages import Plan, Receipt, Task, Upload
from fedbcgd.engine.client_state import StateStore
from fedbcgd.engine.clock import Clock


class Inbox(Protocol):
    """Where a backend hands in the answers of a round: the server, or something that stands before it."""

    @property
    def settled(self) -> int:
        """How many tasks, counted from the first of the plan without a gap, are answered, refused or lost."""

    def expects(self, task: Task) -> bool:
        """Whether the client of this task has still to answer."""

    def receive(self, upload: Upload, sender: int | None = None) -> Receipt:
        """Check an upload and count it in."""

    def lost(self, task: Task, why: str) -> None:
        """Take note that the client of this task will not answer."""


class Backend(Protocol):
    """Has the clients of a round do their work, and evaluates models."""

    store: StateStore
    clock: Clock

    def run_round(self, inbox: Inbox, plan: Plan) -> None:
        """Have the tasks done that the inbox still expects; hand each upload to `inbox.receive`, or call `inbox.lost`."""

    def evaluate(self, x: Tensor) -> dict[str, float]:
        """Return the metrics of the model x on the test data; empty without any."""

    def close(self) -> None:
        """Release all resources; safe to call twice, and in the middle of a round."""


@runtime_checkable
class OverlappingBackend(Backend, Protocol):
    """A backend that can evaluate beside the next round."""

    def begin_evaluation(self, x: Tensor) -> None:
        """Copy the model x; workers evaluate it whenever they have no task."""

    def finish_evaluation(self) -> dict[str, float]:
        """Finish the evaluation that was begun, and return its metrics."""
