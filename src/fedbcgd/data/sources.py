"""What a client holds: something with a length that gives the batch of some rows."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any, Protocol, overload, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset, default_collate

from fedbcgd.data.images import Images
from fedbcgd.errors import UserError


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

    def channels_last(self) -> "Tensors":
        """The same with images laid out so that a batch of them is in channels_last."""
        if isinstance(self.tensors, Mapping):
            return Tensors({key: _laid_out_last(t) for key, t in self.tensors.items()}, self.rows)
        return Tensors(tuple(map(_laid_out_last, self.tensors)), self.rows)

    @property
    def positions(self) -> Tensor:
        """Of its examples, in the tensors."""
        return torch.arange(self._length, device=self.device) if self.rows is None else self.rows

    def subset(self, rows: Tensor) -> "Tensors":
        return Tensors(self.tensors, rows if self.rows is None else self.rows[rows])

    def to(self, device: torch.device, tensors: Any = None) -> "Tensors":
        """The same on a device; `tensors` are there already."""
        rows = None if self.rows is None else self.rows.to(device)
        return Tensors(to_device(self.tensors, device) if tensors is None else tensors, rows)


def _laid_out_last(t: Tensor) -> Tensor:
    images = t.ndim == 4 and t.is_floating_point()
    return t.contiguous(memory_format=torch.channels_last) if images else t


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
    if isinstance(first, Images) and all(isinstance(s, Images) and s.like(first) for s in sources):
        return first.of_all(torch.cat([s.positions for s in sources]))  # type: ignore[attr-defined]
    if isinstance(first, Tensors) and all(isinstance(s, Tensors) and s.tensors is first.tensors for s in sources):
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
    moved: dict[int, Any] = {}  # data sets that clients share stay shared
    return [_on_device(as_source(data, f"client {k}"), device, moved) for k, data in enumerate(clients)]


def _on_device(source: Source, device: torch.device, moved: dict[int, Any]) -> Source:
    if not isinstance(source, (Images, Tensors)):
        return source
    shared = source.resident if isinstance(source, Images) else source.tensors
    if id(shared) not in moved:
        there = source.to(device)
        moved[id(shared)] = shared, there.resident if isinstance(there, Images) else there.tensors
    return source.to(device, moved[id(shared)][1])


def in_channels_last(clients: Sequence[Any]) -> Sequence[Any]:
    """Images among the clients' tensors laid out as convolutions in channels_last read them, once instead of with every
    batch. (Our own images lie so from the start.)"""
    if isinstance(clients, Parts):
        return Parts(_laid_out(clients.data, {}), clients.rows, clients.ends)
    if not isinstance(clients, (list, tuple)):
        return clients
    done: dict[int, Any] = {}  # data sets that clients share stay shared
    return [_laid_out(as_source(data, f"client {k}"), done) for k, data in enumerate(clients)]


def _laid_out(source: Any, done: dict[int, Any]) -> Any:
    if not isinstance(source, Tensors):
        return source
    if id(source.tensors) not in done:
        done[id(source.tensors)] = source.tensors, source.channels_last().tensors
    return Tensors(done[id(source.tensors)][1], source.rows)


def as_source(data: Any, where: str) -> Source:
    """What users have, as a source: (x, y) tensors or arrays, a dictionary of them, or a map-style data set."""
    if isinstance(data, (Tensors, Images, Items)) or (isinstance(data, Source) and not isinstance(data, Tensor)):
        source: Source = data
    elif type(data) is TensorDataset:  # a subclass may do more in __getitem__
        source = Tensors(data.tensors)
    elif type(data) is Subset and type(data.dataset) is TensorDataset:
        source = Tensors(data.dataset.tensors, torch.as_tensor(data.indices))
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
