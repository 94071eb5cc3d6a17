"""Runs a configuration in a folder, with metrics, checkpoints, model and summary; resumes an interrupted run."""

import logging
import platform
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch

from fedbcgd.backends.registry import make_backend
from fedbcgd.backends.workers.processes import cores
from fedbcgd.core.server import Server
from fedbcgd.engine.checkpoint import Checkpoints
from fedbcgd.engine.loop import DIVERGED, Callback, Loop, Outcome, RoundInfo, Stop
from fedbcgd.engine.run_folder import JsonlFile, RunFolder, exclusive_lock, remove_temporary_files
from fedbcgd.engine.signals import uninterrupted
from fedbcgd.errors import Diverged, UserError
from fedbcgd.files import add_checksum, as_json, make_folder, refuse_link, remove, write_tensors, write_text
from fedbcgd.runs import config as configuration
from fedbcgd.runs.config import Config
from fedbcgd.runs.experiment import Experiment
from fedbcgd.runs.folder import read_configuration
from fedbcgd.runs.prepare import PreparedRun, prepare
from fedbcgd.runs.secrets import mask_command, mask_config
from fedbcgd.version import __version__

log = logging.getLogger("fedbcgd")


Prepare = Callable[[Config], PreparedRun]


def examine(config: Config, path: Path, prepare: Prepare = prepare) -> None:
    """Check a configuration and its folder, without writing anything; the arguments are those of `execute`.

    Raises:
        UserError: something is wrong with one of them.
    """
    config = configuration.complete(config)
    _refuse_other_configuration(RunFolder(path), config, resume=True)
    prepare(config)


def execute(
    config: Config,
    path: Path,
    *,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    say: Callable[[str], None] | None = None,
    figures: bool = True,
    prepare: Prepare = prepare,
) -> Outcome:
    """Run a configuration in a folder, or resume the run that is there.

    Args:
        config: what to run.
        path: the folder; it is made if it does not exist.
        resume: whether to resume a run that is there; if False, a folder with a run is refused.
        callbacks: called after each round, before those of the configuration.
        say: called with each message for the user.
        figures: whether to draw the figures of the run at its end.
        prepare: makes the objects of the run from the complete configuration; default: what it describes.

    Returns:
        The outcome of the run.

    Raises:
        UserError: the configuration or the folder is wrong; or the run failed, and then the message says whether a
            checkpoint can be resumed from.
        Diverged: most uploads were refused in the last rounds.
        KeyboardInterrupt: Ctrl-C; the run was saved.
    """
    config = configuration.complete(config)
    if RunFolder(path).config.exists():
        _refuse_other_configuration(RunFolder(path), config, resume)  # before data and model are made, which takes time
    prepared = prepare(config)  # before anything is written
    prepared.warn()
    if say is not None:
        for note in prepared.experiment.notes:
            say(note)
    if config.data.clients_from is not None:  # only now their number is known
        data = config.data.model_copy(update={"clients": len(prepared.experiment.clients)})
        config = config.model_copy(update={"data": data})
    folder = RunFolder(make_folder(path))
    with exclusive_lock(folder.path):
        # Again under the lock: another process may have begun a run in the folder.
        _refuse_other_configuration(folder, config, resume, log.warning)
        make_folder(folder.checkpoint)
        remove_temporary_files(folder)
        return _FolderRun(config, prepared, folder).execute(callbacks, figures)


