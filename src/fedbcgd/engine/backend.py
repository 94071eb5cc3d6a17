"""What a backend must do, and what all of them share: their timings, and how they keep clients' new states."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from torch import Tensor

from fedbcgd.core.messages import Plan, Receipt, StateUpdate, Task, Upload
from fedbcgd.engine.client_state import StateStore


class Timings(dict[str, float]):
    """Real seconds by purpose: `local` and `codec` are summed over the workers, all others are of the main process."""

    def add(self, more: Mapping[str, float]) -> None:
        """Add seconds by purpose."""
        for name, seconds in more.items():
            self[name] = self.get(name, 0.0) + seconds

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the seconds of the block under a name."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add({name: time.perf_counter() - start})


class Inbox(Protocol):
    """Receives the answers of a round from a backend: the server, or a wrapper around it such as `FaultInjector`."""

    @property
    def settled(self) -> int:
        """How many tasks, counted from the first of the plan without a gap, are answered, refused or lost."""

    def expects(self, task: Task) -> bool:
        """Whether the client of this task of the open round has not answered yet and was not given up."""

    def receive(self, upload: Upload, sender: int | None = None) -> Receipt:
        """Check an upload and, if it is accepted, count it in. Backends call it through `NewState.hand_in`."""

    def lost(self, task: Task, why: str) -> None:
        """Record that the client of this task will not answer."""


class NewState:
    """A slot that is reserved for a client's new state, which becomes valid if the server accepts the upload.

    Attributes:
        old: the slot of the state that the task begins with; None: that state is zero.
        new: the slot of the state that the task produces; None: the algorithm keeps no state.
    """

    def __init__(self, store: StateStore, client: int, epoch: int):
        self._store = store
        self._client = client
        self._epoch = epoch
        self.old = store.slot(client, epoch)
        self.new = store.reserve()

    def hand_in(self, inbox: Inbox, upload: Upload, update: StateUpdate | None = None) -> bool:
        """Hand the upload to the server, and keep the new state if the server accepts it.

        Args:
            inbox: receives the uploads of the round.
            upload: the client's upload.
            update: the new state; None if it is in slot `new` already.

        Returns:
            Whether the server accepted the upload.
        """
        accepted = inbox.receive(upload, self._client).accepted
        if not accepted:
            self._store.discard(self.new)
            return False
        if update is not None and self.new is not None and self._store.file is not None:
            self._store.file.write(self.new, self.old, update)
        self._store.accept(self._client, self.new, self._epoch)
        return True


class Backend(Protocol):
    """Runs the tasks of a round, and evaluates models."""

    store: StateStore
    timings: Timings

    def run_round(self, inbox: Inbox, plan: Plan) -> None:
        """Do the tasks that `inbox.expects`.

        Call for each one `NewState(store, client, epoch).hand_in(inbox, upload, update)`, which also keeps the
        client's new state if the upload is accepted, or `inbox.lost(task, why)` if there is no upload.
        """

    def evaluate(self, x: Tensor) -> dict[str, float]:
        """Return the metrics of the model x on the test data; {} if there is no test data."""

    def close(self) -> None:
        """Release all resources; safe to call twice, and in the middle of a round."""


@runtime_checkable
class OverlappingBackend(Backend, Protocol):
    """A backend that can evaluate while the next round is trained."""

    def begin_evaluation(self, x: Tensor) -> None:
        """Copy the model x; workers evaluate it whenever they have no task."""

    def finish_evaluation(self) -> dict[str, float]:
        """Finish the evaluation that was begun, and return its metrics."""
