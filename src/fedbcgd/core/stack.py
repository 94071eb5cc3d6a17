"""Several clients trained at once, as rows of one matrix, so that small models need fewer and larger multiplications.

A local rule trains a stack as it trains one client: x, y, c_i and gradients have a row per client, and every operation of a
rule works row by row. All clients have equally many examples, so that they step together. The model provides the gradient:

    stacked_gradient(values, x, y, out) → losses

`values` and `out` hold a tensor for each parameter, with a client in each row; x and y hold a minibatch in each row. The
method writes the gradient of each client's mean loss into `out`, and returns the loss of each example. A model may provide
plain steps too:

    stacked_step(values, x, y, eta, decay) → losses

It moves each v in `values` to v − eta·(gradient + decay·v). This saves a pass over memory: the matrix multiplication that
computes the gradient can add it to v directly.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from fedbcgd.core.messages import Allocator
from fedbcgd.core.vector import Layout
from fedbcgd.core.work import Gradient, GradientMemory, Minibatch, Progress, Work
from fedbcgd.data.sources import GATHERED_AHEAD, Source, stacked_gather

if TYPE_CHECKING:
    from fedbcgd.core.local_rule import LocalRule

Stacked = dict[str, Tensor]
StackedGradient = Callable[[Stacked, Tensor, Tensor, Stacked], Tensor]
StackedStep = Callable[[Stacked, Tensor, Tensor, float, float], Tensor]


def stacked_gradient_of(module: nn.Module) -> StackedGradient | None:
    """Return the model's `stacked_gradient`; None if it has none."""
    return getattr(module, "stacked_gradient", None)


def stacked_step_of(module: nn.Module) -> StackedStep | None:
    """Return the model's own step, unless a subclass has replaced the gradient that belongs to it."""
    for owner in (module, *type(module).__mro__):
        if "stacked_step" in vars(owner):
            return getattr(module, "stacked_step")  # noqa: B009
        if "stacked_gradient" in vars(owner):
            break
    return None


class StackMemory(GradientMemory):
    """Memory for the models and gradients of several clients: as one matrix, and as views for each parameter."""

    def __init__(self, layout: Layout, clients: int, device: torch.device):
        self.y = torch.empty(clients, layout.dim, dtype=layout.dtype, device=device)
        super().__init__(self.y)
        self.values, self.gradients = (
            {e.name: t[:, e.offset : e.offset + e.numel].view(clients, *e.shape) for e in layout.parameters}
            for t in (self.y, self.newest.vector)
        )


class _StackedMinibatch(Minibatch):
    """A minibatch for each client: `rows` has one row of positions per client."""

    @property
    def size(self) -> int:
        return self.rows.shape[1]


class Stack(Work):
    """The work of several clients, one in each row."""

    def __init__(
        self,
        rule: "LocalRule",
        layout: Layout,
        module: nn.Module,
        x: Tensor,
        controls: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
        sources: Sequence[Source],
        round: int,
        rngs: Sequence[np.random.Generator],
        memory: StackMemory,
    ):
        clients = len(sources)
        anchor = x[: layout.dim].expand(clients, -1)
        Progress.__init__(self, anchor, memory.y.copy_(anchor), controls, state, (), rule.rate(round), x.new_zeros(()))
        self._rule = rule
        stacked_gradient = stacked_gradient_of(module)
        assert stacked_gradient is not None
        self._stacked_gradient = stacked_gradient
        self._stacked_step = stacked_step_of(module)
        self._gather, self._example_size = stacked_gather(sources, x.device)
        self._data_device = getattr(sources[0], "device", "cpu")
        self._examples = len(sources[0])
        self._rngs = rngs
        self._memory = self._gradients = memory
        self._losses: list[Tensor] = []  # of each example, minibatch by minibatch

    def sum_losses(self) -> None:
        """Compute the sum of each client's losses, once for all steps."""
        means = [torch.stack(list(same)).mean(2) for _, same in groupby(self._losses, lambda losses: losses.shape)]
        self.losses = torch.cat(means).sum(0)

    @property
    def examples(self) -> int:
        return self._examples

    def partition(self, first_draw: int = 0) -> list[Minibatch]:
        return [replace(batch, draw=first_draw + k) for k, batch in enumerate(self._epoch(self._examples))]

    def _epoch(self, most: int) -> list[Minibatch]:
        order = torch.from_numpy(np.stack([rng.permutation(self._examples) for rng in self._rngs]))
        size = self._rule.batch_size
        order = order.to(self._data_device)[:, : most * size]  # once an epoch, not with every batch
        batches = order.split(size, dim=1)
        if order.numel() * self._example_size > GATHERED_AHEAD:
            return [_StackedMinibatch(rows) for rows in batches]
        x, y = self._gather(order)
        inputs = zip(x.split(size, dim=1), y.split(size, dim=1), strict=True)
        return [_StackedMinibatch(rows, inputs=pair) for rows, pair in zip(batches, inputs, strict=True)]

    def _load(self, batch: Minibatch) -> tuple[Tensor, Tensor]:
        assert isinstance(batch, _StackedMinibatch)
        self.evaluations += 1
        return batch.inputs or self._gather(batch.rows)

    def gradient(self, batch: Minibatch, out: Gradient | None = None, loss_only: bool = False) -> Tensor:
        x, y = self._load(batch)
        self._losses.append(self._stacked_gradient(self._memory.values, x, y, self._memory.gradients))
        g = self._memory.newest.vector if loss_only else self._decay_and_clip(self._memory.newest.vector)
        return g if out is None else out.vector.copy_(g)

    def descend(self, batch: Minibatch, *terms: tuple[float, Tensor]) -> None:
        rule = self._rule
        if self._stacked_step is None or rule.clip_norm is not None:
            self.add((1.0, self.gradient(batch)), *terms)
            return
        x, y = self._load(batch)
        self._losses.append(self._stacked_step(self._memory.values, x, y, self.eta, rule.weight_decay))
        self.add(*terms)

    def client(self, k: int, slices: tuple[slice, ...], allocate: Allocator | None) -> Progress:
        """Return the progress of one client after training."""
        state = {name: vectors[k] for name, vectors in self.state.items()}
        progress = Progress(self.x[k], self.y[k], self.controls, state, slices, self.eta, self.losses[k], allocate)
        progress.steps, progress.evaluations = self.steps, self.evaluations
        progress.notes = {name: vectors[k] for name, vectors in self.notes.items()}
        return progress


def unbatchable_reason(rule: "LocalRule", layout: Layout, module: nn.Module, objective: Any) -> str:
    """Return why clients of this model cannot be trained in one batch; empty if they can."""
    from fedbcgd.core.objective import classification_loss

    name = type(module).__name__
    if objective.precision != "fp32":
        return f'a stacked_gradient has no autocast, which precision = "{objective.precision}" needs'
    if stacked_gradient_of(module) is None:
        return f"{name} has no method stacked_gradient (logistic, binary-logistic and binary-sigmoid have one)"
    if objective.loss != getattr(module, "own_loss", classification_loss):
        return f"{name} computes the gradient of its own loss, but another loss was given"
    if layout.size > layout.dim:
        return f"{name} has buffers"
    if any(e.order != tuple(range(len(e.shape))) for e in layout.parameters):
        return f"the parameters of {name} are not contiguous"
    return rule.unbatchable_reason
