"""SCAFFOLD (Karimireddy et al. 2020), option II: y ← y − η·(∇f_i(y; ζ) − c_i + c);  c_i⁺ = c_i − c + (x − y)/(Tη).

As published it sends y − x and Δc = c_i⁺ − c_i: 2d floats. But Δc follows from y − x, which the server has: `derived`
sends d and computes Δc at both ends.
"""

from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedbcgd.core.local_rule import Channels, LocalRule
from fedbcgd.core.work import Progress, Work


class Scaffold(LocalRule):
    controls: ClassVar[tuple[str, ...]] = ("c",)
    broadcasts: ClassVar[tuple[str, ...]] = ("c",)

    derived: bool = Field(False, description="send d floats instead of 2d and derive the control change at the server")

    @property
    def channels(self) -> tuple[str, ...]:
        return ("dx",) if self.derived else ("dx", "dc")

    def train(self, work: Work) -> None:
        correction = work.controls["c"] - work.mine["c"]
        for batch in work.minibatches():
            work.descend(batch, (1.0, correction))

    def changes(self, work: Progress, s: slice) -> Channels:
        sent = super().changes(work, s)
        if not self.derived:
            sent["dc"] = control_change(sent["dx"], work.controls["c"][s], work.eta, work.steps, work.room)
        return sent

    def complete(self, sent: Channels, controls: Mapping[str, Tensor], rate: float, steps: int) -> Channels:
        return sent | {"dc": control_change(sent["dx"], controls["c"], rate, steps)} if self.derived else sent


def control_change(
    dx: Tensor, c: Tensor, rate: float, steps: int, room: Callable[[int], Tensor] | None = None
) -> Tensor:
    """Δc = −c + (x − y)/(Tη)."""
    return torch.div(dx, -rate * steps, out=room(len(dx)) if room else None).sub_(c)
