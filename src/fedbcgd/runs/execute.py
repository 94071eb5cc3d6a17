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
from fedbcgd.core.objective import objective
from fedbcgd.core.server import Server
from fedbcgd.engine.assemble import Run, make_job
from fedbcgd.engine.checkpoint import Checkpoints
from fedbcgd.engine.loop import DIVERGED, Callback, Outcome, RoundInfo, Stop
from fedbcgd.engine.precision import warn_if_slower
from fedbcgd.engine.probe import try_out
from fedbcgd.engine.run_folder import JsonlFile, RunFolder, exclusive_lock, remove_temporary_files
from fedbcgd.engine.signals import uninterrupted
from fedbcgd.errors import Diverged, UserError
from fedbcgd.files import (
    add_checksum,
    as_json,
    make_folder,
    refuse_link,
    remove,
    write_tensors,
    write_text,
)
from fedbcgd.network.simulator import NetworkSimulator, fit_to_links
from fedbcgd.runs import config as configuration
from fedbcgd.runs.config import Config
from fedbcgd.runs.experiment import Experiment, make_experiment
from fedbcgd.runs.folder import read_configuration
from fedbcgd.runs.secrets import mask_command, mask_config, refuse_masked
from fedbcgd.version import __version__

log = logging.getLogger("fedbcgd")


def examine(config: Config, path: Path) -> None:
    """Check a configuration and its folder, without writing anything.

    Raises:
        UserError: something is wrong with one of them.
    """
    config = configuration.complete(config)
    _refuse_other_configuration(RunFolder(path), config, resume=True)
    _Prepared(config)


def execute(
    config: Config,
    path: Path,
    *,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    say: Callable[[str], None] | None = None,
    figures: bool = True,
) -> Outcome:
    """Run a configuration in a folder, or resume the run that is there.

    Args:
        config: what to run.
        path: the folder; it is made if it does not exist.
        resume: whether to resume a run that is there; if False, a folder with a run is refused.
        callbacks: called after each round.
        say: called with each message for the user.
        figures: whether to draw the figures of the run at its end.

    Returns:
        The outcome of the run.

    Raises:
        UserError: the configuration or the folder is wrong; or the run failed, and then the message says whether a
            checkpoint can be resumed from.
        Diverged: most uploads were refused in the last rounds.
        KeyboardInterrupt: Ctrl-C; the run was saved.
    """
    config = configuration.complete(config)
    if (path / "config.toml").exists():
        _refuse_other_configuration(RunFolder(path), config, resume)  # before data and model are made, which takes time
    prepared = _Prepared(config)  # before anything is written
    if config.run.precision != "fp32" and not config.placement.entry.device_is_remote:
        warn_if_slower(prepared.run.job, objective(prepared.experiment.loss, prepared.experiment.metrics))
    if say is not None:
        for note in prepared.experiment.notes:
            say(note)
    folder = RunFolder(make_folder(path))
    with exclusive_lock(folder.path):
        # Again under the lock: another process may have begun a run in the folder.
        _refuse_other_configuration(folder, config, resume, log.warning)
        make_folder(folder.checkpoint)
        remove_temporary_files(folder)
        return _execute(prepared, folder, callbacks, figures)


class _Prepared:
    """The objects that a configuration describes. Making them writes no file, and finds every mistake in it."""

    def __init__(self, config: Config):
        settings = config.run
        self.config = config
        refuse_masked(config.model_dump())
        config.placement.check()
        self.experiment = experiment = make_experiment(config)
        algorithm = configuration.algorithm_of(config, "configuration")
        model, clients = experiment.model, experiment.clients
        algorithm = fit_to_links(algorithm, config.network, model, clients, settings.cohort, settings.seed)
        job = make_job(
            model,
            clients,
            algorithm,
            experiment.test,
            settings.seed,
            loss=experiment.loss,
            metrics=experiment.metrics,
            device=config.placement.local_device,
            batch_clients=settings.batch_clients,
            precision=settings.precision,
        )
        if ":" in config.model.name + config.data.name:  # a user's own code
            try_out(job)
        target = None if settings.target is None else (f"{experiment.prefix}_accuracy", ">=", settings.target)
        stop = Stop(settings.rounds, settings.budget, target)
        self.network = NetworkSimulator(job, config.network)
        self.run = Run(job, stop, cohort=settings.cohort, hooks=self.network)


