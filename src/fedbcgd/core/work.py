"""One client's work in one round: what a local rule may touch while it trains, and what it finds afterwards."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedbcgd.core.messages import Allocator
from fedbcgd.core.objective import Objective
from fedbcgd.core.torch_private import copy_each, sgd_step
from fedbcgd.core.vector import FlatModel, Layout
from fedbcgd.data.sources import Source, to_device
from fedbcgd.errors import UserError

if TYPE_CHECKING:
    from fedbcgd.core.local_rule import LocalRule

_CACHED = 1 << 15  # values worked on at a time

Draws = Callable[[int], np.random.Generator]  # seeds everything that is drawn for one minibatch


@dataclass(frozen=True)
class Minibatch:
    """ζ: some rows and, where a rule needs the same ζ twice, the number of its draw (augmentation, dropout)."""

    rows: Tensor
    draw: int | None = None

    @property
    def size(self) -> int:
        return len(self.rows)


def cached(*vectors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Vectors of one length in pieces that stay in a processor's cache from one operation to the next."""
    size = _CACHED if vectors[0].device.type == "cpu" else max(1, vectors[0].shape[-1])
    return zip(*(v.split(size, dim=-1) for v in vectors), strict=True)


class Gradient:
    """A flat vector for a gradient, and where each parameter has its place in it."""

    def __init__(self, vector: Tensor, layout: Layout | None = None):
        self.vector = vector
        self.views = [e.view(vector) for e in layout.parameters] if layout else []


class Gradients:
    """Memory for gradients that lasts from client to client."""

    def __init__(self, like: Tensor, layout: Layout | None = None):
        self._like = like
        self._layout = layout
        self._kept: list[Gradient] = []
        self._aside: Tensor | None = None
        self.newest = self._new()  # of the step that is being taken

    def keep(self, count: int) -> list[Gradient]:
        self._kept += [self._new() for _ in range(count - len(self._kept))]
        return self._kept[:count]

    def put_aside(self, y: Tensor) -> Tensor:
        """A copy, until the next call."""
        if self._aside is None:
            self._aside = torch.empty_like(y)
        return self._aside.copy_(y)

    def _new(self) -> Gradient:
        return Gradient(torch.empty_like(self._like), self._layout)


class Progress:
    """Where a client is in its round: all that is needed to say what changed."""

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        controls: Mapping[str, Tensor],
        mine: Mapping[str, Tensor],
        slices: tuple[slice, ...],
        eta: float,
        losses: Tensor,
        allocate: Allocator | None = None,
    ):
        self.x = x  # the anchor: the model of the broadcast
        self.y = y  # the client's own model
        self.controls = controls  # c, as broadcast
        self.mine = mine  # c_i
        self.slices = slices  # what will be uploaded
        self.eta = eta
        self._lend = allocate
        self.losses = losses  # the sum over the minibatches
        self.steps = 0
        self.evaluations = 0
        self.notes: dict[str, Tensor] = {}  # what a rule's `train` leaves for its `changes`

    def room(self, count: int) -> Tensor:
        """Memory for so many values of an upload."""
        return self._lend(count * self.y.element_size()).view(self.y.dtype) if self._lend else self.y.new_empty(count)

    @property
    def mean_loss(self) -> float:
        return float(self.losses) / max(self.evaluations, 1)


