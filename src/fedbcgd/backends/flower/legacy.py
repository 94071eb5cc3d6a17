"""Support for Flower's older ServerApps: those with `server_fn`."""

import sys
from typing import TYPE_CHECKING, Any

from flwr.common import Parameters

from fedbcgd.backends.flower.privacy import refuse_workflow, refuse_wrapper

if TYPE_CHECKING:
    from flwr.server import ClientManager


DAY = 24 * 3600  # seconds that Flower itself waits for a first client


class LegacyRounds:
    """The methods of a strategy that `flwr.server.Server` calls. In each of its rounds the strategy runs a whole round."""

    def initialize_parameters(self, client_manager: "ClientManager") -> Parameters:
        """Return an empty model, so that Flower does not ask a client for one: the strategy has its own."""
        caller = sys._getframe(1)
        refuse_wrapper(self, caller)
        refuse_workflow(caller)
        return Parameters(tensors=[], tensor_type="numpy.ndarray")

    def configure_fit(self, server_round: int, parameters: Parameters, client_manager: "ClientManager") -> list[Any]:
        """Run the strategy to the end of this round, and return no messages for Flower's server to send."""
        caller = sys._getframe(1)
        refuse_wrapper(self, caller)
        refuse_workflow(caller)
        client_manager.wait_for(1, timeout=DAY)
        proxy: Any = next(iter(client_manager.all().values()))
        timeout = caller.f_locals.get("timeout")  # round_timeout of the ServerConfig, which Flower does not pass on
        given = {} if timeout is None else {"timeout": float(timeout)}
        self.start(proxy.grid, num_rounds=server_round, **given)  # type: ignore[attr-defined]
        return []

    def evaluate(self, server_round: int, parameters: Parameters) -> None:
        """Return nothing: the strategy evaluates in its own rounds."""
