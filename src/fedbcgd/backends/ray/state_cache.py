"""Client state where the work is done: an actor keeps that of its share of the clients, and the driver knows what it keeps.

The truth is the driver's StateStore, where every accepted update is written. Beside it an actor keeps, of a client, the
state that its last task began with and what that task made of it; which of the two holds (was the upload accepted, was the
round committed?) is said with the client's next task. What an actor does not keep is sent along. So a lost actor loses
nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedbcgd.backends.ray.protocol import AFTER, BEFORE, SENT, ZERO, InitialState, as_bytes, as_tensor
from fedbcgd.core.messages import StateUpdate
from fedbcgd.engine.client_state import StateStore

KEEP = 2**30  # bytes of client state that an actor keeps; what was not used for longest goes first


@dataclass
class _Cached:
    before: int | None  # the slot of the state that the last task began with
    after: int | None = None  # the slot of what it made of it, once accepted


class CacheIndex:
    """What the driver knows of its actors' caches. Slots stand for versions: one that the store names for a client does not
    change while it does."""

    def __init__(self, store: StateStore, room: int | None = None):
        self._store = store
        size = 1 if store.file is None else store.file.slot_bytes
        self._room = max(1, KEEP // size) if room is None else room
        self._cached: dict[int, dict[int, _Cached]] = {}  # actor → client → its state, the longest unused first
        self._forget: dict[int, list[int]] = {}  # actor → what it is to forget with its next task

    def assign(self, actor: int, client: int, epoch: int) -> InitialState:
        """What this actor needs for a task of this client."""
        if self._store.file is None:
            return InitialState(ZERO)
        slot = self._store.slot(client, epoch)
        cached = self._cached.get(actor, {}).pop(client, _Cached(None))
        vectors = {}
        if slot is None:
            source = ZERO
        elif slot == cached.after:
            source = AFTER
        elif slot == cached.before:
            source = BEFORE
        else:
            source = SENT
            vectors = {name: as_bytes(vector) for name, vector in self._store.file.open(slot).items()}
        for other, theirs in self._cached.items():  # only who worked last for a client keeps its state
            if theirs.pop(client, None) is not None:
                self._forget.setdefault(other, []).append(client)
        mine = self._cached.setdefault(actor, {})
        mine[client] = _Cached(slot)
        forget = self._forget.pop(actor, [])
        while len(mine) > self._room:
            longest = next(iter(mine))
            del mine[longest]
            forget.append(longest)
        return InitialState(source, vectors, forget)

    def accepted(self, actor: int, client: int, slot: int | None) -> None:
        """The server took the upload; what the actor made of the state is in this slot too."""
        cached = self._cached.get(actor, {}).get(client)
        if cached is not None:
            cached.after = slot

    def lost(self, actor: int) -> None:
        self._cached.pop(actor, None)
        self._forget.pop(actor, None)


class StateCache:
    """An actor's cache: of each client the state its last task began with, and what the task made of it."""

    def __init__(self, names: Sequence[str], dim: int, dtype: torch.dtype, device: torch.device):
        self._names, self._dim, self._dtype, self._device = names, dim, dtype, device
        self._states: dict[int, tuple[dict[str, Tensor], Mapping[str, Any]]] = {}

    @property
    def clients(self) -> list[int]:
        return sorted(self._states)

    def load(self, client: int, initial: InitialState) -> dict[str, Tensor]:
        """The state that the client's task begins with; empty stands for zero."""
        for other in initial.forget:
            self._states.pop(other, None)
        if not self._names:
            return {}
        vectors: dict[str, Tensor] = {}
        if initial.source == SENT:
            vectors = {name: as_tensor(a, self._dtype).clone().to(self._device) for name, a in initial.vectors.items()}
        elif initial.source != ZERO:
            vectors, update = self._states[client]
            if initial.source == AFTER:
                vectors = vectors or {name: self._zeros() for name in self._names}
                for name, pieces in update.items():
                    for s, values in pieces:
                        vectors[name][s] = values
        self._states[client] = (vectors, {})
        return vectors

    def add(self, update: StateUpdate) -> None:
        """Keep what the task made of the state; it holds only if the client's next task says so."""
        if self._names:
            own = {name: [(s, values.clone()) for s, values in pieces] for name, pieces in update.values.items()}
            self._states[update.client] = (self._states[update.client][0], own)

    def _zeros(self) -> Tensor:
        return torch.zeros(self._dim, dtype=self._dtype, device=self._device)
