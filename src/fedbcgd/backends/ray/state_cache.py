"""Client state where the work is done: an actor keeps that of its share of the clients, and the driver knows what it keeps.

The truth is the driver's StateStore, where every accepted update is written. Beside it an actor keeps, of a client, the
state that its last task began with and what that task made of it; which of the two holds (was the upload accepted, was the
round committed?) is said with the client's next task. What an actor does not keep is sent along. So a lost actor loses
nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbcgd.core.messages import StateUpdate
from fedbcgd.engine.client_state import StateStore

KEEP = 2**30  # bytes of client state that an actor keeps; what was not used for longest goes first

NOTHING, BEFORE, AFTER = "nothing", "before", "after"  # which state a task begins with, where it need not be sent
Given = str | dict[str, np.ndarray]


def as_bytes(tensor: Tensor) -> np.ndarray:
    """A vector of any type as bytes, which Ray puts into its store, and takes from it, without a copy."""
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy()


class _Lent:
    """An array of Ray's store, which is read-only. torch has no such tensors and would warn; nothing here writes to it."""

    def __init__(self, array: np.ndarray):
        self.array = array  # keeps the memory, for as long as a tensor uses it
        interface = array.__array_interface__
        self.__array_interface__ = interface | {"data": (interface["data"][0], False)}


def as_tensor(array: np.ndarray, dtype: torch.dtype = torch.uint8) -> Tensor:
    """The vector again, over the same memory."""
    return torch.from_numpy(np.asarray(_Lent(array))).view(dtype)


@dataclass
class _Kept:
    before: int | None  # the slot of the state that the last task began with
    after: int | None = None  # the slot of what it made of it, once accepted


class Record:
    """The driver's end. Slots stand for versions: one that the store names for a client does not change while it does."""

    def __init__(self, store: StateStore, room: int | None = None):
        self._store = store
        size = 1 if store.file is None else store.file.slot_bytes
        self._room = max(1, KEEP // size) if room is None else room
        self._kept: dict[int, dict[int, _Kept]] = {}  # actor → client → what it keeps, the longest unused first
        self._drop: dict[int, list[int]] = {}  # actor → what it is told to forget with its next task

    def give(self, actor: int, client: int, epoch: int) -> tuple[Given, list[int]]:
        """What this actor needs for a task of this client: its state, and whose state to forget."""
        if self._store.file is None:
            return NOTHING, []
        slot = self._store.slot(client, epoch)
        kept = self._kept.get(actor, {}).pop(client, _Kept(None))
        given: Given
        if slot is None:
            given = NOTHING
        elif slot == kept.after:
            given = AFTER
        elif slot == kept.before:
            given = BEFORE
        else:
            given = {name: as_bytes(vector) for name, vector in self._store.file.open(slot).items()}
        for other, theirs in self._kept.items():  # only who worked last for a client keeps its state
            if theirs.pop(client, None) is not None:
                self._drop.setdefault(other, []).append(client)
        mine = self._kept.setdefault(actor, {})
        mine[client] = _Kept(slot)
        drop = self._drop.pop(actor, [])
        while len(mine) > self._room:
            longest = next(iter(mine))
            del mine[longest]
            drop.append(longest)
        return given, drop

    def accepted(self, actor: int, client: int, slot: int | None) -> None:
        """The server took the upload; what the actor made of the state is in this slot too."""
        kept = self._kept.get(actor, {}).get(client)
        if kept is not None:
            kept.after = slot

    def lost(self, actor: int) -> None:
        self._kept.pop(actor, None)
        self._drop.pop(actor, None)


class Shelf:
    """The actor's end."""

    def __init__(self, names: Sequence[str], dim: int, dtype: torch.dtype, device: torch.device):
        self._names, self._dim, self._dtype, self._device = names, dim, dtype, device
        self._kept: dict[int, tuple[dict[str, Tensor], Mapping[str, Any]]] = {}

    def take(self, client: int, given: Given, drop: Sequence[int]) -> dict[str, Tensor]:
        """The state that the client's task begins with; empty stands for zero."""
        for other in drop:
            self._kept.pop(other, None)
        if not self._names:
            return {}
        vectors: dict[str, Tensor] = {}
        if isinstance(given, dict):
            vectors = {name: as_tensor(a, self._dtype).clone().to(self._device) for name, a in given.items()}
        elif given != NOTHING:
            vectors, update = self._kept[client]
            if given == AFTER:
                vectors = vectors or {name: self._zeros() for name in self._names}
                for name, pieces in update.items():
                    for s, values in pieces:
                        vectors[name][s] = values
        self._kept[client] = (vectors, {})
        return vectors

    def made(self, update: StateUpdate) -> None:
        """What the task made of the state; it holds only if the client's next task says so."""
        if self._names:
            own = {name: [(s, values.clone()) for s, values in pieces] for name, pieces in update.values.items()}
            self._kept[update.client] = (self._kept[update.client][0], own)

    def _zeros(self) -> Tensor:
        return torch.zeros(self._dim, dtype=self._dtype, device=self._device)
