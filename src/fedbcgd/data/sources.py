"""Sources of examples: the data of a client, with a length and a method that returns a batch of rows."""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, overload, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate

from fedbcgd.data.images import Images
from fedbcgd.errors import UserError

MAX_LAID_OUT = 1 << 32  # bytes of users' images that are copied into another layout
GATHERED_AHEAD = 1 << 20  # values of minibatches that are gathered before the first is used: they stay in the cache


@runtime_checkable
class Source(Protocol):
    """What training needs of a data set."""

    def __len__(self) -> int: ...

    def gather(self, rows: Tensor, rng: np.random.Generator) -> Any:
        """Return the batch of the examples at these rows; `rng` is for augmentation."""


class Tensors:
    """A source of tensors of equal length.

    Args:
        tensors: a tuple or a dictionary of tensors; batches have the same form.
        rows: the rows of the examples in this source, which are not copied; None: all.
    """

    def __init__(self, tensors: Sequence[Tensor] | Mapping[str, Tensor], rows: Tensor | None = None):
        self.tensors = tensors
        self.rows = rows
        first = next(iter(self.columns()))
        self._length = len(first) if rows is None else len(rows)

    def __len__(self) -> int:
        return self._length

    @property
    def device(self) -> torch.device:
        """The device that has the tensors."""
        return next(iter(self.columns())).device

    @property
    def plain(self) -> bool:
        """Whether `gather` only copies rows, which it always does here."""
        return True

    @property
    def example_size(self) -> int:
        """The number of values of an example."""
        return sum(t.numel() // max(1, len(t)) for t in self.columns())

    def columns(self) -> Iterable[Tensor]:
        """Return the tensors."""
        return self.tensors.values() if isinstance(self.tensors, Mapping) else self.tensors

    def gather(self, rows: Tensor, rng: np.random.Generator) -> Any:
        rows = rows.to(self.device)
        positions = rows if self.rows is None else self.rows.index_select(0, rows)
        if isinstance(self.tensors, Mapping):
            return {key: _select(t, positions) for key, t in self.tensors.items()}
        return tuple([_select(t, positions) for t in self.tensors])

    @property
    def positions(self) -> Tensor:
        """The rows of its examples in the tensors."""
        return torch.arange(self._length, device=self.device) if self.rows is None else self.rows

    def subset(self, rows: Tensor) -> "Tensors":
        """Select rows of this source, without a copy."""
        return Tensors(self.tensors, rows if self.rows is None else self.rows[rows])

    def map(self, function: Callable[[Tensor], Tensor], rows: Tensor | None = None) -> "Tensors":
        """Return a source with a function applied to each tensor, and with other rows unless they are None."""
        rows = self.rows if rows is None else rows
        if isinstance(self.tensors, Mapping):
            return Tensors({key: function(t) for key, t in self.tensors.items()}, rows)
        return Tensors(tuple([function(t) for t in self.tensors]), rows)

    def like(self, other: "Tensors") -> bool:
        """Return whether both select from the same tensors."""
        mine, theirs = (
            (type(s.tensors), [*s.tensors] if isinstance(s.tensors, Mapping) else [], [*map(id, s.columns())])
            for s in (self, other)
        )
        return mine == theirs

    def to(self, device: torch.device) -> "Tensors":
        """Move to a device."""
        rows = None if self.rows is None else self.rows.to(device)
        return self.map(lambda t: to_device(t, device), rows)


def _select(t: Tensor, rows: Tensor) -> Tensor:
    """Copy rows of a tensor in its own memory format."""
    if t.ndim == 4 and not t.is_contiguous() and t.is_contiguous(memory_format=torch.channels_last):
        return t.permute(0, 2, 3, 1).index_select(0, rows).permute(0, 3, 1, 2)
    return t.index_select(0, rows)


class Items:
    """A source over any map-style data set, which is read item by item."""

    def __init__(self, dataset: Any):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def gather(self, rows: Tensor, rng: np.random.Generator) -> Any:
        return default_collate([self.dataset[i] for i in rows.tolist()])


def gather_ahead(
    source: Source, rows: Tensor, size: int, rng: np.random.Generator, device: torch.device
) -> list[Any] | None:
    """Gather several minibatches in one operation.

    Args:
        source: the source of the examples.
        rows: the rows of all minibatches, one after the other.
        size: the size of a minibatch.
        rng: an argument of `gather`, which draws nothing here.
        device: where the minibatches are moved.

    Returns:
        The minibatches; None if they are too large, or if gathering may draw random numbers.
    """
    if not (isinstance(source, (Images, Tensors)) and source.plain):
        return None
    if len(rows) * source.example_size > GATHERED_AHEAD:
        return None
    return _split(to_device(source.gather(rows, rng), device), size)


def _split(batch: Any, size: int) -> list[Any]:
    """Split a batch into batches of this size; the last one may be smaller."""
    if isinstance(batch, Tensor):
        return list(batch.split(size))
    if isinstance(batch, Mapping):
        columns = [_split(column, size) for column in batch.values()]
        return [dict(zip(batch, values, strict=True)) for values in zip(*columns, strict=True)]
    return list(zip(*[_split(column, size) for column in batch], strict=True))


def pooled(clients: Sequence[Any]) -> Source:
    """Join the data of all clients into one source."""
    if isinstance(clients, ClientSubsets):
        return clients.data.subset(clients.rows)
    sources = [as_source(data, f"client {k}") for k, data in enumerate(clients)]
    first = sources[0]
    if type(first) is Images and all(type(s) is Images and s.like(first) for s in sources):
        return first.with_rows(torch.cat([s.positions for s in sources]))  # type: ignore[attr-defined]
    if type(first) is Tensors and all(type(s) is Tensors and s.like(first) for s in sources):
        return Tensors(first.tensors, torch.cat([s.positions for s in sources]))  # type: ignore[attr-defined]
    return Pooled(sources)


class Pooled:
    """Several sources as one; the rows of the first come first."""

    def __init__(self, sources: Sequence[Source]):
        self.sources = sources
        self._ends = np.cumsum([len(source) for source in sources])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def gather(self, rows: Tensor, rng: np.random.Generator) -> Any:
        positions = rows.cpu().numpy()
        owner = np.searchsorted(self._ends, positions, side="right")
        pieces, order = [], []
        for k in np.unique(owner):
            own = np.flatnonzero(owner == k)
            start = self._ends[k] - len(self.sources[k])
            pieces.append(self.sources[k].gather(torch.from_numpy(positions[own] - start), rng))
            order.append(own)
        return _concatenate(pieces, torch.from_numpy(np.argsort(np.concatenate(order))))


def _concatenate(pieces: list[Any], order: Tensor) -> Any:
    """Concatenate batches of one form, and put their examples in this order."""
    if isinstance(pieces[0], Tensor):
        return torch.cat(pieces)[order]
    if isinstance(pieces[0], Mapping):
        return {key: _concatenate([piece[key] for piece in pieces], order) for key in pieces[0]}
    return tuple(_concatenate(list(column), order) for column in zip(*pieces, strict=True))


def stacked_gather(
    sources: Sequence[Source], device: torch.device
) -> tuple[Callable[[Tensor], tuple[Tensor, Tensor]], int]:
    """Make a function that gathers a batch from each of several sources at once.

    Args:
        sources: sources of pairs (x, y), all of one length. Those of one data set are gathered in one operation.
        device: the device to which batches are moved.

    Returns:
        A function of rows (sources, batch) that returns x (sources, batch, …) and y (sources, batch); and the number of
        values of an example.
    """
    first = sources[0]
    if (
        isinstance(first, Images)
        and first.plain
        and all(
            isinstance(s, Images) and s.resident is first.resident and s.plain and s.rows is not None for s in sources
        )
    ):
        positions = torch.stack([s.rows for s in sources])  # type: ignore[attr-defined]
        resident = first.resident

        def gather(rows: Tensor) -> tuple[Tensor, Tensor]:
            chosen = positions.gather(1, rows.to(positions.device)).view(-1)
            x = resident.floats(resident.pixels(chosen))
            pair = x.unflatten(0, rows.shape), resident.labels.index_select(0, chosen).view(rows.shape)
            return to_device(pair, device)

        return gather, first.example_size
    unused = np.random.default_rng(0)  # for augmentation: clients that augment are not computed together

    def gather_each(rows: Tensor) -> tuple[Tensor, Tensor]:
        pairs = [source.gather(r, unused) for source, r in zip(sources, rows, strict=True)]
        return to_device((torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])), device)

    return gather_each, first.gather(torch.arange(1), unused)[0].numel()


