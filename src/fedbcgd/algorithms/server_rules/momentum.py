"""Heavy-ball momentum per slice: v ← λ·v + Δ; x ← x + v (the paper's lines 20 to 26, with errata 5 and 6)."""

from typing import ClassVar

from pydantic import Field
from torch import Tensor

from fedbcgd.core.server_rule import ServerRule


class Momentum(ServerRule):
    """Add the mean change with momentum: v ← λ·v + Δ; x ← x + v."""

    vectors: ClassVar[tuple[str, ...]] = ("v",)

    momentum: float = Field(0.8, ge=0, lt=1, description="λ: server momentum; 1/(1−λ) is its effective step")
    printed_step: bool = Field(False, description="x ← x + Δ + v as printed, to see the difference (erratum 5)")

    def step(self, x: Tensor, delta: Tensor, state: dict[str, Tensor]) -> None:
        x.add_(state["v"].mul_(self.momentum).add_(delta))
        if self.printed_step:
            x.add_(delta)
