"""What a federation's server writes to disk: the same files as a simulated run, and checkpoints to resume from."""

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbcgd.backends.flower.log import log
from fedbcgd.core.algorithm import Algorithm
from fedbcgd.display import plots
from fedbcgd.engine.assemble import Run
from fedbcgd.engine.checkpoint import Checkpoints
from fedbcgd.engine.loop import Callback, Outcome, RoundInfo, Row
from fedbcgd.engine.run_folder import Busy, JsonlFile, RunFolder, exclusive_lock, remove_temporary_files
from fedbcgd.errors import UserError
from fedbcgd.files import add_checksum, as_json, make_folder, refuse_link, remove, write_tensors, write_text
from fedbcgd.models.stored import ModelInfo

if TYPE_CHECKING:
    from fedbcgd.backends.flower.federation import Federation

LOCK_SECONDS = 60.0  # a ServerApp whose SuperLink was killed holds the lock until it notices


@dataclass(frozen=True)
class EarlierRun:
    """What must be known about the run in a folder before its clients are counted.

    Attributes:
        clients: M.
        blocks: N; None if the algorithm has no blocks.
        roster: what `Roster.snapshot` returned for the last checkpoint.
        resets: what `ControlResets.snapshot` returned.
    """

    clients: int
    blocks: int | None
    roster: Mapping[str, Any]
    resets: Mapping[str, Any]


@dataclass(frozen=True)
class ResumedState:
    """What a resumed run takes over from the run in a folder.

    Attributes:
        rows: its metrics so far.
        seconds: the time that it took so far.
        run_id: its id; None if there is no checkpoint, so that a new run begins.
        accepted: by client, the round of its last accepted upload in the current control epoch.
    """

    rows: Sequence[Row]
    seconds: float = 0.0
    run_id: str | None = None
    accepted: Mapping[int, int] = field(default_factory=dict)


