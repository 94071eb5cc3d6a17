"""The runs of many items, those that decide most claims first. May be stopped and started at any time, in any number of
processes.

A `Step` is one repetition of one contender; the search for the contender's hyper-parameters comes before it. After each
run the state of all steps is read again from the disk, so that several processes may work in one folder: each takes the
first run that is due and that no other process has taken. Finished runs are packed at once, and the pages are written.
"""

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fedbcgd.engine.run_folder import Busy, exclusive_lock
from fedbcgd.files import make_folder
from fedbcgd.paper import engine, packs, plan, search
from fedbcgd.paper.costs import Cost, run_cost, search_cost, total
from fedbcgd.paper.engine import Display, Request
from fedbcgd.paper.items import ITEMS
from fedbcgd.paper.origin import CommitRecorder
from fedbcgd.paper.results import PanelResult
from fedbcgd.paper.spec import Contender, Panel
from fedbcgd.runs.batch import Planned, run_all

WAIT = 5.0  # seconds until a process that has nothing to do checks again

# Contenders, those that decide most claims first.
RANKING = (
    *("fedavg", "fedbcgd", "fedbcgd+", "fedbcgd+derived", "scaffold-blocks", "qsgd+fedbcgd", "qsgd+fedbcgd+"),
    *("fedpaq", "topk", "fedavgm", "scaffold-derived", "feddc-derived", "fedadam", "scaffold", "feddc"),
)
LEADERS = RANKING[:7]


@dataclass(frozen=True)
class Group:
    """Runs that are done before others."""

    title: str
    items: tuple[str, ...]
    panels: str = ""  # only panels whose key contains this
    contenders: tuple[str, ...] = ()  # only these; empty: all
    seeds: tuple[int, ...] = (1,)


LENET_10 = ("table6", "table3")
GROUPS = (
    Group("LeNet-5 on CIFAR-10: FedAvg, ours", LENET_10, "cifar10-lenet5", LEADERS),
    Group("LeNet-5 on CIFAR-10: the others", LENET_10, "cifar10-lenet5"),
    Group("LeNet-5 on CIFAR-100", ("table6", "table2"), "cifar100-lenet5"),
    Group("LeNet-5 on CIFAR-10: FedAvg, ours, second and third seeds", LENET_10, "cifar10-lenet5", LEADERS, (2, 3)),
    Group("ResNet-18", ("table4", "table3"), "resnet18"),
    Group("Figures 4, 5 and 7", ("figure4", "figure5", "figure7")),
    Group("Figure 8 and Appendix F", ("figure8", "appendix-erm"), seeds=(1, 2, 3)),
    Group("LeNet-5 on CIFAR-10: the others, second and third seeds", LENET_10, "cifar10-lenet5", (), (2, 3)),
    Group("LeNet-5 on CIFAR-100, second and third seeds", ("table6", "table2"), "cifar100-lenet5", (), (2, 3)),
)


@dataclass(frozen=True)
class Step:
    """One repetition of one contender."""

    group: str
    item: str
    panel: Panel
    contender: Contender
    seed: int

    @property
    def key(self) -> str:
        """A text that is equal for steps that need the same run."""
        panel = {
            k: v for k, v in asdict(self.panel).items() if k in ("data", "model", "local", "run", "budget", "effort")
        }
        target = self.panel.target if self.contender.until_target else None
        contender = {k: v for k, v in asdict(self.contender).items() if k not in ("title", "key")}
        return json.dumps([panel, target, contender, self.seed], sort_keys=True, default=str)

    @property
    def tuned(self) -> Contender:
        """The contender whose search chooses the hyper-parameters."""
        other = self.contender.tuned_as
        return self.contender if other is None else self.panel.contender(other)


def steps(names: Sequence[str], request: Request) -> list[Step]:
    """Return all steps of some items, in order, each once."""
    out: dict[str, Step] = {}
    groups = GROUPS if len(names) > 1 else [Group(ITEMS[n].title, (n,), "", (), tuple(range(1, 100))) for n in names]
    for group in groups:
        group_steps = [
            Step(group.title, name, panel, contender, seed)
            for name in group.items
            if name in names
            for panel in engine.panels_for(ITEMS[name], request)
            if request.only in panel.key and group.panels in panel.key
            for contender in panel.contenders
            if not group.contenders or contender.key in group.contenders
            for seed in group.seeds
            if seed <= request.seeds_of(panel)
        ]
        for step in sorted(group_steps, key=lambda step: (step.seed, _rank(step.contender))):
            out.setdefault(step.key, step)
    return list(out.values())


def _rank(contender: Contender) -> int:
    return RANKING.index(contender.key) if contender.key in RANKING else len(RANKING)


