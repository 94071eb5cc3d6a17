"""The memory that main process and workers share: the broadcast, and slots for uploads."""

import mmap
from typing import Any

import torch
from torch import Tensor

from fedbcgd.backends.workers.shared import aligned
from fedbcgd.core.algorithm import Algorithm
from fedbcgd.core.messages import Broadcast, Upload
from fedbcgd.core.vector import Layout

# The fields of an upload whose payload is in a slot: instead of each piece, `payload` has its (offset, bytes).
StoredUpload = dict[str, Any]


def slot_bytes(algorithm: Algorithm, layout: Layout) -> int:
    """Return the size of a slot, which is that of the largest upload."""
    return max(
        sum(aligned(n) for lengths in algorithm.lengths(layout, j).values() for n in lengths)
        for j in range(layout.blocks)
    )


class Slot:
    """Memory for one upload, filled from its start."""

    def __init__(self, memory: mmap.mmap, start: int):
        self._memory = memory
        self._end = start
        self._allocated: dict[int, int] = {}  # address → offset

    def allocate(self, nbytes: int) -> Tensor:
        """Return memory of the slot, for a codec to write into."""
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        piece = torch.frombuffer(self._memory, dtype=torch.uint8, count=nbytes, offset=self._end)
        self._allocated[piece.data_ptr()] = self._end
        self._end += aligned(nbytes)
        return piece

    def put(self, upload: Upload) -> StoredUpload:
        """Copy pieces of the payload that are not in the slot yet into it, and return where each piece is."""
        places = {channel: [self._put(piece) for piece in pieces] for channel, pieces in upload.payload.items()}
        return {**vars(upload), "payload": places}

    def _put(self, piece: Tensor) -> tuple[int, int]:
        n = piece.numel()
        if n and piece.data_ptr() in self._allocated:
            return self._allocated[piece.data_ptr()], n
        offset = self._end
        self.allocate(n).copy_(piece)
        return offset, n


class RoundMemory:
    """[x, controls …, the model to evaluate, upload slots …], laid out alike in main process and workers."""

    def __init__(self, memory: mmap.mmap, algorithm: Algorithm, layout: Layout):
        self._memory = memory
        self._slot_bytes = slot_bytes(algorithm, layout)
        self._slots = 0  # where the slots begin: after all vectors
        self.x = self._take(layout.size, layout)
        self.controls = {name: self._take(layout.dim, layout) for name in algorithm.local.broadcasts}
        self.evaluated = self._take(layout.size, layout)

    def _take(self, count: int, layout: Layout) -> Tensor:
        """Return the next vector."""
        vector = torch.frombuffer(self._memory, dtype=layout.dtype, count=count, offset=self._slots)
        self._slots += aligned(vector.nbytes)
        return vector

    @staticmethod
    def size(algorithm: Algorithm, layout: Layout, slots: int) -> int:
        """Return the bytes that are needed with this many slots."""
        item = layout.dtype.itemsize
        head = 2 * aligned(layout.size * item) + len(algorithm.local.broadcasts) * aligned(layout.dim * item)
        return head + slots * slot_bytes(algorithm, layout)

    def publish(self, broadcast: Broadcast) -> None:
        """Write the broadcast, once for all clients."""
        self.x.copy_(broadcast.x)
        for name, values in broadcast.controls.items():
            self.controls[name].copy_(values)

    def broadcast(self, round: int, epoch: int) -> Broadcast:
        """Return the broadcast as views of the memory."""
        return Broadcast(round, epoch, self.x, self.controls)

    def slot(self, index: int) -> Slot:
        """Return an upload slot."""
        return Slot(self._memory, self._slots + index * self._slot_bytes)

    def get(self, stored: StoredUpload) -> Upload:
        """Return the upload with its payload as views of its slot."""
        payload = {channel: [self._view(*place) for place in places] for channel, places in stored["payload"].items()}
        return Upload(**{**stored, "payload": payload})

    def _view(self, at: int, n: int) -> Tensor:
        if not n:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=n, offset=at)
