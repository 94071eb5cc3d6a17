"""Checkpoints: one safetensors file, put in place in one step, beside the slots of client state.

What they hold is copied at once; a thread writes it while the work goes on.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedbcgd.errors import UserError
from fedbcgd.files import write_tensors
from fedbcgd.server import Server
from fedbcgd.state import StateStore

SHARE = 0.02  # of the time, at most, goes into checkpoints
DISK = 200e6  # bytes a second, a first guess at what one costs


class Checkpoints:
    def __init__(self, folder: Path, every: int | None):
        self.path = folder / "server.safetensors"
        self.clients = folder / "clients.bin"
        self._every = every
        self._cost: float | None = None
        self._last = time.monotonic()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def due(self, server: Server) -> bool:
        if self._every is not None:
            return server.round % self._every == 0
        if self._thread is not None and self._thread.is_alive():
            return False
        cost = self._cost if self._cost is not None else server.x.numel() * server.x.element_size() * 3 / DISK
        return time.monotonic() - self._last >= max(1.0, cost / SHARE)

    def save(self, server: Server, store: StateStore, more: dict[str, Any]) -> None:
        """Everything that a continuation needs; `more` is kept as JSON."""
        self.begin(server, store, more)
        self.finish(store)

    def begin(
        self, server: Server, store: StateStore, more: dict[str, Any], first: Sequence[Callable[[], object]] = ()
    ) -> None:
        """Save the state as it is now, while the work goes on. `first` makes durable what the checkpoint speaks of."""
        self.finish(store)
        tensors, values = server.snapshot()
        values |= {"clients": store.snapshot(), "layout": server.layout.digest, **more}
        text = json.dumps(values)

        def write() -> None:
            start = time.monotonic()
            try:
                for make_durable in (*first, store.sync):
                    make_durable()
                write_tensors(self.path, tensors, {"fedbcgd": text})
            except BaseException as error:
                self._error = error
            self._last = time.monotonic()
            self._cost = self._last - start

        self._thread = threading.Thread(target=write, name="checkpoint")
        self._thread.start()

    def finish(self, store: StateStore) -> None:
        """Wait for what was begun; an error of its writing is raised here."""
        if self._thread is None:
            return
        self.wait()
        self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        store.released()

    def wait(self) -> None:
        """Until nothing is being written any more."""
        if self._thread is not None:
            self._thread.join()

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """What was saved last, or None."""
        if not self.path.exists():
            return None
        try:
            with safe_open(self.path, "pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                return tensors, json.loads((file.metadata() or {})["fedbcgd"])
        except (SafetensorError, KeyError, ValueError, OSError) as error:
            raise UserError(f"{self.path} is not a checkpoint of fedbcgd, or is damaged: {error}") from None

    def restore(self, server: Server, store: StateStore) -> dict[str, Any] | None:
        """Put server and client state back to the last checkpoint; what was saved beside it. None: there is none."""
        loaded = self.load()
        if loaded is None:
            if store.file is not None:
                os.ftruncate(store.file.fd, 0)
            return None
        tensors, values = loaded
        if values["layout"] != server.layout.digest:
            raise UserError(f"{self.path} is of another model: its parameters are laid out differently")
        server.restore(tensors, values)
        store.restore(values["clients"])
        return values
