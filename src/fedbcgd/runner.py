"""A run in a folder: configuration, metrics, checkpoints, model and summary; interrupted work goes on where it stopped."""

import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

from fedbcgd import config as configuration
from fedbcgd.checkpoint import Checkpoints
from fedbcgd.config import Config
from fedbcgd.errors import Diverged, UserError
from fedbcgd.files import as_json, make_folder, write_tensors, write_text
from fedbcgd.loop import Callback, Loop, Outcome, RoundInfo, Stop
from fedbcgd.network.watch import Watch, fit_to_links
from fedbcgd.processes import cores
from fedbcgd.secrets import mask_command, mask_config, refuse_masked
from fedbcgd.server import Server
from fedbcgd.signals import uninterrupted
from fedbcgd.simulation import export, make_carrier, make_job, make_server, try_out
from fedbcgd.state import StateStore
from fedbcgd.task import Task, make_task
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
    def traffic(self) -> Path:
        return self.path / "traffic.jsonl"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def holdings(self) -> Path:
        """How many examples of which label each client has."""
        return self.path / "holdings.json"

    @property
    def model(self) -> Path:
        return self.path / "model.safetensors"

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint"

    def finished(self, config: Config) -> Outcome | None:
        """The outcome, if this very run is finished here."""
        if not self.summary.exists() or not self.config.exists() or not self.metrics.exists():
            return None
        there = configuration.load(self.config)
        same = not configuration.differences(there, config)
        goals = ("rounds", "budget", "target")
        if not same or any(getattr(there.run, goal) != getattr(config.run, goal) for goal in goals):
            return None
        try:
            if self._other_links(config):
                return None
            return self.outcome()
        except (ValueError, KeyError, TypeError):
            return None  # damaged: it is made again from the checkpoint

    def _other_links(self, config: Config) -> bool:
        """Whether the clients' links are others than when it was made: of a CSV the configuration has the name alone."""
        made = json.loads(self.summary.read_text(encoding="utf-8")).get("links")
        if config.network is None or made is None:
            return False
        return made != config.network.links(config.data.clients, config.run.seed).digest()

    def outcome(self) -> Outcome:
        """What a finished run left."""
        summary = json.loads(self.summary.read_text(encoding="utf-8"))
        return Outcome.from_summary(summary, self.rows())

    def rows(self) -> list[dict[str, float]]:
        """The metrics, as far as the run has come."""
        try:
            return [_row(line) for line in self.metrics.read_text(encoding="utf-8").splitlines()]
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(f"{self.path} is no folder of a run: it has no {self.metrics.name}") from None


def examine(config: Config, path: Path) -> None:
    """Find what is wrong with a run before it is begun, or anything is written."""
    config = configuration.complete(config)
    _refuse_foreign(Folder(path), config, resume=True)
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
        _refuse_foreign(Folder(path), config, resume)
    prepared = _Prepared(config)  # what is wrong with the configuration shows before anything is written
    if say is not None:
        for note in prepared.task.notes:
            say(note)
    folder = Folder(make_folder(path))
    with alone(folder.path):
        _refuse_foreign(folder, config, resume)
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
        self.task = make_task(config)
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
        self.watch = Watch(self.job, config.network)
        self.server = make_server(self.job, run.cohort, self.stop, self.watch)


def _execute(prepared: _Prepared, folder: Folder, callbacks: Sequence[Callback], figures: bool) -> Outcome:
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
    folder.summary.unlink(missing_ok=True)  # it says that a run is finished, which this one is not yet
    write_text(folder.config, config.text())
    if task.counts is not None:
        write_text(folder.holdings, as_json({"classes": task.classes, "counts": task.counts.tolist()}) + "\n")
    with (
        MetricsFile(folder.metrics, before["metrics"] if before else 0) as metrics,
        MetricsFile(folder.traffic, before.get("traffic", 0) if before else 0) as traffic,
    ):
        watch.record = lambda sent: traffic.append(sent.row())
        carrier = make_carrier(job, store, server.cohort, config.where)
        carrier.clock.add(before["clock"] if before else {})
        loop = Loop(server, carrier, stop, run.evaluate_every, (), task.prefix, metrics.rows, watch=watch, overlap=True)
        loop.seconds = before["seconds"] if before else 0.0

        def save(beside: bool = False) -> None:
            with carrier.clock.timing("checkpoint"):
                more = {"metrics": metrics.size, "seconds": loop.lap(), "clock": dict(carrier.clock)}
                more |= {"data": task.digest, "network": watch.snapshot(), "traffic": traffic.size}
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
            summary = outcome.summary() | _circumstances(config, server.layout, dict(carrier.clock))
            summary["notes"] = list(task.notes)
            if watch.links is not None:
                summary["links"] = watch.links.digest()
            write_text(folder.summary, as_json(summary, indent=1) + "\n")

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
            saved = checkpoints.load()
            kept = f"the checkpoint of round {saved[1]['round']} is whole" if saved else "no checkpoint was written yet"
            raise UserError(f"{error}; {kept}") from error
        finally:
            carrier.close()
            checkpoints.wait()
            store.close()


