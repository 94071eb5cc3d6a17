"""Caches of client state at the actors, so that it need not be sent with every task.

The driver's StateStore has every accepted state. In addition an actor caches the state of a client before and after its
last task. Which of the two is valid depends on whether the upload was accepted and the round committed; the client's next
task says which. A state that the actor does not have is sent with the task. So nothing is lost if an actor is lost.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedbcgd.backends.ray.protocol import AFTER, BEFORE, SENT, ZERO, InitialState, as_bytes, as_tensor
from fedbcgd.core.messages import StateUpdate
from fedbcgd.engine.client_state import StateStore

MAX_CACHE_BYTES = 2**30  # of an actor; the least recently used state is dropped first


@dataclass
class _Cached:
    """The slots of the store that hold the same states as an actor's cache: before and after a client's last task."""

    before: int | None
    after: int | None = None  # None until the upload is accepted


class CacheIndex:
    """What the driver knows of its actors' caches.

    Slots of the store identify states: a slot does not change while it is the client's.
    """

    def __init__(self, store: StateStore, capacity: int | None = None):
        self._store = store
        size = 1 if store.file is None else store.file.slot_bytes
        self._capacity = max(1, MAX_CACHE_BYTES // size) if capacity is None else capacity  # clients of an actor
        self._cached: dict[int, dict[int, _Cached]] = {}  # actor → client → its state, the least recently used first
        self._forget: dict[int, list[int]] = {}  # actor → clients to drop with its next task

    def assign(self, actor: int, client: int, epoch: int) -> InitialState:
        """Return what this actor needs for a task of this client."""
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
        for other, states in self._cached.items():  # only the actor that worked last for a client caches its state
            if states.pop(client, None) is not None:
                self._forget.setdefault(other, []).append(client)
        states = self._cached.setdefault(actor, {})
        states[client] = _Cached(slot)
        forget = self._forget.pop(actor, [])
        while len(states) > self._capacity:
            oldest = next(iter(states))
            del states[oldest]
            forget.append(oldest)
        return InitialState(source, vectors, forget)

    def accepted(self, actor: int, client: int, slot: int | None) -> None:
        """Record that the server accepted the upload, and that the new state is in this slot."""
        cached = self._cached.get(actor, {}).get(client)
        if cached is not None:
            cached.after = slot

    def lost(self, actor: int) -> None:
        """Forget the cache of an actor that is gone."""
        self._cached.pop(actor, None)
        self._forget.pop(actor, None)


class StateCache:
    """An actor's cache: for each client the state before its last task, and what the task changed."""

    def __init__(self, names: Sequence[str], dim: int, dtype: torch.dtype, device: torch.device):
        self._names, self._dim, self._dtype, self._device = names, dim, dtype, device
        self._states: dict[int, tuple[dict[str, Tensor], Mapping[str, Any]]] = {}

    @property
    def clients(self) -> list[int]:
        """The clients whose state is cached."""
        return sorted(self._states)

    def load(self, client: int, initial: InitialState) -> dict[str, Tensor]:
        """Return the state that the client's task begins with; empty if it is zero."""
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
        """Cache a client's new state, which is valid only if its next task says so."""
        if self._names:
            copied = {name: [(s, values.clone()) for s, values in pieces] for name, pieces in update.values.items()}
            self._states[update.client] = (self._states[update.client][0], copied)

    def _zeros(self) -> Tensor:
        return torch.zeros(self._dim, dtype=self._dtype, device=self._device)
