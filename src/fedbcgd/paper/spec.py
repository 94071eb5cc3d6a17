"""How an item of the paper is described: contenders compared in panels, the numbers printed, the claims made."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from fedbcgd.paper.results import Results

Scale = Literal["paper", "desk", "cpu", "smoke"]
SCALES: tuple[Scale, ...] = ("paper", "desk", "cpu", "smoke")
AT_PAPER: tuple[Scale, ...] = ("paper",)
LATE: tuple[Scale, ...] = ("paper", "desk")  # scales with long training, which show how it ends

HOLDS, FAILS, UNTESTABLE, NOT_RUN = "holds", "does not hold", "not testable at this scale", "not run"
PARTLY = "holds where it was run"  # some panels of the claim were not run
ONE_SEED = " (one seed)"  # appended to a verdict that rests on a single seed


@dataclass(frozen=True)
class Contender:
    """What is compared: a row of a table, or a curve of a figure."""

    key: str
    title: str
    algorithm: Mapping[str, Any]  # the algorithm's name and fixed options
    grid: tuple[str, ...] = ("lr",)  # options that are searched; their values are in the panel's `Effort.grid`
    tuned_as: str | None = None  # another contender of the panel, from whose search this one takes its options
    rounds_of: str | None = None  # for a contender that uploads nothing: the one whose number of rounds it gets
    until_target: bool = False  # whether its runs end at the target, since only its floats to the target are needed


@dataclass(frozen=True)
class Printed:
    """The paper's numbers for a contender: accuracy in percent, and floats to the target accuracy in d."""

    mean: float
    deviation: float
    floats: float | None = None  # infinity: the target was not reached; None: nothing is printed


@dataclass(frozen=True)
class Halving:
    """Successive halving: all candidates are trained a little, then the better half of them further, and so on.

    The gradient evaluations are divided equally among the rungs, and those of a rung among the candidates that are left.
    So the search for an algorithm with more hyper-parameters does not get more gradient evaluations.
    """

    rounds: int  # the search for each algorithm gets the gradient evaluations of this many rounds of FedAvg
    candidates: int = 12  # the most candidates, drawn from the grid so that each value occurs about equally often
    rungs: int = 3

    def __str__(self) -> str:
        effort = f"gradient evaluations of {self.rounds} rounds of FedAvg"
        return f"{self.rungs} rungs, at most {self.candidates} candidates, {effort}"


@dataclass(frozen=True)
class Effort:
    """How hyper-parameters are searched, and how often a run is repeated."""

    grid: Mapping[str, tuple[float, ...]]  # values of each option; a contender that does not search one takes the first
    seeds: int
    share: float  # a run of the search gets this share of the rounds of a whole run; not used with `halving`
    min_rounds: int = 20  # a run of the search has at least this many rounds, if a whole run has as many
    validation: float = 0.1  # share of the training set held out for the search
    evaluations: int = 200  # how often a run is evaluated, about; a run of the search has two fifths of that
    halving: Halving | None = None  # None: all points of the grid are tried, equally long


@dataclass(frozen=True)
class Panel:
    """One setting in which contenders are compared: a column of a table, a panel of a figure."""

    key: str
    title: str
    data: Mapping[str, Any]
    model: Mapping[str, Any]
    local: Mapping[str, Any]  # options of every contender's algorithm
    run: Mapping[str, Any]
    budget: float  # the mean upload of a participating client, in d
    contenders: tuple[Contender, ...]
    effort: Effort
    metric: str = "accuracy"  # or "loss", on the test set
    target: float | None = None  # None: the final value of the reference
    reference: str = "fedavg"  # the contender whose final value may be the target; if the panel lacks it, the first one
    printed: Mapping[str, Printed] = field(default_factory=dict)
    drawn: tuple[str, ...] = ()  # further metrics to draw

    def contender(self, key: str) -> Contender:
        """Return the contender with this key."""
        return next(c for c in self.contenders if c.key == key)


@dataclass(frozen=True)
class Verdict:
    """The result of testing a claim."""

    status: str  # one of the constants above
    evidence: str
    one_seed: bool = False  # whether a compared contender has only one seed
    missing: tuple[str, ...] = ()  # panels and contenders of the claim that were not run
    measured: bool = True  # whether the evidence is numbers, and not the reason why there are none


@dataclass(frozen=True)
class Claim:
    """A sentence of Section 5, paraphrased, and its test on the measured results."""

    key: str
    text: str
    test: Callable[["Results"], Verdict]
    panels: str = ""  # the claim is about panels whose key contains this
    scales: tuple[Scale, ...] = ("paper", "desk", "cpu")  # the scales at which it can be tested


@dataclass(frozen=True)
class Item:
    """A table or figure of the paper."""

    name: str
    title: str
    panels: Mapping[Scale, tuple[Panel, ...]]
    claims: tuple[Claim, ...] = ()
    notes: tuple[str, ...] = ()  # what the paper leaves open or contradicts, and what is done here
    runs_of: tuple[str, ...] = ()  # items whose runs are all that this one needs


def omitted_panels(item: Item, used: Sequence[Panel]) -> list[Panel]:
    """Return the paper's panels that a scale leaves out.

    A scale with as many panels as the paper leaves none out: its panels stand in for those with other keys.
    """
    originals = item.panels["paper"]
    keys = {panel.key for panel in used}
    return [panel for panel in originals if panel.key not in keys] if len(used) < len(originals) else []
