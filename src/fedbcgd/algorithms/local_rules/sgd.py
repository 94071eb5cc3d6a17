"""Local SGD: y ← y − η·∇f_i(y; ζ), and two variants of it."""

from collections.abc import Callable
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedbcgd.core.local_rule import LocalRule, TrainingNeeds
from fedbcgd.core.work import Minibatch, Work


class SGD(LocalRule):
    """Local SGD, with momentum if `client_momentum` is set. A subclass may replace `direction` and `move`."""

    own_training: ClassVar[TrainingNeeds] = "free"

    client_momentum: float = Field(
        0.0, ge=0, lt=1, description="momentum of the local steps; its velocity starts at zero in every round"
    )

    def direction(self, work: Work, batch: Minibatch) -> Tensor:
        """Return the direction of a step; the caller may change the vector."""
        return work.gradient(batch)

    def move(self, work: Work, step: Tensor) -> None:
        """Move y by −η·step."""
        work.y.add_(step, alpha=-work.eta)

    def train(self, work: Work) -> None:
        velocity = torch.zeros_like(work.y) if self.client_momentum else None
        # The fused step may be used if no subclass has replaced a method.
        plain = (type(self).direction, type(self).move) == (SGD.direction, SGD.move) and velocity is None
        for batch in work.minibatches():
            if plain:
                work.descend(batch)  # the same step in fewer passes over memory
                continue
            step = self.direction(work, batch)
            if velocity is not None:
                step = velocity.mul_(self.client_momentum).add_(step)
            self.move(work, step)


class Frozen(SGD):
    """Move only the coordinates that are uploaded; the rest of the model stays at x (the paper's Figure 5)."""

    own_training: ClassVar[TrainingNeeds] = "corrected"

    @property
    def unbatchable_reason(self) -> str:
        return "local rule 'frozen' moves different coordinates for each client"

    def move(self, work: Work, step: Tensor) -> None:
        for s in work.slices:
            work.y[s].add_(step[s], alpha=-work.eta)

    def corrector(self, work: Work) -> Callable[[Tensor], None]:
        return lambda gradient: None  # `project` restores the other coordinates after each step

    def project(self, work: Work) -> bool:
        moved = [work.y[s].clone() for s in work.slices]
        work.y.copy_(work.x)
        for s, values in zip(work.slices, moved, strict=True):
            work.y[s] = values
        return True


class Prox(SGD):
    """FedProx (Li et al. 2020): y ← y − η·(∇f_i(y; ζ) + μ·(y − x))."""

    own_training: ClassVar[TrainingNeeds] = "corrected"

    mu: float = Field(0.01, ge=0, description="μ: weight of the proximal term (μ/2)·‖y − x‖²")

    def direction(self, work: Work, batch: Minibatch) -> Tensor:
        gradient = work.gradient(batch)
        self.corrector(work)(gradient)
        return gradient

    def corrector(self, work: Work) -> Callable[[Tensor], None]:
        def correct(gradient: Tensor) -> None:
            gradient.add_(work.y, alpha=self.mu).sub_(work.x, alpha=self.mu)

        return correct
