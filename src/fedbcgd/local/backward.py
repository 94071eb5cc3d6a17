"""The backward pass: what each parameter's gradient is, and where it goes.

The gradient of a dense layer's weight is gᵀ·x, with the gradient g of its output and its input x: two matrices with a row
for each example of a minibatch, whose product is as large as the weight. Where that is large it is left as its factors until
it is known where it goes, and then multiplied right into that place: into a step, y ← (1 − ηw)·y − η·gᵀx, or into a vector
of gradients. So it is neither written to memory of its own nor read from there.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbcgd.errors import UserError
from fedbcgd.flat import Entry, FlatModel

LARGE = 1 << 18  # values of a weight whose gradient is left as factors
_KNOWN = (torch.float32, torch.float64)

Part = Tensor | None  # a gradient; None where the loss does not use the parameter


class Gradient:
    """A flat vector for a gradient, and where each parameter has its place in it."""

    def __init__(self, vector: Tensor, entries: Sequence[Entry] = ()):
        self.vector = vector
        self.views = [e.view(vector) for e in entries]


class Factors:
    """g and x of a weight, for each time that it was used."""

    def __init__(self) -> None:
        self.wanted = False
        self.pairs: list[tuple[Tensor, Tensor]] = []

    def put(self, view: Tensor, rest: Part) -> None:
        """The gradient into its place; `rest` is of uses elsewhere."""
        first = rest is None
        if rest is not None:
            view.copy_(rest)
        for g, x in self.pairs:
            if first:
                torch.mm(g.t(), x, out=view)
            else:
                view.addmm_(g.t(), x)
            first = False

    def step(self, view: Tensor, rest: Part, eta: float, decay: float) -> None:
        """v ← v − η·(gᵀx + w·v)."""
        kept = 1 - eta * decay
        for g, x in self.pairs:
            view.addmm_(g.t(), x, beta=kept, alpha=-eta)
            kept = 1.0
        if rest is not None:
            view.mul_(kept).add_(rest, alpha=-eta)


class Parts:
    """The gradient of one loss, parameter by parameter, to be used once. Whatever is not needed any more is let go."""

    def __init__(self, grads: tuple[Part, ...], factors: list[Factors]):
        dense = len(grads) - len(factors)
        self._plain, self._rest, self._factors = grads[:dense], grads[dense:], factors

    @property
    def complete(self) -> bool:
        """Whether the loss uses every parameter."""
        used = (rest is not None or f.pairs for rest, f in zip(self._rest, self._factors, strict=True))
        return type(None) not in set(map(type, self._plain)) and all(used)

    @property
    def none(self) -> bool:
        """Whether it uses no parameter at all."""
        return set(map(type, (*self._plain, *self._rest))) == {type(None)} and not any(f.pairs for f in self._factors)

    def put(self, out: Gradient) -> None:
        """Into a flat vector; a parameter that the loss does not use has gradient zero."""
        views = out.views[: len(self._plain)]
        if type(None) not in set(map(type, self._plain)):
            torch._foreach_copy_(views, list(self._plain))  # type: ignore[arg-type]
        else:
            for view, g in zip(views, self._plain, strict=True):
                view.zero_() if g is None else view.copy_(g)
        for view, rest, factors in zip(out.views[len(self._plain) :], self._rest, self._factors, strict=True):
            factors.put(view, rest) if factors.pairs or rest is not None else view.zero_()
        self._let_go()

    def step(self, views: list[Tensor], strides: list[tuple[int, ...]], eta: float, decay: float) -> None:
        """v ← v − η·(g + w·v) for each; the loss uses all of them."""
        if self._plain:
            step(views[: len(self._plain)], strides, list(self._plain), eta, decay)  # type: ignore[arg-type]
        for view, rest, factors in zip(views[len(self._plain) :], self._rest, self._factors, strict=True):
            factors.step(view, rest, eta, decay)
        self._let_go()

    def _let_go(self) -> None:
        self._plain = self._rest = ()
        for factors in self._factors:
            factors.pairs = []
        self._factors = []


class Backward:
    """Gradients of a model's losses. `order` is that of the parameters here: those of large dense layers come last."""

    def __init__(self, model: FlatModel):
        self._factors: list[Factors] = []
        large = _dense(model)
        self.order = [k for k in range(len(model.parameters)) if k not in large] + list(large)
        self.entries = [model.layout.parameters[k] for k in self.order]
        self._parameters = [model.parameters[k] for k in self.order]
        self._views = [model.views[k] for k in self.order]
        self._strides = [v.stride() for v in self._views[: len(self._views) - len(large)]]
        for layers in large.values():
            self._factors.append(factors := Factors())
            for layer in layers:
                layer.forward = partial(_linear, layer, layer.weight, factors)  # type: ignore[method-assign]

    def of(self, loss: object) -> Parts:
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise UserError(f"the loss must be a tensor with one number, such as a mean over the batch; it is {what}")
        if loss.requires_grad:
            try:
                for factors in self._factors:
                    factors.wanted, factors.pairs = True, []
                parts = Parts(torch.autograd.grad(loss, self._parameters, allow_unused=True), self._factors)
            finally:
                for factors in self._factors:
                    factors.wanted = False
            if not parts.none:
                return parts
        raise UserError(
            "the loss does not depend on any trainable parameter of the model it was given: nothing would be trained"
        )

    def step(self, parts: Parts, eta: float, decay: float) -> None:
        """y ← y − η·(g + w·y), parameter by parameter."""
        parts.step(self._views, self._strides, eta, decay)


