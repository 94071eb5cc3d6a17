"""What a carrier is."""

from typing import Protocol

from fedbcgd.messages import Plan
from fedbcgd.server import Server


class Carrier(Protocol):
    def carry(self, server: Server, plan: Plan) -> None:
        """Have every task of the plan done, and hand each upload to `server.receive` or say that it is lost."""

    def close(self) -> None:
        """Give back whatever was taken."""