class Work(Progress):
    def __init__(
        self,
        rule: "LocalRule",
        model: FlatModel,
        objective: Objective,
        x: Tensor,
        controls: Mapping[str, Tensor],
        mine: Mapping[str, Tensor],
        data: Source,
        round: int,
        slices: tuple[slice, ...],
        rng: np.random.Generator,
        draws: Draws,
        gradients: Gradients,
        allocate: Allocator | None,
    ):
        dim = model.layout.dim
        loss = torch.zeros((), device=model.vector.device)
        super().__init__(x[:dim], model.vector[:dim], controls, mine, slices, rule.rate(round), loss, allocate)
        self.blocks = [model.layout.block(j) for j in range(model.layout.blocks)] + [model.layout.shared]
        self._rule = rule
        self._model = model
        self._objective = objective
        self._data = data
        self._rng = rng
        self._draws = draws
        self._gradients = gradients

    @property
    def examples(self) -> int:
        return len(self._data)

    def minibatches(self) -> Iterator[Minibatch]:
        """T minibatches: every epoch a new order, its last batch as small as it comes."""
        total = self._rule.steps(self.examples)
        while self.steps < total:
            for batch in self._epoch():
                self.steps += 1
                yield batch
                if self.steps == total:
                    return

    def partition(self, first_draw: int = 0) -> list[Minibatch]:
        """All examples once, in minibatches whose draws are fixed: whoever uses one again gets the very same ζ."""
        return [replace(batch, draw=first_draw + k) for k, batch in enumerate(self._epoch())]

    def _epoch(self) -> list[Minibatch]:
        """All examples once, in a new order."""
        order = torch.from_numpy(self._rng.permutation(self.examples))
        order = order.to(getattr(self._data, "device", "cpu"))  # once an epoch, not with every batch
        return [Minibatch(rows) for rows in order.split(self._rule.batch_size)]

    def keep(self, count: int) -> list[Gradient]:
        """Memory for so many gradients, until the next client."""
        return self._gradients.keep(count)

    def gradient(self, batch: Minibatch, out: Gradient | None = None, bare: bool = False) -> Tensor:
        """∇f_i(y; ζ) as one flat vector, weight decay included, then clipped. Without `out` the next call overwrites it.

        `bare` leaves out weight decay and clipping."""
        return self._whole(self._parts(batch), out, bare)

    def descend(self, batch: Minibatch, *more: tuple[float, Tensor]) -> None:
        """y ← y − η·(∇f_i(y; ζ) + Σ a·v) for (a, v) in `more`; the gradient parameter by parameter, which saves a pass."""
        parts = self._parts(batch)
        if self._rule.clip_norm is not None or not _complete(parts):
            self.y.add_(self._whole(parts), alpha=-self.eta)
        else:
            model, decay = self._model, self._rule.weight_decay
            sgd_step(model.views, model.strides, list(parts), self.eta, decay)  # type: ignore[arg-type]
        self.add(*more)

    def add(self, *more: tuple[float, Tensor]) -> None:
        """y ← y − η·Σ a·v, in pieces that stay in the cache from one v to the next."""
        if not more:
            return
        for y, *parts in cached(self.y, *(v for _, v in more)):
            for (a, _), v in zip(more, parts, strict=True):
                y.add_(v, alpha=-self.eta * a)

    def _parts(self, batch: Minibatch) -> tuple[Tensor | None, ...]:
        """The gradient of the loss alone for each parameter."""
        rng = self._rng if batch.draw is None else self._draws(batch.draw)
        inputs = to_device(self._data.gather(batch.rows, rng), self.y.device)
        loss = self._objective.loss(self._model.module, inputs)
        parts = _gradients(loss, self._model.parameters)
        self._model.reattach()
        self.evaluations += 1
        self.losses += loss.detach()
        return parts

    def _whole(self, parts: tuple[Tensor | None, ...], out: Gradient | None = None, bare: bool = False) -> Tensor:
        out = out or self._gradients.newest
        _put(parts, out.views)
        return out.vector if bare else self._finished(out.vector)

    def _finished(self, g: Tensor) -> Tensor:
        if self._rule.weight_decay:
            g.add_(self.y, alpha=self._rule.weight_decay)
        if self._rule.clip_norm is not None:
            norm = torch.linalg.vector_norm(g, dim=-1, keepdim=True)
            g.mul_((self._rule.clip_norm / norm.clamp(min=1e-12)).clamp(max=1))
        return g

    def gradient_at_anchor(self, batch: Minibatch, out: Gradient, bare: bool = False) -> Tensor:
        """∇f_i(x; ζ), wherever y is."""
        here = self._gradients.put_aside(self.y)
        self.y.copy_(self.x)
        g = self.gradient(batch, out, bare)
        self.y.copy_(here)
        return g


def _complete(grads: tuple[Tensor | None, ...]) -> bool:
    """Whether the loss uses every parameter."""
    return type(None) not in set(map(type, grads))


def _put(grads: tuple[Tensor | None, ...], views: list[Tensor]) -> None:
    """Gradients into a flat vector; a parameter that the loss does not use has gradient zero."""
    if _complete(grads):
        copy_each(views, list(grads))  # type: ignore[arg-type]
        return
    for view, g in zip(views, grads, strict=True):
        view.zero_() if g is None else view.copy_(g)


def _gradients(loss: object, parameters: list[Tensor]) -> tuple[Tensor | None, ...]:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise UserError(f"the loss must be a tensor with one number, such as a mean over the batch; it is {what}")
    if loss.requires_grad:
        grads = torch.autograd.grad(loss, parameters, allow_unused=True)
        if set(map(type, grads)) != {type(None)}:
            return grads
    raise UserError(
        "the loss does not depend on any trainable parameter of the model it was given: nothing would be trained"
    )
