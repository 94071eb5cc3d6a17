"""Runs an item: a search chooses hyper-parameters on held-out data, then every seed is run; finished runs are kept."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedbcgd.engine.loop import Outcome
from fedbcgd.engine.run_folder import RunFolder
from fedbcgd.errors import UserError
from fedbcgd.files import Damaged, make_folder
from fedbcgd.paper import packs, plan, search
from fedbcgd.paper.origin import CommitRecorder, commit_of_run
from fedbcgd.paper.plan import Machine
from fedbcgd.paper.results import PanelResult, Trial
from fedbcgd.paper.settings import with_changes
from fedbcgd.paper.spec import Item, Panel, Scale
from fedbcgd.runs import config as configuration
from fedbcgd.runs import folder as run_folder
from fedbcgd.runs.batch import Planned, run_all

MAX_SEEDS = 5  # finished runs of seeds up to this one are shown, even if fewer seeds are requested

Display = Callable[[list[str]], AbstractContextManager[Any]]
Options = Mapping[str, Any]


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


def check(item: Item, request: Request) -> None:
    """Check that the requested panels exist and that their data sets are available.

    Raises:
        UserError: one of them is missing.
    """
    for panel in select_panels(panels_for(item, request), request.only):
        plan.data_facts(panel)


def run(
    item: Item, request: Request, display: Display, write: Callable[[list[PanelResult]], None]
) -> list[PanelResult]:
    """Run all runs of an item that are not finished.

    Args:
        item: the table or figure.
        request: scale, folder, panels and seeds.
        display: makes the progress display for runs with these labels.
        write: called with the results so far after each seed.

    Returns:
        The results of every panel at this scale, in order.
    """
    panels = panels_for(item, request)
    selected = select_panels(panels, request.only)
    make_folder(request.runs)
    _run(request, display, [planned for panel in selected for planned in search.first_trials(panel, request.machine)])
    results = gather(panels, request, selected)
    for seed in range(1, 1 + max(map(request.seeds_of, selected), default=0)):
        due = [r for r in results if r.panel in selected and seed <= request.seeds_of(r.panel)]
        _run(request, display, [p for r in due for _, p in plan.seed_runs(r.panel, r.chosen, seed, request.machine)])
        results = gather(panels, request, selected)
        write(results)
    return results


def gather(panels: Iterable[Panel], request: Request, needed: Sequence[Panel] = ()) -> list[PanelResult]:
    """Collect the finished runs of these panels, also of seeds that are not requested.

    Args:
        panels: the panels.
        request: scale and folders.
        needed: panels whose data set must be available. The result of any other panel is empty if its data set is missing.

    Raises:
        UserError: the data set of a needed panel is missing.
        Damaged: a file of a run is damaged.
    """
    results = []
    for panel in panels:
        try:
            results.append(_gather_panel(panel, request))
        except UserError as error:
            if panel in needed or isinstance(error, Damaged):
                raise
            results.append(PanelResult(panel, {}, unavailable=str(error)))
    return results


def _gather_panel(panel: Panel, request: Request) -> PanelResult:
    trials, chosen, searched = _gather_search(panel, request)
    seeds = range(1, 1 + max(request.seeds_of(panel), panel.effort.seeds, MAX_SEEDS))
    planned_runs = [(seed, *each) for seed in seeds for each in plan.seed_runs(panel, chosen, seed, request.machine)]
    packs.restore(request.out, (planned.folder for _, _, planned in planned_runs))
    outcomes: dict[str, dict[int, Outcome]] = {}
    repeated = set()
    for seed, contender, planned in planned_runs:
        outcome = finished(planned, request.runs)
        if outcome is not None:
            outcomes.setdefault(contender.key, {})[seed] = outcome
            repeated.add(planned.folder)
    return PanelResult(
        panel,
        outcomes,
        chosen,
        tuple(trials),
        commits=frozenset(commit_of_run(request.runs / folder) for folder in repeated),
        folders=frozenset(searched | repeated),
        chance=100 / plan.data_facts(panel).classes if panel.metric == "accuracy" else None,
    )


def _gather_search(panel: Panel, request: Request) -> tuple[list[Trial], dict[str, Options], set[str]]:
    """Return the trials of all finished rungs, the chosen hyper-parameters, and the folders of finished search runs."""
    packs.restore(request.out, (planned.folder for planned in search.first_trials(panel, request.machine)))
    searches = {c.key: search.state(panel, c, request.runs, request.machine) for c in panel.contenders}
    chosen = {key: state.chosen for key, state in searches.items() if state.chosen is not None}
    for contender in panel.contenders:
        if contender.tuned_as in chosen:
            chosen[contender.key] = chosen[contender.tuned_as]
    trials = [trial for state in searches.values() for trial in state.trials]
    return trials, chosen, {folder for state in searches.values() for folder in state.folders}


def finished(planned: Planned, runs: Path) -> Outcome | None:
    """Return the outcome of a planned run, or None if it is not finished."""
    return run_folder.finished(RunFolder(runs / planned.folder), configuration.complete(planned.config))


def _run(request: Request, display: Display, runs: list[Planned]) -> None:
    """Run each planned run once, under its first label."""
    unique: dict[str, Planned] = {}
    for planned in runs:
        unique.setdefault(planned.folder, planned)
    runs = list(unique.values())
    packs.restore(request.out, unique)
    if runs:
        with display([planned.label for planned in runs]) as shown:
            run_all(runs, request.runs, CommitRecorder(shown, runs, request.runs), figures=False)
