"""All private functions of PyTorch that we use, each with a fallback of public functions for versions that lack it.

The private ones save calls and passes over memory. On the CPU both give the same bits (`tests/core/test_torch_private.py`);
on GPUs, which round otherwise, they are only close.
"""

from functools import cache

import torch
from torch import Tensor, nn

_UNSUPPORTED = (AttributeError, TypeError, RuntimeError)  # raised if a version of PyTorch lacks or changed a function


def sgd_step(
    values: list[Tensor], strides: list[tuple[int, ...]], gradients: list[Tensor], eta: float, decay: float
) -> None:
    """Move each value: v ← v − η·(g + w·v), with the bits of torch.optim.SGD, in one pass if PyTorch has a fused step.

    Args:
        values: the parameters, which are changed in place.
        strides: the strides of each of them.
        gradients: the gradient of each of them.
        eta: η.
        decay: w, the weight decay.
    """
    same_order = list(map(Tensor.stride, gradients)) == strides or all(map(_same_memory_order, values, gradients))
    if same_order and has_fused_step(values[0].device.type, values[0].dtype):
        _fused_sgd_step(values, gradients, eta, decay)
    else:
        plain_sgd_step(values, gradients, eta, decay)


def plain_sgd_step(values: list[Tensor], gradients: list[Tensor], eta: float, decay: float) -> None:
    """Like `sgd_step`, with public functions."""
    for v, g in zip(values, gradients, strict=True):
        # Not in place: autograd may return one gradient tensor for two parameters.
        v.add_(g.add(v, alpha=decay) if decay else g, alpha=-eta)


def _fused_sgd_step(values: list[Tensor], gradients: list[Tensor], eta: float, decay: float) -> None:
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


@cache
def has_fused_step(device: str, dtype: torch.dtype) -> bool:
    """Return whether PyTorch has a fused step that gives what `plain_sgd_step` gives."""
    if device not in ("cpu", "cuda") or dtype not in (torch.float32, torch.float64):
        return False
    fused, plain, gradient = (torch.arange(k, k + 8, device=device, dtype=dtype) / 7 for k in (1, 1, 3))
    plain_sgd_step([plain], [gradient], 0.1, 0.01)
    try:
        _fused_sgd_step([fused], [gradient], 0.1, 0.01)
    except _UNSUPPORTED:
        return False
    return torch.allclose(fused, plain)


def differentiate(loss: Tensor, parameters: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """Return the gradient of a loss, one number, for each parameter; None where the loss does not use it.

    `torch.autograd.grad` checks its arguments at every call, which takes half as long as the backward pass of a small model.
    """
    if type(loss) is Tensor and loss.is_cpu and _has_engine():
        return _run_engine(loss, parameters)
    return plain_differentiate(loss, parameters)


def plain_differentiate(loss: Tensor, parameters: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """Like `differentiate`, with public functions."""
    return torch.autograd.grad(loss, parameters, allow_unused=True)


def _run_engine(loss: Tensor, parameters: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    # The cached tensor may itself be returned as a gradient: callers are done with the gradients before the next call.
    one = _one(loss.shape, loss.dtype).fill_(1)
    return torch.autograd.Variable._execution_engine.run_backward(
        (loss,), (one,), False, False, parameters, allow_unreachable=True, accumulate_grad=False
    )


@cache
def _one(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


@cache
def _has_engine() -> bool:
    """Return whether PyTorch's engine can be called directly, and gives what `plain_differentiate` gives."""
    used, unused = (torch.arange(3.0, requires_grad=True) for _ in range(2))
    try:
        fast = _run_engine(used.square().sum(), (used, unused))
    except _UNSUPPORTED:
        return False
    plain = plain_differentiate(used.square().sum(), (used, unused))
    return fast[1] is None and torch.equal(fast[0], plain[0])  # type: ignore[arg-type]


def copy_each(to: list[Tensor], values: list[Tensor]) -> None:
    """Copy each value into the tensor at the same position, in one call if PyTorch has one."""
    if _has_foreach_copy():
        torch._foreach_copy_(to, values)
    else:
        for view, value in zip(to, values, strict=True):
            view.copy_(value)


@cache
def _has_foreach_copy() -> bool:
    to, value = torch.zeros(2), torch.ones(2)
    try:
        torch._foreach_copy_([to], [value])
    except _UNSUPPORTED:
        return False
    return torch.equal(to, value)


def is_saved(module: nn.Module, buffer: str) -> bool:
    """Return whether a buffer of the module belongs to its state_dict."""
    excluded = getattr(module, "_non_persistent_buffers_set", None)
    return buffer in module.state_dict() if excluded is None else buffer not in excluded


def _same_memory_order(a: Tensor, b: Tensor) -> bool:
    """Return whether the elements of both are in memory in the same order, without gaps or overlaps."""
    return a.dtype == b.dtype and (
        a.stride() == b.stride()
        or all(s == t for n, s, t in zip(a.shape, a.stride(), b.stride(), strict=True) if n > 1)
    )
