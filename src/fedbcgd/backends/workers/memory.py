"""The memory that server and workers share: the broadcast, and slots for uploads. Both ends lay it out with this code."""

import mmap
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedbcgd.backends.workers.shared import aligned
from fedbcgd.core.algorithm import Algorithm
from fedbcgd.core.messages import Broadcast, Upload
from fedbcgd.core.vector import Layout

PayloadOffsets = dict[str, list[tuple[int, int]]]  # channel → (offset, bytes) of each slice


@dataclass(frozen=True)
class StoredUpload:
    """An upload whose payload stays in its slot."""

    upload: Upload  # with an empty payload
    offsets: PayloadOffsets


def upload_room(algorithm: Algorithm, layout: Layout) -> int:
    """Bytes that any upload fits in."""
    return max(
        sum(aligned(n) for lengths in algorithm.lengths(layout, j).values() for n in lengths)
        for j in range(layout.blocks)
    )


class Slot:
    """Room for one upload, filled from its start on."""

    def __init__(self, memory: mmap.mmap, at: int):
        self._memory = memory
        self._at = at
        self._allocator: dict[int, int] = {}  # address of what was lent → its offset

    def allocate(self, nbytes: int) -> Tensor:
        """Memory for so many bytes, to be written by whoever makes them."""
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        lent = torch.frombuffer(self._memory, dtype=torch.uint8, count=nbytes, offset=self._at)
        self._allocator[lent.data_ptr()] = self._at
        self._at += aligned(nbytes)
        return lent

    def put(self, upload: Upload) -> StoredUpload:
        """Leave what was written into lent memory where it is, and copy everything else into the slot."""
        offsets = {channel: [self._put(piece) for piece in pieces] for channel, pieces in upload.payload.items()}
        return StoredUpload(replace(upload, payload={}), offsets)

    def _put(self, piece: Tensor) -> tuple[int, int]:
        n = piece.numel()
        if n and piece.data_ptr() in self._allocator:
            return self._allocator[piece.data_ptr()], n
        at = self._at
        if n:
            torch.frombuffer(self._memory, dtype=torch.uint8, count=n, offset=at).copy_(piece)
            self._at += aligned(n)
        return at, n


class RoundMemory:
    """[x, controls …, the model that is evaluated, upload slots …]"""

    def __init__(self, memory: mmap.mmap, algorithm: Algorithm, layout: Layout):
        self._memory = memory
        self._room = upload_room(algorithm, layout)
        item = layout.dtype.itemsize
        self.x = torch.frombuffer(memory, dtype=layout.dtype, count=layout.size)
        self.controls: dict[str, Tensor] = {}
        at = aligned(layout.size * item)
        for name in algorithm.local.broadcasts:
            self.controls[name] = torch.frombuffer(memory, dtype=layout.dtype, count=layout.dim, offset=at)
            at += aligned(layout.dim * item)
        self.evaluated = torch.frombuffer(memory, dtype=layout.dtype, count=layout.size, offset=at)
        self._slots = at + aligned(layout.size * item)

    @staticmethod
    def size(algorithm: Algorithm, layout: Layout, slots: int) -> int:
        item = layout.dtype.itemsize
        head = 2 * aligned(layout.size * item) + len(algorithm.local.broadcasts) * aligned(layout.dim * item)
        return head + slots * upload_room(algorithm, layout)

    def publish(self, broadcast: Broadcast) -> None:
        """Write what goes to every client, once."""
        self.x.copy_(broadcast.x)
        for name, values in broadcast.controls.items():
            self.controls[name].copy_(values)

    def broadcast(self, round: int, epoch: int) -> Broadcast:
        return Broadcast(round, epoch, self.x, self.controls)

    def slot(self, place: int) -> "Slot":
        return Slot(self._memory, self._slots + place * self._room)

    def get(self, stored: StoredUpload) -> Upload:
        """The upload, its payload as views of its slot."""
        payload = {channel: [self._view(at, n) for at, n in pieces] for channel, pieces in stored.offsets.items()}
        return replace(stored.upload, payload=payload)

    def _view(self, at: int, n: int) -> Tensor:
        if not n:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=n, offset=at)
