"""All that is used of PyTorch without being public, each with a public form for versions that lack it or changed it.

On the CPU both forms give the same bits; the private ones save passes over memory and calls.
"""

from functools import cache

import torch
from torch import Tensor, nn

_CHANGED = (AttributeError, TypeError, RuntimeError)  # what a call raises that a version of PyTorch does not know


def sgd_step(
    values: list[Tensor], strides: list[tuple[int, ...]], gradients: list[Tensor], eta: float, decay: float
) -> None:
    """v ← v − η·(g + w·v) for each, to the bits of torch.optim.SGD: in one pass where PyTorch has one."""
    alike = list(map(Tensor.stride, gradients)) == strides or all(map(_laid_out_alike, values, gradients))
    if alike and has_fused_step(values[0].device.type, values[0].dtype):
        _fused_sgd_step(values, gradients, eta, decay)
    else:
        plain_sgd_step(values, gradients, eta, decay)


def plain_sgd_step(values: list[Tensor], gradients: list[Tensor], eta: float, decay: float) -> None:
    for v, g in zip(values, gradients, strict=True):
        # into a new tensor: autograd may hand out one gradient for two parameters
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
    """Whether PyTorch's step in one pass is there, and does what `plain_sgd_step` does."""
    if device not in ("cpu", "cuda") or dtype not in (torch.float32, torch.float64):
        return False
    fused, plain, gradient = (torch.arange(k, k + 8, device=device, dtype=dtype) / 7 for k in (1, 1, 3))
    plain_sgd_step([plain], [gradient], 0.1, 0.01)
    try:
        _fused_sgd_step([fused], [gradient], 0.1, 0.01)
    except _CHANGED:
        return False
    return torch.allclose(fused, plain)


def copy_each(to: list[Tensor], values: list[Tensor]) -> None:
    if _has_copies_at_once():
        torch._foreach_copy_(to, values)
    else:
        for view, value in zip(to, values, strict=True):
            view.copy_(value)


@cache
def _has_copies_at_once() -> bool:
    to, value = torch.zeros(2), torch.ones(2)
    try:
        torch._foreach_copy_([to], [value])
    except _CHANGED:
        return False
    return torch.equal(to, value)


def is_saved(module: nn.Module, buffer: str) -> bool:
    """Whether a buffer of the module belongs to its state_dict."""
    left_out = getattr(module, "_non_persistent_buffers_set", None)
    return buffer in module.state_dict() if left_out is None else buffer not in left_out


def _laid_out_alike(a: Tensor, b: Tensor) -> bool:
    """Whether the elements of both lie in memory in the same order, without gaps or overlaps."""
    return a.dtype == b.dtype and (
        a.stride() == b.stride()
        or all(s == t for n, s, t in zip(a.shape, a.stride(), b.stride(), strict=True) if n > 1)
    )
