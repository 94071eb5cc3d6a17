"""What a client holds: something with a length that gives the batch of some rows."""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any, Protocol, overload, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset, default_collate

from fedbcgd.data.images import Images
from fedbcgd.errors import UserError

LAID_OUT = 1 << 32  # bytes of users' images that are copied into another layout


@runtime_checkable
class Source(Protocol):
    def __len__(self) -> int: ...

    def gather(self, rows: Tensor, rng: np.random.Generator) -> Any:
        """The examples at these rows; `rng` is for augmentation."""


class Tensors:
    """Tensors of equal length, as a tuple or a dictionary; `rows` restricts them without a copy."""

    def __init__(self, tensors: Sequence[Tensor] | Mapping[str, Tensor], rows: Tensor | None = None):
        self.tensors = tensors
        self.rows = rows
        first = next(iter(self._columns()))
        self._length = len(first) if rows is None else len(rows)

    def __len__(self) -> int:
        return self._length

    @property
    def device(self) -> torch.device:
        return next(iter(self._columns())).device

    def _columns(self) -> Iterable[Tensor]:
        return self.tensors.values() if isinstance(self.tensors, Mapping) else self.tensors

    def gather(self, rows: Tensor, rng: np.random.Generator) -> Any:
        rows = rows.to(self.device)
        at = rows if self.rows is None else self.rows.index_select(0, rows)
        if isinstance(self.tensors, Mapping):
            return {key: _rows_of(t, at) for key, t in self.tensors.items()}
        return tuple([_rows_of(t, at) for t in self.tensors])

    @property
    def positions(self) -> Tensor:
        """Of its examples, in the tensors."""
        return torch.arange(self._length, device=self.device) if self.rows is None else self.rows

    def subset(self, rows: Tensor) -> "Tensors":
        return Tensors(self.tensors, rows if self.rows is None else self.rows[rows])

    def changed(self, change: Callable[[Tensor], Tensor], rows: Tensor | None = None) -> "Tensors":
        """The same with each tensor changed, and other rows, if any are given."""
        rows = self.rows if rows is None else rows
        if isinstance(self.tensors, Mapping):
            return Tensors({key: change(t) for key, t in self.tensors.items()}, rows)
        return Tensors(tuple([change(t) for t in self.tensors]), rows)

    def like(self, other: "Tensors") -> bool:
        """Whether both look into the same tensors."""
        mine, theirs = (
            (type(s.tensors), [*s.tensors] if isinstance(s.tensors, Mapping) else [], [*map(id, s._columns())])
            for s in (self, other)
        )
        return mine == theirs

    def to(self, device: torch.device) -> "Tensors":
        rows = None if self.rows is None else self.rows.to(device)
        return self.changed(lambda t: to_device(t, device), rows)


def _rows_of(t: Tensor, at: Tensor) -> Tensor:
    if t.ndim == 4 and not t.is_contiguous() and t.is_contiguous(memory_format=torch.channels_last):
        return t.permute(0, 2, 3, 1).index_select(0, at).permute(0, 3, 1, 2)  # as it lies in memory
    return t.index_select(0, at)


class Items:
    """Any map-style data set, item by item."""

    def __init__(self, dataset: Any):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def gather(self, rows: Tensor, rng: np.random.Generator) -> Any:
        return default_collate([self.dataset[i] for i in rows.tolist()])


def pooled(clients: Sequence[Any]) -> Source:
    """The data of all clients as one source."""
    if isinstance(clients, Parts):
        return clients.data.subset(clients.rows)
    sources = [as_source(data, f"client {k}") for k, data in enumerate(clients)]
    first = sources[0]
    if type(first) is Images and all(type(s) is Images and s.like(first) for s in sources):
        return first.of_all(torch.cat([s.positions for s in sources]))  # type: ignore[attr-defined]
    if type(first) is Tensors and all(type(s) is Tensors and s.like(first) for s in sources):
        return Tensors(first.tensors, torch.cat([s.positions for s in sources]))  # type: ignore[attr-defined]
    return Pooled(sources)


class Pooled:
    """Several sources as one, their rows one after the other."""

    def __init__(self, sources: Sequence[Source]):
        self.sources = sources
        self._ends = np.cumsum([len(source) for source in sources])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def gather(self, rows: Tensor, rng: np.random.Generator) -> Any:
        at = rows.cpu().numpy()
        owner = np.searchsorted(self._ends, at, side="right")
        pieces, order = [], []
        for k in np.unique(owner):
            mine = np.flatnonzero(owner == k)
            start = self._ends[k] - len(self.sources[k])
            pieces.append(self.sources[k].gather(torch.from_numpy(at[mine] - start), rng))
            order.append(mine)
        return _joined(pieces, torch.from_numpy(np.argsort(np.concatenate(order))))


