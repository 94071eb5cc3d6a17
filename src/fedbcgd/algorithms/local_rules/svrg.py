"""FedBCGD+'s local rule: SVRG against the noise of minibatches and, on top, control variates against client drift.

    g = ∇f_i(y; ζ) − ∇f_i(x; ζ) + ∇f_i(x)  − c_i + c        (the paper's Eq. 4, signs corrected: docs/errata.md, 1)
        \\_______ SVRG, same ζ ________/     \\_ SCAFFOLD _/

ζ is the same rows with the same augmentation and dropout in both gradients. ∇f_i(x) is the mean of ∇f_i(x; ζ) over the
client's minibatches, weighted by their size. At the first step y = x, so g = ∇f_i(x) − c_i + c without a further gradient.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn

from fedbcgd.algorithms.local_rules.scaffold import control_change
from fedbcgd.core.local_rule import Channels, LocalRule, TrainingNeeds
from fedbcgd.core.work import Gradient, Minibatch, Progress, Work, in_cached_pieces

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True)
class _Step:
    """One local step: which gradients it computes."""

    draw: int  # of its minibatch ζ
    moved: bool  # whether y may differ from x, so that ∇f_i(y; ζ) is needed
    recompute: bool  # whether ∇f_i(x; ζ) was not kept and is computed again


class SVRG(LocalRule):
    """SVRG: variance reduction, without control variates."""

    own_training: ClassVar[TrainingNeeds] = "anchored"

    fixed_batches: bool = Field(True, description="the minibatches of a round are the same in each of its epochs")
    cache_mb: float = Field(
        512, ge=0, description="MiB of a client for gradients at the anchor; beyond it they are computed again"
    )
    printed: bool = Field(False, description="use the signs of Eq. 4 as the paper prints them (docs/errata.md, 1)")

    def evaluations(self, examples: int, nbytes: int) -> int:
        batches = -(-examples // self.batch_size)  # each once at the anchor
        plan = self._plan(batches, self.steps(examples), self._capacity(nbytes))
        return batches + sum(step.moved + step.recompute for step in plan)

    def _plan(self, batches: int, steps: int, capacity: int) -> Iterator[_Step]:
        """Yield the steps of a round; `train` takes them and `evaluations` counts them."""
        kept = min(batches, capacity)
        for number in range(steps if batches else 0):
            draw = number % batches if self.fixed_batches else number
            moved = self.printed or number > 0  # at the first step y = x: the two gradients of ζ cancel
            yield _Step(draw, moved, recompute=moved and draw >= kept)

    def _capacity(self, nbytes: int) -> int:
        """Return how many gradients may be kept, each of `nbytes` bytes."""
        return int(self.cache_mb * 2**20 // nbytes)

    def refuses(self, model: nn.Module) -> str:
        for name, part in model.named_modules():
            # A model that is entirely in evaluation mode is put in training mode by the client.
            trained = part.training or not model.training
            if isinstance(part, BATCH_NORMS) and trained and part.track_running_stats:
                return (
                    "expected no BatchNorm in training mode, with which gradients at the anchor depend on the minibatch, "
                    f"got {name!r}; use GroupNorm, or keep the layer in evaluation mode"
                )
        return ""

    def train(self, work: Work) -> None:
        # Weight decay is the same in every gradient at the anchor: if nothing is clipped it is added once, to the sum.
        decay = self.weight_decay if self.clip_norm is None else 0.0
        capacity = self._capacity(work.x.shape[-1] * work.x.element_size())
        anchor = _Anchor(work, capacity, decay, loss_only=self.clip_norm is None)
        work.notes["full"] = anchor.full
        sign = -1 if self.printed else 1
        first, later = self._offsets(work, anchor.full, sign, decay)
        epoch = anchor.batches
        for step in self._plan(len(epoch), self.steps(work.examples), capacity):
            index = step.draw % len(epoch)
            if index == 0 and step.draw > 0:  # a new epoch, without fixed_batches
                epoch = work.partition(first_draw=step.draw)
            work.steps += 1
            if step.moved:
                batch = epoch[index]
                work.descend(batch, (-sign, anchor.gradient(batch, step)), (1.0, later))
            else:
                work.add((1.0, first))

    def _offsets(self, work: Work, full: Tensor, sign: int, decay: float) -> tuple[Tensor, Tensor]:
        """Return two vectors: what the first step adds, and what later steps add to ∇f_i(y; ζ) − ∇f_i(x; ζ).

        They differ by the weight decay at the anchor, which the kept gradients leave out.
        """
        first = self.correction(work, full)
        later = torch.empty_like(first) if decay else first
        for full_piece, x, first_piece, later_piece in in_cached_pieces(full, work.x, first, later):
            first_piece.add_(full_piece, alpha=sign)
            if decay:
                torch.sub(first_piece, x, alpha=sign * decay, out=later_piece)
        return first, later

    def corrector(self, work: Work) -> Callable[[Tensor], None]:
        """Return the function that corrects a gradient.

        It reads `work.notes`: "full" is ∇f_i(x) with weight decay; "anchor" is ∇f_i(x; ζ) without it, set before each step.
        """
        sign = -1 if self.printed else 1
        full = work.notes["full"]
        offset = self.correction(work, full).add_(full, alpha=sign).sub_(work.x, alpha=sign * self.weight_decay)

        def correct(gradient: Tensor) -> None:
            gradient.sub_(work.notes["anchor"], alpha=sign).add_(offset)

        return correct

    def correction(self, work: Work, full: Tensor) -> Tensor:
        """Return what is added to the variance-reduced gradient, as a new tensor; `full` is ∇f_i(x)."""
        return torch.zeros_like(full)


class SVRGControl(SVRG):
    """FedBCGD+: with control variates. Δc = ∇f_i(x) − c_i on what is uploaded; with uplink `blocks` 2d/N floats a round.

    `derived` sends half of that: Δc = −c + (x − y)/(Tη), known to the server from y − x, as in SCAFFOLD. That is the mean of
    the variance-reduced gradients along the client's path, minus c_i; the fixed point is the same.

    `damping` is the weight of the correction c − c_i; a smaller one limits the harm of outdated controls. `adaptive` takes
    the weight of a regression of ∇f_i(x) on c_i: w = ⟨∇f_i(x), c_i⟩/⟨c_i, c_i⟩, between 0 and 1, for each block. A client
    that never took part has w = 0. As controls converge, w goes to 1, so the fixed point is the same.
    """

    controls: ClassVar[tuple[str, ...]] = ("c",)
    broadcasts: ClassVar[tuple[str, ...]] = ("c",)
    own_training: ClassVar[TrainingNeeds] = "anchored"

    derived: bool = Field(
        False, description="send d/N floats instead of 2d/N and derive the control change at the server"
    )
    damping: float | Literal["adaptive"] = Field(
        1.0,
        description="weight of the correction c − c_i: a number from 0 to 1, or adaptive (a regression weight for each "
        "block)",
        json_schema_extra={"expected": "a number from 0 to 1, or 'adaptive'"},
    )
    printed_refresh: bool = Field(
        False, description="c_i ← ∇f_i(x) on all coordinates, as the paper prints it (docs/errata.md, 2)"
    )

    @field_validator("damping")
    @classmethod
    def _check_damping(cls, value: float | str) -> float | str:
        if isinstance(value, float) and not 0 <= value <= 1:
            raise ValueError("expected a number from 0 to 1, or 'adaptive'")
        return value

    @model_validator(mode="after")
    def _check_derived(self) -> "SVRGControl":
        if self.derived and (self.damping != 1 or self.printed or self.printed_refresh):
            raise ValueError(
                "derived: expected False with damping, printed or printed_refresh, got True; the server can derive the "
                "control change only if the whole of c − c_i was added"
            )
        return self

    @property
    def channels(self) -> tuple[str, ...]:
        return ("dx",) if self.derived else ("dx", "dc")

    @property
    def unbatchable_reason(self) -> str:
        return "adaptive damping has a weight for each client and block" if self.damping == "adaptive" else ""

    def correction(self, work: Work, full: Tensor) -> Tensor:
        c, c_i = work.controls["c"], work.state["c"]
        if self.printed:
            return c_i - c
        shift = c - c_i
        if self.damping != "adaptive":
            return shift if self.damping == 1 else shift.mul_(self.damping)
        for s in work.blocks:
            shift[s].mul_(_regression_weight(full[s], c_i[s]))
        return shift

    def changes(self, work: Progress, s: slice) -> Channels:
        sent = super().changes(work, s)
        if not self.derived:
            out = work.allocate_values(s.stop - s.start)
            sent["dc"] = torch.sub(work.notes["full"][s], work.state["c"][s], out=out)
        return sent

    def complete(self, sent: Channels, controls: Mapping[str, Tensor], rate: float, steps: int) -> Channels:
        return sent | {"dc": control_change(sent["dx"], controls["c"], rate, steps)} if self.derived else sent

    def new_controls(
        self, work: Progress, parts: Sequence[tuple[slice, Channels]]
    ) -> dict[str, list[tuple[slice, Tensor]]]:
        if self.printed_refresh:
            return {"c": [(slice(0, len(work.x)), work.notes["full"])]}
        return super().new_controls(work, parts)


def _regression_weight(gradient: Tensor, control: Tensor) -> Tensor:
    """Return the w in [0, 1] that minimises |gradient − w·control|; 0 if the control is zero."""
    square = torch.dot(control, control)
    weight = torch.dot(gradient, control) / square.clamp(min=torch.finfo(square.dtype).tiny)
    return torch.where(square > 0, weight.clamp(0, 1), 0)


class _Anchor:
    """Gradients at the anchor x: their mean ∇f_i(x), and each of them, kept as far as memory allows."""

    def __init__(self, work: Work, capacity: int, decay: float, loss_only: bool):
        self.work = work
        self.batches = work.partition()
        self._loss_only = loss_only
        self._capacity = min(capacity, len(self.batches))
        self._kept = work.keep(self._capacity)
        self.full = torch.zeros_like(work.y)
        # If all of them are kept, they are summed at the end, piece by piece, so that the sum stays in the cache.
        sum_at_end = self._capacity == len(self.batches)
        weights = [batch.size / work.examples for batch in self.batches]
        for k, batch in enumerate(self.batches):  # still y = x, so y need not be saved
            g = work.gradient(batch, self._kept[k] if k < self._capacity else self._spare, loss_only)
            if not sum_at_end:
                self.full.add_(g, alpha=weights[k])
        to_sum = [gradient.vector for gradient in self._kept] if sum_at_end else []
        for full, x, *gradients in in_cached_pieces(self.full, work.x, *to_sum):
            for weight, g in zip(weights, gradients, strict=False):
                full.add_(g, alpha=weight)
            if decay:
                full.add_(x, alpha=decay)

    def gradient(self, batch: Minibatch, step: _Step) -> Tensor:
        """Return ∇f_i(x; ζ): kept, or computed again with the same bits."""
        if step.recompute:
            return self.work.gradient_at_anchor(batch, self._spare, self._loss_only)
        return self._kept[step.draw].vector

    @property
    def _spare(self) -> Gradient:
        """Memory for a gradient that is not kept."""
        return self.work.keep(self._capacity + 1)[-1]
