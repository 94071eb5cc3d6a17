"""The tables of `fedbcgd hours`."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from fedbcgd.display.metrics import accuracy_column
from fedbcgd.display.progress import printable
from fedbcgd.engine.run_folder import RunFolder
from fedbcgd.errors import UserError
from fedbcgd.network.profiles import PROFILES
from fedbcgd.network.settings import Network
from fedbcgd.runs.bias import BlockBias
from fedbcgd.runs.retiming import DependsOnItsNetwork, bias, check_target, conditions_of, hours, value_at_target

OWN = "own"
Networks = dict[str, Network | str | None]  # by shown name: a network, a profile, or None for the run's own


def select_networks(folder: Path, names: str | None, csv: Path | None) -> Networks:
    """Return the networks on which a run is timed: measured links first, then the run's own network, then profiles.

    Args:
        folder: The folder of the run.
        names: Names separated by commas; by default the run's own network, if it has one, and every profile.
        csv: A file of measured links.

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
        raise UserError(f"--network: expected names separated by commas, of {', '.join((*PROFILES, OWN))}, got none")
    measured: Networks = {} if csv is None else {str(csv): Network(csv=str(csv))}
    return measured | {name: None if name == OWN else name for name in chosen}


def measure_hours(folder: Path, chosen: Networks, target: float | None) -> list[dict[str, Any]]:
    """Return a row for each network: hours of the whole run and to the target, or why there are none.

    Args:
        folder: The folder of the run.
        chosen: From `select_networks`.
        target: An accuracy; by default the best that the run reached.

    Raises:
        UserError: the run has no metrics yet, or no accuracy for a target.
    """
    check_target(target)
    rows = RunFolder(folder).rows()
    if not rows:
        raise UserError(f"{folder}: expected metrics, got none yet; wait for the run's first evaluation")
    metric = accuracy_column(rows[-1])
    if metric is None and target is not None:
        raise UserError(
            f"--target: expected none with {folder}, whose run has no accuracy, got {target:g}; leave it out"
        )
    goal = target
    if metric is not None and target is None:
        goal = max((row[metric] for row in rows if math.isfinite(row.get(metric, math.nan))), default=None)
    table = []
    for name, network in chosen.items():
        row: dict[str, Any] = {"network": name, "hours": None}
        try:
            at = hours(folder, network)
            row["hours"] = at[-1]
            if metric is not None and goal is not None:
                row |= {"target": goal, "hours_to_target": value_at_target(rows, at, metric, goal)}
        except DependsOnItsNetwork as why:
            row["why"] = str(why)
        table.append(row)
    return table


def hours_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the rows of `measure_hours` as a table for the terminal."""
    goal = next((row["target"] for row in rows if "target" in row), None)
    out = Table(title="simulated time on each network", title_justify="left")
    out.add_column("network")
    out.add_column("whole run", justify="right")
    if goal is not None:
        out.add_column(f"to accuracy {goal:.4f}", justify="right")
    for row in rows:
        cells: list[Text | str] = [
            printable(row["network"]),
            "–" if row["hours"] is None else format_hours(row["hours"]),
        ]
        if goal is not None:
            reached = row.get("hours_to_target")
            cells.append("–" if row["hours"] is None else "not reached" if reached is None else format_hours(reached))
        out.add_row(*cells)
    return out


def format_hours(hours: float) -> str:
    """Return a time in seconds or hours, as text."""
    return f"{hours * 3600:.3g} s" if hours < 1 / 60 else f"{hours:.3g} h"


def bias_table(biases: Sequence[BlockBias], name: str) -> Table:
    """Return a table of which clients served each block, by the speed of their uplinks."""
    whose = "the run's own network" if name == OWN else name
    out = Table(title=printable(f"who served each block ({whose})"), title_justify="left")
    for column in ("block", "uploads", "different\nclients", "mean rank of uplinks\n(0 slowest, fair 0.5)"):
        out.add_column(column, justify="right")
    for column in ("slowest\nfifth", "2", "3", "4", "fastest\nfifth", "distance\nfrom fair"):
        out.add_column(column, justify="right")
    for block in biases:
        shares = [f"{share:.0%}" for share in block.shares]
        head = (str(block.block + 1), str(block.uploads), str(block.clients), f"{block.rank:.2f}")
        out.add_row(*head, *shares, f"{block.distance:.2f}")
    return out


def first_bias(folder: Path, chosen: Networks) -> tuple[str, list[BlockBias]]:
    """Return the name of the first network, and for each block which clients served it, by the links of that network."""
    name, network = next(iter(chosen.items()))
    return name, bias(folder, network)