def _execute(prepared: _Prepared, folder: RunFolder, callbacks: Sequence[Callback], figures: bool) -> Outcome:
    config, experiment, run, network = prepared.config, prepared.experiment, prepared.run, prepared.network
    settings, server = config.run, run.server
    checkpoints = Checkpoints(folder.checkpoint, settings.checkpoint_every)
    before = run.restore(checkpoints)
    store = run.store
    assert store is not None
    if before and before["data"] != experiment.digest:
        raise UserError(
            f"data.name: expected the data that {folder.path} was begun with, got other data named "
            f"{config.data.name!r}; another --out begins a new run"
        )
    _refuse_past(folder, server, run.stop)
    if before and "network" in before:
        network.restore(before["network"])
    remove(folder.summary)  # a summary says that a run is finished
    text = config.text()
    write_text(folder.config, add_checksum(text))
    if experiment.counts is not None:
        label_counts = as_json({"classes": experiment.classes, "counts": experiment.counts.tolist()})
        write_text(folder.label_counts, add_checksum(label_counts) + "\n")
    with (
        run,
        JsonlFile.resumed(folder.metrics, before) as metrics,
        JsonlFile.resumed(folder.traffic, before) as traffic,
    ):

        def record_traffic() -> None:
            assert network.sent is not None
            traffic.append(network.sent.row())

        def save(in_background: bool = False) -> None:
            with loop.backend.clock.timing("checkpoint"):
                checkpoints.finish(store)  # the last one may still be flushing metrics and traffic
                more: dict[str, Any] = {
                    "seconds": loop.update_seconds(),
                    "clock": dict(loop.backend.clock),
                    "config": text,
                }
                more |= {"data": experiment.digest, "network": network.snapshot()} | metrics.kept() | traffic.kept()
                checkpoints.begin(server, store, more, [metrics.sync, traffic.sync])
                if not in_background:
                    checkpoints.finish(store)

        def write_rows(info: RoundInfo | None = None) -> None:
            for row in metrics.rows[metrics.written :]:
                metrics.append(row)

        def write_checkpoint(info: RoundInfo) -> None:
            write_rows()  # a callback that stopped the run has added a row
            if not info.reason and checkpoints.due(server):
                save(in_background=True)

        def write_summary(outcome: Outcome) -> None:
            summary = outcome.summary() | _origin_of_result(config, server.layout, dict(loop.backend.clock))
            summary["notes"] = list(experiment.notes)
            if network.links is not None:
                summary["links"] = network.links.digest()
            write_text(folder.summary, add_checksum(as_json(summary, indent=1)) + "\n")

        loop = run.start(
            partial(make_backend, where=config.placement),
            every=settings.evaluate_every,
            # Rows are on disk before any other callback sees them.
            callbacks=[write_rows, *callbacks, *_tensorboard(config, folder), write_checkpoint],
            metric_prefix=experiment.prefix,
            rows=metrics.rows,
            seconds=before["seconds"] if before else 0.0,
            overlap=config.placement.entry.overlaps_evaluation,
            on_commit=record_traffic,
        )
        loop.backend.clock.add(before["clock"] if before else {})
        try:
            reason = loop.run()
            save()
            write_tensors(folder.model, run.state_dict(), experiment.info.metadata())
            outcome = run.outcome(reason)
            write_summary(outcome)
            if figures:
                _draw(folder, outcome, experiment)
            return outcome
        except KeyboardInterrupt:
            write_rows()  # the interrupted round may have completed a row
            save()
            raise KeyboardInterrupt(
                f"interrupted after round {server.round}; --resume continues from there ({folder.path})"
            ) from None
        except Diverged:
            write_rows()
            write_summary(run.outcome(DIVERGED))
            raise
        except UserError as error:
            checkpoints.wait()
            try:
                saved = checkpoints.load()
            except (UserError, OSError):
                raise error from None  # the first error, such as too many open files, is the one to show
            resumable = (
                f"--resume continues from the checkpoint of round {saved[1]['round']}"
                if saved
                else "no checkpoint was written yet"
            )
            raise UserError(f"{error}; {resumable}") from error
        finally:
            loop.backend.close()
            checkpoints.wait()


def _draw(folder: RunFolder, outcome: Outcome, experiment: Experiment) -> None:
    with uninterrupted():  # matplotlib cannot be imported again after Ctrl-C in its first import
        from fedbcgd.display import plots

    plots.curves({outcome.algorithm: outcome.rows}, folder.path / "curve.png")
    if experiment.counts is not None:
        plots.label_counts(experiment.counts, folder.path / "label_counts.png", experiment.classes)


def _refuse_other_configuration(
    folder: RunFolder, config: Config, resume: bool, say: Callable[[str], None] = lambda line: None
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
    changed = configuration.differences(read_configuration(folder, say), config)
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


def _origin_of_result(config: Config, layout: Any, clock: dict[str, float]) -> dict[str, Any]:
    """Return what is recorded with a result: seed, time, blocks, versions, machine, configuration, command."""
    return {
        "seed": config.run.seed,
        "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "time": {name: round(seconds, 3) for name, seconds in sorted(clock.items())},
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