class Batch:
    """The steps that are left of a request.

    Args:
        names: names of the items.
        request: what was asked for.
    """

    def __init__(self, names: Sequence[str], request: Request):
        self.request = request
        make_folder(request.runs)
        self._restored: set[str] = set()
        self.steps = [step for step in steps(names, request) if self.due(step)]

    def due(self, step: Step) -> list[Planned]:
        """Return the runs that can be done now: those of its search, or its own run; empty if the step is finished."""
        search_state = self._search(step)
        if search_state.chosen is None:
            return list(search_state.due)
        chosen = {step.contender.key: search_state.chosen}
        ((_, planned),) = plan.seed_runs(step.panel, chosen, step.seed, self.request.machine)
        self._restore([planned])
        return [] if engine.finished(planned, self.request.runs) else [planned]

    def costs(self) -> dict[str, tuple[Cost, Cost]]:
        """Estimate the cost of what is left of each group: of its searches, and of its other runs.

        A search that has begun counts as a whole.
        """
        out: dict[str, tuple[list[Cost], list[Cost]]] = {}
        counted = set()
        for step in self.steps:
            searches, runs = out.setdefault(step.group, ([], []))
            runs.append(run_cost(step.panel, step.contender, self.request.machine))
            tuned = Step(step.group, step.item, step.panel, step.tuned, 0).key
            if tuned not in counted and self._search(step).chosen is None:
                searches.append(search_cost(step.panel, step.tuned, self.request.machine))
            counted.add(tuned)
        return {group: (total(searches), total(runs)) for group, (searches, runs) in out.items()}

    def _search(self, step: Step) -> search.Search:
        """Return the state of the search that a step waits for."""
        machine, panel = self.request.machine, step.panel
        first = search.rungs(panel, step.tuned)[:1]
        points = search.candidates(panel, step.tuned)
        self._restore(search.trial(panel, step.tuned, point, rung, machine) for rung in first for point in points)
        return search.state(panel, step.tuned, self.request.runs, machine)

    def _restore(self, runs: Iterable[Planned]) -> None:
        new = {planned.folder for planned in runs} - self._restored
        if new:
            packs.restore(self.request.out, new)
            self._restored |= new

    def run(
        self, display: Display, say: Callable[[str], None], write: Callable[[str, list[PanelResult]], None]
    ) -> None:
        """Do all that is left.

        Args:
            display: makes the progress display for a run with this label.
            say: called with a line when a run begins or ends.
            write: called with an item and its results when a run of it is finished.
        """
        while self.steps:
            if not any(self._take(step, display, say, write) for step in list(self.steps)):
                if not self.steps:
                    return
                time.sleep(WAIT)  # other processes do all runs that are due

    def _take(
        self, step: Step, display: Display, say: Callable[[str], None], write: Callable[[str, list[PanelResult]], None]
    ) -> bool:
        """Do one run of a step, unless other processes do all of its runs; return whether a run was done."""
        for planned in self.due(step):
            if not self._run(planned, display, say):
                continue
            if not self.due(step):
                self.steps.remove(step)
            if self._search(step).chosen is not None:
                self._keep(step.item, write)
            return True
        if not self.due(step):
            self.steps.remove(step)  # another process did it
        return False

    def _run(self, planned: Planned, display: Display, say: Callable[[str], None]) -> bool:
        """Do a run and return True; return False if another process does it."""
        try:
            with exclusive_lock(make_folder(self.request.runs / planned.folder)):
                pass
        except Busy:
            return False
        say(f"{time.strftime('%F %T')} {planned.label}")
        try:
            with display([planned.label]) as shown:
                recorder = CommitRecorder(shown, [planned], self.request.runs)
                (outcome,) = run_all([planned], self.request.runs, recorder, figures=False).values()
        except Busy:
            return False  # another process has begun it in this moment
        say(
            f"{time.strftime('%F %T')} {planned.label}: {_result(outcome.final)}{outcome.stopped}, {outcome.seconds:.0f} s"
        )
        return True

    def _keep(self, item: str, write: Callable[[str, list[PanelResult]], None]) -> None:
        """Pack the finished runs of an item and write its pages, when no other process does."""
        while True:
            try:
                with exclusive_lock(self.request.out):
                    results = engine.gather(engine.panels_for(ITEMS[item], self.request), self.request)
                    folders = {folder for result in results for folder in result.folders}
                    packs.add(self.request.out, item, [self.request.runs / folder for folder in sorted(folders)])
                    write(item, results)
                    return
            except Busy:
                time.sleep(WAIT / 10)


def _result(final: dict[str, Any]) -> str:
    names = [name for name in final if name.endswith("accuracy")] or [name for name in final if name.endswith("_loss")]
    return "".join(f"{name.replace('_', ' ')} {final[name]:.4f}, " for name in names[:1])