class ServerFolder:
    """The run folder of a federation's server; a context manager that holds the folder's lock.

    Args:
        path: the folder; it is made if it does not exist.
        every: rounds between checkpoints.
    """

    def __init__(self, path: Path, every: int):
        self._folder = RunFolder(path)
        self._every = every
        self._stack = contextlib.ExitStack()
        self._checkpoints = Checkpoints(self._folder.checkpoint, every)
        self._run: Run
        self._metrics: JsonlFile
        self._traffic: JsonlFile | None = None  # None in a folder of an earlier version, which wrote none

    def __enter__(self) -> "ServerFolder":
        make_folder(self._folder.path)
        refuse_link(self._folder.checkpoint)
        make_folder(self._folder.checkpoint)
        self._lock()
        remove_temporary_files(self._folder)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _lock(self) -> None:
        deadline, waiting = time.monotonic() + LOCK_SECONDS, False
        while True:
            try:
                self._stack.enter_context(exclusive_lock(self._folder.path))
                return
            except Busy:
                if time.monotonic() >= deadline:
                    raise
            if not waiting:
                log.warning("another process uses %s; waiting up to %g s for its end", self._folder.path, LOCK_SECONDS)
                waiting = True
            time.sleep(0.2)

    def peek(self) -> EarlierRun | None:
        """Return what the last checkpoint says about the run, without restoring it; None if there is no checkpoint."""
        saved = self._checkpoints.load()
        if saved is None:
            return None
        values = saved[1]
        blocks = json.loads(values["algorithm"]).get("blocks")
        return EarlierRun(int(values["clients_in_all"]), blocks, values.get("roster", {}), values.get("claims", {}))

    def restore(self, run: Run, model_digest: str, close_at: float) -> ResumedState:
        """Restore the last checkpoint, if there is one, into a run, and open the files of metrics and traffic.

        Args:
            run: the run, which was just made.
            model_digest: see `Definition.digest`.
            close_at: see `fedbcgd.flower.strategy`; it is written to the folder for `report` and `hours`.

        Raises:
            UserError: the run in the folder has another algorithm, precision, model or number of clients.
        """
        self._run, server = run, run.server
        before = self._checkpoints.load()
        if before is not None:
            self._refuse_another(before[1], model_digest)
        saved = run.restore(self._checkpoints)
        self._metrics = self._stack.enter_context(JsonlFile.resumed(self._folder.metrics, saved))
        if saved is None or "traffic" in saved:  # a file that lacks the first rounds could not be used
            self._traffic = self._stack.enter_context(JsonlFile.resumed(self._folder.traffic, saved))
        self._write_conditions(close_at)
        remove(self._folder.summary)  # a summary says that a run is finished
        if saved is None:
            return ResumedState(self._metrics.rows)
        log.info("going on after round %d, from %s", server.round, self._folder.path)
        accepted = {int(client): round for client, round in saved["accepted"].items()}
        if (saved["every"] > 1 or self._checkpoints.fallen_back) and server.controls:
            # Rounds after the checkpoint may have changed the clients' c_i, so that c may no longer be their mean.
            server.reset_controls()
            accepted = {}
        return ResumedState(self._metrics.rows, float(saved["seconds"]), saved["run"], accepted)

    def _refuse_another(self, values: Mapping[str, Any], model_digest: str) -> None:
        """Raise a UserError if the run in the folder was begun with other options or another model."""
        job, clients = self._run.job, self._run.server.clients
        before = json.loads(values["algorithm"])
        before |= {"precision": values.get("precision", "fp32"), "clients": values["clients_in_all"]}
        now = json.loads(_options(job.algorithm)) | {"precision": job.objective.precision, "clients": clients}
        for option in {**now, **before}:
            label = "algorithm" if option == "name" else option
            ours, theirs = (f"{label} = {v[option]!r}" if option in v else f"no {label}" for v in (now, before))
            if ours != theirs:
                raise UserError(
                    f"folder: expected a run with {ours} in {self._folder.path}, got one that was begun with {theirs}; "
                    "set the same, or choose another folder for a new run"
                )
        if values.get("model", model_digest) != model_digest:
            raise UserError(
                f"folder: expected a run of the same model in {self._folder.path}, got one that was begun with another "
                "(its frozen weights, names, shapes or types differ); choose another folder for a new run"
            )

    def _write_conditions(self, close_at: float) -> None:
        """Write what `report` and `hours` must know about the run. They may read it while the run goes on."""
        server = self._run.server
        values = {
            "algorithm": server.algorithm.options(),
            "data": {"clients": server.clients},
            "run": {"backend": "flower", "seed": server.seed, "cohort": server.cohort, "close_at": close_at},
        }
        write_text(self._folder.federation, add_checksum(as_json(values, indent=1)) + "\n")

    def after(self, federation: "Federation") -> Callback:
        """Return a callback that writes a round's metrics, traffic and checkpoint."""

        def write(info: RoundInfo) -> None:
            if self._traffic is not None and federation.rounds.traffic is not None:
                self._traffic.append(federation.rounds.traffic.row())
            if info.row and len(federation.rows) > self._metrics.written:
                self._metrics.append(info.row)
            if info.reason or self._checkpoints.due(info.server):
                self._save(federation.snapshot(), info.seconds)

        return write

    def _save(self, snapshot: Mapping[str, Any], seconds: float) -> None:
        run, store = self._run, self._run.store
        assert store is not None
        more = {
            **self._metrics.kept(),
            **({} if self._traffic is None else self._traffic.kept()),
            **snapshot,
            "seconds": seconds,
            "algorithm": _options(run.job.algorithm),
            "precision": run.job.objective.precision,
            "clients_in_all": run.server.clients,
            "every": self._every,
        }
        self._metrics.sync()
        if self._traffic is not None:
            self._traffic.sync()
        self._checkpoints.save(run.server, store, more)

    def finish(self, outcome: Outcome) -> None:
        """Write the model, the summary and the figure."""
        run, server = self._run, self._run.server
        info = ModelInfo.of_module(run.job.module, precision=run.job.objective.precision)
        write_tensors(self._folder.model, run.state_dict(), info.metadata())
        summary: dict[str, Any] = outcome.summary() | {
            "backend": "flower",
            "clients": server.clients,
            "cohort": server.cohort,
            "seed": server.seed,
            "options": server.algorithm.options(),
            "precision": run.job.objective.precision,
        }
        write_text(self._folder.summary, add_checksum(as_json(summary, indent=1)) + "\n")
        if outcome.rows:
            plots.curves({server.algorithm.name: outcome.rows}, self._folder.path / "curve.png")


def _options(algorithm: Algorithm) -> str:
    return as_json(algorithm.options())
