"""One client's work in one round: `Work` is what a local rule calls while it trains, `Progress` the results so far."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedbcgd.core.messages import Allocator
from fedbcgd.core.objective import Objective
from fedbcgd.core.torch_private import copy_each, differentiate, sgd_step
from fedbcgd.core.vector import FlatModel, Layout
from fedbcgd.data.sources import Source, gather_ahead, to_device
from fedbcgd.errors import UserError

if TYPE_CHECKING:
    from fedbcgd.core.local_rule import LocalRule

_CACHED = 1 << 15  # values worked on at a time

# Seeds torch for the draw of this number, and returns the generator for augmentation.
SeedDraw = Callable[[int], np.random.Generator]


@dataclass(slots=True)
class Minibatch:
    """A minibatch ζ: its rows, and a number for its draws (augmentation, dropout) if a rule needs the same ones twice."""

    rows: Tensor
    draw: int | None = None
    inputs: Any = None  # the examples themselves, if they are gathered already

    @property
    def size(self) -> int:
        """The number of examples."""
        return len(self.rows)


def in_cached_pieces(*vectors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split vectors of one length into pieces that stay in a processor's cache from one operation to the next."""
    size = _CACHED if vectors[0].device.type == "cpu" else max(1, vectors[0].shape[-1])
    return zip(*(v.split(size, dim=-1) for v in vectors), strict=True)


class Gradient:
    """A flat vector for a gradient, and a view of it for each parameter."""

    def __init__(self, vector: Tensor, layout: Layout | None = None):
        self.vector = vector
        self.views = [e.view(vector) for e in layout.parameters] if layout else []


class GradientMemory:
    """Memory for gradients, used by one client after the other."""

    def __init__(self, like: Tensor, layout: Layout | None = None):
        self._like = like
        self._layout = layout
        self._kept: list[Gradient] = []
        self._saved: Tensor | None = None
        self.newest = self._new()  # memory for the gradient of the current step

    def keep(self, count: int) -> list[Gradient]:
        """Return memory for this many gradients."""
        self._kept += [self._new() for _ in range(count - len(self._kept))]
        return self._kept[:count]

    def save(self, y: Tensor) -> Tensor:
        """Return a copy of y, which lasts until the next call."""
        if self._saved is None:
            self._saved = torch.empty_like(y)
        return self._saved.copy_(y)

    def _new(self) -> Gradient:
        return Gradient(torch.empty_like(self._like), self._layout)


@dataclass(eq=False)
class Progress:
    """The state of a client's round: everything from which its upload is computed.

    Attributes:
        x: the model of the broadcast (the anchor of SVRG).
        y: the client's own model.
        controls: c, the server's control vectors.
        state: c_i, the client's own vectors.
        slices: the coordinates that it uploads.
        eta: the learning rate of the round.
        losses: the sum of the losses of the minibatches so far.
        allocate: returns memory of the upload; None: the backend has none.
        steps: local steps so far.
        evaluations: gradients of minibatches computed so far.
        notes: vectors that a rule's `train` stores for later, such as ∇f_i(x) for `changes`. Those of SVRG are "full" and
            "anchor".
    """

    x: Tensor
    y: Tensor
    controls: Mapping[str, Tensor]
    state: Mapping[str, Tensor]
    slices: tuple[slice, ...]
    eta: float
    losses: Tensor
    allocate: Allocator | None = None
    steps: int = 0
    evaluations: int = 0
    notes: dict[str, Tensor] = field(default_factory=dict)

    def allocate_values(self, count: int) -> Tensor:
        """Return memory for this many values of an upload: the upload's own, if the backend has some."""
        if self.allocate is None:
            return self.y.new_empty(count)
        return self.allocate(count * self.y.element_size()).view(self.y.dtype)

    @property
    def mean_loss(self) -> float:
        """The mean of the losses over the minibatches."""
        return float(self.losses) / max(self.evaluations, 1)


