"""Adaptive server rules (Reddi et al. 2021), without bias correction:

m ← β₁·m + (1 − β₁)·Δ;   FedAdam: u ← β₂·u + (1 − β₂)·Δ²   FedYogi: u ← u − (1 − β₂)·Δ²·sign(u − Δ²)
x ← x + η_s·m/(√u + τ),  from m = 0 and u = τ²
"""

from typing import ClassVar

from pydantic import Field
from torch import Tensor

from fedbcgd.core.server_rule import ServerRule


class Adam(ServerRule):
    """FedAdam's server step; the formulas are at the top of this module."""

    vectors: ClassVar[tuple[str, ...]] = ("m", "u")

    server_lr: float = Field(0.01, gt=0, description="η_s: server learning rate")
    beta1: float = Field(0.9, ge=0, lt=1, description="β₁: decay of the average of the mean change")
    beta2: float = Field(0.99, ge=0, lt=1, description="β₂: decay of the average of its square")
    tau: float = Field(
        1e-3, gt=0, description="τ: added to √u; the smaller, the more the step adapts to each coordinate"
    )

    def init(self, name: str) -> float:
        return self.tau**2 if name == "u" else 0.0

    def update_second_moment(self, u: Tensor, square: Tensor) -> None:
        """Change u in place; `square` is Δ²."""
        u.mul_(self.beta2).add_(square, alpha=1 - self.beta2)

    def step(self, x: Tensor, delta: Tensor, state: dict[str, Tensor]) -> None:
        m, u = state["m"], state["u"]
        m.mul_(self.beta1).add_(delta, alpha=1 - self.beta1)
        self.update_second_moment(u, delta.square())
        x.addcdiv_(m, u.sqrt().add_(self.tau), value=self.server_lr)


class Yogi(Adam):
    """FedYogi."""

    def update_second_moment(self, u: Tensor, square: Tensor) -> None:
        u.sub_(square * (u - square).sign(), alpha=1 - self.beta2)
