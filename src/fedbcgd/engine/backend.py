"""What a backend is."""

from typing import Protocol, runtime_checkable

from torch import Tensor

from fedbcgd.core.messages import Plan
from fedbcgd.core.server import Server
from fedbcgd.engine.client_state import StateStore
from fedbcgd.engine.clock import Clock


class Backend(Protocol):
    store: StateStore
    clock: Clock

    def carry(self, server: Server, plan: Plan) -> None:
        """Have every task of the plan done that the server expects (`server.expects`: some may have been given up before),
        and hand each upload to `server.receive` or say that it is lost."""

    def evaluate(self, x: Tensor) -> dict[str, float]:
        """Metrics of the model x on the test data; empty without any."""

    def close(self) -> None:
        """Give back whatever was taken. May be called at any moment, also in the middle of a round."""


@runtime_checkable
class OverlappingBackend(Backend, Protocol):
    """A backend that can evaluate beside the next round."""

    def begin_evaluation(self, x: Tensor) -> None:
        """Take note of the model x; from now on it is evaluated whenever a worker would have nothing to do."""

    def finish_evaluation(self) -> dict[str, float]:
        """What is left of it, and its metrics."""
