"""Callbacks that are ready to use: early stopping, the best model, per-client results, Weights & Biases, MLflow."""

import csv
import math
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import contiguous_format as contiguous
from torch import nn

from fedbcgd.display.metrics import falls, main_metric
from fedbcgd.engine.loop import Loop, RoundInfo, Row
from fedbcgd.errors import UserError
from fedbcgd.files import as_csv, open_regular, write_tensors, write_text


class _Best:
    """Follows the best value of a metric.

    Args:
        metric: such as "mae"; None: the one that the run is about.
        goal: "min" or "max"; None: what the run or the metric's name says.
    """

    def __init__(self, metric: str | None = None, goal: str | None = None):
        self._metric, self._goal = metric, goal

    def start(self, loop: Loop) -> None:
        """Begin a run; see the rows that a resumed one has already."""
        self._stated = self._metric or loop.metric
        self._aim = self._goal or (loop.goal if self._metric is None else None)
        self.best, self.since = math.nan, 0  # the best value, and the evaluations since
        for row in loop.rows:
            self._see(row)

    def _see(self, row: Row) -> bool:
        """Return whether a row is the best so far."""
        column = main_metric(row, self._stated)
        value = math.nan if column is None else row[column]
        better = value < self.best if column and falls(column, self._stated, self._aim) else value > self.best
        if better or (math.isnan(self.best) and not math.isnan(value)):
            self.best, self.since = value, 0
            return True
        self.since += 1
        return False


class EarlyStopping(_Best):
    """Ends a run whose metric has not become better for `patience` evaluations.

    Args:
        patience: how many.
        metric: such as "mae"; default: the one that the run is about.
        goal: "min" or "max"; default: what the run or the metric's name says.
    """

    def __init__(self, patience: int, metric: str | None = None, goal: str | None = None):
        super().__init__(metric, goal)
        if not isinstance(patience, int) or patience < 1:
            raise UserError(f"patience: expected an integer ≥ 1, got {patience!r}")
        self.patience = patience

    def start(self, loop: Loop) -> None:
        """Begin a run; one that had ended is not continued."""
        super().start(loop)
        if self.since >= self.patience:
            loop.ended = "patience"

    def __call__(self, info: RoundInfo) -> None:
        for row in info.rows:
            self._see(row)
        if self.since >= self.patience:
            info.reason = info.reason or "patience"


def _file_of(callback: object, loop: Loop, path: str | Path | None, name: str) -> Path:
    """Return the file that a callback writes: the one that was given, or one of this name in the run's folder."""
    if path is not None:
        return Path(path)
    if loop.folder is None:
        raise UserError(f"{type(callback).__name__}: expected a path, or a run in a folder (out=…), got neither")
    return Path(loop.folder) / name


class KeepBest(_Best):
    """Writes the model with the best metric so far to best.safetensors, which `fedbcgd.load_model` reads.

    Args:
        path: the file; default: best.safetensors in the folder of the run.
        metric: such as "mae"; default: the one that the run is about.
        goal: "min" or "max"; default: what the run or the metric's name says.
    """

    def __init__(self, path: str | Path | None = None, metric: str | None = None, goal: str | None = None):
        super().__init__(metric, goal)
        self._path = path

    def start(self, loop: Loop) -> None:
        """Begin a run."""
        super().start(loop)
        self._file = _file_of(self, loop, self._path, "best.safetensors")
        self._metadata = loop.metadata
        if loop.rows and not self.since and loop.rows[-1]["round"] == loop.server.round and loop.model is not None:
            self._write(loop.model())  # the run was interrupted before it could be written

    def __call__(self, info: RoundInfo) -> None:
        better = [self._see(row) for row in info.rows]
        if any(better):
            self._write(info.module)

    def _write(self, module: nn.Module) -> None:
        values = {name: value.clone(memory_format=contiguous) for name, value in module.state_dict().items()}
        write_tensors(self._file, values, dict(self._metadata))


class ClientCsv:
    """Writes what each client did: a line for each upload of each round, and its metrics where they are measured.

    The uploads: client, block, bytes, gradients, and whether it was accepted. With `held_out` or `client_tests` a second
    file, clients_metrics.csv, has the metrics of each client on its own examples, a line for each client and evaluation.

    Args:
        path: the file; default: clients.csv in the folder of the run.
    """

    def __init__(self, path: str | Path | None = None):
        self._path = path

    def start(self, loop: Loop) -> None:
        """Begin a run; lines of rounds that a resumed run repeats are removed."""
        file = _file_of(self, loop, self._path, "clients.csv")
        self._files = (file, file.with_name(f"{file.stem}_metrics.csv"))
        self._last = [_cut_back(path, loop.server.round) for path in self._files]

    def __call__(self, info: RoundInfo) -> None:
        names = ("client", "block", "upload_bytes", "download_bytes", "gradient_evaluations", "accepted")
        entries = sorted(info.ledger.entries, key=lambda entry: entry.client)
        self._append(0, info, [{name: getattr(entry, name) for name in names} for entry in entries])
        self._append(1, info, [{"client": k, **metrics} for k, metrics in info.client_metrics.items()])

    def _append(self, which: int, info: RoundInfo, rows: Sequence[Mapping[str, Any]]) -> None:
        if not rows or info.server.round <= self._last[which]:  # a resumed run reports its last round again
            return
        self._last[which] = info.server.round
        text = as_csv([{"round": info.server.round, **row} for row in rows])
        with open_regular(self._files[which], "a+b") as file:
            file.write((text if not file.tell() else text.partition("\n")[2]).encode())


def _cut_back(path: Path, round: int) -> int:
    """Remove the lines of later rounds from a CSV file, and return the last round that it has then; 0 if it has none."""
    if not path.exists():
        return 0
    if not round:
        write_text(path, "")
        return 0
    with open_regular(path) as file:
        lines = csv.DictReader(file.read().decode().splitlines())
    kept = [row for row in lines if int(row["round"]) <= round]
    write_text(path, as_csv(kept) if kept else "")
    return int(kept[-1]["round"]) if kept else 0


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise UserError(f"{name}: expected the package {name}, got none: pip install {name}") from None


class WandB:
    """Logs every row of metrics to Weights & Biases.

    Args:
        **options: those of `wandb.init`.
    """

    def __init__(self, **options: Any):
        self._wandb, self._options = _package("wandb"), options

    def start(self, loop: Loop) -> None:
        """Begin a run."""
        self._run = self._wandb.init(**{"name": loop.folder and Path(loop.folder).name, **self._options})

    def __call__(self, info: RoundInfo) -> None:
        for row in info.rows:
            self._run.log(dict(row), step=int(row["round"]))

    def end(self, loop: Loop) -> None:
        """End the run, however it ended."""
        self._run.finish()


class MLflow:
    """Logs every row of metrics to MLflow.

    Args:
        **options: those of `mlflow.start_run`.
    """

    def __init__(self, **options: Any):
        self._mlflow, self._options = _package("mlflow"), options

    def start(self, loop: Loop) -> None:
        """Begin a run."""
        self._mlflow.start_run(**self._options)

    def __call__(self, info: RoundInfo) -> None:
        for row in info.rows:
            self._mlflow.log_metrics({name: float(value) for name, value in row.items()}, step=int(row["round"]))

    def end(self, loop: Loop) -> None:
        """End the run, however it ended."""
        self._mlflow.end_run()