class ClientSubsets(Sequence["Images | Tensors"]):
    """Clients that share one data set. Only their rows are stored; the source of a client is created on access.

    Args:
        data: the whole data set.
        rows: the rows of all clients, one client after the other.
        ends: where the rows of each client end.
    """

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
        """Return how many examples client k has."""
        return int(self.ends[k] - (self.ends[k - 1] if k else 0))

    def to(self, device: torch.device) -> "ClientSubsets":
        """Move to a device."""
        return ClientSubsets(self.data.to(device), self.rows.to(device), self.ends)


def split(data: Images | Tensors, parts: Sequence[np.ndarray]) -> ClientSubsets:
    """Split a data set over clients, which share its memory.

    Args:
        data: the whole data set.
        parts: the row numbers of each client, for instance from `dirichlet`.

    Returns:
        The source of each client.

    Raises:
        UserError: a client has no examples.
    """
    sizes = [len(part) for part in parts]
    if 0 in sizes:
        raise _no_examples(f"client {sizes.index(0)}")
    rows = np.concatenate([np.empty(0, np.int64), *parts]).astype(np.int64, copy=False)
    return ClientSubsets(data, torch.from_numpy(rows), np.cumsum(sizes, dtype=np.int64))


def on_device(clients: Sequence[Any], device: torch.device) -> Sequence[Any]:
    """Move the clients' tensors and images to a device; what clients share stays shared.

    Other data stays where it is, and is moved batch by batch.

    Args:
        clients: the data of each client.
        device: the destination.

    Returns:
        The clients' sources.
    """
    if isinstance(clients, ClientSubsets):
        return clients.to(device)
    if not isinstance(clients, (list, tuple)):
        return clients
    move, residents = once(lambda t: to_device(t, device)), {}

    def moved(source: Source) -> Source:
        if isinstance(source, Images):
            resident = source.resident
            if id(resident) not in residents:
                residents[id(resident)] = resident, resident.to(device)
            return source.to(device, residents[id(resident)][1])
        if isinstance(source, Pooled):
            return _merge([moved(s) for s in source.sources])
        if type(source) is Tensors:
            return source.map(move, None if source.rows is None else source.rows.to(device))
        return source

    return [moved(as_source(data, f"client {k}")) for k, data in enumerate(clients)]


