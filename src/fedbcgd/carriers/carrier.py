"""What a carrier is."""

from typing import Protocol

from torch import Tensor

from fedbcgd.clock import Clock
from fedbcgd.messages import Plan
from fedbcgd.server import Server
from fedbcgd.state import StateStore


class Carrier(Protocol):
    store: StateStore
    clock: Clock

    def carry(self, server: Server, plan: Plan) -> None:
        """Have every task of the plan done that the server expects (`server.expects`: some may have been given up before),
        and hand each upload to `server.receive` or say that it is lost."""

    def evaluate(self, x: Tensor) -> dict[str, float]:
        """Metrics of the model x on the test data; empty without any."""

    def close(self) -> None:
        """Give back whatever was taken. May be called at any moment, also in the middle of a round."""
