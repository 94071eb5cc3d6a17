"""FedBCGD+'s local rule: SVRG against the noise of minibatches and, on top, control variates against client drift.

    g = ∇f_i(y; ζ) − ∇f_i(x; ζ) + ∇f_i(x)  − c_i + c        (the paper's Eq. 4 with the signs of its proof, erratum 1)
        \\_______ SVRG, same ζ ________/     \\_ SCAFFOLD _/

ζ is the same rows with the same augmentation and dropout in both gradients. ∇f_i(x) is the mean of ∇f_i(x; ζ) over the
client's minibatches, weighted by their size. At the first step y = x, so g = ∇f_i(x) − c_i + c without a further gradient.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn

from fedbcgd.algorithms.local_rules.scaffold import control_change
from fedbcgd.core.local_rule import Channels, LocalRule
from fedbcgd.core.work import Gradient, Minibatch, Progress, Work, cached


@dataclass(frozen=True)
class _Step:
    draw: int  # of its minibatch ζ
    moved: bool  # whether y may differ from x, so that ∇f_i(y; ζ) is needed
    again: bool  # whether ∇f_i(x; ζ) was not kept and is computed again


class SVRG(LocalRule):
    """Variance reduction alone: d/N floats a round."""

    fixed_batches: bool = Field(True, description="the minibatches of a round are the same in each of its epochs")
    cache_mb: float = Field(
        512, ge=0, description="memory of a client for gradients at the anchor; beyond it they are computed again"
    )

    printed: bool = Field(False, description="the signs as printed in Eq. 4, to see the difference (erratum 1)")

    def evaluations(self, examples: int, nbytes: int) -> int:
        """All minibatches at the anchor, then what the steps take."""
        batches = -(-examples // self.batch_size)
        plan = self._plan(batches, self.steps(examples), self._room(nbytes))
        return batches + sum(step.moved + step.again for step in plan)

    def _plan(self, batches: int, steps: int, room: int) -> Iterator[_Step]:
        """The steps of a round; `train` takes them and `evaluations` counts them."""
        kept = min(batches, room)
        for number in range(steps if batches else 0):
            draw = number % batches if self.fixed_batches else number
            moved = self.printed or number > 0  # at the first step y = x: the two gradients of ζ cancel
            yield _Step(draw, moved, again=moved and draw >= kept)

    def _room(self, nbytes: int) -> int:
        """How many gradients are kept."""
        return int(self.cache_mb * 2**20 // nbytes)

    def refuses(self, model: nn.Module) -> str:
        for name, part in model.named_modules():
            trains = (
                part.training or not model.training
            )  # a model that comes in evaluation mode is trained all the same
            if isinstance(part, nn.modules.batchnorm._BatchNorm) and trains and part.track_running_stats:
                return (
                    f"{name!r} is a BatchNorm in training mode, with which the gradient at the anchor, that this rule is "
                    "built on, is not defined. Use GroupNorm, or keep it in evaluation mode"
                )
        return ""

    def train(self, work: Work) -> None:
        # Weight decay is the same in every gradient at the anchor: where nothing is clipped it is added once, to the sum.
        decay = self.weight_decay if self.clip_norm is None else 0.0
        room = self._room(work.x.shape[-1] * work.x.element_size())
        anchor = _Anchor(work, room, decay, bare=self.clip_norm is None)
        work.notes["full"] = full = anchor.full
        sign = -1 if self.printed else 1
        first = self.correction(work, full)
        offset = torch.empty_like(first) if decay else first
        for f, x, one, other in cached(full, work.x, first, offset):
            one.add_(f, alpha=sign)
            if decay:
                torch.sub(one, x, alpha=sign * decay, out=other)
        epoch = anchor.batches
        for step in self._plan(len(epoch), self.steps(work.examples), room):
            place = step.draw % len(epoch)
            if place == 0 and step.draw > 0:  # the minibatches are not the same in each epoch
                epoch = work.partition(first_draw=step.draw)
            work.steps += 1
            if step.moved:
                batch = epoch[place]
                work.descend(batch, (-sign, anchor.gradient(batch, step)), (1.0, offset))
            else:
                work.add((1.0, first))

    def correction(self, work: Work, full: Tensor) -> Tensor:
        """What is added to the variance-reduced gradient, as a tensor of its own."""
        return torch.zeros_like(full)


class SVRGControl(SVRG):
    """FedBCGD+: with control variates. Δc = ∇f_i(x) − c_i on what is uploaded; 2d/N floats a round.

    `derived` sends d/N: Δc = −c + (x − y)/(Tη), known to the server from y − x, as in SCAFFOLD. That is the mean of the
    variance-reduced gradients along the client's path, minus c_i; the fixed point is the same.

    `damping` weighs c − c_i. A control that is out of date misleads; the weight that fits best is that of a regression of
    ∇f_i(x), which the client knows whole, on c_i: w = ⟨∇f_i(x), c_i⟩/⟨c_i, c_i⟩, within 0 and 1, for each block. A client
    that never took part has w = 0; as controls settle, w goes to 1, so the exact fixed point stays.
    """

    controls: ClassVar[tuple[str, ...]] = ("c",)
    broadcasts: ClassVar[tuple[str, ...]] = ("c",)

    derived: bool = Field(
        False, description="send d/N floats instead of 2d/N and derive the control change at the server"
    )
    damping: float | Literal["adaptive"] = Field(1.0, description="weight of c − c_i: from 0 to 1, or adaptive")
    printed_refresh: bool = Field(False, description="c_i ← ∇f_i(x) on all coordinates, as printed (erratum 2)")

    @field_validator("damping")
    @classmethod
    def _share(cls, value: float | str) -> float | str:
        if isinstance(value, float) and not 0 <= value <= 1:
            raise ValueError("from 0 to 1, or adaptive")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> "SVRGControl":
        if self.derived and (self.damping != 1 or self.printed or self.printed_refresh):
            raise ValueError(
                "derived: the server can derive the control change only where c − c_i was added whole, so not together with "
                "damping, printed or printed_refresh"
            )
        return self

    @property
    def channels(self) -> tuple[str, ...]:
        return ("dx",) if self.derived else ("dx", "dc")

    @property
    def unbatchable_reason(self) -> str:
        return "adaptive damping looks at each client's blocks" if self.damping == "adaptive" else ""

    def correction(self, work: Work, full: Tensor) -> Tensor:
        c, mine = work.controls["c"], work.mine["c"]
        if self.printed:
            return mine - c
        shift = c - mine
        if self.damping != "adaptive":
            return shift if self.damping == 1 else shift.mul_(self.damping)
        for s in work.blocks:
            shift[s].mul_(_fit(full[s], mine[s]))
        return shift

    def changes(self, work: Progress, s: slice) -> Channels:
        sent = super().changes(work, s)
        if not self.derived:
            sent["dc"] = torch.sub(work.notes["full"][s], work.mine["c"][s], out=work.room(s.stop - s.start))
        return sent

    def complete(self, sent: Channels, controls: Mapping[str, Tensor], rate: float, steps: int) -> Channels:
        return sent | {"dc": control_change(sent["dx"], controls["c"], rate, steps)} if self.derived else sent

    def keep(self, work: Progress, parts: Sequence[tuple[slice, Channels]]) -> dict[str, list[tuple[slice, Tensor]]]:
        if self.printed_refresh:
            return {"c": [(slice(0, len(work.x)), work.notes["full"])]}
        return super().keep(work, parts)


def _fit(gradient: Tensor, control: Tensor) -> Tensor:
    """The weight of `control` that explains `gradient` best, within 0 and 1; 0 for a control that is nothing."""
    size = torch.dot(control, control)
    weight = torch.dot(gradient, control) / size.clamp(min=torch.finfo(size.dtype).tiny)
    return torch.where(size > 0, weight.clamp(0, 1), 0)


class _Anchor:
    """Gradients at the anchor x: their mean, and each of them, kept as far as memory allows."""

    def __init__(self, work: Work, room: int, decay: float, bare: bool):
        self.work = work
        self.batches = work.partition()
        self._bare = bare
        self._room = min(room, len(self.batches))
        self._kept = work.keep(self._room)
        self.full = torch.zeros_like(work.y)
        # Where all are kept they are added up at last: the sum is then written once, while it is in the cache.
        at_last = self._room == len(self.batches)
        shares = [batch.size / work.examples for batch in self.batches]
        for k, batch in enumerate(self.batches):  # y = x still, so no model has to be put aside
            g = work.gradient(batch, self._kept[k] if k < self._room else self._spare, bare)
            if not at_last:
                self.full.add_(g, alpha=shares[k])
        for full, x, *gradients in cached(self.full, work.x, *(one.vector for one in self._kept if at_last)):
            for share, g in zip(shares, gradients, strict=False):
                full.add_(g, alpha=share)
            if decay:
                full.add_(x, alpha=decay)

    def gradient(self, batch: Minibatch, step: _Step) -> Tensor:
        """∇f_i(x; ζ): kept, or computed again to the same bits."""
        if step.again:
            return self.work.gradient_at_anchor(batch, self._spare, self._bare)
        return self._kept[step.draw].vector

    @property
    def _spare(self) -> Gradient:
        """For those that are not kept."""
        return self.work.keep(self._room + 1)[-1]
