"""Client state on disk: fixed-size slots of a memory-mapped file, written copy-on-write.

A client's new state goes to a free slot; the table client → slot changes only when the round is committed. A slot that
one of the last two durable checkpoints names is not overwritten; it is free once two later ones are durable. The table
of a checkpoint has a checksum of every slot. A client that never took part takes no space.
"""

import mmap
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fedbcgd.core.messages import StateUpdate
from fedbcgd.errors import UserError
from fedbcgd.files import Damaged, bytes_checksum, open_regular, same_file, write_whole

_PAGE = mmap.ALLOCATIONGRANULARITY


class SlotFile:
    """A file of slots, each holding one vector for each name. Processes that share the descriptor share the slots.

    Args:
        fd: the descriptor of the file.
        names: the vectors of a slot.
        dim: the length of each vector.
        dtype: its type.
    """

    def __init__(self, fd: int, names: Sequence[str], dim: int, dtype: torch.dtype):
        self.fd = fd
        self.names = tuple(names)
        self.dim = dim
        self.dtype = dtype
        self._vector_bytes = -(-dim * dtype.itemsize // 64) * 64
        self.slot_bytes = max(_PAGE, -(-self._vector_bytes * len(self.names) // _PAGE) * _PAGE)
        self._memory: mmap.mmap | None = None

    def open(self, slot: int) -> dict[str, Tensor]:
        """Return the vectors of a slot, as views of the file."""
        memory, start = self._map(slot)
        return {
            name: torch.frombuffer(memory, dtype=self.dtype, count=self.dim, offset=start + k * self._vector_bytes)
            for k, name in enumerate(self.names)
        }

    def checksum(self, slot: int) -> int:
        """Return the checksum of a slot's bytes."""
        memory, start = self._map(slot)
        return bytes_checksum(torch.frombuffer(memory, dtype=torch.uint8, count=self.slot_bytes, offset=start))

    def _map(self, slot: int) -> tuple[mmap.mmap, int]:
        start = slot * self.slot_bytes
        memory = self._memory
        if memory is None or len(memory) < start + self.slot_bytes:
            # Map the whole file: mapping each slot separately costs more than copying it.
            memory = self._memory = mmap.mmap(self.fd, 0)
        return memory, start

    def write(self, new: int, old: int | None, update: StateUpdate) -> None:
        """Write to slot `new` the vectors of slot `old` (zero if it is None) with the update applied."""
        vectors = self.open(new)
        before = self.open(old) if old is not None else None
        for name, vector in vectors.items():
            if before is None:
                vector.zero_()
            else:
                vector.copy_(before[name])
            for s, values in update.values[name]:
                vector[s] = values


class StateStore:
    """The state of all clients, in slots.

    In a round: `reserve` a slot, write it, then `accept` or `discard` it; `commit` or `abandon` ends the round.

    Args:
        names: the vectors that each client keeps; may be empty.
        dim: the length of each vector.
        dtype: its type.
        path: a file in the folder of the checkpoints; None: a temporary file without a name.

    Raises:
        UserError: the file cannot be made.
    """

    def __init__(self, names: Sequence[str], dim: int, dtype: torch.dtype, path: Path | None = None):
        self.names = tuple(names)
        self.durable = path is not None
        self._path = path
        self._table: dict[int, tuple[int, int]] = {}  # client → (slot, control epoch)
        self._pending: dict[int, tuple[int, int]] = {}  # accepted in the open round
        self._slots = 0
        self._free: list[int] = []
        self._unsaved: set[int] = set()  # slots in use that no checkpoint names
        # Slots that are no longer in use, but not free yet because a checkpoint names them:
        self._named_by_last: list[int] = []  # that of the last snapshot
        self._named_by_previous: list[int] = []  # that of the snapshot before it, until the last one is durable
        self._named_by_older: list[int] = []  # only the older of the two durable ones
        self._checksums: dict[int, int] = {}  # of the slots that a checkpoint names
        self.file: SlotFile | None = None
        if self.names:
            try:
                self._handle = tempfile.TemporaryFile() if path is None else open_regular(path, "a+b")  # noqa: SIM115
            except OSError as error:
                raise UserError(
                    f"{path or tempfile.gettempdir()}: cannot write client state here: {error.strerror}"
                ) from None
            self.file = SlotFile(self._handle.fileno(), names, dim, dtype)

    # -- a round --------------------------------------------------------------------------------------------------

    def slot(self, client: int, epoch: int) -> int | None:
        """Return the slot of a client's state; None if it has none, or one of an older control epoch."""
        slot, slot_epoch = self._table.get(client, (None, epoch))
        return slot if slot_epoch == epoch else None

    def load(self, client: int, epoch: int) -> Mapping[str, Tensor]:
        """Return a client's vectors; empty if it has none of this control epoch."""
        slot = self.slot(client, epoch)
        return {} if slot is None or self.file is None else self.file.open(slot)

    def reserve(self) -> int | None:
        """Return a free slot for a new state; None if clients keep no state."""
        if self.file is None:
            return None
        if not self._free:
            more = max(4, self._slots // 8)
            try:
                # Allocate it now: a full disk then shows here, not as a bus error when a page is written.
                os.posix_fallocate(self.file.fd, self._slots * self.file.slot_bytes, more * self.file.slot_bytes)
            except AttributeError:  # not on every system
                os.ftruncate(self.file.fd, (self._slots + more) * self.file.slot_bytes)
            except OSError as error:
                raise self._unwritable(error) from error
            self._free = list(range(self._slots + more - 1, self._slots - 1, -1))
            self._slots += more
        return self._free.pop()

    def accept(self, client: int, slot: int | None, epoch: int) -> None:
        """Record that the server accepted the client's upload: `slot` becomes its state when the round is committed."""
        if slot is not None:
            self._pending[client] = (slot, epoch)

    def discard(self, slot: int | None) -> None:
        """Free a slot whose upload was not accepted."""
        if slot is not None:
            self._free.append(slot)

    def commit(self) -> None:
        """Make what was accepted in this round the clients' state."""
        for client, (slot, epoch) in self._pending.items():
            if client in self._table:
                self._retire(self._table[client][0])
            self._table[client] = (slot, epoch)
            self._unsaved.add(slot)
        self._pending.clear()

    def abandon(self) -> None:
        """Roll back the open round."""
        self._free += [slot for slot, _ in self._pending.values()]
        self._pending.clear()

    def _retire(self, slot: int) -> None:
        if not self.durable or slot in self._unsaved:
            self._unsaved.discard(slot)
            self._free.append(slot)
        else:
            self._named_by_last.append(slot)

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, list[int]]:
        """Return the table to keep in a checkpoint.

        From now on the slots that it names are not overwritten; nor are those of the checkpoint before it, until
        `checkpoint_is_durable` was called twice.
        """
        self._named_by_previous += self._named_by_last
        self._named_by_last = []
        for slot in self._unsaved:
            self._checksums.pop(slot, None)
        self._unsaved.clear()
        return {str(client): list(entry) for client, entry in self._table.items()}

    def seal(self, table: dict[str, list[int]]) -> None:
        """Add the checksum of each slot to a snapshot; only the checksums of new slots are computed."""
        for entry in table.values():
            slot = entry[0]
            if slot not in self._checksums:
                assert self.file is not None
                self._checksums[slot] = self.file.checksum(slot)
            entry.append(self._checksums[slot])

    def sync(self) -> None:
        """Make all slots durable."""
        if self.file is not None:
            try:
                os.fsync(self.file.fd)
            except OSError as error:
                raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> UserError:
        return UserError(f"{self._path or tempfile.gettempdir()}: cannot write client state here: {error.strerror}")

    def checkpoint_is_durable(self) -> None:
        """Free the slots that only checkpoints before the last two name.

        To be called when the checkpoint of the last snapshot is durable.
        """
        self._free += self._named_by_older
        self._named_by_older, self._named_by_previous = self._named_by_previous, []

    def put_back(self) -> bool:
        """Write a copy of the file if its path was removed or replaced.

        Returns:
            Whether that was the case. If so the run must stop and be resumed, since worker processes still write to the
            old file.
        """
        if self.file is None or self._path is None or same_file(self.file.fd, self._path):
            return False

        def copy(temporary: Path) -> None:
            with open(self.file.fd, "rb", closefd=False) as old, temporary.open("wb") as new:  # type: ignore[union-attr]
                old.seek(0)
                shutil.copyfileobj(old, new, 1 << 20)

        write_whole(self._path, copy)
        return True

    def check(self, table: Mapping[str, Sequence[int]]) -> None:
        """Check the slots that a checkpoint names: that they exist, and their checksums if it has any.

        Raises:
            Damaged: the content of a slot is not what was written.
        """
        slots = 0 if self.file is None else os.fstat(self.file.fd).st_size // self.file.slot_bytes
        for client, (slot, _, *checksum) in table.items():
            if not 0 <= slot < slots:
                raise Damaged(f"{self._path}: expected slot {slot}, which its checkpoint names, got {slots} slots")
            assert self.file is not None
            if checksum and self.file.checksum(slot) != checksum[0]:
                raise Damaged(f"{self._path} is damaged: the state of client {client} is not what was written")

    def restore(self, table: Mapping[str, Sequence[int]], before: Mapping[str, Sequence[int]] | None = None) -> None:
        """Load the table of a checkpoint.

        Args:
            table: the slot, control epoch and checksum of each client.
            before: the table of the checkpoint before it, whose slots are not overwritten either.
        """
        self.check(table)
        self._table = {int(client): (slot, epoch) for client, (slot, epoch, *_) in table.items()}
        self._checksums = {slot: checksum[0] for slot, _, *checksum in table.values() if checksum}
        used = {slot for slot, _ in self._table.values()}
        self._slots = 0 if self.file is None else os.fstat(self.file.fd).st_size // self.file.slot_bytes
        self._named_by_older = sorted({slot for slot, *_ in (before or {}).values() if slot < self._slots} - used)
        named = used.union(self._named_by_older)
        self._free = [slot for slot in range(self._slots - 1, -1, -1) if slot not in named]
        self._unsaved, self._named_by_last, self._named_by_previous, self._pending = set(), [], [], {}

    def clients(self) -> list[int]:
        """Return the clients that have state."""
        return sorted(self._table)

    def close(self) -> None:
        """Close the file; safe to call twice."""
        if self.file is not None:
            self._handle.close()
