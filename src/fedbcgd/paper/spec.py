"""How an item of the paper is described: contenders that meet in panels, what was printed, what is claimed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from fedbcgd.paper.results import Results

Scale = Literal["paper", "cpu", "smoke"]
SCALES: tuple[Scale, ...] = ("paper", "cpu", "smoke")

HOLDS, FAILS, UNTESTABLE, NOT_RUN = "holds", "does not hold", "not testable at this scale", "not run"
PARTLY = "holds where it was run"  # some panels that it speaks of were not
ONCE = " (one seed)"  # follows a verdict that no spread of seeds stands behind


@dataclass(frozen=True)
class Contender:
    """A row of a table, a curve of a figure."""

    key: str
    title: str
    algorithm: Mapping[str, Any]  # its name, and the options that make it this contender
    grid: tuple[str, ...] = ("lr",)  # what is searched for it, of what the panel's effort has
    tuned_as: str | None = None  # takes what was chosen for another contender of the panel: "the same settings"
    rounds_of: str | None = None  # uploads nothing, so it gets the rounds of another contender


@dataclass(frozen=True)
class Printed:
    """What the paper prints for a contender: accuracy in percent, and the floats to the target accuracy in d."""

    mean: float
    deviation: float
    floats: float | None = None  # infinity where the target was not reached; None where nothing is printed


@dataclass(frozen=True)
class Effort:
    """How hyper-parameters are chosen, and how often a run is repeated."""

    grid: Mapping[
        str, tuple[float, ...]
    ]  # values for each searched option; the first is taken where it is not searched
    seeds: int
    share: float  # of the rounds that a run of the search gets, but at least `least` of them
    least: int = 20
    validation: float = 0.1  # share of the training set held out for it
    evaluations: int = 200  # of a run, about; of a run of the search two fifths of that


@dataclass(frozen=True)
class Panel:
    """One setting in which contenders meet: a column of a table, a panel of a figure."""

    key: str
    title: str
    data: Mapping[str, Any]
    model: Mapping[str, Any]
    local: Mapping[str, Any]  # options of every contender that has them
    run: Mapping[str, Any]
    budget: float  # upload of a participating client, in d
    contenders: tuple[Contender, ...]
    effort: Effort
    metric: str = "accuracy"  # or loss, of the test set
    target: float | None = None  # None: what the reference ends with
    reference: str = "fedavg"  # or, where that is no contender, the first of them
    printed: Mapping[str, Printed] = field(default_factory=dict)
    drawn: tuple[str, ...] = ()  # metrics that are drawn too

    def contender(self, key: str) -> Contender:
        return next(c for c in self.contenders if c.key == key)


@dataclass(frozen=True)
class Verdict:
    status: str  # one of the above
    evidence: str
    once: bool = False  # something that was compared was run with one seed only
    missing: tuple[str, ...] = ()  # panels and contenders that it speaks of and that were not run
    measured: bool = True  # the evidence is of numbers, not a reason why there are none


@dataclass(frozen=True)
class Claim:
    """A sentence of Section 5, in our words, and how it is tested from what was measured."""

    key: str
    text: str
    test: Callable[["Results"], Verdict]
    scales: tuple[Scale, ...] = ("paper", "cpu")  # where it can be tested at all
    panels: str = ""  # it speaks of those whose key has this in it


@dataclass(frozen=True)
class Item:
    name: str
    title: str
    panels: Mapping[Scale, tuple[Panel, ...]]
    claims: tuple[Claim, ...] = ()
    notes: tuple[str, ...] = ()  # where the paper is silent or contradicts itself, and what is done here
    shares: tuple[str, ...] = ()  # items whose runs are all that this one needs


def left_out(item: Item, used: Sequence[Panel]) -> list[Panel]:
    """The paper's panels that a scale does not have; one that stands in the place of another leaves nothing out."""
    originals = item.panels["paper"]
    there = {panel.key for panel in used}
    return [panel for panel in originals if panel.key not in there] if len(used) < len(originals) else []
