"""The vector: all trainable parameters and floating-point buffers of a model as one flat tensor, laid out block by block.

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
    order: tuple[int, ...]  # its dimensions by stride, the largest first: channels_last is (0, 2, 3, 1)

    @property
    def numel(self) -> int:
        """The number of values."""
        return torch.Size(self.shape).numel()

    def view(self, vector: Tensor) -> Tensor:
        """Return this entry as a view of the vector, with the shape and strides that it has in the model."""
        flat = vector[self.offset : self.offset + self.numel]
        in_memory = flat.view([self.shape[d] for d in self.order])
        return in_memory.permute([self.order.index(d) for d in range(len(self.shape))])


@dataclass(frozen=True)
class Layout:
    """Where each parameter and buffer is in the vector. Holds no tensor; equal models have equal layouts in any process.

    Attributes:
        parameters: in the order of the vector.
        buffers: those that are sent, after the parameters.
        bounds: block j is [bounds[j], bounds[j+1]); the shared block is [bounds[N], dim).
        dim: d, the number of trainable values.
        size: length of the vector: d plus the number of buffer values.
        dtype: the one type of all parameters and buffers.
        divider: how the blocks were cut: "layers", "even", "sizes", "patterns" or "paper".
    """

    parameters: tuple[Entry, ...]
    buffers: tuple[Entry, ...]
    bounds: tuple[int, ...]
    dim: int
    size: int
    dtype: torch.dtype
    divider: str

    @classmethod
    def of(cls, model: nn.Module, division: Division) -> "Layout":
        """Return the layout of a model.

        Raises:
            UserError: its parameters and buffers have several types, or two parameters share memory.
        """
        named = dict(model.named_parameters())
        _refuse_overlap({name: named[name] for name in division.names})
        buffers = _float_buffers(model)
        dtype = named[division.names[0]].dtype
        entries: list[Entry] = []
        offset = 0
        for name, tensor in [*((n, named[n]) for n in division.names), *buffers.items()]:
            if tensor.dtype != dtype:
                raise UserError(
                    f"model: expected one floating-point type, got {dtype} for {division.names[0]!r} and {tensor.dtype} for "
                    f"{name!r}; convert the model (model.float() or model.to(dtype))"
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
        """The number of blocks, N."""
        return len(self.bounds) - 1

    def block(self, j: int) -> slice:
        """Return where block j is in the vector."""
        return slice(self.bounds[j], self.bounds[j + 1])

    @property
    def shared(self) -> slice:
        """Where the shared block is in the vector."""
        return slice(self.bounds[-1], self.dim)

    @property
    def buffer_slice(self) -> slice:
        """Where the buffers are in the vector."""
        return slice(self.dim, self.size)

    def slices(self, j: int) -> tuple[slice, ...]:
        """Return the coordinates that a client of block j uploads: its block and, unless empty, the shared block."""
        return (self.block(j), self.shared) if self.bounds[-1] < self.dim else (self.block(j),)

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """Return all parameters and buffers as views of a vector, by name."""
        return {e.name: e.view(vector) for e in (*self.parameters, *self.buffers)}

    def vector(self, state: Mapping[str, Tensor], device: torch.device | str | None = None) -> Tensor:
        """Return a vector with the values of a state_dict; entries that the layout does not have are ignored.

        Raises:
            UserError: values are missing, of another shape, NaN or infinite.
        """
        out = torch.empty(self.size, dtype=self.dtype, device=device)
        for e in (*self.parameters, *self.buffers):
            if e.name not in state:
                raise UserError(f"weights: expected an entry {e.name!r}, as the model has, got none")
            if tuple(state[e.name].shape) != e.shape:
                raise UserError(
                    f"weights: expected shape {e.shape} for {e.name!r}, as in the model, got {tuple(state[e.name].shape)}"
                )
            e.view(out).copy_(state[e.name])
            if not out.is_meta and not e.view(out).isfinite().all():
                kind = "parameter" if e.offset < self.dim else "buffer"
                value = "NaN" if e.view(out).isnan().any() else "infinity"
                raise UserError(
                    f"model: expected finite initial weights, got {value} in {kind} {e.name!r}; "
                    "initialise it, or pass other weights"
                )
        return out

    @property
    def digest(self) -> str:
        """A short fingerprint: processes with the same digest have the same layout."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]


