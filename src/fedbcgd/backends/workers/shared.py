"""Memory shared between processes: a file without a name, which is gone when the last process closes it.

`pickle_to_memory` writes an object into such memory, `unpickle_from_memory` makes it again, with tensors that are views of
the memory.
"""

import copyreg
import io
import mmap
import os
import pickle
import tempfile
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from fedbcgd.errors import UserError

ALIGN = 64  # bytes: tensors begin at multiples of this


def anonymous_memory(size: int) -> int:
    """Return a file descriptor of new anonymous memory of this size in bytes."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("fedbcgd")
    else:  # this system has no memory files: an ordinary file, removed at once
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    try:
        os.ftruncate(fd, max(1, size))
    except OSError:
        os.close(fd)
        raise
    return fd


def aligned(n: int) -> int:
    """Round up to a multiple of ALIGN."""
    return -(-n // ALIGN) * ALIGN


class _MemoryPickler(cloudpickle.Pickler):
    """Pickle any object; the memory of tensors and arrays goes to a list of buffers, each storage once."""

    def __init__(self, file: Any):
        super().__init__(file, protocol=5, buffer_callback=self._buffer)
        self.buffers: list[memoryview] = []
        self.out_of_band: list[tuple[int, int]] = []  # (offset, bytes) of pickle's out-of-band buffers
        self.size = 0
        self._at: dict[tuple[int, int], int] = {}
        self._alive: list[Any] = []  # so that ids and addresses stay unique

    def _add(self, view: memoryview) -> int:
        at = self.size
        self.buffers.append(view)
        self.size = at + aligned(view.nbytes)
        return at

    def _buffer(self, buffer: pickle.PickleBuffer) -> None:
        self.out_of_band.append((self._add(buffer.raw()), buffer.raw().nbytes))

    def reducer_override(self, obj: Any) -> Any:
        # Modules with torch.nn.utils.parametrize (weight_norm, spectral_norm) refuse to be pickled, so that they are not
        # loaded with another version of their class; here the class travels with them.
        if isinstance(obj, nn.Module) and is_parametrized(obj):
            return copyreg.__newobj__, (type(obj),), dict(vars(obj))  # type: ignore[attr-defined]
        return super().reducer_override(obj)

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is not Tensor or obj.device.type != "cpu" or obj.layout != torch.strided or obj.requires_grad:
            return None
        storage = obj.untyped_storage()
        if not storage.nbytes():
            return None
        key = storage.data_ptr(), storage.nbytes()  # two storages at one address may differ in length
        if key not in self._at:
            view = torch.empty(0, dtype=torch.uint8).set_(storage)
            self._at[key] = self._add(view.numpy().data)
        self._alive.append(obj)
        place = (self._at[key], obj.dtype, tuple(obj.shape), obj.stride(), obj.storage_offset())
        return (*place, storage.nbytes(), id(obj))


class _MemoryUnpickler(pickle.Unpickler):
    """Unpickle an object; its tensors and arrays become views of the memory."""

    def __init__(self, file: Any, memory: mmap.mmap, buffers: list[Any]):
        super().__init__(file, buffers=buffers)
        self._memory = memory
        self._known: dict[Any, Tensor] = {}

    def persistent_load(self, pid: Any) -> Tensor:
        if pid not in self._known:  # each tensor once
            at, dtype, shape, stride, offset, nbytes, _ = pid
            flat = torch.frombuffer(self._memory, dtype=dtype, count=nbytes // dtype.itemsize, offset=at)
            self._known[pid] = flat.as_strided(shape, stride, offset)
        return self._known[pid]


def pickle_to_memory(obj: Any) -> tuple[int, int, int]:
    """Write an object into new shared memory.

    Returns:
        The file descriptor, the bytes of the object's buffers, and the bytes of its pickle.

    Raises:
        UserError: it cannot be pickled.
    """
    text = io.BytesIO()
    pickler = _MemoryPickler(text)
    try:
        pickler.dump(obj)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise UserError(
            f"workers: expected model, loss and data that can be pickled, got {error}; workers=0 (backend = 'inprocess') "
            "sends nothing"
        ) from error
    head = pickle.dumps(pickler.out_of_band)
    body = len(head).to_bytes(8, "little") + head + text.getvalue()
    fd = anonymous_memory(pickler.size + len(body))
    at = 0
    for view in pickler.buffers:
        _write(fd, view.cast("B"), at)
        at += aligned(view.nbytes)
    _write(fd, memoryview(body), pickler.size)
    return fd, pickler.size, len(body)


def unpickle_from_memory(fd: int, size: int, length: int) -> Any:
    """Return the object that `pickle_to_memory` wrote, with its tensors as copy-on-write views of the memory.

    Args:
        fd: the file descriptor of the memory.
        size: the bytes of the object's buffers.
        length: the bytes of its pickle.
    """
    memory = mmap.mmap(fd, size + length, access=mmap.ACCESS_COPY)
    body = memory[size : size + length]
    head = int.from_bytes(body[:8], "little")
    view = memoryview(memory)
    buffers = [view[at : at + n] for at, n in pickle.loads(body[8 : 8 + head])]
    return _MemoryUnpickler(io.BytesIO(body[8 + head :]), memory, buffers).load()


def _write(fd: int, view: memoryview, at: int) -> None:
    while view:
        written = os.pwrite(fd, view, at)
        view, at = view[written:], at + written
