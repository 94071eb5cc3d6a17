"""What a federation's server leaves on disk: the same files as a simulated run, and a checkpoint to go on from."""

import contextlib
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbcgd.display import plots
from fedbcgd.engine.assemble import Run
from fedbcgd.engine.checkpoint import Checkpoints
from fedbcgd.engine.loop import Callback, Outcome, RoundInfo
from fedbcgd.engine.run_folder import JsonlFile, RunFolder, exclusive_lock, remove_temporary_files
from fedbcgd.errors import UserError
from fedbcgd.files import add_checksum, as_json, make_folder, refuse_link, remove, write_tensors, write_text
from fedbcgd.models.stored import ModelInfo

log = logging.getLogger("flwr.fedbcgd")

if TYPE_CHECKING:
    from fedbcgd.backends.flower.federation import Federation


class ServerFolder:
    """The run folder of a federation's server; a context manager that holds its lock.

    Args:
        path: the folder; it is made if it is not there.
        every: rounds between checkpoints.
    """

    def __init__(self, path: Path, every: int):
        self._folder = RunFolder(path)
        self._every = every
        self._stack = contextlib.ExitStack()
        self._checkpoints = Checkpoints(self._folder.checkpoint, every)
        self._traffic: JsonlFile | None = None

    def __enter__(self) -> "ServerFolder":
        make_folder(self._folder.path)
        refuse_link(self._folder.checkpoint)
        make_folder(self._folder.checkpoint)
        self._stack.enter_context(exclusive_lock(self._folder.path))
        remove_temporary_files(self._folder)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def peek(self, federation: "Federation") -> tuple[int | None, int | None]:
        """Restore what is needed before the clients are counted: which node is which, and how often state was lost.

        Returns:
            How many clients and how many blocks the run in the folder has; None if there is no run, or no blocks.
        """
        saved = self._checkpoints.load()
        if saved is None:
            return None, None
        values = saved[1]
        federation.roster.restore(values.get("roster", {}))
        federation.claims = {int(client): (last, times) for client, (last, times) in values.get("claims", {}).items()}
        return int(values["clients_in_all"]), json.loads(values["algorithm"]).get("blocks")

    def restore(self, federation: "Federation", run: Run) -> float:
        """Put the federation back to its last checkpoint, if there is one.

        Returns:
            The seconds that the run took until then.

        Raises:
            UserError: the run in the folder has another algorithm, another precision or another number of clients.
        """
        self._run, server = run, run.server
        before = self._checkpoints.load()
        if before is not None:
            values = before[1]
            if values["algorithm"] != self._options(federation) or values["clients_in_all"] != server.clients:
                raise UserError(
                    f"{self._folder.path} was begun with another algorithm, other options or another number of clients "
                    f"({values['clients_in_all']}): it cannot go on with these; another folder begins a new run"
                )
            before_precision, precision = values.get("precision", "fp32"), federation.job.objective.precision
            if before_precision != precision:
                raise UserError(
                    f"{self._folder.path} was begun with precision = {before_precision!r}: it cannot go on with "
                    f"{precision!r}; another folder begins a new run"
                )
            if values.get("model", federation.definition.digest) != federation.definition.digest:
                raise UserError(
                    f"{self._folder.path} was begun with another model: its frozen weights, names, shapes or types are "
                    "not those of this one; another folder begins a new run"
                )
        saved = run.restore(self._checkpoints)
        if saved is not None:
            log.info("going on after round %d, from %s", server.round, self._folder.path)
            federation.run_id = saved["run"]
            federation.accepted = {int(client): round for client, round in saved["accepted"].items()}
            if (saved["every"] > 1 or self._checkpoints.fallen_back) and server.controls:
                # Rounds after the checkpoint may have moved the clients' c_i on; c no longer fits them.
                server.reset_controls()
                federation.accepted = {}
        self._metrics = self._stack.enter_context(JsonlFile.resumed(self._folder.metrics, saved))
        if saved is None or "traffic" in saved:  # earlier versions wrote none: it must begin with round 1
            self._traffic = self._stack.enter_context(JsonlFile.resumed(self._folder.traffic, saved))
        self._write_conditions(federation)
        federation.rows[:] = self._metrics.rows
        remove(self._folder.summary)
        return 0.0 if saved is None else float(saved["seconds"])

    def _write_conditions(self, federation: "Federation") -> None:
        """Write what `report` and `hours` must know of the run, while it goes on too."""
        server = federation.server
        values = {
            "algorithm": federation.algorithm.options(),
            "data": {"clients": server.clients},
            "run": {"backend": "flower", "seed": server.seed, "cohort": server.cohort, "close_at": federation.close_at},
        }
        write_text(self._folder.federation, add_checksum(as_json(values, indent=1)) + "\n")

    def after(self, federation: "Federation") -> Callback:
        """Return a callback that writes metrics and checkpoints."""

        def write(info: RoundInfo) -> None:
            if self._traffic is not None and federation.traffic is not None:
                self._traffic.append(federation.traffic.row())
            if info.row and len(federation.rows) > self._metrics.written:
                self._metrics.append(info.row)
            if info.reason or self._checkpoints.due(info.server):
                self._save(federation, info.seconds)

        return write

    @staticmethod
    def _options(federation: "Federation") -> str:
        return as_json(federation.algorithm.options())

    def _save(self, federation: "Federation", seconds: float) -> None:
        store = self._run.store
        assert store is not None
        more = {
            **self._metrics.kept(),
            **({} if self._traffic is None else self._traffic.kept()),
            "seconds": seconds,
            "run": federation.run_id,
            "accepted": {str(client): round for client, round in federation.accepted.items()},
            "claims": {str(client): claim for client, claim in federation.claims.items()},
            "roster": federation.roster.snapshot(),
            "algorithm": self._options(federation),
            "precision": federation.job.objective.precision,
            "model": federation.definition.digest,
            "clients_in_all": federation.server.clients,
            "every": self._every,
        }
        self._metrics.sync()
        if self._traffic is not None:
            self._traffic.sync()
        self._checkpoints.save(federation.server, store, more)

    def finish(self, federation: "Federation", outcome: Outcome) -> None:
        """Write the model, the summary and the figure."""
        server = federation.server
        info = ModelInfo.of_module(federation.job.module, precision=federation.job.objective.precision)
        write_tensors(self._folder.model, federation.state_dict(), info.metadata())
        summary: dict[str, Any] = outcome.summary() | {
            "backend": "flower",
            "clients": server.clients,
            "cohort": server.cohort,
            "seed": server.seed,
            "options": federation.algorithm.options(),
            "precision": federation.job.objective.precision,
        }
        write_text(self._folder.summary, add_checksum(as_json(summary, indent=1)) + "\n")
        if outcome.rows:
            plots.curves({federation.algorithm.name: outcome.rows}, self._folder.path / "curve.png")