def _joined(pieces: list[Any], order: Tensor) -> Any:
    if isinstance(pieces[0], Tensor):
        return torch.cat(pieces)[order]
    if isinstance(pieces[0], Mapping):
        return {key: _joined([piece[key] for piece in pieces], order) for key in pieces[0]}
    return tuple(_joined(list(column), order) for column in zip(*pieces, strict=True))


def together(sources: Sequence[Source], device: torch.device) -> tuple[Callable[[Tensor], tuple[Tensor, Tensor]], int]:
    """For sources of equal length: the examples at a row of positions for each of them, (x, y) with a source per row; and
    the size of an example.

    Where all look into one data set they are gathered at once.
    """
    first = sources[0]
    if (
        isinstance(first, Images)
        and first.plain
        and all(
            isinstance(s, Images) and s.resident is first.resident and s.plain and s.rows is not None for s in sources
        )
    ):
        at = torch.stack([s.rows for s in sources])  # type: ignore[attr-defined]
        resident = first.resident

        def gather(rows: Tensor) -> tuple[Tensor, Tensor]:
            chosen = at.gather(1, rows.to(at.device)).view(-1)
            x = resident.floats(resident.pixels(chosen))
            pair = x.unflatten(0, rows.shape), resident.labels.index_select(0, chosen).view(rows.shape)
            return to_device(pair, device)

        return gather, prod(resident.size)
    unused = np.random.default_rng(0)  # for augmentation, and clients that augment are not computed together

    def gather_each(rows: Tensor) -> tuple[Tensor, Tensor]:
        pairs = [source.gather(r, unused) for source, r in zip(sources, rows, strict=True)]
        return to_device((torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])), device)

    return gather_each, first.gather(torch.arange(1), unused)[0].numel()


class Parts(Sequence["Images | Tensors"]):
    """Clients that share one data set. Which rows each of them has is all that is kept, so a hundred thousand cost no more
    than their indices; a client is made when it is asked for."""

    def __init__(self, data: Images | Tensors, rows: Tensor, ends: np.ndarray):
        self.data, self.rows, self.ends = data, rows, ends

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, k: int) -> Images | Tensors: ...

    @overload
    def __getitem__(self, k: slice) -> "list[Images | Tensors]": ...

    def __getitem__(self, k: int | slice) -> "Images | Tensors | list[Images | Tensors]":
        if isinstance(k, slice):
            return [self[i] for i in range(*k.indices(len(self)))]
        k = range(len(self))[k]
        return self.data.subset(self.rows[self.ends[k] - self.size(k) : self.ends[k]])

    def size(self, k: int) -> int:
        """How many examples client k has."""
        return int(self.ends[k] - (self.ends[k - 1] if k else 0))

    def to(self, device: torch.device) -> "Parts":
        return Parts(self.data.to(device), self.rows.to(device), self.ends)


def split(data: Images | Tensors, parts: Sequence[np.ndarray]) -> Parts:
    """One client per part; they share the data's memory."""
    sizes = [len(part) for part in parts]
    if 0 in sizes:
        raise UserError(f"client {sizes.index(0)} holds no examples; leave it out or give it at least one")
    rows = np.concatenate([np.empty(0, np.int64), *parts]).astype(np.int64, copy=False)
    return Parts(data, torch.from_numpy(rows), np.cumsum(sizes, dtype=np.int64))


def on_device(clients: Sequence[Any], device: torch.device) -> Sequence[Any]:
    """The clients' data on a device, once and for all, as far as it is tensors; other data goes there batch by batch."""
    if isinstance(clients, Parts):
        return clients.to(device)
    if not isinstance(clients, (list, tuple)):
        return clients
    move, residents = _once(lambda t: to_device(t, device)), {}  # what clients share stays shared

    def moved(source: Source) -> Source:
        if isinstance(source, Images):
            resident = source.resident
            if id(resident) not in residents:
                residents[id(resident)] = resident, resident.to(device)
            return source.to(device, residents[id(resident)][1])
        if isinstance(source, Pooled):
            return _united([moved(s) for s in source.sources])
        if type(source) is Tensors:
            return source.changed(move, None if source.rows is None else source.rows.to(device))
        return source

    return [moved(as_source(data, f"client {k}")) for k, data in enumerate(clients)]


