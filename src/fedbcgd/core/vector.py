"""The vector: all parameters (and floating-point buffers) of a model as one flat tensor, laid out block by block.

[block 1 … block N, shared block, buffers], in the model's own dtype and memory format. The module's parameters are
views of it, so a broadcast is one copy and an upload is two slices.
"""

import copy
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from fedbcgd.core.blocks import Division
from fedbcgd.core.torch_private import is_saved
from fedbcgd.errors import UserError


@dataclass(frozen=True)
class Entry:
    """One parameter or buffer in the vector."""

    name: str
    offset: int
    shape: tuple[int, ...]
    order: tuple[int, ...]  # its dimensions from the slowest to the fastest in memory: channels_last is (0, 2, 3, 1)

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    def view(self, vector: Tensor) -> Tensor:
        """This entry as a view of the vector, shaped and strided as the model has it."""
        flat = vector[self.offset : self.offset + self.numel]
        in_memory = flat.view([self.shape[d] for d in self.order])
        return in_memory.permute([self.order.index(d) for d in range(len(self.shape))])


@dataclass(frozen=True)
class Layout:
    """Where everything stands in the vector. Holds no tensor; equal models give equal layouts in any process."""

    parameters: tuple[Entry, ...]
    buffers: tuple[Entry, ...]
    bounds: tuple[int, ...]
    dim: int  # d, the trainable parameters
    size: int  # d and the buffers
    dtype: torch.dtype
    divider: str

    @classmethod
    def of(cls, model: nn.Module, division: Division) -> "Layout":
        named = dict(model.named_parameters())
        _refuse_overlap({name: named[name] for name in division.names})
        buffers = _float_buffers(model)
        dtype = named[division.names[0]].dtype
        entries: list[Entry] = []
        offset = 0
        for name, tensor in [*((n, named[n]) for n in division.names), *buffers.items()]:
            if tensor.dtype != dtype:
                raise UserError(
                    f"{name!r} is of type {tensor.dtype} and {division.names[0]!r} of type {dtype}: the model must be "
                    "of one floating-point type (model.float() or model.to(dtype))"
                )
            entries.append(Entry(name, offset, tuple(tensor.shape), _memory_order(tensor)))
            offset += tensor.numel()
        count = len(division.names)
        return cls(
            tuple(entries[:count]),
            tuple(entries[count:]),
            division.bounds,
            division.dim,
            offset,
            dtype,
            division.divider,
        )

    @property
    def blocks(self) -> int:
        return len(self.bounds) - 1

    def block(self, j: int) -> slice:
        return slice(self.bounds[j], self.bounds[j + 1])

    @property
    def shared(self) -> slice:
        return slice(self.bounds[-1], self.dim)

    @property
    def buffer_slice(self) -> slice:
        return slice(self.dim, self.size)

    def slices(self, j: int) -> tuple[slice, ...]:
        """What a client of block j uploads of the parameters: its block and, unless empty, the shared block."""
        return (self.block(j), self.shared) if self.bounds[-1] < self.dim else (self.block(j),)

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        return {e.name: e.view(vector) for e in (*self.parameters, *self.buffers)}

    def vector(self, state: Mapping[str, Tensor], device: torch.device | str | None = None) -> Tensor:
        """The vector with the values of an ordinary state_dict (whose further entries are not ours).

        Raises UserError for values that are missing, of another shape, NaN or infinite: no training can begin from those.
        """
        out = torch.empty(self.size, dtype=self.dtype, device=device)
        for e in (*self.parameters, *self.buffers):
            if e.name not in state:
                raise UserError(f"the weights lack {e.name!r}, which the model has")
            if tuple(state[e.name].shape) != e.shape:
                raise UserError(
                    f"{e.name!r} has shape {tuple(state[e.name].shape)} in the weights, {e.shape} in the model"
                )
            e.view(out).copy_(state[e.name])
            if not out.is_meta and not e.view(out).isfinite().all():
                kind = "parameter" if e.offset < self.dim else "buffer"
                what = "NaN" if e.view(out).isnan().any() else "infinity"
                raise UserError(
                    f"model: expected finite initial weights, {kind} {e.name!r} holds {what}; "
                    "initialise it, or give weights that are whole"
                )
        return out

    @property
    def digest(self) -> str:
        """Short fingerprint: two processes that agree on it cut their vectors alike."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]


class FlatModel:
    """A module whose parameters and buffers are views of `vector`. It takes the module over: pass a copy."""

    def __init__(self, module: nn.Module, layout: Layout):
        self.module = module
        self.layout = layout
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        self.vector = torch.empty(layout.size, dtype=layout.dtype, device=tensors[layout.parameters[0].name].device)
        views = layout.views(self.vector)
        self._sent_buffers: list[tuple[nn.Module, str, Tensor]] = []
        replaced = {}
        for name, view in views.items():
            view.copy_(tensors[name].detach())
            replaced[id(tensors[name])] = view
        self.parameters = [tensors[e.name] for e in layout.parameters]
        self.views = [replaced[id(p)] for p in self.parameters]  # the parameters' memory, without autograd
        self._address = [view.data_ptr() for view in self.views]
        self.strides = [view.stride() for view in self.views]
        for p, view in zip(self.parameters, self.views, strict=True):
            p.data = view  # ties stay: they are one Parameter object, which only changes its memory
        for owner, key, tensor in list(_all_buffers(module)):
            if id(tensor) in replaced:
                setattr(owner, key, replaced[id(tensor)])
                self._sent_buffers.append((owner, key, replaced[id(tensor)]))
        # What is neither sent nor trained (counters, masks) starts every client's work from the same values.
        self._constants = [
            (owner, key, t, t.clone())
            for owner, key, t in _all_buffers(module)
            if id(t) not in {id(v) for _, _, v in self._sent_buffers} and _writable(t)
        ]

    def load(self, vector: Tensor) -> None:
        """Take over a vector, and put every other buffer back to its first value."""
        self.reattach()
        self.vector.copy_(vector)
        for owner, key, tensor, first in self._constants:
            tensor.copy_(first)
            setattr(owner, key, tensor)
        for owner, key, view in self._sent_buffers:
            setattr(owner, key, view)

    def reattach(self) -> None:
        """Bring parameters whose memory the module replaced (`p.data = …`) back into the vector, with their values."""
        if list(map(Tensor.data_ptr, self.parameters)) == self._address:  # asked at every step: no loop of Python's
            return
        for p, view, address in zip(self.parameters, self.views, self._address, strict=True):
            if p.data_ptr() != address:
                view.copy_(p.data)
                p.data = view

    def gather_buffers(self) -> None:
        """Bring buffers that the module replaced, instead of writing into them, back into the vector."""
        for owner, key, view in self._sent_buffers:
            now = getattr(owner, key, None)
            if now is not view and now is not None:
                view.copy_(now.detach())
                setattr(owner, key, view)

    def state_dict(self) -> dict[str, Tensor]:
        """An ordinary state_dict: contiguous copies that share no memory."""
        return {
            k: v.detach().clone(memory_format=torch.contiguous_format) if isinstance(v, Tensor) else copy.deepcopy(v)
            for k, v in self.module.state_dict().items()
        }


def _memory_order(tensor: Tensor) -> tuple[int, ...]:
    """Dimensions from slowest to fastest; of two with equal strides the one of size 1 is the faster."""
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda d: (-strides[d], tensor.shape[d] == 1, d)))
    dense = tensor.permute(order).is_contiguous()
    return order if dense else tuple(range(tensor.dim()))  # gaps or overlaps in memory: store it contiguous


def _all_buffers(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for owner in model.modules():
        for key, tensor in owner.named_buffers(recurse=False, remove_duplicate=False):
            yield owner, key, tensor


def _float_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that travel: floating-point ones that belong to the state_dict."""
    saved = {id(t) for owner, key, t in _all_buffers(model) if is_saved(owner, key)}
    return {n: b for n, b in model.named_buffers() if b.is_floating_point() and id(b) in saved}


def _writable(tensor: Tensor) -> bool:
    """False for expanded tensors, whose elements share memory: nothing writes into those in place."""
    return all(s != 0 or n <= 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True))


def _refuse_overlap(parameters: dict[str, Tensor]) -> None:
    """Two different Parameters over the same memory would silently come apart; a tie is one Parameter used twice."""
    spans = sorted(
        (p.untyped_storage().data_ptr(), p.storage_offset(), p.storage_offset() + p.numel(), name)
        for name, p in parameters.items()
        if p.numel() and not p.is_meta  # a model on the meta device has shapes and no memory
    )
    for (base, _, end, first), (other, start, _, second) in pairwise(spans):
        if base == other and start < end:
            raise UserError(
                f"parameters {first!r} and {second!r} are two Parameters over the same memory; to tie them, make them "
                "one Parameter (module.b = module.a)"
            )
