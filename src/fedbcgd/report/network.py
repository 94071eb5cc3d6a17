"""The tables of `fedbcgd hours`."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from fedbcgd.display.metrics import ACCURACIES, falls, main_metric
from fedbcgd.display.progress import printable
from fedbcgd.display.tables import text_table
from fedbcgd.engine.loop import Row
from fedbcgd.engine.run_folder import RunFolder, find_runs
from fedbcgd.errors import UserError
from fedbcgd.network.profiles import PROFILES
from fedbcgd.network.settings import Network
from fedbcgd.runs.bias import BlockBias
from fedbcgd.runs.retiming import Tied, check_target, conditions_of, hours, to_reach

OWN = "own"
Networks = dict[str, Network | str | None]  # by shown name: a network, a profile, or None for the run's own


def select_networks(folder: Path, names: str | None, csv: Path | None) -> Networks:
    """Return the networks to time a run on: measured links first, then the run's own network, then profiles.

    Args:
        folder: the folder of the run.
        names: names separated by commas; None: the run's own network, if it has one, and every profile.
        csv: a file of measured links; None: there is none.

    Raises:
        UserError: no network is named.
    """
    run = RunFolder(folder)
    if names is None:
        own = run.config.exists() and conditions_of(run).network is not None
        chosen = [*([OWN] if own else []), *PROFILES]
    else:
        chosen = [name.strip() for name in names.split(",") if name.strip()]
        chosen.sort(key=lambda name: name != OWN)
    if not chosen and csv is None:
        raise UserError(f"--network: expected names separated by commas, of {', '.join((*PROFILES, OWN))}; got none")
    measured: Networks = {} if csv is None else {str(csv): Network(csv=str(csv))}
    return measured | {name: None if name == OWN else name for name in chosen}


@dataclass(frozen=True)
class TargetMetric:
    """The metric that a target is about."""

    column: str
    falling: bool

    @property
    def name(self) -> str:
        """The metric in words."""
        return self.column.replace("_", " ")

    def best(self, rows: Sequence[Row]) -> float | None:
        """Return the best value in these rows; None if there is none."""
        values = [row[self.column] for row in rows if math.isfinite(row.get(self.column, math.nan))]
        return (min if self.falling else max)(values, default=None)

    def common(self, runs: Sequence[Sequence[Row]]) -> float | None:
        """Return the best value that every run reached, of those that have one; None if none has."""
        best = [value for value in map(self.best, runs) if value is not None]
        return (max if self.falling else min)(best, default=None)

    def check(self, target: float | None) -> None:
        """Check that a target is a possible value of the metric.

        Raises:
            UserError: it is not.
        """
        if self.column in ACCURACIES:
            check_target(target)
        elif target is not None and not math.isfinite(target):
            raise UserError(f"target: expected a number, got {target:g}")

    def to_reach(self, rows: Sequence[Row], values: Sequence[float], target: float) -> float | None:
        """Return the first of `values` at which the target is reached."""
        return to_reach(rows, values, self.column, target, self.falling)


def target_metric_of(folder: Path, columns: Sequence[Sequence[str]]) -> TargetMetric | None:
    """Return the metric that targets are about: what a run's summary says, else an accuracy, else a loss.

    Args:
        folder: the folder of the run.
        columns: the columns of this run and of those that it is compared with, all of which must have the metric.
    """
    try:
        summary = RunFolder(folder).summary_values()
    except (UserError, OSError):
        summary = {}
    stated, goal = (value if isinstance(value, str) else None for value in map(summary.get, ("metric", "goal")))
    common = [column for column in (columns[0] if columns else ()) if all(column in own for own in columns)]
    metric = main_metric(common, stated)
    return None if metric is None else TargetMetric(metric, falls(metric, stated, goal))


def measure_hours(folder: Path, chosen: Networks, target: float | None) -> list[dict[str, Any]]:
    """Return a row for each network: hours of the whole run and to the target, or why there are none.

    Args:
        folder: the folder of the run.
        chosen: what `select_networks` returned.
        target: a value of the run's metric; None: the best that the run reached.

    Raises:
        UserError: the run has no metrics yet, or none for a target.
    """
    rows = RunFolder(folder).rows()
    if not rows:
        raise UserError(f"{folder}: expected metrics, got none yet; wait for the run's first evaluation")
    metric = target_metric_of(folder, [list(rows[-1])])
    if metric is None and target is not None:
        raise UserError(f"--target: expected a run with an accuracy or a loss, got {folder} without; leave it out")
    goal = None
    if metric is not None:
        metric.check(target)
        goal = metric.best(rows) if target is None else target
    table = []
    for name, network in chosen.items():
        row: dict[str, Any] = {"network": name, "hours": None}
        try:
            at = hours(folder, network)
            row["hours"] = at[-1]
            if metric is not None and goal is not None:
                row |= {"metric": metric.column, "target": goal, "hours_to_target": metric.to_reach(rows, at, goal)}
        except Tied as why:
            row["why"] = str(why)
        table.append(row)
    return table


def runs_in(folder: Path) -> list[Path]:
    """Return the runs below a folder; if the folder is a run itself or has none below, return the folder alone."""
    runs = find_runs([folder]) if folder.is_dir() else []
    return [folder] if not runs or folder in runs else runs


def measure_runs(
    folder: Path, runs: Sequence[Path], names: str | None, csv: Path | None, target: float | None
) -> list[dict[str, Any]]:
    """Return the rows of `measure_hours` for each run, with its name; a run without hours has the reason.

    Args:
        folder: the folder that the runs are in.
        runs: the folders of the runs.
        names: as for `select_networks`.
        csv: as for `select_networks`.
        target: a value of the metric; None: the best value that every run reached.
    """
    metrics = {run: RunFolder(run).rows() for run in runs}
    measured = [rows for rows in metrics.values() if rows]
    metric = target_metric_of(runs[0], [list(rows[-1]) for rows in measured])
    if metric is not None:
        metric.check(target)
        target = metric.common(measured) if target is None else target
    table = []
    for run in runs:
        name = str(run.relative_to(folder))
        try:
            table += [{"run": name, **row} for row in measure_hours(run, select_networks(run, names, csv), target)]
        except UserError as why:
            table.append({"run": name, "network": None, "hours": None, "why": str(why)})
    return table


def runs_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the rows of `measure_runs` as a table: a row for the seeds of an algorithm, a column for each network."""
    aimed = next((row for row in rows if "target" in row), None)
    networks = list(dict.fromkeys(row["network"] for row in rows if row["network"] is not None))
    title = "whole run"
    if aimed is not None:
        title += f", and below it to {aimed['metric'].replace('_', ' ')} {aimed['target']:.4g}"
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        parent, _, last = row["run"].rpartition("/")
        groups.setdefault(parent if parent and last.startswith("seed-") else row["run"], []).append(row)
    cells = (
        (printable(name), *(_both([row for row in group if row["network"] == n]) for n in networks))
        for name, group in groups.items()
    )
    return text_table(f"{title} (mean over seeds)", ("run", *(printable(name) for name in networks)), cells)


