"""What a backend is."""

from typing import Protocol, runtime_checkable

from torch import Tensor

from fedbcgd.core.messages import Plan, Receipt, Task, Upload
from fedbcgd.engine.client_state import StateStore
from fedbcgd.engine.clock import Clock


class Inbox(Protocol):
    """Where a backend hands in the answers of a round: the server, or whatever stands before it."""

    @property
    def settled(self) -> int:
        """How many tasks, from the first of the plan on, are done with."""

    def expects(self, task: Task) -> bool:
        """Whether the client of this task has still to answer."""

    def receive(self, upload: Upload, sender: int | None = None) -> Receipt:
        """Check an upload and count it in."""

    def lost(self, task: Task, why: str) -> None:
        """Take note that the client of this task will not answer."""


class Backend(Protocol):
    store: StateStore
    clock: Clock

    def carry(self, inbox: Inbox, plan: Plan) -> None:
        """Have every task of the plan done that the inbox expects (some may have been given up before), and hand each
        upload to `inbox.receive` or say that it is lost."""

    def evaluate(self, x: Tensor) -> dict[str, float]:
        """Metrics of the model x on the test data; empty without any."""

    def close(self) -> None:
        """Release all resources; safe to call twice, and in the middle of a round."""


@runtime_checkable
class OverlappingBackend(Backend, Protocol):
    """A backend that can evaluate beside the next round."""

    def begin_evaluation(self, x: Tensor) -> None:
        """Take note of the model x; from now on it is evaluated whenever a worker would have nothing to do."""

    def finish_evaluation(self) -> dict[str, float]:
        """What is left of it, and its metrics."""
