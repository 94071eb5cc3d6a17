"""Several clients' work in one: a row for each, so that a small model fills a multiplication.

A local rule trains a stack as it trains one client: x, y, c_i and gradients have a row per client, and every operation of a
rule works row by row. The clients are of equal size, so that they step together. The model offers the gradient:

    stacked_gradient(values, x, y, out) → losses

where `values` and `out` hold for each parameter a tensor with a client in each row, x and y a minibatch in each row. It
writes the gradients of each client's mean loss into `out` and gives the loss of each example. It may offer plain steps too,

    stacked_step(values, x, y, eta, decay) → losses

which moves each v in `values` to v − eta·(gradient + decay·v): a multiplication can do that as it writes its result.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from fedbcgd.core.messages import Allocator
from fedbcgd.core.vector import Layout
from fedbcgd.core.work import Gradient, Gradients, Minibatch, Progress, Work
from fedbcgd.data.sources import Source, stacked_gather

if TYPE_CHECKING:
    from fedbcgd.core.local_rule import LocalRule

AT_ONCE = 1 << 20  # values that are gathered ahead of their steps: they stay in the cache

Stacked = dict[str, Tensor]
Offer = Callable[[Stacked, Tensor, Tensor, Stacked], Tensor]
Step = Callable[[Stacked, Tensor, Tensor, float, float], Tensor]


def offer(module: nn.Module) -> Offer | None:
    """What the model offers for clients computed together; None for most models."""
    return getattr(module, "stacked_gradient", None)


def offered_step(module: nn.Module) -> Step | None:
    """Its own step, unless a subclass has another gradient since."""
    for owner in (module, *type(module).__mro__):
        if "stacked_step" in vars(owner):
            return getattr(module, "stacked_step")  # noqa: B009
        if "stacked_gradient" in vars(owner):
            break
    return None


class Rows(Gradients):
    """Memory for so many clients: their models and gradients, whole and by parameter."""

    def __init__(self, layout: Layout, clients: int, device: torch.device):
        self.y = torch.empty(clients, layout.dim, dtype=layout.dtype, device=device)
        super().__init__(self.y)
        self.values, self.gradients = (
            {e.name: t[:, e.offset : e.offset + e.numel].view(clients, *e.shape) for e in layout.parameters}
            for t in (self.y, self.newest.vector)
        )


@dataclass(frozen=True)
class _Batch(Minibatch):
    """A minibatch of each client: a row of rows for each."""

    examples: tuple[Tensor, Tensor] | None = None  # where they were gathered already

    @property
    def size(self) -> int:
        return self.rows.shape[1]


class Stack(Work):
    def __init__(
        self,
        rule: "LocalRule",
        layout: Layout,
        module: nn.Module,
        x: Tensor,
        controls: Mapping[str, Tensor],
        mine: Mapping[str, Tensor],
        sources: Sequence[Source],
        round: int,
        rngs: Sequence[np.random.Generator],
        rows: Rows,
    ):
        clients = len(sources)
        anchor = x[: layout.dim].expand(clients, -1)
        Progress.__init__(self, anchor, rows.y.copy_(anchor), controls, mine, (), rule.rate(round), x.new_zeros(()))
        self._rule = rule
        stacked_gradient = offer(module)
        assert stacked_gradient is not None
        self._stacked_gradient = stacked_gradient
        self._stacked_step = offered_step(module)
        self._gather, self._example = stacked_gather(sources, x.device)
        self._home = getattr(sources[0], "device", "cpu")
        self._examples = len(sources[0])
        self._rngs = rngs
        self._rows = self._gradients = rows
        self._losses: list[Tensor] = []  # of each example, minibatch by minibatch

    def sum_up(self) -> None:
        """Work out the losses, once for all steps."""
        means = [torch.stack(list(same)).mean(2) for _, same in groupby(self._losses, lambda losses: losses.shape)]
        self.losses = torch.cat(means).sum(0)

    @property
    def examples(self) -> int:
        return self._examples

    def _epoch(self) -> list[Minibatch]:
        order = torch.from_numpy(np.stack([rng.permutation(self._examples) for rng in self._rngs]))
        order = order.to(self._home)  # once an epoch, not with every batch
        size = self._rule.batch_size
        parts = order.split(size, dim=1)
        if order.numel() * self._example > AT_ONCE:
            return [_Batch(rows) for rows in parts]
        x, y = self._gather(order)
        examples = zip(x.split(size, dim=1), y.split(size, dim=1), strict=True)
        return [_Batch(rows, examples=pair) for rows, pair in zip(parts, examples, strict=True)]

    def _of(self, batch: Minibatch) -> tuple[Tensor, Tensor]:
        assert isinstance(batch, _Batch)
        self.evaluations += 1
        return batch.examples or self._gather(batch.rows)

    def gradient(self, batch: Minibatch, out: Gradient | None = None, bare: bool = False) -> Tensor:
        x, y = self._of(batch)
        self._losses.append(self._stacked_gradient(self._rows.values, x, y, self._rows.gradients))
        g = self._rows.newest.vector if bare else self._finished(self._rows.newest.vector)
        return g if out is None else out.vector.copy_(g)

    def descend(self, batch: Minibatch, *more: tuple[float, Tensor]) -> None:
        rule = self._rule
        if self._stacked_step is None or rule.clip_norm is not None:
            self.add((1.0, self.gradient(batch)), *more)
            return
        x, y = self._of(batch)
        self._losses.append(self._stacked_step(self._rows.values, x, y, self.eta, rule.weight_decay))
        self.add(*more)

    def client(self, k: int, slices: tuple[slice, ...], allocate: Allocator | None) -> Progress:
        """One client of the stack, trained."""
        mine = {name: kept[k] for name, kept in self.mine.items()}
        one = Progress(self.x[k], self.y[k], self.controls, mine, slices, self.eta, self.losses[k], allocate)
        one.steps, one.evaluations = self.steps, self.evaluations
        one.notes = {name: noted[k] for name, noted in self.notes.items()}
        return one


def why_not(rule: "LocalRule", layout: Layout, module: nn.Module, objective: Any) -> str:
    """Why the clients of this model cannot be computed together; empty if they can."""
    from fedbcgd.core.objective import classification_loss

    name = type(module).__name__
    if offer(module) is None:
        return f"{name} has no stacked_gradient (logistic, binary-logistic and binary-sigmoid have)"
    if objective.loss != getattr(module, "own_loss", classification_loss):
        return f"{name} offers the gradient of its own loss, and another one is given"
    if layout.size > layout.dim:
        return f"{name} has buffers"
    if any(e.order != tuple(range(len(e.shape))) for e in layout.parameters):
        return f"the parameters of {name} do not lie in memory in their ordinary order"
    return rule.unbatchable_reason
