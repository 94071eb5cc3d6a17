"""The cost of reaching a target: rounds, upload, and hours under each network, by algorithm."""

import logging
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from fedbcgd.display.progress import printable
from fedbcgd.display.tables import client_tables, text_table
from fedbcgd.engine.run_folder import RunFolder
from fedbcgd.errors import UserError
from fedbcgd.files import as_csv, write_text
from fedbcgd.network.profiles import PROFILES
from fedbcgd.report.network import format_hours, target_metric_of
from fedbcgd.runs import compare as comparison
from fedbcgd.runs.compare import Outcomes
from fedbcgd.runs.retiming import hours

log = logging.getLogger("fedbcgd")


def rows(
    outcomes: Outcomes, folder: Path, target: float | None = None, say: Callable[[str], None] = log.warning
) -> list[dict[str, Any]]:
    """Return a row for each run; a run that diverged reached nothing.

    Args:
        outcomes: the outcomes by algorithm and seed.
        folder: the folder of the comparison.
        target: a value of the metric that all runs measured; None: the best that every run reached.
        say: called with the reason why a run has no hours.
    """
    run_folders = [folder / name / f"seed-{seed}" for name, group in outcomes.items() for seed in group]
    columns = [list(o.rows[0]) for group in outcomes.values() for o in group.values() if o.rows]
    metric = target_metric_of(run_folders[0], columns)
    runs = [o for group in outcomes.values() for o in group.values() if o.rows and not o.diverged]
    if metric is None or not runs:
        return []
    metric.check(target)
    goal = metric.common([o.rows for o in runs]) if target is None else target
    if goal is None:
        return []
    out = []
    for name, group in outcomes.items():
        for seed, o in group.items():
            run = folder / name / f"seed-{seed}"
            cost: dict[str, Any] = {
                name: metric.to_reach(o.rows, [row.get(column, math.nan) for row in o.rows], goal)
                for name, column in (("rounds", "round"), ("upload_d", "upload_d"), ("upload_bytes", "upload_bytes"))
            }
            if RunFolder(run).traffic.exists():  # runs of earlier versions have none
                try:
                    times = {profile: hours(run, profile) for profile in PROFILES}
                    cost |= {f"hours_{p}": metric.to_reach(o.rows, at, goal) for p, at in times.items()}
                except UserError as why:
                    say(str(why))
            if o.rows and "hours" in o.rows[0]:
                cost["hours_own"] = metric.to_reach(o.rows, [row.get("hours", math.nan) for row in o.rows], goal)
            if o.diverged:
                cost = dict.fromkeys(cost)
            out.append({"algorithm": name, "seed": seed, "metric": metric.column, "target": goal, **cost})
    return out


def write_comparison(
    outcomes: Outcomes, folder: Path, target: float | None, say: Callable[[str], None] = log.warning
) -> tuple[list[dict[str, Any]], list[Table]]:
    """Write compare.csv, compare.png and, if there is a metric to reach, reach.csv.

    Args:
        outcomes: as for `rows`.
        folder: as for `rows`.
        target: as for `rows`.
        say: as for `rows`.

    Returns:
        The rows of reach.csv, and the tables for the terminal.
    """
    comparison.write(outcomes, folder)
    reached = rows(outcomes, folder, target, say)
    tables = [comparison.table(outcomes)]
    tables += client_tables({name: [*group.values()] for name, group in outcomes.items()})
    if reached:
        write_text(folder / "reach.csv", as_csv(reached))
        tables.append(table(reached))
    return reached, tables


def table(reached: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table for the terminal: means over seeds, or how many seeds reached the target if not all did."""
    first = reached[0]
    keys = dict.fromkeys(key for row in reached for key in row if key not in ("algorithm", "seed", "metric", "target"))
    by_name = {
        name: [row for row in reached if row["algorithm"] == name] for name in (row["algorithm"] for row in reached)
    }
    cells = (
        (printable(name), *(_cell(key, [row[key] for row in group if key in row]) for key in keys))
        for name, group in by_name.items()
    )
    title = f"to reach {first['metric'].replace('_', ' ')} {first['target']:.4g} (mean over seeds)"
    return text_table(title, ("algorithm", *map(_title, keys)), cells)


def _title(key: str) -> str:
    if key.startswith("hours_"):
        return f"time,\n{key.removeprefix('hours_').replace('own', 'own network')}"
    return {"rounds": "rounds", "upload_d": "upload, d", "upload_bytes": "upload, MB"}[key]


def _cell(key: str, values: Sequence[float | None]) -> str:
    if not values:
        return "–"
    reached = [v for v in values if v is not None]
    if len(reached) < len(values):
        return f"{len(reached)} of {len(values)} runs"
    mean = statistics.fmean(reached)
    if key.startswith("hours_"):
        return format_hours(mean)
    return {"rounds": f"{mean:.0f}", "upload_d": f"{mean:.2f}", "upload_bytes": f"{mean / 1e6:.1f}"}[key]