def _merge(sources: list[Source]) -> Source:
    """Copy all examples into one set of tensors if the shapes allow it; otherwise pool the sources."""
    if all(type(s) is Tensors for s in sources):
        batches: list[Any] = [s.gather(torch.arange(len(s)), np.random.default_rng(0)) for s in sources]
        with contextlib.suppress(RuntimeError, KeyError, ValueError, TypeError):  # other shapes or names
            order = torch.arange(sum(map(len, sources)), device=sources[0].device)  # type: ignore[attr-defined]
            return Tensors(_concatenate(batches, order))
    return Pooled(sources)


def in_channels_last(clients: Sequence[Any]) -> Sequence[Any]:
    """Convert the images among the clients' tensors to channels_last once, instead of batch by batch.

    Nothing is done if that would copy more than `MAX_LAID_OUT` bytes. (`Images` has this layout already.)

    Args:
        clients: the data of each client.

    Returns:
        The clients' sources.
    """
    if isinstance(clients, ClientSubsets):
        return ClientSubsets(in_channels_last([clients.data])[0], clients.rows, clients.ends)
    if not isinstance(clients, (list, tuple)):
        return clients
    sources = [as_source(data, f"client {k}") for k, data in enumerate(clients)]
    images = {_identity(t): t.nbytes for s in sources if type(s) is Tensors for t in s.columns() if _is_images(t)}
    if sum(images.values()) > MAX_LAID_OUT:
        return clients
    convert = once(batch_in_channels_last)
    return [s.map(convert) if type(s) is Tensors else s for s in sources]


def batch_in_channels_last(batch: Any) -> Any:
    """Convert the images of a batch to channels_last."""
    return _map_tensors(lambda t: t.contiguous(memory_format=torch.channels_last) if _is_images(t) else t, batch)


def _is_images(t: Tensor) -> bool:
    return t.ndim == 4 and t.is_floating_point()


