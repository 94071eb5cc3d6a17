"""What was measured in a panel, contender by contender."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedbcgd.engine.loop import DIVERGED, Outcome
from fedbcgd.paper.measures import floats_to, last_tenth, spread, step_before
from fedbcgd.paper.spec import Contender, Panel

NEAR = 2.0  # times the accuracy of guessing: what is not above that tells nothing


@dataclass(frozen=True)
class Trial:
    """A run of the search."""

    contender: str
    options: Mapping[str, Any]
    score: float  # mean over the last tenth on held-out data; not a number where it diverged
    rounds: int
    chosen: bool


@dataclass(frozen=True)
class PanelResult:
    panel: Panel
    outcomes: Mapping[str, Mapping[int, Outcome]]  # by contender and seed; contenders that were not run are not here
    chosen: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # hyper-parameters, by contender
    trials: tuple[Trial, ...] = ()
    commits: frozenset[str] = frozenset()  # of the source that made the runs
    folders: frozenset[str] = frozenset()  # of all finished runs, the search included
    unknown: str = ""  # why it cannot be known what of it is finished: its data set is not here
    chance: float | None = None  # the accuracy of guessing, in percent, where accuracy is what is measured
    measured: str = ""  # another metric in the place of the panel's

    @property
    def higher(self) -> bool:
        return self.metric.endswith("accuracy")

    @property
    def metric(self) -> str:
        return self.measured or f"test_{self.panel.metric}"

    @property
    def unit(self) -> float:
        return 100.0 if self.higher else 1.0  # accuracies are in percent, as printed

    @property
    def digits(self) -> int:
        """Behind the point, as they are printed."""
        return 1 if self.higher else 4

    def title(self, key: str) -> str:
        return next((c.title for c in self.panel.contenders if c.key == key), key)

    @property
    def contenders(self) -> list[Contender]:
        """Those that were run, in the order of the paper."""
        return [c for c in self.panel.contenders if self.outcomes.get(c.key)]

    def hyper_parameters(self, key: str) -> dict[str, Any]:
        """What a contender ran with: what was chosen, but for what it says itself."""
        own = self.panel.contender(key).algorithm
        return {name: own.get(name, value) for name, value in self.chosen.get(key, {}).items()}

    def has(self, *keys: str) -> bool:
        return all(self.outcomes.get(key) for key in keys)

    def finals(self, key: str) -> list[float]:
        """The mean over the last 10 % of rounds, for each seed."""
        return [
            math.nan if o.diverged else self.unit * last_tenth(o.rows, self.metric) for o in self.outcomes[key].values()
        ]

    def final(self, key: str) -> tuple[float, float | None]:
        return spread(self.finals(key))

    @property
    def reference(self) -> str | None:
        """The contender whose end is the target where the panel names none."""
        run = [c.key for c in self.contenders if c.rounds_of is None]
        return next((key for key in run if key == self.panel.reference), run[0] if run else None)

    @property
    def target(self) -> float | None:
        """In percent, or as a loss."""
        if self.panel.target is not None:
            return self.panel.target
        reached = math.nan if self.reference is None else self.final(self.reference)[0]
        return reached if math.isfinite(reached) else None

    def floats(self, key: str) -> list[float]:
        """The upload to the target, for each seed; a run that diverged has not reached it, whatever it passed before."""
        if self.target is None or self.panel.contender(key).rounds_of is not None:
            return []
        goal = self.target / self.unit
        return [
            math.inf if o.diverged else floats_to(o.rows, self.metric, goal, self.higher)
            for o in self.outcomes[key].values()
        ]

    def to_target(self, key: str) -> float:
        """Their mean; infinity where a seed never got there."""
        values = self.floats(key)
        return spread(values)[0] if values else math.nan

    def resolution(self, key: str) -> float:
        """How far apart in d the evaluations stand between which the target was met, at most; 0 where it was not."""
        if self.target is None:
            return 0.0
        runs = zip(self.outcomes[key].values(), self.floats(key), strict=False)
        return max((step_before(o.rows, at) for o, at in runs if math.isfinite(at)), default=0.0)

    def at_chance(self, accuracy: float) -> bool:
        """Whether an accuracy in percent is no more than NEAR times that of guessing, or is none."""
        return self.chance is not None and self.higher and not accuracy > NEAR * self.chance

    def near_chance(self, keys: Sequence[str]) -> bool:
        """Whether a comparison of these decides nothing: the target is near chance, or all of them ended there."""
        low = self.target is not None and self.at_chance(self.target)
        return low or all(self.at_chance(self.final(key)[0]) for key in keys)

    def searched_in_vain(self, key: str) -> bool:
        """Whether all that was tried for a contender stayed near chance on the data held out."""
        own = self.panel.contender(key).tuned_as or key
        scores = [self.unit * trial.score for trial in self.trials if trial.contender == own]
        return bool(scores) and all(map(self.at_chance, scores))

    def beats(self, one: str, other: str) -> bool:
        """Whether `one` ended better than `other` by more than the spread of the seeds. A run that diverged beats none."""
        (a, da), (b, db) = self.final(one), self.final(other)
        if math.isnan(a) or math.isnan(b):
            return not math.isnan(a)
        ahead = a - b if self.higher else b - a
        return ahead > math.hypot(da or 0.0, db or 0.0)


Results = Mapping[str, PanelResult]  # by panel


def shown(value: float, digits: int = 1) -> str:
    if math.isnan(value):
        return DIVERGED
    return "∞" if math.isinf(value) else f"{value:.{digits}f}"


def shown_final(result: PanelResult, key: str, digits: int | None = None) -> str:
    digits = result.digits if digits is None else digits
    mean, deviation = result.final(key)
    bad = sum(map(math.isnan, result.finals(key)))
    if bad:
        return f"{bad} of {len(result.finals(key))} diverged" if len(result.finals(key)) > 1 else DIVERGED
    return shown(mean, digits) + (f" ± {deviation:.{digits}f}" if deviation is not None else "")


def shown_floats(result: PanelResult, key: str, digits: int = 1) -> str:
    """As the paper prints them: 558d, or ∞; how many got there, where some did."""
    values = result.floats(key)
    if not values:
        return "–"
    reached = [v for v in values if math.isfinite(v)]
    if len(reached) == len(values):
        return f"{spread(values)[0]:.{digits}f}d"
    return f"∞ ({len(reached)} of {len(values)} reached it)" if reached else "∞"
