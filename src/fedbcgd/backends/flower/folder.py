"""What a federation's server leaves on disk: the same files as a simulated run, and a checkpoint to go on from."""

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbcgd.display import plots
from fedbcgd.engine.checkpoint import Checkpoints
from fedbcgd.engine.client_state import StateStore
from fedbcgd.engine.loop import Loop, Outcome, RoundInfo
from fedbcgd.engine.run_folder import JsonlFile, RunFolder, exclusive_lock, sweep_up
from fedbcgd.errors import UserError
from fedbcgd.files import as_json, make_folder, refuse_link, remove, sealed, write_tensors, write_text

log = logging.getLogger("flwr.fedbcgd")

if TYPE_CHECKING:
    from fedbcgd.backends.flower.federation import Federation


class ServerFolder:
    def __init__(self, path: Path, every: int):
        self.seconds = 0.0
        self._folder = RunFolder(path)
        self._every = every
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "ServerFolder":
        make_folder(self._folder.path)
        refuse_link(self._folder.checkpoint)
        make_folder(self._folder.checkpoint)
        self._stack.enter_context(exclusive_lock(self._folder.path))
        sweep_up(self._folder)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def peek(self, federation: "Federation") -> int | None:
        """Say how many clients the run in the folder has, if there is one, and which node is which of them."""
        self._checkpoints = Checkpoints(self._folder.checkpoint, self._every)
        there = self._checkpoints.load()
        self._before = values = None if there is None else there[1]
        if values is None:
            return None
        federation.roster.restore(values.get("roster", {}))
        federation.claims = {int(client): (last, times) for client, (last, times) in values.get("claims", {}).items()}
        return int(values["clients_in_all"])

    def restore(self, federation: "Federation") -> None:
        """Put the federation back to where the last checkpoint left it, if there is one."""
        server = federation.server
        assert server is not None
        self._store = StateStore((), server.layout.dim, server.layout.dtype)
        before = self._before
        if before is not None:
            said = federation.algorithm.options()
            if before["algorithm"] != as_json(said) or before["clients_in_all"] != server.clients:
                raise UserError(
                    f"{self._folder.path} was begun with another algorithm, other options or another number of clients "
                    f"({before['clients_in_all']}): it cannot go on with these; another folder begins a new run"
                )
            self._checkpoints.restore(server, self._store)
            log.info("going on after round %d, from %s", server.round, self._folder.path)
            federation.run = before["run"]
            federation.accepted = {int(client): round for client, round in before["accepted"].items()}
            self.seconds = before["seconds"]
            if (before["every"] > 1 or self._checkpoints.fallen_back) and server.controls:
                # Rounds after the checkpoint may have moved the clients' c_i on; c no longer fits them.
                server.reset_controls()
                federation.accepted = {}
        self._metrics = self._stack.enter_context(JsonlFile.resumed(self._folder.metrics, before))
        federation.rows[:] = self._metrics.rows
        remove(self._folder.summary)

    def after(self, federation: "Federation", loop: Loop) -> Callable[[RoundInfo], None]:
        def keep(info: RoundInfo) -> None:
            if info.row and len(federation.rows) > self._metrics.written:
                self._metrics.append(info.row)
            if info.reason or self._checkpoints.due(info.server):
                self._save(federation, loop.lap())

        return keep

    def _save(self, federation: "Federation", seconds: float) -> None:
        server = federation.server
        assert server is not None
        more = {
            **self._metrics.kept(),
            "seconds": seconds,
            "run": federation.run,
            "accepted": {str(client): round for client, round in federation.accepted.items()},
            "claims": {str(client): claim for client, claim in federation.claims.items()},
            "roster": federation.roster.snapshot(),
            "algorithm": as_json(federation.algorithm.options()),
            "clients_in_all": server.clients,
            "every": self._every,
        }
        self._metrics.sync()
        self._checkpoints.save(server, self._store, more)

    def finish(self, federation: "Federation", outcome: Outcome) -> None:
        server = federation.server
        assert server is not None
        write_tensors(self._folder.model, dict(federation.state_dict()))
        summary: dict[str, Any] = outcome.summary() | {
            "backend": "flower",
            "clients": server.clients,
            "cohort": server.cohort,
            "seed": server.seed,
            "options": federation.algorithm.options(),
        }
        write_text(self._folder.summary, sealed(as_json(summary, indent=1)) + "\n")
        if outcome.rows:
            plots.curves({federation.algorithm.name: outcome.rows}, self._folder.path / "curve.png")