class Work(Progress):
    """The work of one client while it trains: its minibatches and gradients."""

    def __init__(
        self,
        rule: "LocalRule",
        model: FlatModel,
        objective: Objective,
        x: Tensor,
        controls: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
        data: Source,
        round: int,
        slices: tuple[slice, ...],
        rng: np.random.Generator,
        seed_draw: SeedDraw,
        gradients: GradientMemory,
        allocate: Allocator | None,
    ):
        dim = model.layout.dim
        loss = torch.zeros((), device=model.vector.device)
        super().__init__(x[:dim], model.vector[:dim], controls, state, slices, rule.rate(round), loss, allocate)
        self._rule = rule
        self._model = model
        self._objective = objective
        self._data = data
        self._rng = rng
        self._seed_draw = seed_draw
        self._gradients = gradients

    @property
    def examples(self) -> int:
        """The number of examples of the client, n_i."""
        return len(self._data)

    @property
    def blocks(self) -> list[slice]:
        """All blocks, the shared one last."""
        layout = self._model.layout
        return [layout.block(j) for j in range(layout.blocks)] + [layout.shared]

    def minibatches(self) -> Iterator[Minibatch]:
        """Yield T minibatches: every epoch in a new order, with a smaller last batch if their number is no multiple of B."""
        total = self._rule.steps(self.examples)
        while self.steps < total:
            for batch in self._epoch(total - self.steps):
                self.steps += 1
                yield batch

    def partition(self, first_draw: int = 0) -> list[Minibatch]:
        """Return the minibatches of one epoch, each of which can be used again with the same augmentation and dropout."""
        batches = self._order().split(self._rule.batch_size)
        return [Minibatch(rows, first_draw + k) for k, rows in enumerate(batches)]

    def _epoch(self, most: int) -> list[Minibatch]:
        """Return minibatches of all examples in a new order, but no more than `most`."""
        size = self._rule.batch_size
        order = self._order()[: most * size]
        batches = order.split(size)
        inputs = gather_ahead(self._data, order, size, self._rng, self.y.device) or [None] * len(batches)
        return [Minibatch(rows, None, one) for rows, one in zip(batches, inputs, strict=True)]

    def _order(self) -> Tensor:
        """Return the rows of all examples, in a new order."""
        order = torch.from_numpy(self._rng.permutation(self.examples))
        return order.to(getattr(self._data, "device", "cpu"))  # once an epoch, not with every batch

    def keep(self, count: int) -> list[Gradient]:
        """Return memory for this many gradients; it is reused by the next client."""
        return self._gradients.keep(count)

    def gradient(self, batch: Minibatch, out: Gradient | None = None, loss_only: bool = False) -> Tensor:
        """Return ∇f_i(y; ζ) as one flat vector: with weight decay, then clipped.

        Args:
            batch: ζ.
            out: where to write it; by default memory that the next call overwrites.
            loss_only: leave out weight decay and clipping.
        """
        return self._flat(self._parts(batch), out, loss_only)

    def descend(self, batch: Minibatch, *terms: tuple[float, Tensor]) -> None:
        """Step: y ← y − η·(∇f_i(y; ζ) + Σ a·v) for (a, v) in `terms`, where ∇f_i has weight decay and is clipped.

        The gradient is added parameter by parameter, which saves a pass over memory.
        """
        parts = self._parts(batch)
        if self._rule.clip_norm is not None or not _complete(parts):
            self.y.add_(self._flat(parts), alpha=-self.eta)
        else:
            model, decay = self._model, self._rule.weight_decay
            sgd_step(model.views, model.strides, list(parts), self.eta, decay)  # type: ignore[arg-type]
        self.add(*terms)

    def add(self, *terms: tuple[float, Tensor]) -> None:
        """Step without a gradient: y ← y − η·Σ a·v."""
        if not terms:
            return
        for y, *vectors in in_cached_pieces(self.y, *(v for _, v in terms)):
            for (a, _), v in zip(terms, vectors, strict=True):
                y.add_(v, alpha=-self.eta * a)

    def gradient_at_anchor(self, batch: Minibatch, out: Gradient, loss_only: bool = False) -> Tensor:
        """Return ∇f_i(x; ζ), wherever y is."""
        y = self._gradients.save(self.y)
        self.y.copy_(self.x)
        g = self.gradient(batch, out, loss_only)
        self.y.copy_(y)
        return g

    def _parts(self, batch: Minibatch) -> tuple[Tensor | None, ...]:
        """Return the gradient of the loss, without weight decay, for each parameter; count the evaluation and its loss."""
        inputs = batch.inputs
        if inputs is None:
            rng = self._rng if batch.draw is None else self._seed_draw(batch.draw)
            inputs = to_device(self._data.gather(batch.rows, rng), self.y.device)
        loss = self._objective.loss(self._model.module, inputs)
        parts = _differentiate(loss, self._model.parameters)
        self._model.reattach()
        self.evaluations += 1
        self.losses += loss.detach()
        return parts

    def _flat(self, parts: tuple[Tensor | None, ...], out: Gradient | None = None, loss_only: bool = False) -> Tensor:
        out = out or self._gradients.newest
        _copy(parts, out.views)
        return out.vector if loss_only else self._decay_and_clip(out.vector)

    def _decay_and_clip(self, g: Tensor) -> Tensor:
        if self._rule.weight_decay:
            g.add_(self.y, alpha=self._rule.weight_decay)
        if self._rule.clip_norm is not None:
            norm = torch.linalg.vector_norm(g, dim=-1, keepdim=True)
            g.mul_((self._rule.clip_norm / norm.clamp(min=1e-12)).clamp(max=1))
        return g


def _complete(gradients: tuple[Tensor | None, ...]) -> bool:
    """Return whether the loss uses every parameter."""
    return type(None) not in set(map(type, gradients))


def _copy(gradients: tuple[Tensor | None, ...], views: list[Tensor]) -> None:
    """Copy gradients into a flat vector; a parameter that the loss does not use has gradient zero."""
    if _complete(gradients):
        copy_each(views, list(gradients))  # type: ignore[arg-type]
        return
    for view, g in zip(views, gradients, strict=True):
        view.zero_() if g is None else view.copy_(g)


def _differentiate(loss: object, parameters: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise UserError(f"loss: expected a tensor with one number, such as a mean over the batch, got {kind}")
    if loss.requires_grad:
        gradients = differentiate(loss, parameters)
        if set(map(type, gradients)) != {type(None)}:
            return gradients
    raise UserError(
        "loss: expected one that depends on the trainable parameters of the model it is called with, got one that depends "
        "on none; nothing would be trained"
    )
