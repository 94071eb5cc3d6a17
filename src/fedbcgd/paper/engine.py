"""The engine that does the runs of any item at any scale. May be stopped and started at any time, in any number of
processes.

A search chooses a contender's hyper-parameters on held-out data, then every seed is run. After each run the state of the
steps is read again from the disk, so that several processes may work in one folder: each takes the first run that is due
and that no other process has taken. Finished runs are kept and packed, and the pages are written.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from fedbcgd.engine.loop import Outcome
from fedbcgd.engine.run_folder import Busy, RunFolder, exclusive_lock
from fedbcgd.errors import UserError
from fedbcgd.files import Damaged, make_folder, write_text
from fedbcgd.paper import packs, plan, search
from fedbcgd.paper.costs import Cost, run_cost, search_cost, total
from fedbcgd.paper.order import Step, steps
from fedbcgd.paper.origin import COMMIT_FILE, commit_of_run, current_commit
from fedbcgd.paper.request import Request, panels_for
from fedbcgd.paper.results import PanelResult, Trial
from fedbcgd.paper.search import Point
from fedbcgd.paper.spec import Item, Panel
from fedbcgd.runs import config as configuration
from fedbcgd.runs import folder as run_folder
from fedbcgd.runs.batch import PlannedRun, run_all

SHOWN_SEEDS = 5  # finished runs of seeds up to this one are always looked for
WAIT = 5.0  # seconds until a process that has nothing to do checks again
KEEP_EVERY = 60.0  # seconds between two times that finished runs are packed and pages are written

Display = Callable[[list[str]], AbstractContextManager[Any]]
Write = Callable[[Item, list[PanelResult]], None]


class Engine:
    """The steps that are left of a request.

    Args:
        items: the tables and figures.
        request: what was asked for.

    Raises:
        UserError: the data set of a requested panel is missing.
    """

    def __init__(self, items: Sequence[Item], request: Request):
        self.request = request
        make_folder(request.runs)
        self.steps = [step for step in steps(items, request) if self.due(step)]

    def due(self, step: Step) -> list[PlannedRun]:
        """Return the runs that can be done now: those of its search, or its own run; empty if the step is finished."""
        search_state = self._search(step)
        if search_state.chosen is None:
            return list(search_state.due)
        chosen = {step.contender.key: search_state.chosen}
        ((_, planned),) = plan.seed_runs(step.panel, chosen, step.seed, self.request.machine)
        packs.restore(self.request.out, [planned.folder])
        return [] if finished(planned, self.request.runs) else [planned]

    def costs(self) -> dict[str, tuple[Cost, Cost]]:
        """Estimate the cost of what is left of each group: of its searches, and of its other runs.

        A search that has begun counts as a whole.
        """
        out: dict[str, tuple[list[Cost], list[Cost]]] = {}
        counted = set()
        for step in self.steps:
            searches, runs = out.setdefault(step.group, ([], []))
            runs.append(run_cost(step.panel, step.contender, self.request.machine))
            tuned = Step(step.group, step.item, step.panel, step.tuned, 0).key  # of the search, which all seeds share
            if tuned not in counted and self._search(step).chosen is None:
                searches.append(search_cost(step.panel, step.tuned, self.request.machine))
            counted.add(tuned)
        return {group: (total(searches), total(runs)) for group, (searches, runs) in out.items()}

    def _search(self, step: Step) -> search.Search:
        """Return the state of the search that a step waits for."""
        return search.state(step.panel, step.tuned, self.request.out, self.request.machine)

    def run(self, display: Display, say: Callable[[str], None], write: Write) -> None:
        """Do all that is left.

        Args:
            display: makes the progress display for a run with this label.
            say: called with a line when a run begins or ends.
            write: called with an item and its results, after runs of it were finished.
        """
        changed: dict[str, Item] = {}  # items with runs that are not on their pages yet
        kept = time.monotonic()
        while self.steps:
            for step in list(self.steps):
                # Do the first run that no other process does.
                done = any(self._run(planned, display, say) for planned in self.due(step))
                if not self.due(step):
                    self.steps.remove(step)  # this process has finished it, or another one
                if done:
                    changed[step.item.name] = step.item
                    break
            else:
                time.sleep(WAIT if self.steps else 0)  # other processes do all runs that are due
            if not self.steps or time.monotonic() - kept > KEEP_EVERY:
                for item in changed.values():
                    self._keep(item, write)
                changed, kept = {}, time.monotonic()

    def _run(self, planned: PlannedRun, display: Display, say: Callable[[str], None]) -> bool:
        """Do a run and return True; return False if another process does it."""
        try:
            with exclusive_lock(make_folder(self.request.runs / planned.folder)):
                write_text(self.request.runs / planned.folder / COMMIT_FILE, current_commit() + "\n")
            say(f"{time.strftime('%F %T')} {planned.label}")
            with display([planned.label]) as shown:
                (outcome,) = run_all([planned], self.request.runs, shown, figures=False).values()
        except Busy:
            return False
        result = f"{_result(outcome.final)}{outcome.stopped}, {outcome.seconds:.0f} s"
        say(f"{time.strftime('%F %T')} {planned.label}: {result}")
        return True

    def _keep(self, item: Item, write: Write) -> None:
        """Pack the finished runs of an item and write its pages, when no other process does."""
        while True:
            try:
                with exclusive_lock(self.request.out):
                    results = gather(panels_for(item, self.request), self.request)
                    folders = {folder for result in results for folder in result.folders}
                    packs.add(self.request.out, item.name, [self.request.runs / folder for folder in sorted(folders)])
                    write(item, results)
                    return
            except Busy:
                time.sleep(WAIT / 10)


def _result(final: dict[str, Any]) -> str:
    names = [name for name in final if name.endswith("accuracy")] or [name for name in final if name.endswith("_loss")]
    return "".join(f"{name.replace('_', ' ')} {final[name]:.4f}, " for name in names[:1])


def gather(panels: Iterable[Panel], request: Request) -> list[PanelResult]:
    """Collect the finished runs of these panels, also of seeds that are not requested.

    The result of a panel whose data set is missing is empty, and says so.

    Raises:
        Damaged: a file of a run is damaged.
    """
    results = []
    for panel in panels:
        try:
            results.append(_gather_panel(panel, request))
        except Damaged:
            raise
        except UserError as error:
            results.append(PanelResult(panel, {}, unavailable=str(error)))
    return results


def _gather_panel(panel: Panel, request: Request) -> PanelResult:
    trials, chosen, searched = _gather_search(panel, request)
    seeds = range(1, 1 + max(request.seeds_of(panel), panel.effort.seeds, SHOWN_SEEDS))
    planned_runs = [(seed, *each) for seed in seeds for each in plan.seed_runs(panel, chosen, seed, request.machine)]
    packs.restore(request.out, (planned.folder for _, _, planned in planned_runs))
    outcomes: dict[str, dict[int, Outcome]] = {}
    run_folders = set()
    for seed, contender, planned in planned_runs:
        outcome = finished(planned, request.runs)
        if outcome is not None:
            outcomes.setdefault(contender.key, {})[seed] = outcome
            run_folders.add(planned.folder)
    return PanelResult(
        panel,
        outcomes,
        chosen,
        tuple(trials),
        commits=frozenset(commit_of_run(request.runs / folder) for folder in run_folders),
        folders=frozenset(searched | run_folders),
        chance=100 / plan.data_facts(panel).classes if panel.metric == "accuracy" else None,
    )


def _gather_search(panel: Panel, request: Request) -> tuple[list[Trial], dict[str, Point], set[str]]:
    """Return the trials of all finished rungs, the chosen hyper-parameters, and the folders of finished search runs."""
    own = [contender for contender in panel.contenders if contender.tuned_as is None]
    searches = {c.key: search.state(panel, c, request.out, request.machine) for c in own}
    found = {c.key: searches[c.tuned_as or c.key].chosen for c in panel.contenders}
    chosen = {key: point for key, point in found.items() if point is not None}
    trials = [trial for state in searches.values() for trial in state.trials]
    return trials, chosen, {folder for state in searches.values() for folder in state.folders}


def finished(planned: PlannedRun, runs: Path) -> Outcome | None:
    """Return the outcome of a planned run, or None if it is not finished."""
    return run_folder.finished(RunFolder(runs / planned.folder), configuration.complete(planned.config))