class _FolderRun:
    """A run that is written to its folder."""

    def __init__(self, config: Config, prepared: PreparedRun, folder: RunFolder):
        assert prepared.network is not None
        self.config, self.prepared, self.folder = config, prepared, folder
        self.run, self.experiment, self.network = prepared.run, prepared.experiment, prepared.network
        self.text = config.text()
        self.checkpoints = Checkpoints(folder.checkpoint, config.run.checkpoint_every)
        self.saved = self._restore()  # values of the last checkpoint; None: a new run

    def _restore(self) -> dict[str, Any] | None:
        """Restore the last checkpoint, and return what was saved with it."""
        before = self.run.restore(self.checkpoints)
        if before and before["data"] != self.experiment.digest:
            raise UserError(
                f"data.name: expected the data that {self.folder.path} was begun with, got other data named "
                f"{self.config.data.name!r}; another --out begins a new run"
            )
        _refuse_past(self.folder, self.run.server, self.run.stop)
        if before and "network" in before:
            self.network.restore(before["network"])
        return before

    def execute(self, callbacks: Sequence[Callback], figures: bool) -> Outcome:
        """Run to the end; see the function `execute`."""
        folder, run, before = self.folder, self.run, self.saved
        remove(folder.summary)  # a summary says that a run is finished
        write_text(folder.config, add_checksum(self.text))
        if self.experiment.counts is not None:
            counts = as_json({"classes": self.experiment.classes, "counts": self.experiment.counts.tolist()})
            write_text(folder.label_counts, add_checksum(counts) + "\n")
        with (
            run,
            JsonlFile.resumed(folder.metrics, before) as self.metrics,
            JsonlFile.resumed(folder.traffic, before) as self.traffic,
        ):
            self.loop = self._start(callbacks)
            try:
                reason = self.loop.run()
                self._save()
                write_tensors(folder.model, run.state_dict(), self.experiment.info.metadata())
                outcome = run.outcome(reason)
                self._write_summary(outcome)
                if figures:
                    _draw(folder, outcome, self.experiment)
                return outcome
            except KeyboardInterrupt:
                self._write_rows()  # the interrupted round may have completed a row
                self._save()
                raise KeyboardInterrupt(
                    f"interrupted after round {run.server.round}; --resume continues from there ({folder.path})"
                ) from None
            except Diverged:
                self._write_rows()
                self._write_summary(run.outcome(DIVERGED))
                raise
            except UserError as error:
                raise UserError(f"{str(error).rstrip('.')}; {self._resumable(error)}") from error
            finally:
                self.loop.backend.close()
                self.checkpoints.wait()

    def _start(self, callbacks: Sequence[Callback]) -> Loop:
        config, before, prepared = self.config, self.saved, self.prepared
        # Rows are on disk before any other callback sees them.
        own = [*callbacks, *self.experiment.callbacks, *_tensorboard(config, self.folder)]
        loop = self.run.start(
            partial(make_backend, where=prepared.placement, transport=prepared.transport),
            every=config.run.evaluate_every,
            callbacks=[self._write_rows, *own, self._write_checkpoint],
            metric_prefix=self.experiment.prefix,
            rows=self.metrics.rows,
            seconds=before["seconds"] if before else 0.0,
            overlap=prepared.overlap,
            on_commit=self._record_traffic,
            metric=config.run.metric,
            goal=config.run.goal,
            folder=self.folder.path,
            metadata=self.experiment.info.metadata(),
        )
        loop.backend.timings.add(before["clock"] if before else {})
        return loop

    def _record_traffic(self) -> None:
        assert self.network.sent is not None
        self.traffic.append(self.network.sent.row())

    def _write_rows(self, info: RoundInfo | None = None) -> None:
        for row in self.metrics.rows[self.metrics.written :]:
            self.metrics.append(row)

    def _write_checkpoint(self, info: RoundInfo) -> None:
        self._write_rows()  # a callback that stopped the run has added a row
        if not info.reason and self.checkpoints.due(self.run.server):
            self._save(in_background=True)

    def _save(self, in_background: bool = False) -> None:
        store, timings = self.run.store, self.loop.backend.timings
        assert store is not None
        with timings.measure("checkpoint"):
            self.checkpoints.finish(store)  # the last one may still be flushing metrics and traffic
            more: dict[str, Any] = {
                "seconds": self.loop.update_seconds(),
                "clock": dict(timings),
                "config": self.text,
                "data": self.experiment.digest,
                "network": self.network.snapshot(),
            }
            more |= self.metrics.kept() | self.traffic.kept()
            self.checkpoints.begin(self.run.server, store, more, [self.metrics.sync, self.traffic.sync])
            if not in_background:
                self.checkpoints.finish(store)

    def _write_summary(self, outcome: Outcome) -> None:
        timings = dict(self.loop.backend.timings)
        summary = outcome.summary() | _origin_of_result(self.config, self.run.server.layout, timings)
        summary["notes"] = list(self.experiment.notes)
        if self.network.links is not None:
            summary["links"] = self.network.links.digest()
        write_text(self.folder.summary, add_checksum(as_json(summary, indent=1)) + "\n")

    def _resumable(self, error: UserError) -> str:
        """Return a sentence on whether the run can be resumed after this error."""
        self.checkpoints.wait()
        try:
            saved = self.checkpoints.load()
        except (UserError, OSError):
            raise error from None  # the first error, such as too many open files, is the one to show
        if not saved:
            return "no checkpoint was written yet"
        return f"--resume continues from the checkpoint of round {saved[1]['round']}"


