"""The definition of a model: what must be the same on server and clients, beside the weights that are sent.

Trained weights and floating-point buffers are sent with every task. Frozen weights are not: a client whose frozen weights
differ from the server's would train another model, and nobody would notice. So the definition has a hash of each of them.
"""

import hashlib
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from fedbcgd.backends.flower.wire import TaskRequest
from fedbcgd.core.torch_private import is_saved
from fedbcgd.core.vector import Layout
from fedbcgd.errors import UserError

TRAINED, FROZEN, BUFFER = "trained parameter", "frozen parameter", "buffer"
MOST_NAMED = 3  # differences that a message names; it counts the others


@dataclass(frozen=True)
class Item:
    """A parameter or buffer: its kind, shape and type, and a hash of its content if the content is not sent."""

    kind: str
    shape: tuple[int, ...]
    dtype: str
    content: str


@dataclass(frozen=True)
class Definition:
    """All parameters and saved buffers of a model by name."""

    tensors: dict[str, Item]

    @classmethod
    def of(cls, module: nn.Module) -> "Definition":
        """Return the definition of a module. Keep the result: all frozen weights are hashed, which takes time."""
        tensors = {}
        for name, p in module.named_parameters():
            kind = TRAINED if p.requires_grad else FROZEN
            tensors[name] = _entry(kind, p, is_sent=p.requires_grad)
        for name, b in _saved_buffers(module):
            # Buffers of a single value are counters (of batches, of steps), which may differ.
            tensors[name] = _entry(BUFFER, b, is_sent=b.is_floating_point() or b.numel() <= 1)
        return cls(tensors)

    @cached_property
    def packed(self) -> bytes:
        """The definition as bytes, to be sent."""
        rows = {name: [t.kind, t.shape, t.dtype, t.content] for name, t in self.tensors.items()}
        return zlib.compress(json.dumps(rows).encode(), 9)

    @classmethod
    def unpacked(cls, data: bytes) -> "Definition":
        """Read what `packed` returned."""
        rows: dict[str, Any] = json.loads(zlib.decompress(data))
        return cls({n: Item(kind, tuple(shape), *rest) for n, (kind, shape, *rest) in rows.items()})

    @cached_property
    def digest(self) -> str:
        """A short fingerprint: models with the same one differ at most in the weights that are sent."""
        rows = sorted((name, repr(t)) for name, t in self.tensors.items())
        return hashlib.sha256(repr(rows).encode()).hexdigest()[:16]

    def differences(self, server: "Definition") -> str:
        """Return how this model differs from the server's, as text; empty if it does not."""
        texts = list(self._differences(server))
        more = f"; and {len(texts) - MOST_NAMED} more" if len(texts) > MOST_NAMED else ""
        return "; ".join(texts[:MOST_NAMED]) + more

    def _differences(self, server: "Definition") -> Iterator[str]:
        for name in {**server.tensors, **self.tensors}:
            here, there = self.tensors.get(name), server.tensors.get(name)
            if here is None or there is None:
                owner = "the server's model has" if here is None else "this model has"
                yield f"{owner} {(here or there).kind} {name!r}, the other does not"  # type: ignore[union-attr]
            elif here.shape != there.shape:
                yield f"{name!r} has shape {list(here.shape)} here, {list(there.shape)} on the server"
            elif here.dtype != there.dtype:
                yield f"{name!r} is of type {here.dtype} here, {there.dtype} on the server"
            elif here.kind != there.kind:
                yield f"{name!r} is a {here.kind} here, a {there.kind} on the server"
            elif here.content != there.content:
                yield f"{here.kind} {name!r} has other values than on the server"


def as_on_server(module: nn.Module, request: TaskRequest) -> tuple[nn.Module, Layout]:
    """Check that a client's model is the server's, and return it in the server's memory format, with its layout.

    Args:
        module: the client's model.
        request: the server's request.

    Raises:
        UserError: the models differ in more than the weights that are sent; the message names the differences.
    """
    if differences := Definition.of(module).differences(Definition.unpacked(request.model)):
        raise UserError(
            f"make_model: expected the server's model, got another one: {differences}; install the same app on both"
        )
    if request.channels_last:
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    layout = request.algorithm.uplink.layout(module)
    if layout.digest != request.layout:  # the same tensors in another order
        raise UserError(
            f"make_model: expected a model whose blocks lie where the server's do, got {type(module).__name__} with "
            f"d = {layout.dim:,}; install the same app on both"
        )
    return module, layout


def _saved_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, owner in module.named_modules():
        for key, tensor in owner.named_buffers(recurse=False):
            if is_saved(owner, key):
                yield f"{path}.{key}" if path else key, tensor


def _entry(kind: str, tensor: Tensor, is_sent: bool) -> Item:
    content = "" if is_sent or tensor.is_meta else _hash(tensor)
    return Item(kind, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), content)


def _hash(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().data).hexdigest()[:16]
