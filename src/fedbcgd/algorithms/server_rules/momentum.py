"""FedAvg's server: x ← x + Δ; and heavy-ball momentum per slice: v ← λ·v + Δ; x ← x + v (lines 20 to 26 of the paper's
Algorithm 1, corrected: docs/errata.md, 5 and 6)."""

from typing import ClassVar

from pydantic import Field
from torch import Tensor

from fedbcgd.core.server_rule import ServerRule


class Average(ServerRule):
    """Add the mean change."""

    def step(self, x: Tensor, delta: Tensor, state: dict[str, Tensor]) -> None:
        x.add_(delta)


class Momentum(ServerRule):
    """Add the mean change with momentum: v ← λ·v + Δ; x ← x + v."""

    vectors: ClassVar[tuple[str, ...]] = ("v",)

    momentum: float = Field(
        0.8, ge=0, lt=1, description="λ: server momentum; it multiplies the effective step by 1/(1−λ)"
    )
    printed_step: bool = Field(False, description="use x ← x + Δ + v, as the paper prints it (docs/errata.md, 5)")

    def step(self, x: Tensor, delta: Tensor, state: dict[str, Tensor]) -> None:
        x.add_(state["v"].mul_(self.momentum).add_(delta))
        if self.printed_step:
            x.add_(delta)