def _draw(folder: RunFolder, outcome: Outcome, experiment: Experiment) -> None:
    with uninterrupted():  # matplotlib cannot be imported again after Ctrl-C in its first import
        from fedbcgd.display import plots

    plots.curves({outcome.algorithm: outcome.rows}, folder.path / "curve.png", metric=outcome.metric)
    if experiment.counts is not None:
        plots.label_counts(experiment.counts, folder.path / "label_counts.png", experiment.classes)


def _refuse_other_configuration(
    folder: RunFolder, config: Config, resume: bool, on_damage: Callable[[str], None] = lambda line: None
) -> None:
    """Refuse a folder with parts of a run, with a run unless `resume`, or with a run of another configuration."""
    refuse_link(folder.checkpoint)
    if not folder.config.exists():
        if folder.metrics.exists() or any(folder.checkpoint.glob("*.safetensors")):
            raise UserError(
                f"{folder.path}: expected an empty folder or one with config.toml, got parts of a run without it; another "
                "--out begins a new run"
            )
        return
    begun = any(folder.checkpoint.glob("*.safetensors")) or (folder.metrics.exists() and folder.metrics.lstat().st_size)
    if not begun:
        return  # the run failed before its first round
    if not resume:
        raise UserError(
            f"{folder.path}: expected a folder without a run, got one with a run; --resume continues it, another --out "
            "begins a new run"
        )
    changed = configuration.differences(read_configuration(folder, on_damage), config)
    if changed:
        lines = "\n  ".join(changed)
        raise UserError(
            f"{folder.path}: expected the configuration that the run was begun with, got another one; another --out begins "
            f"a new run:\n  {lines}"
        )


def _refuse_past(folder: RunFolder, server: Server, stop: Stop) -> None:
    """Refuse a limit that the run has passed already, since a run can be extended but not shortened."""
    spent = server.ledger.upload_d
    if (stop.rounds is not None and server.round > stop.rounds) or (
        stop.budget is not None and spent > stop.budget * (1 + 1e-9)
    ):
        raise UserError(
            f"run.rounds, run.budget: expected at least round {server.round} and {spent:.4g} d, which {folder.path} has "
            "reached, got less; another --out begins a new run"
        )


def _tensorboard(config: Config, folder: RunFolder) -> list[Callback]:
    if not config.run.tensorboard:
        return []
    from fedbcgd.display.tensorboard import TensorBoard

    refuse_link(folder.path / "tensorboard")
    return [TensorBoard(folder.path / "tensorboard")]


def _origin_of_result(config: Config, layout: Any, timings: dict[str, float]) -> dict[str, Any]:
    """Return what is recorded with a result: seed, time, blocks, versions, machine, configuration, command."""
    return {
        "seed": config.run.seed,
        "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "time": {name: round(seconds, 3) for name, seconds in sorted(timings.items())},
        "blocks": [layout.bounds[j + 1] - layout.bounds[j] for j in range(layout.blocks)],
        "shared": layout.dim - layout.bounds[-1],
        "divider": layout.divider,
        "versions": {
            "fedbcgd": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": numpy.__version__,
        },
        "machine": {"system": platform.platform(), "cores": cores(), "device": config.run.device},
        "config": mask_config(config.model_dump()),
        "command": " ".join([Path(sys.argv[0]).name, *mask_command(sys.argv[1:])]),
    }
