"""Tables of `fedbcgd hours`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from fedbcgd.errors import UserError
from fedbcgd.network.afterwards import bias, hours, to_reach
from fedbcgd.network.settings import Network
from fedbcgd.runner import Folder


def measure(folder: Path, names: Sequence[str], csv: Path | None, target: float | None) -> list[dict[str, Any]]:
    """A row for each network: hours of the whole run, and to the target."""
    rows = Folder(folder).rows()
    if not rows:
        raise UserError(f"{folder} has no metrics yet")
    metric = next((m for m in ("test_accuracy", "validation_accuracy") if m in rows[-1]), "test_accuracy")
    goal = max((row[metric] for row in rows if metric in row), default=0.0) if target is None else target
    networks: dict[str, Any] = {name: None if name == "own" else name for name in names}
    if csv is not None:
        networks[str(csv)] = Network(csv=str(csv))
    found = []
    for name, network in networks.items():
        at = hours(folder, network)
        found.append(
            {"network": name, "hours": at[-1], "target": goal, "hours_to_target": to_reach(rows, at, metric, goal)}
        )
    return found


def hours_table(found: Sequence[dict[str, Any]]) -> Table:
    out = Table(title="on the clock of each network", title_justify="left")
    out.add_column("network")
    out.add_column("hours, whole run", justify="right")
    out.add_column(f"hours to accuracy {found[0]['target']:.4f}", justify="right")
    for row in found:
        reached = row["hours_to_target"]
        out.add_row(row["network"], f"{row['hours']:.4g}", "not reached" if reached is None else f"{reached:.4g}")
    return out


def bias_table(folder: Path, network: str | None) -> Table:
    """Who served each block, by the speed of its uplink."""
    out = Table(title=f"who served each block ({network or 'the own network'})", title_justify="left")
    for column in ("block", "uploads", "different\nclients", "mean rank of uplinks\n(0 slowest, fair 0.5)"):
        out.add_column(column, justify="right")
    for column in ("slowest\nfifth", "2", "3", "4", "fastest\nfifth", "distance\nfrom fair"):
        out.add_column(column, justify="right")
    for lean in bias(folder, network):
        shares = [f"{share:.0%}" for share in lean.shares]
        head = (str(lean.block + 1), str(lean.uploads), str(lean.clients), f"{lean.rank:.2f}")
        out.add_row(*head, *shares, f"{lean.distance:.2f}")
    return out
