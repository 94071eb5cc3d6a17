"""SCAFFOLD (Karimireddy et al. 2020), option II: y ← y − η·(∇f_i(y; ζ) − c_i + c);  c_i⁺ = c_i − c + (x − y)/(Tη).

As published it sends y − x and Δc = c_i⁺ − c_i: 2d floats with uplink `whole`. But Δc can be computed from y − x, which
the server has: with `derived` it sends d floats and computes Δc at both ends.
"""

from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedbcgd.core.local_rule import Channels, LocalRule, TrainingNeeds
from fedbcgd.core.work import Progress, Work


class Scaffold(LocalRule):
    """Local SGD with control variates c_i against client drift."""

    controls: ClassVar[tuple[str, ...]] = ("c",)
    broadcasts: ClassVar[tuple[str, ...]] = ("c",)
    own_training: ClassVar[TrainingNeeds] = "corrected"

    derived: bool = Field(False, description="send d floats instead of 2d and derive the control change at the server")

    @property
    def channels(self) -> tuple[str, ...]:
        return ("dx",) if self.derived else ("dx", "dc")

    def train(self, work: Work) -> None:
        correction = work.controls["c"] - work.state["c"]
        for batch in work.minibatches():
            work.descend(batch, (1.0, correction))

    def corrector(self, work: Work) -> Callable[[Tensor], None]:
        correction = work.controls["c"] - work.state["c"]

        def correct(gradient: Tensor) -> None:
            gradient.add_(correction)

        return correct

    def changes(self, work: Progress, s: slice) -> Channels:
        sent = super().changes(work, s)
        if not self.derived:
            out = work.allocate_values(s.stop - s.start)
            sent["dc"] = control_change(sent["dx"], work.controls["c"][s], work.eta, work.steps, out)
        return sent

    def complete(self, sent: Channels, controls: Mapping[str, Tensor], rate: float, steps: int) -> Channels:
        return sent | {"dc": control_change(sent["dx"], controls["c"], rate, steps)} if self.derived else sent


def control_change(dx: Tensor, c: Tensor, rate: float, steps: int, out: Tensor | None = None) -> Tensor:
    """Return Δc = −c + (x − y)/(Tη), in `out` if given."""
    return torch.div(dx, -rate * steps, out=out).sub_(c)