def _dense(model: FlatModel) -> dict[int, list[nn.Linear]]:
    """Large weights, by their places among the parameters, and the dense layers that have them."""
    places = {id(p): k for k, p in enumerate(model.parameters) if p.numel() >= LARGE and p.dtype in _KNOWN}
    found: dict[int, list[nn.Linear]] = {}
    for layer in model.module.modules():
        if type(layer) is nn.Linear and "forward" not in vars(layer):  # a subclass may do something else
            place = places.get(id(layer._parameters.get("weight")))
            if place is not None:
                found.setdefault(place, []).append(layer)
    return found


def _linear(layer: nn.Linear, weight: Tensor, factors: Factors, x: Tensor) -> Tensor:
    """The layer's forward pass: with factors where it is an ordinary one."""
    ordinary = (
        torch.is_grad_enabled()
        and layer.weight is weight
        and type(x) is Tensor
        and x.dim() > 1
        and x.dtype == weight.dtype
        and not weight._backward_hooks
        and not (torch.amp.is_autocast_available(x.device.type) and torch.is_autocast_enabled(x.device.type))
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
    )
    if not ordinary:
        return F.linear(x, layer.weight, layer.bias)
    return _Linear.apply(x, weight, layer.bias, factors)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, factors: Factors) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.factors = factors
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        g, rows = gradient.reshape(-1, weight.shape[0]), x.reshape(-1, weight.shape[1])
        to_x, to_weight, to_bias, _ = ctx.needs_input_grad
        product = None
        if to_weight and ctx.factors.wanted:
            ctx.factors.pairs.append((g.detach(), rows.detach()))
        elif to_weight:
            product = g.t() @ rows
        return (g @ weight).view(x.shape) if to_x else None, product, g.sum(0) if to_bias else None, None


def step(
    values: list[Tensor], strides: list[tuple[int, ...]], gradients: list[Tensor], eta: float, decay: float
) -> None:
    """v ← v − η·(g + w·v) for each, to the bits of torch.optim.SGD: in one pass where PyTorch has one."""
    known = values[0].device.type in ("cpu", "cuda") and values[0].dtype in _KNOWN
    alike = list(map(Tensor.stride, gradients)) == strides or all(map(_laid_out_alike, values, gradients))
    if known and alike:
        torch._fused_sgd_(
            values,
            gradients,
            [],
            weight_decay=decay,
            momentum=0.0,
            lr=eta,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )
        return
    if decay:  # into new tensors: autograd may hand out one gradient for two parameters
        gradients = list(torch._foreach_add(gradients, values, alpha=decay))
    torch._foreach_add_(values, gradients, alpha=-eta)


def _laid_out_alike(a: Tensor, b: Tensor) -> bool:
    """Whether the elements of both lie in memory in the same order, without gaps or overlaps."""
    return a.dtype == b.dtype and (
        a.stride() == b.stride()
        or all(s == t for n, s, t in zip(a.shape, a.stride(), b.stride(), strict=True) if n > 1)
    )