def _identity(t: Tensor) -> Any:
    """Return a key that is equal for tensors that are views of the same memory in the same way."""
    if t.layout is not torch.strided:  # it has no data_ptr
        return id(t)
    return t.data_ptr(), t.shape, t.stride(), t.dtype, t.device


def once(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Cache a function of tensors, so that those over the same memory give one result."""
    results: dict[Any, tuple[Tensor, Tensor]] = {}  # with the argument, which keeps its memory from being reused

    def cached(t: Tensor) -> Tensor:
        key = _identity(t)
        if key not in results:
            results[key] = t, function(t)
        return results[key][1]

    return cached


def as_source(data: Any, where: str) -> Source:
    """Return a user's data as a source.

    Args:
        data: a pair (x, y) of tensors or arrays, a dictionary of them, a map-style data set, or a source.
        where: whose data it is, for error messages.

    Returns:
        The source.

    Raises:
        UserError: the data is something else, has no examples, or has tensors of unequal length.
    """
    if isinstance(data, (Tensors, Images, Items)) or (isinstance(data, Source) and not isinstance(data, Tensor)):
        source: Source = data
    elif type(data) is TensorDataset:  # a subclass may do more in __getitem__
        source = Tensors(data.tensors)
    elif type(data) is Subset and type(data.dataset) is TensorDataset:
        rows = torch.as_tensor(data.indices)
        source = Tensors(data.dataset.tensors, torch.where(rows < 0, rows + len(data.dataset), rows))
    elif isinstance(data, Mapping):
        source = Tensors(_columns(data, where))
    elif (
        isinstance(data, (tuple, list)) and data and _is_array(data[0]) and (isinstance(data, tuple) or len(data) == 2)
    ) or (isinstance(data, tuple) and len(data) == 2 and all(isinstance(column, list) for column in data)):
        source = Tensors(tuple(_columns(dict(enumerate(data)), where).values()))
    elif (
        hasattr(data, "__getitem__")
        and hasattr(data, "__len__")
        and not isinstance(data, (str, bytes, Tensor, np.ndarray))
    ):
        source = Items(data)
    elif isinstance(data, DataLoader):
        raise UserError(
            f"{where}: expected a data set, got a DataLoader; pass the data set in it (loader.dataset), from which "
            "minibatches are drawn by batch_size, or a training function of your own (train=…), which may use the loader"
        )
    else:
        raise UserError(
            f"{where}: expected a pair (x, y) of tensors, a dictionary of tensors, or a data set with __len__ and "
            f"__getitem__, got {type(data).__name__}"
        )
    if not len(source):
        raise _no_examples(where)
    return source


def _no_examples(where: str) -> UserError:
    return UserError(f"{where}: expected at least one example, got none; add one, or leave it out")


def first_loader(data: Any) -> DataLoader[Any] | None:
    """Return the DataLoader of a training function's data: the data itself, or the first of (train_loader, test_loader)."""
    first = data[0] if isinstance(data, (tuple, list)) and data else data
    return first if isinstance(first, DataLoader) else None


def examples_in(data: Any) -> int | None:
    """Return how many examples a training function's data has; None if that is unknown."""
    loader = first_loader(data)
    try:
        return len(as_source(data, "data") if loader is None else loader.dataset)  # type: ignore[arg-type]
    except (UserError, TypeError):  # a data set without a length, or something else
        return None


def _is_array(value: Any) -> bool:
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
                f"{where}: {key!r}: expected a tensor, an array or a list of numbers, got {type(values).__name__}"
            )
    if not tensors:
        raise UserError(f"{where}: expected a dictionary of tensors, got an empty one")
    lengths = {key: len(t) for key, t in tensors.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{key}: {length}" for key, length in lengths.items())
        raise UserError(f"{where}: expected tensors of equal length, got {listed}")
    return tensors


def to_device(batch: Any, device: torch.device) -> Any:
    """Move the tensors of a batch to a device."""
    return _map_tensors(lambda t: t if t.device == device else t.to(device, non_blocking=True), batch)


def _map_tensors(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """Apply a function to each tensor of a batch; a list becomes a tuple, and what holds no tensors stays as it is."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: _map_tensors(function, value) for key, value in batch.items()}
    return tuple(_map_tensors(function, value) for value in batch) if isinstance(batch, (tuple, list)) else batch