def _both(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the mean hours of the whole run and, if there is a target, those to the target on a second line."""
    timed = [row for row in rows if row["hours"] is not None]
    if not timed:
        return "–"
    whole = format_hours(statistics.fmean(row["hours"] for row in timed))
    if "target" not in timed[0]:
        return whole
    reached = [row["hours_to_target"] for row in timed if row["hours_to_target"] is not None]
    if len(reached) < len(timed):
        return f"{whole}\n{len(reached)} of {len(timed)} reached"
    return f"{whole}\n{format_hours(statistics.fmean(reached))}"


def hours_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the rows of `measure_hours` as a table for the terminal."""
    aimed = next((row for row in rows if "target" in row), None)
    target = () if aimed is None else (f"to {aimed['metric'].replace('_', ' ')} {aimed['target']:.4g}",)
    cells = (
        (printable(row["network"]), *(_time(row, key) for key in ("hours", "hours_to_target")[: 1 + len(target)]))
        for row in rows
    )
    return text_table("on the clock of each network", ("network", "whole run", *target), cells)


def _time(row: Mapping[str, Any], key: str) -> str:
    if row["hours"] is None:
        return "–"
    return "not reached" if row.get(key) is None else format_hours(row[key])


def format_hours(hours: float) -> str:
    """Return a time in seconds or hours, as text."""
    return f"{hours * 3600:.3g} s" if hours < 1 / 60 else f"{hours:.3g} h"


def bias_table(biases: Sequence[BlockBias], name: str) -> Table:
    """Return a table of which clients served each block, by the speed of their uplinks."""
    whose = "the run's own network" if name == OWN else name
    counts = ("block", "uploads", "different\nclients", "mean rank of uplinks\n(0 slowest, fair 0.5)")
    shares = ("slowest\nfifth", "2", "3", "4", "fastest\nfifth")
    rows = (
        (
            *(str(block.block + 1), str(block.uploads), str(block.clients), f"{block.rank:.2f}"),
            *(f"{share:.0%}" for share in block.shares),
            f"{block.distance:.2f}",
        )
        for block in biases
    )
    title = printable(f"who served each block ({whose})")
    return text_table(title, (*counts, *shares, "distance\nfrom fair"), rows, texts=0)
