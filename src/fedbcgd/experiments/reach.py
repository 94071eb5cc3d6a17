"""What it took each algorithm to reach one accuracy: rounds, upload, and hours under each network."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from fedbcgd.loop import Outcome
from fedbcgd.network.afterwards import hours, to_reach
from fedbcgd.network.profiles import PROFILES
from fedbcgd.runner import Folder

Outcomes = Mapping[str, dict[int, Outcome]]  # by algorithm and seed


def rows(outcomes: Outcomes, folder: Path, target: float | None = None) -> list[dict[str, Any]]:
    """A row for each run. Without a target: the highest accuracy that every run reached. What diverged reached nothing."""
    metric = accuracy(outcomes)
    runs = [o for group in outcomes.values() for o in group.values() if o.rows and not o.diverged]
    if metric is None or not runs:
        return []
    best = [max(row[metric] for row in o.rows) for o in runs]
    goal = min(best) if target is None else target
    out = []
    for name, group in outcomes.items():
        for seed, o in group.items():
            place = folder / name / f"seed-{seed}"
            cost: dict[str, Any] = {
                "rounds": to_reach(o.rows, [row["round"] for row in o.rows], metric, goal),
                "upload_d": to_reach(o.rows, [row["upload_d"] for row in o.rows], metric, goal),
                "upload_bytes": to_reach(o.rows, [row["upload_bytes"] for row in o.rows], metric, goal),
            }
            for profile in PROFILES if Folder(place).traffic.exists() else ():  # a run of earlier days has no record
                cost[f"hours_{profile}"] = to_reach(o.rows, hours(place, profile), metric, goal)
            if o.rows and "hours" in o.rows[0]:
                cost["hours_own"] = to_reach(o.rows, [row["hours"] for row in o.rows], metric, goal)
            if o.diverged:
                cost = dict.fromkeys(cost)
            out.append({"algorithm": name, "seed": seed, "target": goal, **cost})
    return out


def accuracy(outcomes: Outcomes) -> str | None:
    """The accuracy that these runs measured; None if they measured none."""
    measured = [o.rows[0] for group in outcomes.values() for o in group.values() if o.rows]
    return next(
        (m for m in ("test_accuracy", "validation_accuracy") if measured and all(m in r for r in measured)), None
    )


def table(reached: Sequence[Mapping[str, Any]]) -> Table:
    """Means over the seeds; where not every seed arrived, how many did."""
    out = Table(title=f"to reach accuracy {reached[0]['target']:.4f} (mean over seeds)", title_justify="left")
    out.add_column("algorithm", no_wrap=True)
    keys = [
        key for key in dict.fromkeys(k for row in reached for k in row) if key not in ("algorithm", "seed", "target")
    ]
    for key in keys:
        out.add_column(_title(key), justify="right")
    for name in dict.fromkeys(row["algorithm"] for row in reached):
        group = [row for row in reached if row["algorithm"] == name]
        out.add_row(name, *(_cell(key, [row.get(key) for row in group]) for key in keys))
    return out


def _title(key: str) -> str:
    if key.startswith("hours_"):
        return f"hours,\n{key.removeprefix('hours_').replace('own', 'own network')}"
    return {"rounds": "rounds", "upload_d": "upload, d", "upload_bytes": "upload, MB"}[key]


def _cell(key: str, values: Sequence[float | None]) -> str:
    there = [v for v in values if v is not None]
    if len(there) < len(values):
        return f"{len(there)} of {len(values)} runs"
    mean = statistics.fmean(there)
    return {"rounds": f"{mean:.0f}", "upload_d": f"{mean:.2f}", "upload_bytes": f"{mean / 1e6:.1f}"}.get(
        key, f"{mean:.3g}"
    )
