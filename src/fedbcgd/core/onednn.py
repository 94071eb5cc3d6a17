"""A fault of oneDNN, and the way around it.

The backward pass of a 1×1 convolution with a stride and fewer than 8 input channels writes past the end of its memory when
input or weight are in channels_last: seen with PyTorch 2.13 on a machine with AVX2. In the ordinary format it does not.
"""

from typing import Any

from torch import nn


def writes_astray(layer: nn.Module) -> bool:
    return (
        isinstance(layer, nn.Conv2d)
        and set(layer.kernel_size) == {1}
        and max(layer.stride) > 1
        and layer.in_channels // layer.groups < 8
    )


def keep_within_bounds(module: nn.Module) -> None:
    """Such layers get what they work on in the ordinary format; all others are left alone."""
    for layer in module.modules():
        if writes_astray(layer) and not hasattr(layer, "kept_within_bounds"):
            layer.register_forward_pre_hook(_ordinary)
            layer.kept_within_bounds = True  # type: ignore[assignment]  # copied and pickled along with the hook


def _ordinary(layer: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
    return (given[0].contiguous(), *given[1:])