def _united(sources: list[Source]) -> Source:
    """All that they hold as one set of tensors, where they hold tensors that fit."""
    if all(type(s) is Tensors for s in sources):
        whole: list[Any] = [s.gather(torch.arange(len(s)), np.random.default_rng(0)) for s in sources]
        with contextlib.suppress(RuntimeError, KeyError, ValueError, TypeError):  # of other shapes, or with other names
            order = torch.arange(sum(map(len, sources)), device=sources[0].device)  # type: ignore[attr-defined]
            return Tensors(_joined(whole, order))
    return Pooled(sources)


def in_channels_last(clients: Sequence[Any]) -> Sequence[Any]:
    """Images among the clients' tensors laid out as convolutions in channels_last read them, once instead of with every
    batch; unless that would take gigabytes. (Our own images lie so from the start.)"""
    if isinstance(clients, Parts):
        return Parts(in_channels_last([clients.data])[0], clients.rows, clients.ends)
    if not isinstance(clients, (list, tuple)):
        return clients
    sources = [as_source(data, f"client {k}") for k, data in enumerate(clients)]
    images = {_identity(t): t.nbytes for s in sources if type(s) is Tensors for t in s._columns() if _images(t)}
    if sum(images.values()) > LAID_OUT:
        return clients
    lay_out = _once(batch_in_channels_last)
    return [s.changed(lay_out) if type(s) is Tensors else s for s in sources]


def batch_in_channels_last(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch.contiguous(memory_format=torch.channels_last) if _images(batch) else batch
    if isinstance(batch, Mapping):
        return {key: batch_in_channels_last(value) for key, value in batch.items()}
    return tuple(map(batch_in_channels_last, batch)) if isinstance(batch, (tuple, list)) else batch


def _images(t: Tensor) -> bool:
    return t.ndim == 4 and t.is_floating_point()


def _identity(t: Tensor) -> Any:
    if t.layout is not torch.strided:  # no memory to look at
        return id(t)
    return t.data_ptr(), t.shape, t.stride(), t.dtype, t.device


def _once(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The same change, but of tensors over the same memory only once: they become one."""
    done: dict[Any, tuple[Tensor, Tensor]] = {}  # with the first one, so that its memory is nobody else's

    def changed(t: Tensor) -> Tensor:
        key = _identity(t)
        if key not in done:
            done[key] = t, change(t)
        return done[key][1]

    return changed


def as_source(data: Any, where: str) -> Source:
    """What users have, as a source: (x, y) tensors or arrays, a dictionary of them, or a map-style data set."""
    if isinstance(data, (Tensors, Images, Items)) or (isinstance(data, Source) and not isinstance(data, Tensor)):
        source: Source = data
    elif type(data) is TensorDataset:  # a subclass may do more in __getitem__
        source = Tensors(data.tensors)
    elif type(data) is Subset and type(data.dataset) is TensorDataset:
        rows = torch.as_tensor(data.indices)
        source = Tensors(data.dataset.tensors, torch.where(rows < 0, rows + len(data.dataset), rows))
    elif isinstance(data, Mapping):
        source = Tensors(_columns(data, where))
    elif isinstance(data, (tuple, list)) and data and _array(data[0]) and (isinstance(data, tuple) or len(data) == 2):
        source = Tensors(tuple(_columns(dict(enumerate(data)), where).values()))
    elif (
        hasattr(data, "__getitem__")
        and hasattr(data, "__len__")
        and not isinstance(data, (str, bytes, Tensor, np.ndarray))
    ):
        source = Items(data)
    else:
        raise UserError(
            f"{where} is {type(data).__name__}; wanted: a pair (x, y) of tensors, a dictionary of tensors, or a data "
            "set with __len__ and __getitem__"
        )
    if not len(source):
        raise UserError(f"{where} holds no examples; leave it out or give it at least one")
    return source


def _array(value: Any) -> bool:
    return isinstance(value, (Tensor, np.ndarray)) and value.ndim > 0


def _columns(data: Mapping[Any, Any], where: str) -> dict[Any, Tensor]:
    tensors = {}
    for key, values in data.items():
        try:
            tensors[key] = torch.as_tensor(values)
        except (TypeError, ValueError, RuntimeError):
            tensors[key] = torch.empty(())
        if not tensors[key].ndim:
            raise UserError(
                f"{where}: {key!r} is {type(values).__name__}, which is no tensor, array or list of numbers"
            )
    if not tensors:
        raise UserError(f"{where} is an empty dictionary")
    lengths = {key: len(t) for key, t in tensors.items()}
    if len(set(lengths.values())) > 1:
        raise UserError(f"{where} has tensors of unequal length: {', '.join(f'{k}: {n}' for k, n in lengths.items())}")
    return tensors


def to_device(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Tensor):
        return batch if batch.device == device else batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return tuple(to_device(value, device) for value in batch)
    return batch
