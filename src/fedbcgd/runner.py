"""A run in a folder: configuration, metrics, checkpoints, model and summary; interrupted work goes on where it stopped."""

import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

from fedbcgd import config as configuration
from fedbcgd.carriers.workers import cores
from fedbcgd.checkpoint import Checkpoints
from fedbcgd.config import Config
from fedbcgd.errors import UserError
from fedbcgd.files import make_folder, write_tensors, write_text
from fedbcgd.loop import Callback, Loop, Outcome, RoundInfo, Stop
from fedbcgd.report import plots
from fedbcgd.simulation import export, make_carrier, make_job, make_server
from fedbcgd.state import StateStore
from fedbcgd.task import make_task
from fedbcgd.version import __version__


@dataclass(frozen=True)
class Folder:
    """Where everything of a run is."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def model(self) -> Path:
        return self.path / "model.safetensors"

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint"

    def finished(self, config: Config) -> Outcome | None:
        """The outcome, if this very run is finished here."""
        if not self.summary.exists() or not self.config.exists():
            return None
        there = configuration.load(self.config)
        same = not configuration.differences(there, config)
        goals = ("rounds", "budget", "target")
        if not same or any(getattr(there.run, goal) != getattr(config.run, goal) for goal in goals):
            return None
        return self.outcome()

    def outcome(self) -> Outcome:
        """What a finished run left."""
        summary = json.loads(self.summary.read_text(encoding="utf-8"))
        rows = [json.loads(line) for line in self.metrics.read_text(encoding="utf-8").splitlines()]
        return Outcome.from_summary(summary, rows)


def execute(config: Config, path: Path, *, resume: bool = False, callbacks: Sequence[Callback] = ()) -> Outcome:
    """Run a configuration in a folder, or go on with what is there."""
    config = configuration.complete(config)
    folder = Folder(make_folder(path))
    with _alone(folder.path):
        _refuse_foreign(folder, config, resume)
        make_folder(folder.checkpoint)
        write_text(folder.config, config.text())
        return _execute(config, folder, callbacks)


def _execute(config: Config, folder: Folder, callbacks: Sequence[Callback]) -> Outcome:
    task = make_task(config)
    algorithm = configuration.algorithm_of(config, "configuration")
    run = config.run
    job = make_job(task.model, task.clients, algorithm, task.test, run.seed, device=run.device)
    stop = Stop(run.rounds, run.budget, None if run.target is None else (f"{task.prefix}_accuracy", ">=", run.target))
    server = make_server(job, run.cohort, stop)
    checkpoints = Checkpoints(folder.checkpoint, run.checkpoint_every)
    store = StateStore(algorithm.state_names, job.layout.dim, job.layout.dtype, checkpoints.clients)
    before = checkpoints.restore(server, store)
    with _Metrics(folder.metrics, before["metrics"] if before else 0) as metrics:
        carrier = make_carrier(job, store, server.cohort, run.workers)
        carrier.clock.add(before["clock"] if before else {})
        loop = Loop(server, carrier, stop, run.evaluate_every, (), task.prefix, metrics.rows)
        loop.seconds = before["seconds"] if before else 0.0

        def save() -> None:
            with carrier.clock.timing("checkpoint"):
                more = {"metrics": metrics.sync(), "seconds": loop.lap(), "clock": dict(carrier.clock)}
                checkpoints.save(server, store, more)

        def write(info: RoundInfo) -> None:
            if info.row and len(metrics.rows) > metrics.written:
                metrics.append(info.row)

        def keep(info: RoundInfo) -> None:
            write(info)  # a row that a callback asked for, by stopping
            if not info.reason and checkpoints.due(server):
                save()

        # What was measured is on disk before anybody else hears of it.
        loop.callbacks = [write, *callbacks, *_tensorboard(config, folder), keep]
        try:
            reason = loop.run()
            save()
            write_tensors(folder.model, export(job, server.x))
            outcome = Outcome.of(loop, reason)
            summary = outcome.summary() | _circumstances(config, server.layout, dict(carrier.clock))
            write_text(folder.summary, json.dumps(summary, indent=1) + "\n")
            plots.curves({algorithm.name: outcome.rows}, folder.path / "curve.png")
            return outcome
        except KeyboardInterrupt:
            save()
            raise KeyboardInterrupt(
                f"interrupted after round {server.round}; --resume goes on from there ({folder.path})"
            ) from None
        except UserError as error:
            saved = checkpoints.load()
            kept = f"the checkpoint of round {saved[1]['round']} is whole" if saved else "no checkpoint was written yet"
            raise UserError(f"{error}; {kept}") from error
        finally:
            carrier.close()
            store.close()


class _Metrics:
    """metrics.jsonl: a row per evaluation, cut back to the checkpoint when a run goes on."""

    def __init__(self, path: Path, size: int):
        self._path = path
        try:
            self._file = path.open("a+b")
            self._file.truncate(size)
            self._file.seek(0)
            self.rows: list[dict[str, float]] = [json.loads(line) for line in self._file.read().splitlines()]
            self.written = len(self.rows)
        except OSError as error:
            raise UserError(f"{path} could not be opened: {error.strerror}") from error

    def append(self, row: dict[str, float]) -> None:
        try:
            self._file.write(json.dumps(row).encode() + b"\n")
            self._file.flush()
            self.written += 1
        except OSError as error:
            raise UserError(f"{self._path} could not be written: {error.strerror}") from error

    def sync(self) -> int:
        """Make what was written durable; its length."""
        os.fsync(self._file.fileno())
        return self._file.seek(0, os.SEEK_END)

    def __enter__(self) -> "_Metrics":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process at a time works in a folder; the lock goes with the process, however it ends."""
    try:
        file = (path / ".lock").open("w")
    except OSError as error:
        raise UserError(f"{path} cannot be written to: {error.strerror}; choose another folder") from None
    with file:
        if os.name == "posix":
            import fcntl

            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UserError(f"another process is at work in {path}") from None
        yield


def _refuse_foreign(folder: Folder, config: Config, resume: bool) -> None:
    if not folder.config.exists():
        if folder.metrics.exists():
            raise UserError(f"{folder.path} has metrics but no config.toml: this is not a folder of ours to write into")
        return
    if not resume:
        raise UserError(f"{folder.path} holds a run already: --resume goes on with it, another --out begins a new one")
    changed = configuration.differences(configuration.load(folder.config), config)
    if changed:
        lines = "\n  ".join(changed)
        raise UserError(
            f"{folder.path} was begun with another configuration, so it cannot go on with this one:\n  {lines}"
        )


def _tensorboard(config: Config, folder: Folder) -> list[Callback]:
    if not config.run.tensorboard:
        return []
    from fedbcgd.report.tensorboard import TensorBoard

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
        "config": config.model_dump(),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }
