"""A run in a folder: configuration, metrics, checkpoints, model and summary; interrupted work goes on where it stopped."""

import logging
import math
import os
import platform
import sys
import time
import tomllib
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
from fedbcgd.files import (
    Damaged,
    as_json,
    make_folder,
    open_regular,
    read_regular,
    refuse_link,
    remove,
    same_file,
    sealed,
    sync_folder,
    unsealed,
    vouched,
    write_tensors,
    write_text,
    write_whole,
)
from fedbcgd.loop import Callback, Loop, Outcome, RoundInfo, Stop
from fedbcgd.network.watch import Watch, fit_to_links
from fedbcgd.processes import cores
from fedbcgd.server import Server
from fedbcgd.signals import uninterrupted
from fedbcgd.simulation import export, make_carrier, make_job, make_server, try_out
from fedbcgd.state import StateStore
from fedbcgd.task import Task, make_task
from fedbcgd.version import __version__

log = logging.getLogger("fedbcgd")

LARGEST = 1 << 26  # bytes of a configuration or a summary
MOST = 1 << 32  # bytes of metrics or traffic


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
        try:
            there = self.configuration()
            same = not configuration.differences(there, config)
            goals = ("rounds", "budget", "target")
            if not same or any(getattr(there.run, goal) != getattr(config.run, goal) for goal in goals):
                return None
            if self._other_links(config):
                return None
            return self.outcome()
        except (ValueError, KeyError, TypeError):
            return None  # damaged: it is made again from the checkpoint

    def _other_links(self, config: Config) -> bool:
        """Whether the clients' links are others than when it was made: of a CSV the configuration has the name alone."""
        made = self._summary().get("links")
        if config.network is None or made is None:
            return False
        return made != config.network.links(config.data.clients, config.run.seed).digest()

    def _summary(self) -> dict[str, Any]:
        try:
            return unsealed(read_regular(self.summary, LARGEST))[0]
        except ValueError as error:
            raise Damaged(f"{self.summary} is damaged: {error}") from None

    def configuration(self, say: Callable[[str], None] = lambda line: None) -> Config:
        """What the run was begun with: as config.toml has it, or, where that is damaged, which is said, a checkpoint.

        Raises:
            Damaged: config.toml is, and no checkpoint has a copy.
        """
        text, wrong = b"", "it has no checksum"  # as those of earlier days
        try:
            found = read_regular(self.config, LARGEST)
            wrong = "" if vouched(found) else wrong
            text = found
        except OSError as error:
            raise UserError(f"{self.config} cannot be read: {error.strerror}") from None
        except Damaged as error:
            wrong = str(error)
        kept = Checkpoints(self.checkpoint, None).load() if wrong else None
        if kept is not None and "config" in kept[1]:
            say(f"{self.config} is damaged ({wrong}): the copy in the checkpoint is taken")
            text = kept[1]["config"].encode()
        elif wrong and not text:
            raise Damaged(f"{self.config} is damaged: {wrong}; put a copy of it there")
        try:
            return configuration.check(tomllib.loads(text.decode()), str(self.config))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Damaged(f"{self.config} is damaged: {error}; put a copy of it there") from None

    def outcome(self) -> Outcome:
        """What a finished run left."""
        return Outcome.from_summary(self._summary(), self.rows())

    def rows(self) -> list[dict[str, float]]:
        """The metrics, as far as the run has come."""
        try:
            rows, lines, _ = read_rows(read_regular(self.metrics, MOST))
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(f"{self.path} is no folder of a run: it has no {self.metrics.name}") from None
        if len(rows) < lines:
            raise Damaged(f"{self.metrics} is damaged: {lines - len(rows)} of its {lines} rows")
        return rows


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
        _refuse_foreign(folder, config, resume, log.warning)
        make_folder(folder.checkpoint)
        sweep_up(folder)
        return _execute(prepared, folder, callbacks, figures)


class _Prepared:
    """A configuration made into things."""

    def __init__(self, config: Config):
        run = config.run
        self.config = config
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
    remove(folder.summary)  # it says that a run is finished, which this one is not yet
    text = config.text()
    write_text(folder.config, sealed(text))
    if task.counts is not None:
        holdings = as_json({"classes": task.classes, "counts": task.counts.tolist()})
        write_text(folder.holdings, sealed(holdings) + "\n")
    with (
        MetricsFile.resumed(folder.metrics, before) as metrics,
        MetricsFile.resumed(folder.traffic, before) as traffic,
    ):
        watch.record = lambda sent: traffic.append(sent.row())
        carrier = make_carrier(job, store, server.cohort, config.where)
        carrier.clock.add(before["clock"] if before else {})
        loop = Loop(server, carrier, stop, run.evaluate_every, (), task.prefix, metrics.rows, watch=watch, overlap=True)
        loop.seconds = before["seconds"] if before else 0.0

        def save(beside: bool = False) -> None:
            with carrier.clock.timing("checkpoint"):
                checkpoints.finish(store)  # which may still be at the rows
                more: dict[str, Any] = {"seconds": loop.lap(), "clock": dict(carrier.clock), "config": text}
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
            summary = outcome.summary() | _circumstances(config, server.layout, dict(carrier.clock))
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


