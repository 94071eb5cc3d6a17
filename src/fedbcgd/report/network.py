"""Tables of `fedbcgd hours`."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from fedbcgd.display.progress import printable
from fedbcgd.engine.run_folder import RunFolder
from fedbcgd.errors import UserError
from fedbcgd.network.profiles import PROFILES
from fedbcgd.network.settings import Network
from fedbcgd.runs.bias import Lean
from fedbcgd.runs.retiming import Tied, bias, check_target, conditions_of, hours, to_reach

OWN = "own"
Networks = dict[str, Network | str | None]  # by the name they are shown under; None: the run's own


def networks(folder: Path, names: str | None, csv: Path | None) -> Networks:
    """Those asked for, with commas; by default the run's own, where it has one, and every profile. The user's measurements
    come first, then the run's own network."""
    place = RunFolder(folder)
    if names is None:
        own = place.config.exists() and conditions_of(place).network is not None
        chosen = [*([OWN] if own else []), *PROFILES]
    else:
        chosen = [name.strip() for name in names.split(",") if name.strip()]
        chosen.sort(key=lambda name: name != OWN)
    if not chosen and csv is None:
        raise UserError(f"--network: name at least one of {', '.join(PROFILES)}, or {OWN}; with commas between them")
    measured: Networks = {} if csv is None else {str(csv): Network(csv=str(csv))}
    return measured | {name: None if name == OWN else name for name in chosen}


def measure(folder: Path, chosen: Networks, target: float | None) -> list[dict[str, Any]]:
    """A row for each network: hours of the whole run, and to the target; or why there are none."""
    check_target(target)
    rows = RunFolder(folder).rows()
    if not rows:
        raise UserError(f"{folder} has no metrics yet")
    metric = next((m for m in ("test_accuracy", "validation_accuracy") if m in rows[-1]), None)
    if metric is None and target is not None:
        raise UserError(f"--target: {folder} measured no accuracy; leave it out")
    goal = target
    if metric is not None and target is None:
        goal = max((row[metric] for row in rows if math.isfinite(row.get(metric, math.nan))), default=None)
    found = []
    for name, network in chosen.items():
        row: dict[str, Any] = {"network": name, "hours": None}
        try:
            at = hours(folder, network)
            row["hours"] = at[-1]
            if metric is not None and goal is not None:
                row |= {"target": goal, "hours_to_target": to_reach(rows, at, metric, goal)}
        except Tied as why:
            row["why"] = str(why)
        found.append(row)
    return found


def hours_table(found: Sequence[dict[str, Any]]) -> Table:
    goal = next((row["target"] for row in found if "target" in row), None)
    out = Table(title="on the clock of each network", title_justify="left")
    out.add_column("network")
    out.add_column("whole run", justify="right")
    if goal is not None:
        out.add_column(f"to accuracy {goal:.4f}", justify="right")
    for row in found:
        cells: list[Text | str] = [printable(row["network"]), "–" if row["hours"] is None else told(row["hours"])]
        if goal is not None:
            reached = row.get("hours_to_target")
            cells.append("–" if row["hours"] is None else "not reached" if reached is None else told(reached))
        out.add_row(*cells)
    return out


def told(hours: float) -> str:
    """A time as a person would say it."""
    return f"{hours * 3600:.3g} s" if hours < 1 / 60 else f"{hours:.3g} h"


def bias_table(leans: Sequence[Lean], name: str) -> Table:
    """Who served each block, by the speed of its uplink."""
    whose = "the own network" if name == OWN else name
    out = Table(title=printable(f"who served each block ({whose})"), title_justify="left")
    for column in ("block", "uploads", "different\nclients", "mean rank of uplinks\n(0 slowest, fair 0.5)"):
        out.add_column(column, justify="right")
    for column in ("slowest\nfifth", "2", "3", "4", "fastest\nfifth", "distance\nfrom fair"):
        out.add_column(column, justify="right")
    for lean in leans:
        shares = [f"{share:.0%}" for share in lean.shares]
        head = (str(lean.block + 1), str(lean.uploads), str(lean.clients), f"{lean.rank:.2f}")
        out.add_row(*head, *shares, f"{lean.distance:.2f}")
    return out


def first_bias(folder: Path, chosen: Networks) -> tuple[str, list[Lean]]:
    """Under the first of these networks: its name, and who served each block."""
    name, network = next(iter(chosen.items()))
    return name, bias(folder, network)
