"""The measured results of a panel, contender by contender."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedbcgd.engine.loop import DIVERGED, Outcome
from fedbcgd.paper.measures import floats_to, last_tenth, mean_and_deviation, step_before
from fedbcgd.paper.spec import Contender, Panel, Printed

ENDED_EARLY = "ended at the target"
NEAR_CHANCE = 2.0  # an accuracy of at most this many times that of guessing decides nothing


@dataclass(frozen=True)
class Trial:
    """A run of the search."""

    contender: str
    options: Mapping[str, Any]
    score: float  # mean over the last tenth on held-out data; NaN if the run diverged
    rounds: int
    chosen: bool
    rung: int = 1  # of successive halving


@dataclass(frozen=True)
class PanelResult:
    """The finished runs of a panel, and the numbers that follow from them."""

    panel: Panel
    outcomes: Mapping[str, Mapping[int, Outcome]]  # by contender and seed; only contenders that were run
    chosen: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # hyper-parameters by contender
    trials: tuple[Trial, ...] = ()
    commits: frozenset[str] = frozenset()  # the commits of the source that computed the runs
    folders: frozenset[str] = frozenset()  # the folders of all finished runs, those of the search included
    unavailable: str = ""  # why finished runs cannot be identified: the data set is missing
    chance: float | None = None  # the accuracy of guessing in percent, if accuracy is the metric
    other_metric: str = ""  # replaces the panel's metric

    @property
    def metric(self) -> str:
        """The column of metrics that is compared."""
        return self.other_metric or f"test_{self.panel.metric}"

    @property
    def higher_is_better(self) -> bool:
        """Whether the metric is an accuracy."""
        return self.metric.endswith("accuracy")

    @property
    def unit(self) -> float:
        """The factor that turns a metric into what is printed: accuracies are printed in percent."""
        return 100.0 if self.higher_is_better else 1.0

    @property
    def digits(self) -> int:
        """How many digits are printed after the decimal point."""
        return 1 if self.higher_is_better else 4

    def title(self, key: str) -> str:
        """Return the title of a contender; its key if the panel does not have it."""
        return next((c.title for c in self.panel.contenders if c.key == key), key)

    @property
    def contenders(self) -> list[Contender]:
        """The contenders that were run, in the order of the paper."""
        return [c for c in self.panel.contenders if self.outcomes.get(c.key)]

    def hyper_parameters(self, key: str) -> dict[str, Any]:
        """Return the searched options with the values a contender ran with; its fixed options override chosen ones."""
        fixed = self.panel.contender(key).algorithm
        return {name: fixed.get(name, value) for name, value in self.chosen.get(key, {}).items()}

    def has(self, *keys: str) -> bool:
        """Return whether all these contenders were run."""
        return all(self.outcomes.get(key) for key in keys)

    def ended_early(self, key: str) -> bool:
        """Return whether runs of a contender ended at the target, so that they have no final value to compare."""
        return any(outcome.stopped == "target" for outcome in self.outcomes.get(key, {}).values())

    def has_final(self, key: str) -> bool:
        """Return whether a contender was run to its end."""
        return self.has(key) and not self.ended_early(key)

    def finals(self, key: str) -> list[float]:
        """Return the mean over the last 10 % of rounds for each seed; NaN for a run that diverged."""
        return [
            math.nan if o.diverged else self.unit * last_tenth(o.rows, self.metric) for o in self.outcomes[key].values()
        ]

    def final(self, key: str) -> tuple[float, float | None]:
        """Return mean and standard deviation of `finals`."""
        return mean_and_deviation(self.finals(key))

    @property
    def reference(self) -> str | None:
        """The contender whose final value is the target if the panel names none."""
        uploading = [c.key for c in self.contenders if c.rounds_of is None]
        return next((key for key in uploading if key == self.panel.reference), uploading[0] if uploading else None)

    @property
    def target(self) -> float | None:
        """The target, in percent or as a loss."""
        if self.panel.target is not None:
            return self.panel.target
        final = math.nan if self.reference is None else self.final(self.reference)[0]
        return final if math.isfinite(final) else None

    def floats_to_target(self, key: str) -> list[float]:
        """Return the upload to the target in d for each seed.

        It is infinity for a run that did not reach the target, or that diverged after reaching it. The list is empty if
        there is no target, or if the contender uploads nothing.
        """
        if self.target is None or self.panel.contender(key).rounds_of is not None:
            return []
        goal = self.target / self.unit
        return [
            math.inf if o.diverged else floats_to(o.rows, self.metric, goal, self.higher_is_better)
            for o in self.outcomes[key].values()
        ]

    def mean_floats_to_target(self, key: str) -> float:
        """Return the mean of `floats_to_target`: infinity if a seed did not reach the target, NaN if it is empty."""
        return mean_and_deviation(self.floats_to_target(key))[0]

    def resolution(self, key: str) -> float:
        """Return the largest upload in d between the evaluation that met the target and the one before; 0 if none did."""
        if self.target is None:
            return 0.0
        runs = zip(self.outcomes[key].values(), self.floats_to_target(key), strict=False)
        return max((step_before(o.rows, upload) for o, upload in runs if math.isfinite(upload)), default=0.0)

    def at_chance(self, accuracy: float) -> bool:
        """Return whether an accuracy in percent is at most `NEAR_CHANCE` times that of guessing, or NaN."""
        return self.chance is not None and self.higher_is_better and not accuracy > NEAR_CHANCE * self.chance

    def near_chance(self, keys: Sequence[str]) -> bool:
        """Return whether comparing these contenders decides nothing: the target, or all of them, are near chance."""
        low_target = self.target is not None and self.at_chance(self.target)
        return low_target or all(self.at_chance(self.final(key)[0]) for key in keys)

    def search_failed(self, key: str) -> bool:
        """Return whether every trial of a contender stayed near chance on the held-out data."""
        tuned = self.panel.contender(key).tuned_as or key
        scores = [self.unit * trial.score for trial in self.trials if trial.contender == tuned]
        return bool(scores) and all(map(self.at_chance, scores))

    def beats(self, first: str, second: str) -> bool:
        """Return whether `first` ended better than `second` by more than √(s₁² + s₂²), with s the deviation over seeds.

        A contender of which a run diverged beats none.
        """
        (a, da), (b, db) = self.final(first), self.final(second)
        if math.isnan(a) or math.isnan(b):
            return not math.isnan(a)
        ahead = a - b if self.higher_is_better else b - a
        return ahead > math.hypot(da or 0.0, db or 0.0)


Results = Mapping[str, PanelResult]  # by panel


def format_number(value: float, digits: int = 1) -> str:
    """Return a number as text: "diverged" for NaN, "∞" for infinity."""
    if math.isnan(value):
        return DIVERGED
    return "∞" if math.isinf(value) else f"{value:.{digits}f}"


def format_final(result: PanelResult, key: str, digits: int | None = None) -> str:
    """Return a contender's final value as "mean ± deviation", or how many of its seeds diverged."""
    digits = result.digits if digits is None else digits
    if result.ended_early(key):
        return ENDED_EARLY
    mean, deviation = result.final(key)
    seeds = len(result.finals(key))
    diverged = sum(map(math.isnan, result.finals(key)))
    if diverged:
        return f"{diverged} of {seeds} diverged" if seeds > 1 else DIVERGED
    return format_number(mean, digits) + (f" ± {deviation:.{digits}f}" if deviation is not None else "")


def format_floats(result: PanelResult, key: str, digits: int = 1) -> str:
    """Return the floats to the target as the paper prints them ("558d", "∞"), and how many seeds reached it if some did."""
    values = result.floats_to_target(key)
    if not values:
        return "–"
    reached = [v for v in values if math.isfinite(v)]
    if len(reached) == len(values):
        return f"{mean_and_deviation(values)[0]:.{digits}f}d"
    return f"∞ ({len(reached)} of {len(values)} reached it)" if reached else "∞"


def format_printed(printed: Printed | None) -> tuple[str, str]:
    """Return the paper's accuracy and floats to the target as texts; "–" if it prints none."""
    if printed is None:
        return "–", "–"
    floats = "–" if printed.floats is None else "∞" if math.isinf(printed.floats) else f"{printed.floats:g}d"
    return f"{printed.mean:.1f} ± {printed.deviation:.1f}", floats