def read_rows(data: bytes, checked: bool = False) -> tuple[list[dict[str, float]], int, bool]:
    """The rows of metrics or traffic that are whole, null read as what is not a number; how many lines there are; whether
    the rows have checksums.

    checked: whether each must have one; else it is enough if none has, as in earlier days.
    """
    rows, lines = [], data.splitlines()
    checked = checked or any(b', "crc": ' in line for line in lines)
    for line in lines:
        try:
            row, fits = unsealed(line)
        except ValueError:
            continue
        if isinstance(row.get("round"), int) and (fits or not checked):
            rows.append({name: math.nan if value is None else value for name, value in row.items()})
    return rows, len(lines), checked


class MetricsFile:
    """metrics.jsonl: a row per evaluation, cut back to the checkpoint when a run goes on. traffic.jsonl likewise.

    Rows that are lost or damaged are left out, which is said: the model does not depend on them.

    Args:
        path: of the file.
        size: bytes that the checkpoint knows of; what follows is cut off.
        count: rows that it knows of; None where it does not say, as in earlier days.
        last: its round.
    """

    def __init__(self, path: Path, size: int, count: int | None = None, last: int | None = None):
        self._path = path
        try:
            self._file = open_regular(path, "a+b")
            self._file.seek(0)
            data = self._file.read() if size else b""
            self.rows, lines, _ = read_rows(data[:size], count is not None)
            whole = len(data) >= size and len(self.rows) == lines and count in (lines, None)
            if not whole:  # lines may have moved: what is left of them stands anywhere
                found = [row for row in read_rows(data)[0] if last is None or row["round"] <= last]
                self.rows = found[:count]
                lost = "some" if count is None else f"{count - len(self.rows)} of {count}"
                log.warning("%s is damaged: %s rows are lost, and the run goes on without them", path, lost)
            self.written = len(self.rows)
            if whole and count is not None:
                self._file.truncate(size)
                sync_folder(path.parent)  # it may be new
            else:
                self._replace("".join(map(_line, self.rows)).encode())
        except OSError as error:
            raise UserError(f"{path} could not be opened: {error.strerror}") from error

    @classmethod
    def resumed(cls, path: Path, before: dict[str, Any] | None) -> "MetricsFile":
        """As the checkpoint `before` knows it; empty without one."""
        if before is None:
            return cls(path, 0, 0)
        return cls(path, before.get(path.stem, 0), before.get(f"{path.stem}_rows"), before["round"])

    def append(self, row: dict[str, float]) -> None:
        try:
            with uninterrupted():
                self._file.write(_line(row).encode())
                self._file.flush()
                self.written += 1
        except OSError as error:
            raise UserError(f"{self._path} could not be written: {error.strerror}") from error

    def kept(self) -> dict[str, int]:
        """What a checkpoint has to know. A file that was removed or replaced in the middle of the run is put back first."""
        if not same_file(self._file.fileno(), self._path):
            log.warning("%s was removed or replaced in the middle of the run: it is written anew", self._path)
            self._file.seek(0)
            self._replace(self._file.read())
        return {self._path.stem: self.size, f"{self._path.stem}_rows": self.written}

    def _replace(self, data: bytes) -> None:
        def write(temporary: Path) -> None:
            temporary.write_bytes(data)

        self._file.close()
        write_whole(self._path, write)
        self._file = open_regular(self._path, "a+b")

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


def _line(row: dict[str, float]) -> str:
    return sealed(as_json(row)) + "\n"


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """One process at a time works in a folder; the lock goes with the process, however it ends."""
    try:
        file = open_regular(path / ".lock", "a+b")
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
            ("metrics", ".jsonl"),
            ("traffic", ".jsonl"),
            ("clients", ".bin"),
            ("holdings", ".json"),
            *((figure, kind) for figure in ("curve", "holdings") for kind in (".png", ".svg")),
        ):
            for path in place.glob(f".{stem}-*{suffix}"):
                path.unlink(missing_ok=True)


def _refuse_foreign(
    folder: Folder, config: Config, resume: bool, say: Callable[[str], None] = lambda line: None
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
    changed = configuration.differences(folder.configuration(say), config)
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
        "config": config.model_dump(),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }
