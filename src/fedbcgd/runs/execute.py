"""A run in a folder: configuration, metrics, checkpoints, model and summary; interrupted work goes on where it stopped."""

import logging
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch

from fedbcgd.backends.registry import make_backend
from fedbcgd.backends.workers.processes import cores
from fedbcgd.core.server import Server
from fedbcgd.engine.assemble import export, make_job, make_server, try_out
from fedbcgd.engine.checkpoint import Checkpoints
from fedbcgd.engine.client_state import StateStore
from fedbcgd.engine.loop import Callback, Loop, Outcome, RoundInfo, Stop
from fedbcgd.engine.run_folder import JsonlFile, RunFolder, exclusive_lock, sweep_up
from fedbcgd.engine.signals import uninterrupted
from fedbcgd.errors import Diverged, UserError
from fedbcgd.files import (
    as_json,
    make_folder,
    refuse_link,
    remove,
    sealed,
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
    """Find what is wrong with a run before it is begun, or anything is written."""
    config = configuration.complete(config)
    _refuse_foreign(RunFolder(path), config, resume=True)
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
    """Run a configuration in a folder, or go on with what is there. `say` gets what a person should know about it."""
    config = configuration.complete(config)
    if (path / "config.toml").exists():
        _refuse_foreign(RunFolder(path), config, resume)
    prepared = _Prepared(config)  # what is wrong with the configuration shows before anything is written
    if say is not None:
        for note in prepared.task.notes:
            say(note)
    folder = RunFolder(make_folder(path))
    with exclusive_lock(folder.path):
        _refuse_foreign(folder, config, resume, log.warning)
        make_folder(folder.checkpoint)
        sweep_up(folder)
        return _execute(prepared, folder, callbacks, figures)


class _Prepared:
    """A configuration made into things."""

    def __init__(self, config: Config):
        run = config.run
        self.config = config
        refuse_masked(config.model_dump())
        config.where.check()
        self.task = make_experiment(config)
        algorithm = configuration.algorithm_of(config, "configuration")
        task = self.task
        algorithm = fit_to_links(algorithm, config.network, task.model, task.clients, run.cohort, run.seed)
        self.job = make_job(
            *(task.model, task.clients, algorithm, task.test, run.seed, task.loss, task.metrics),
            device=config.where.home,
            together=run.together,
        )
        if ":" in config.model.name + config.data.name:  # a user's own code
            try_out(self.job)
        goal = None if run.target is None else (f"{self.task.prefix}_accuracy", ">=", run.target)
        self.stop = Stop(run.rounds, run.budget, goal)
        self.watch = NetworkSimulator(self.job, config.network)
        self.server = make_server(self.job, run.cohort, self.stop, self.watch)


def _execute(prepared: _Prepared, folder: RunFolder, callbacks: Sequence[Callback], figures: bool) -> Outcome:
    config, task, job = prepared.config, prepared.task, prepared.job
    stop, server, algorithm, run = prepared.stop, prepared.server, prepared.job.algorithm, config.run
    checkpoints = Checkpoints(folder.checkpoint, run.checkpoint_every)
    store = StateStore(algorithm.state_names, job.layout.dim, job.layout.dtype, checkpoints.clients)
    before = checkpoints.restore(server, store)
    if before and before["data"] != task.digest:
        raise UserError(f"{folder.path} was begun with other data under the name {config.data.name!r}: it cannot go on")
    _refuse_past(folder, server, stop)
    watch = prepared.watch
    if before and "network" in before:
        watch.restore(before["network"], server)
    remove(folder.summary)  # it says that a run is finished, which this one is not yet
    text = config.text()
    write_text(folder.config, sealed(text))
    if task.counts is not None:
        label_counts = as_json({"classes": task.classes, "counts": task.counts.tolist()})
        write_text(folder.label_counts, sealed(label_counts) + "\n")
    with (
        JsonlFile.resumed(folder.metrics, before) as metrics,
        JsonlFile.resumed(folder.traffic, before) as traffic,
    ):
        watch.record = lambda sent: traffic.append(sent.row())
        backend = make_backend(job, store, server.cohort, config.where)
        backend.clock.add(before["clock"] if before else {})
        overlap = config.where.entry.overlaps_evaluation
        loop = Loop(
            server, backend, stop, run.evaluate_every, (), task.prefix, metrics.rows, watch=watch, overlap=overlap
        )
        loop.seconds = before["seconds"] if before else 0.0

        def save(beside: bool = False) -> None:
            with backend.clock.timing("checkpoint"):
                checkpoints.finish(store)  # which may still be at the rows
                more: dict[str, Any] = {"seconds": loop.lap(), "clock": dict(backend.clock), "config": text}
                more |= {"data": task.digest, "network": watch.snapshot()} | metrics.kept() | traffic.kept()
                checkpoints.begin(server, store, more, [metrics.sync, traffic.sync])
                if not beside:
                    checkpoints.finish(store)

        def write(info: RoundInfo | None = None) -> None:
            for row in metrics.rows[metrics.written :]:
                metrics.append(row)

        def keep(info: RoundInfo) -> None:
            write(info)  # a row that a callback asked for, by stopping
            if not info.reason and checkpoints.due(server):
                save(beside=True)

        def summarise(outcome: Outcome) -> None:
            summary = outcome.summary() | _circumstances(config, server.layout, dict(backend.clock))
            summary["notes"] = list(task.notes)
            if watch.links is not None:
                summary["links"] = watch.links.digest()
            write_text(folder.summary, sealed(as_json(summary, indent=1)) + "\n")

        # What was measured is on disk before anybody else hears of it.
        loop.callbacks = [write, *callbacks, *_tensorboard(config, folder), keep]
        try:
            reason = loop.run()
            save()
            write_tensors(folder.model, export(job, server.x))
            outcome = Outcome.of(loop, reason)
            summarise(outcome)
            if figures:
                _draw(folder, outcome, task)
            return outcome
        except KeyboardInterrupt:
            write()  # a row may have come in with the round that was broken off
            save()
            raise KeyboardInterrupt(
                f"interrupted after round {server.round}; --resume goes on from there ({folder.path})"
            ) from None
        except Diverged:
            write()
            summarise(Outcome.of(loop, "diverged"))
            raise
        except UserError as error:
            checkpoints.wait()
            try:
                saved = checkpoints.load()
            except (UserError, OSError):
                raise error from None  # such as too many open files: what failed first is said
            kept = f"the checkpoint of round {saved[1]['round']} is whole" if saved else "no checkpoint was written yet"
            raise UserError(f"{error}; {kept}") from error
        finally:
            backend.close()
            checkpoints.wait()
            store.close()


def _draw(folder: RunFolder, outcome: Outcome, task: Experiment) -> None:
    with uninterrupted():  # matplotlib cannot be imported a second time, if Ctrl-C breaks off the first
        from fedbcgd.display import plots

    plots.curves({outcome.algorithm: outcome.rows}, folder.path / "curve.png")
    if task.counts is not None:
        plots.label_counts(task.counts, folder.path / "holdings.png", task.classes)


def _refuse_foreign(
    folder: RunFolder, config: Config, resume: bool, say: Callable[[str], None] = lambda line: None
) -> None:
    refuse_link(folder.checkpoint)
    if not folder.config.exists():
        if folder.metrics.exists() or any(folder.checkpoint.glob("*.safetensors")):
            raise UserError(f"{folder.path} has parts of a run but no config.toml; another --out begins a new run")
        return
    begun = any(folder.checkpoint.glob("*.safetensors")) or (folder.metrics.exists() and folder.metrics.lstat().st_size)
    if not begun:
        return  # it failed before its first round: nothing is lost
    if not resume:
        raise UserError(f"{folder.path} holds a run already: --resume goes on with it, another --out begins a new one")
    changed = configuration.differences(read_configuration(folder, say), config)
    if changed:
        lines = "\n  ".join(changed)
        raise UserError(
            f"{folder.path} was begun with another configuration, so it cannot go on with this one:\n  {lines}"
        )


def _refuse_past(folder: RunFolder, server: Server, stop: Stop) -> None:
    """A run can be extended, not shortened: what it has computed cannot be taken back."""
    spent = server.ledger.upload_d
    if (stop.rounds is not None and server.round > stop.rounds) or (
        stop.budget is not None and spent > stop.budget * (1 + 1e-9)
    ):
        raise UserError(
            f"{folder.path} is at round {server.round} with {spent:.4g} d uploaded already, past what is asked for; "
            "another --out begins a new run"
        )


def _tensorboard(config: Config, folder: RunFolder) -> list[Callback]:
    if not config.run.tensorboard:
        return []
    from fedbcgd.display.tensorboard import TensorBoard

    refuse_link(folder.path / "tensorboard")
    return [TensorBoard(folder.path / "tensorboard")]


def _circumstances(config: Config, layout: Any, clock: dict[str, float]) -> dict[str, Any]:
    """What a reader of the result wants to know about how it came about."""
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
