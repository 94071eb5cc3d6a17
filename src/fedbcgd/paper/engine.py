"""Runs any item: hyper-parameters are chosen on held-out data, then every seed is run; what is finished is kept."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedbcgd.engine.loop import Outcome
from fedbcgd.engine.run_folder import RunFolder
from fedbcgd.errors import UserError
from fedbcgd.files import Damaged, make_folder
from fedbcgd.paper import packs, plan
from fedbcgd.paper.measures import last_tenth
from fedbcgd.paper.origin import Recorded, commit_of
from fedbcgd.paper.plan import Machine
from fedbcgd.paper.results import PanelResult, Trial
from fedbcgd.paper.settings import changed
from fedbcgd.paper.spec import Item, Panel, Scale
from fedbcgd.runs import config as configuration
from fedbcgd.runs import folder as run_folder
from fedbcgd.runs.batch import Planned, run_all

MOST_SEEDS = 5  # so many are looked for among what is finished, whatever is asked for now

Display = Callable[[list[str]], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Asked:
    """What a user asked for."""

    scale: Scale
    out: Path
    seeds: int | None = None
    only: str = ""  # panels whose key has this in it
    data: Mapping[str, str] = field(default_factory=dict)  # another data set in the place of one
    machine: Machine = field(default_factory=Machine)

    @property
    def runs(self) -> Path:
        return self.out / "runs"

    def command(self, item: Item) -> str:
        """What a user would type for this item."""
        parts = ["fedbcgd reproduce", item.name, "--scale", self.scale]
        parts += ["--only", self.only] if self.only else []
        parts += ["--seeds", str(self.seeds)] if self.seeds is not None else []
        used = {panel.data["name"] for panel in item.panels[self.scale]}
        parts += [f"--data {name}={other}" for name, other in self.data.items() if name in used]
        parts += [f"--device {self.machine.device}"] if self.machine.device != "cpu" else []
        return " ".join(parts)


def panels(item: Item, asked: Asked) -> list[Panel]:
    """All panels of the item at this scale, with the data sets that were asked for."""
    out = []
    for panel in item.panels[asked.scale]:
        name = panel.data["name"]
        out.append(changed(panel, {"data": {"name": asked.data[name]}}) if name in asked.data else panel)
    return out


def selected(every: Sequence[Panel], only: str) -> list[Panel]:
    found = [panel for panel in every if only in panel.key]
    if every and not found:
        raise UserError(f"--only {only}: no panel is called so; there are {', '.join(panel.key for panel in every)}")
    return found


def check(item: Item, asked: Asked) -> None:
    """That what is wanted can be run: its panels are there, and their data sets."""
    for panel in selected(panels(item, asked), asked.only):
        plan.examples(panel)


def run(item: Item, asked: Asked, display: Display, write: Callable[[list[PanelResult]], None]) -> list[PanelResult]:
    """Run what is not finished. `write` gets what there is after the search and after each seed."""
    every = panels(item, asked)
    chosen = selected(every, asked.only)
    make_folder(asked.runs)
    _run(asked, display, [planned for panel in chosen for _, _, planned in plan.search(panel, asked.machine)])
    results = gather(every, asked, chosen)
    for seed in range(1, 1 + max((_seeds(panel, asked) for panel in chosen), default=0)):
        wanted = [result for result in results if result.panel in chosen and seed <= _seeds(result.panel, asked)]
        _run(asked, display, [p for r in wanted for _, p in plan.repetition(r.panel, r.chosen, seed, asked.machine)])
        results = gather(every, asked, chosen)
        write(results)
    return results


def gather(every: Iterable[Panel], asked: Asked, needed: Sequence[Panel] = ()) -> list[PanelResult]:
    """What is finished, also of panels and seeds that were not asked for now. A panel that is not needed may be one whose
    data set is not here: then there is nothing of it."""
    results = []
    for panel in every:
        try:
            results.append(_gather(panel, asked))
        except UserError as error:
            if panel in needed or isinstance(error, Damaged):
                raise
            results.append(PanelResult(panel, {}, unknown=str(error)))
    return results


def _gather(panel: Panel, asked: Asked) -> PanelResult:
    trials: list[Trial] = []
    chosen: dict[str, Mapping[str, Any]] = {}
    tried: dict[str, list[tuple[dict[str, float], float, int]]] = {}
    folders: set[str] = set()
    planned_search = plan.search(panel, asked.machine)
    packs.restore(asked.out, (planned.folder for _, _, planned in planned_search))
    for contender, point, planned in planned_search:
        done = finished(planned, asked.runs)
        if done is not None:
            folders.add(planned.folder)
            tried.setdefault(contender.key, []).append((point, _score(done, panel), done.rounds))
    for contender in panel.contenders:
        every = plan.points(panel, contender)
        if len(every) == 1:
            chosen[contender.key] = every[0]
        done_points = tried.get(contender.key, [])
        if len(every) > 1 and len(done_points) == len(every):
            best = _best(done_points, panel.metric == "accuracy")
            chosen[contender.key] = done_points[best][0]
            trials += [Trial(contender.key, p, s, r, k == best) for k, (p, s, r) in enumerate(done_points)]
    for contender in panel.contenders:
        if contender.tuned_as in chosen:
            chosen[contender.key] = chosen[contender.tuned_as]
    outcomes: dict[str, dict[int, Outcome]] = {}
    commits: set[str] = set()
    seeds = range(1, 1 + max(_seeds(panel, asked), panel.effort.seeds, MOST_SEEDS))
    repeated = [(seed, *each) for seed in seeds for each in plan.repetition(panel, chosen, seed, asked.machine)]
    packs.restore(asked.out, (planned.folder for _, _, planned in repeated))
    for seed, contender, planned in repeated:
        done = finished(planned, asked.runs)
        if done is not None:
            folders.add(planned.folder)
            outcomes.setdefault(contender.key, {})[seed] = done
            commits.add(commit_of(asked.runs / planned.folder))
    chance = 100 / plan.classes(panel) if panel.metric == "accuracy" else None
    return PanelResult(panel, outcomes, chosen, tuple(trials), frozenset(commits), frozenset(folders), chance=chance)


def finished(planned: Planned, runs: Path) -> Outcome | None:
    return run_folder.finished(RunFolder(runs / planned.folder), configuration.complete(planned.config))


def _run(asked: Asked, display: Display, runs: list[Planned]) -> None:
    unique = list({planned.folder: planned for planned in reversed(runs)}.values())[
        ::-1
    ]  # each once, under its first name
    packs.restore(asked.out, (planned.folder for planned in unique))
    if unique:
        with display([planned.label for planned in unique]) as shown:
            run_all(unique, asked.runs, Recorded(shown, unique, asked.runs), figures=False)


def _seeds(panel: Panel, asked: Asked) -> int:
    return asked.seeds if asked.seeds is not None else panel.effort.seeds


def _score(outcome: Outcome, panel: Panel) -> float:
    if outcome.diverged:
        return math.nan
    return last_tenth(outcome.rows, f"validation_{panel.metric}")


def _best(tried: Sequence[tuple[Any, float, int]], higher: bool) -> int:
    """The place of the best score, of equal ones the first; a run that diverged is worse than any."""
    worst = -math.inf if higher else math.inf
    scores = [worst if math.isnan(score) else score for _, score, _ in tried]
    return scores.index(max(scores) if higher else min(scores))
