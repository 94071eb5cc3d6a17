"""FedAvg's server: x ← x + Δ."""

from torch import Tensor

from fedbcgd.core.server_rule import ServerRule


class Average(ServerRule):
    """Add the mean change."""

    def step(self, x: Tensor, delta: Tensor, state: dict[str, Tensor]) -> None:
        x.add_(delta)
