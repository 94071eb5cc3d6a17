"""Checkpoints: one safetensors file, replaced atomically, and the file of client state.

The state is copied at once; a thread writes it while training continues. The last two checkpoints are kept: if the newer
one is damaged, the run resumes from the other.
"""

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fedbcgd.core.server import Server
from fedbcgd.engine.client_state import StateStore
from fedbcgd.engine.signals import uninterrupted
from fedbcgd.errors import UserError
from fedbcgd.files import Damaged, open_regular, read_tensors, write_tensors

log = logging.getLogger("fedbcgd")

FORMAT = 2  # from 2 on there are checksums
MAX_TIME_SHARE = 0.02  # of a run's time that checkpoints may take
DISK_BYTES_PER_SECOND = 200e6  # to estimate the time of the first checkpoint


class Checkpoints:
    """The last two checkpoints of a run.

    Args:
        folder: where they are.
        every: rounds between checkpoints; None: so many that checkpoints take less than 2 % of the time.
    """

    def __init__(self, folder: Path, every: int | None):
        self.path = folder / "server.safetensors"
        self.previous = folder / "previous.safetensors"
        self.clients = folder / "clients.bin"
        self._every = every
        self.fallen_back = False  # whether the last load had to use the older checkpoint
        self._cost: float | None = None
        self._last = time.monotonic()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def due(self, server: Server) -> bool:
        """Whether it is time for a checkpoint."""
        if self._every is not None:
            return server.round % self._every == 0
        if self._thread is not None and self._thread.is_alive():
            return False
        cost = self._cost
        if cost is None:
            cost = server.x.numel() * server.x.element_size() * 3 / DISK_BYTES_PER_SECOND
        return time.monotonic() - self._last >= max(1.0, cost / MAX_TIME_SHARE)

    def save(self, server: Server, store: StateStore, more: dict[str, Any]) -> None:
        """Save everything that a resumed run needs, and wait until it is written; `more` is kept as JSON."""
        self.begin(server, store, more)
        self.finish(store)

    def begin(
        self, server: Server, store: StateStore, more: dict[str, Any], first: Sequence[Callable[[], object]] = ()
    ) -> None:
        """Copy the state as it is now, and save it while training continues.

        Args:
            server: its snapshot is saved.
            store: the clients' state.
            more: further values, kept as JSON.
            first: functions called before the checkpoint is written; they flush files that it refers to.

        Raises:
            UserError: the file of client state was removed or replaced. Before the error is raised, the file and a
                checkpoint are written again.
        """
        self.finish(store)
        replaced = store.put_back()
        tensors, values = server.snapshot()
        table = store.snapshot()
        slot = 0 if store.file is None else store.file.slot_bytes
        values |= {"format": FORMAT, "clients": table, "slot_bytes": slot, "layout": server.layout.digest, **more}

        def write() -> None:
            start = time.monotonic()
            try:
                for make_durable in (*first, store.sync):
                    make_durable()
                store.seal(table)
                before = None if self.fallen_back else self.previous
                write_tensors(self.path, tensors, {"fedbcgd": json.dumps(values)}, before)
                self.fallen_back = False
            except BaseException as error:
                self._error = error
            self._last = time.monotonic()
            self._cost = self._last - start

        with uninterrupted():  # a thread that Ctrl-C left half started could not be waited for
            self._thread = threading.Thread(target=write, name="checkpoint")
            self._thread.start()
        if replaced:
            self.finish(store)
            raise UserError(
                f"{self.clients}: expected the file that the run has open, got another one or none; it was written "
                "again, with a checkpoint, and --resume continues from there"
            )

    def finish(self, store: StateStore) -> None:
        """Wait until the checkpoint that was begun is written; raise the error if that failed."""
        if self._thread is None:
            return
        self.wait()
        self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        store.checkpoint_is_durable()

    def wait(self) -> None:
        """Wait until nothing is being written."""
        if self._thread is not None:
            self._thread.join()

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Return tensors and values of the newest undamaged checkpoint; None if nothing was saved."""
        checkpoint, _ = self._newest()
        return checkpoint

    def _newest(self, store: StateStore | None = None) -> tuple[tuple[dict[str, Tensor], dict[str, Any]] | None, str]:
        """Return the newest undamaged checkpoint, and what is wrong with a newer one that was skipped.

        If `store` is given, a checkpoint counts as damaged if its slots of client state are.
        """
        wrong = []
        for path in (self.path, self.previous):
            try:
                checkpoint = read(path)
                if store is not None:
                    store.check(checkpoint[1]["clients"])
            except FileNotFoundError:
                continue
            except Damaged as error:
                wrong.append(str(error))
                continue
            self.fallen_back = path == self.previous
            if self.fallen_back and not wrong:  # the process was killed between the two renames that replace it
                wrong.append(f"{self.path} is missing")
            return checkpoint, " and ".join(wrong)
        if wrong:
            raise Damaged(
                f"{' and '.join(wrong)}; expected an undamaged checkpoint, got none; start a new run with another --out"
            )
        return None, ""

    def restore(self, server: Server, store: StateStore) -> dict[str, Any] | None:
        """Load the newest undamaged checkpoint into server and client state.

        Returns:
            The values that were saved with it; None if there is no checkpoint.

        Raises:
            UserError: the checkpoints are damaged, or of another model.
        """
        checkpoint, wrong = self._newest(store)
        if checkpoint is None:
            if store.file is not None:
                os.ftruncate(store.file.fd, 0)
            return None
        tensors, values = checkpoint
        if wrong:
            log.warning("%s: the run resumes from the checkpoint before it, of round %d", wrong, values["round"])
        if "format" not in values:
            log.warning("%s was written by an earlier version, without checksums, so it is not checked", self.path)
        try:
            if values["layout"] != server.layout.digest:
                raise UserError(
                    f"{self.path}: expected a checkpoint of this model and block division, got one with another layout"
                )
            server.restore(tensors, values)
        except (KeyError, TypeError, RuntimeError) as error:
            raise Damaged(f"{self.path} is damaged: {error!r}") from None
        store.restore(values["clients"], None if self.fallen_back else self._table_before())
        return values

    def _table_before(self) -> dict[str, Any] | None:
        try:
            table: dict[str, Any] = read(self.previous)[1]["clients"]
            return table
        except (OSError, Damaged):
            return None


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the values of a checkpoint.

    Raises:
        Damaged: its content is not what was written.
        FileNotFoundError: there is no such file.
    """
    try:
        open_regular(path).close()
        tensors, metadata, checked = read_tensors(path)
        values = json.loads(metadata["fedbcgd"])
        if "format" in values and not checked:
            raise Damaged(f"{path} is damaged: it has no checksum")
        if not all(isinstance(slot, int) and isinstance(epoch, int) for slot, epoch, *_ in values["clients"].values()):
            raise TypeError("its table of clients has entries of a wrong type")
        return tensors, values
    except (UserError, FileNotFoundError):
        raise
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{path} is damaged, or not a checkpoint of fedbcgd: {error!r}") from None