def _draw(folder: Folder, outcome: Outcome, task: Task) -> None:
    from fedbcgd.report import plots  # matplotlib takes a while, and nobody needs it before the first step

    plots.curves({outcome.algorithm: outcome.rows}, folder.path / "curve.png")
    if task.counts is not None:
        plots.holdings(task.counts, folder.path / "holdings.png", task.classes)


def _row(line: str | bytes) -> dict[str, float]:
    """A row of metrics; null stands for what was not a number."""
    return {name: math.nan if value is None else value for name, value in json.loads(line).items()}


class MetricsFile:
    """metrics.jsonl: a row per evaluation, cut back to the checkpoint when a run goes on."""

    def __init__(self, path: Path, size: int):
        self._path = path
        try:
            self._file = path.open("a+b")
            if self._file.seek(0, os.SEEK_END) < size:
                raise UserError(f"{path} is shorter than its checkpoint says: this run cannot go on")
            self._file.truncate(size)
            self._file.seek(0)
            self.rows: list[dict[str, float]] = [_row(line) for line in self._file.read().splitlines()]
            self.written = len(self.rows)
        except OSError as error:
            raise UserError(f"{path} could not be opened: {error.strerror}") from error
        except json.JSONDecodeError:
            raise UserError(f"{path} is damaged: it holds lines that are not JSON. This run cannot go on") from None

    def append(self, row: dict[str, float]) -> None:
        try:
            with uninterrupted():
                self._file.write(as_json(row).encode() + b"\n")
                self._file.flush()
                self.written += 1
        except OSError as error:
            raise UserError(f"{self._path} could not be written: {error.strerror}") from error

    def sync(self) -> int:
        """Make what was written durable; its length."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise UserError(f"{self._path} could not be written: {error.strerror}") from error
        return self.size

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return os.fstat(self._file.fileno()).st_size

    def __enter__(self) -> "MetricsFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


@contextmanager
def alone(path: Path) -> Iterator[None]:
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


def sweep_up(folder: Folder) -> None:
    """Temporary files that a kill in the middle of writing left behind."""
    for place in (folder.path, folder.checkpoint):
        for stem, suffix in (
            ("server", ".safetensors"),
            ("model", ".safetensors"),
            ("config", ".toml"),
            ("summary", ".json"),
            ("holdings", ".json"),
            *((figure, kind) for figure in ("curve", "holdings") for kind in (".png", ".svg")),
        ):
            for path in place.glob(f".{stem}-*{suffix}"):
                path.unlink(missing_ok=True)


def _refuse_foreign(folder: Folder, config: Config, resume: bool) -> None:
    if not folder.config.exists():
        if folder.metrics.exists() or any(folder.checkpoint.glob("*.safetensors")):
            raise UserError(f"{folder.path} has parts of a run but no config.toml; another --out begins a new run")
        return
    begun = any(folder.checkpoint.glob("*.safetensors")) or (folder.metrics.exists() and folder.metrics.stat().st_size)
    if not begun:
        return  # it failed before its first round: nothing is lost
    if not resume:
        raise UserError(f"{folder.path} holds a run already: --resume goes on with it, another --out begins a new one")
    changed = configuration.differences(configuration.load(folder.config), config)
    if changed:
        lines = "\n  ".join(changed)
        raise UserError(
            f"{folder.path} was begun with another configuration, so it cannot go on with this one:\n  {lines}"
        )


def _refuse_past(folder: Folder, server: Server, stop: Stop) -> None:
    """A run can be extended, not shortened: what it has computed cannot be taken back."""
    spent = server.ledger.upload_d
    if (stop.rounds is not None and server.round > stop.rounds) or (
        stop.budget is not None and spent > stop.budget * (1 + 1e-9)
    ):
        raise UserError(
            f"{folder.path} is at round {server.round} with {spent:.4g} d uploaded already, past what is asked for; "
            "another --out begins a new run"
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
        "config": mask_config(config.model_dump()),
        "command": " ".join([Path(sys.argv[0]).name, *mask_command(sys.argv[1:])]),
    }
