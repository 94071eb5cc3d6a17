"""A fault of oneDNN, and the way around it.

The backward pass of a 1×1 convolution with a stride and fewer than 8 input channels writes past the end of its memory if
its input or weight is in channels_last: seen with PyTorch 2.13 on a machine with AVX2. In the ordinary format it does not.
"""

from typing import Any

from torch import nn


def has_faulty_kernel(layer: nn.Module) -> bool:
    """Return whether the layer is a convolution that oneDNN gets wrong in channels_last."""
    return (
        isinstance(layer, nn.Conv2d)
        and set(layer.kernel_size) == {1}
        and max(layer.stride) > 1
        and layer.in_channels // layer.groups < 8
    )


def avoid_faulty_kernel(module: nn.Module) -> None:
    """Make the faulty convolutions of a module convert their input to the contiguous format. Safe to call twice."""
    for layer in module.modules():
        if has_faulty_kernel(layer) and not hasattr(layer, "avoids_faulty_kernel"):
            layer.register_forward_pre_hook(_make_contiguous)
            layer.avoids_faulty_kernel = True  # type: ignore[assignment]  # copied and pickled with the hook


def _make_contiguous(layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return (inputs[0].contiguous(), *inputs[1:])