class FlatModel:
    """A module whose parameters and buffers are views of `vector`. The module is changed, so pass a copy."""

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
        self.parameters = tuple(tensors[e.name] for e in layout.parameters)
        self.views = [replaced[id(p)] for p in self.parameters]  # the parameters' memory, without autograd
        self._address = [view.data_ptr() for view in self.views]
        self.strides = [view.stride() for view in self.views]
        for p, view in zip(self.parameters, self.views, strict=True):
            p.data = view  # tied parameters are one object, so they stay tied
        for owner, key, tensor in list(_all_buffers(module)):
            if id(tensor) in replaced:
                setattr(owner, key, replaced[id(tensor)])
                self._sent_buffers.append((owner, key, replaced[id(tensor)]))
        # Buffers that are not sent (counters, masks) start every client's work from the same values.
        self._constants = [
            (owner, key, t, t.clone())
            for owner, key, t in _all_buffers(module)
            if id(t) not in {id(v) for _, _, v in self._sent_buffers} and _writable(t)
        ]

    def load(self, vector: Tensor) -> None:
        """Copy a vector into the module, and reset the buffers that are not in it to their initial values."""
        self.reattach()
        self.vector.copy_(vector)
        for owner, key, tensor, initial in self._constants:
            tensor.copy_(initial)
            setattr(owner, key, tensor)
        for owner, key, view in self._sent_buffers:
            setattr(owner, key, view)

    def reattach(self) -> None:
        """Move parameters whose memory the module replaced (`p.data = …`) back into the vector, with their values."""
        # Checked at every step, so without a Python loop.
        if list(map(Tensor.data_ptr, self.parameters)) == self._address:
            return
        for p, view, address in zip(self.parameters, self.views, self._address, strict=True):
            if p.data_ptr() != address:
                view.copy_(p.data)
                p.data = view

    def gather_buffers(self) -> None:
        """Move buffers that the module replaced, instead of writing into them, back into the vector."""
        for owner, key, view in self._sent_buffers:
            current = getattr(owner, key, None)
            if current is not view and current is not None:
                view.copy_(current.detach())
                setattr(owner, key, view)

    def state_dict(self) -> dict[str, Tensor]:
        """Return an ordinary state_dict: contiguous copies that share no memory."""
        return {
            k: v.detach().clone(memory_format=torch.contiguous_format) if isinstance(v, Tensor) else copy.deepcopy(v)
            for k, v in self.module.state_dict().items()
        }


def _memory_order(tensor: Tensor) -> tuple[int, ...]:
    """Return the dimensions by stride, the largest first; of two with equal strides, the one of size 1 comes last."""
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda d: (-strides[d], tensor.shape[d] == 1, d)))
    dense = tensor.permute(order).is_contiguous()
    return order if dense else tuple(range(tensor.dim()))  # with gaps or overlaps: store it contiguous


def _all_buffers(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for owner in model.modules():
        for key, tensor in owner.named_buffers(recurse=False, remove_duplicate=False):
            yield owner, key, tensor


def _float_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that are sent: floating-point ones that belong to the state_dict."""
    saved = {id(t) for owner, key, t in _all_buffers(model) if is_saved(owner, key)}
    return {n: b for n, b in model.named_buffers() if b.is_floating_point() and id(b) in saved}


def _writable(tensor: Tensor) -> bool:
    """Return False for expanded tensors, whose elements share memory: they cannot be written in place."""
    return all(s != 0 or n <= 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True))


def _refuse_overlap(parameters: dict[str, Tensor]) -> None:
    """Refuse two Parameters over the same memory, which the vector would separate; a tie is one Parameter used twice."""
    spans = sorted(
        (p.untyped_storage().data_ptr(), p.storage_offset(), p.storage_offset() + p.numel(), name)
        for name, p in parameters.items()
        if p.numel() and not p.is_meta  # a model on the meta device has shapes and no memory
    )
    for (base, _, end, first), (other, start, _, second) in pairwise(spans):
        if base == other and start < end:
            raise UserError(
                f"model: expected parameters that do not overlap, got {first!r} and {second!r} over the same memory; "
                "to tie them, make them one Parameter (module.b = module.a)"
            )
