"""What a user asks `fedbcgd reproduce` for."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedbcgd.errors import UserError
from fedbcgd.paper.plan import Machine
from fedbcgd.paper.settings import with_changes
from fedbcgd.paper.spec import Item, Panel, Scale


@dataclass(frozen=True)
class Request:
    """What a user asked `fedbcgd reproduce` for."""

    scale: Scale
    out: Path
    seeds: int | None = None
    only: str = ""  # panels whose key contains this
    data: Mapping[str, str] = field(default_factory=dict)  # data sets to replace: name → other name
    machine: Machine = field(default_factory=Machine)

    @property
    def runs(self) -> Path:
        """The folder of all runs."""
        return self.out / "runs"

    def seeds_of(self, panel: Panel) -> int:
        """Return how many seeds of a panel are requested."""
        return self.seeds if self.seeds is not None else panel.effort.seeds

    def command(self, item: Item) -> str:
        """Return the command line that makes this request for one item."""
        parts = ["fedbcgd reproduce", item.name, "--scale", self.scale]
        parts += ["--only", self.only] if self.only else []
        parts += ["--seeds", str(self.seeds)] if self.seeds is not None else []
        used = {panel.data["name"] for panel in item.panels[self.scale]}
        parts += [f"--data {name}={other}" for name, other in self.data.items() if name in used]
        parts += [f"--device {self.machine.device}"] if self.machine.device != "cpu" else []
        parts += [f"--precision {self.machine.precision}"] if self.machine.precision != "fp32" else []
        return " ".join(parts)


def panels_for(item: Item, request: Request) -> list[Panel]:
    """Return all panels of an item at the requested scale, with the requested data sets."""
    panels = []
    for panel in item.panels[request.scale]:
        name = panel.data["name"]
        panels.append(with_changes(panel, {"data": {"name": request.data[name]}}) if name in request.data else panel)
    return panels


def select_panels(panels: Sequence[Panel], only: str) -> list[Panel]:
    """Return the panels whose key contains `only`.

    Raises:
        UserError: there are panels, and none of them is selected.
    """
    selected = [panel for panel in panels if only in panel.key]
    if panels and not selected:
        raise no_panel(only, (panel.key for panel in panels))
    return selected


def no_panel(only: str, keys: Iterable[str]) -> UserError:
    """Return the error for a `--only` that selects nothing."""
    return UserError(f"--only: expected part of one of {', '.join(keys)}, got {only!r}")
