"""Estimates of an item's running time: examples counted from its description, times measured seconds per example."""

from dataclasses import dataclass

from fedbcgd.algorithms.registry import make_algorithm
from fedbcgd.data.catalog import KNOWN
from fedbcgd.paper.plan import DataFacts, count_rounds, count_search_rounds, network_shapes
from fedbcgd.paper.search import candidates
from fedbcgd.paper.spec import Contender, Item, Panel, Scale

CORES = 2
RUN_SECONDS = 3.3  # start and end of a run with worker processes
# Seconds to train on one example, on one core, by model and width. Narrow networks and LeNet-5 were measured; the other
# whole networks are computed from their multiplications at 100 GFLOP/s.
SECONDS = {
    ("lenet5", 1.0): 0.6e-3,
    ("lenet5", 0.25): 0.137e-3,
    ("vgg11", 1.0): 9e-3,
    ("vgg11", 0.125): 0.4e-3,
    ("vgg19", 1.0): 24e-3,
    ("vgg19", 0.125): 0.7e-3,
    ("resnet18", 1.0): 36e-3,
    ("resnet18", 0.125): 1.3e-3,
    ("vit-base", 1.0): 1.1,
    ("vit-small", 1.0): 0.9e-3,
    ("binary-logistic", 1.0): 5e-6,
    ("binary-sigmoid", 1.0): 5e-6,
}


@dataclass(frozen=True)
class Cost:
    """The number of runs of an item, and their hours on two cores."""

    runs: int
    hours: float

    def __str__(self) -> str:
        minutes = self.hours * 60
        if minutes < 1:
            return f"{self.runs} runs, under a minute"
        return f"{self.runs} runs, {f'{minutes:.0f} minutes' if minutes < 120 else f'{self.hours:,.0f} hours'}"


def cost(item: Item, scale: Scale) -> Cost:
    """Estimate the cost of all runs of an item, none of them finished before or shared with another item."""
    panels = [_panel_cost(panel) for panel in item.panels[scale]]
    return Cost(sum(c.runs for c in panels), sum(c.hours for c in panels))


def _panel_cost(panel: Panel) -> Cost:
    runs, seconds = 0, 0.0
    effort = panel.effort
    facts, test = catalogue_facts(panel)
    for contender in panel.contenders:
        rounds = count_rounds(panel, contender, facts)
        points = len(candidates(panel, contender))
        searched = points if points > 1 else 0
        short = count_search_rounds(panel, rounds)
        runs += searched + effort.seeds
        seconds += effort.seeds * _run_seconds(panel, contender, rounds, effort.evaluations, facts, test)
        seconds += searched * _run_seconds(panel, contender, short, effort.evaluations * 2 // 5, facts, test)
        seconds += RUN_SECONDS * (searched + effort.seeds) * (panel.run.get("workers") != 0)
    return Cost(runs, seconds / 3600)


def _run_seconds(
    panel: Panel, contender: Contender, rounds: int, evaluations: int, facts: DataFacts, test: int
) -> float:
    rule = make_algorithm(**{**panel.local, **contender.algorithm}).local
    per_client = facts.train // panel.data["clients"]
    steps = rule.steps(per_client)
    examples = steps * rule.batch_size if rule.local_steps else rule.local_epochs * per_client
    nbytes = sum(p.nbytes for p in network_shapes(panel, facts).parameters())
    trained = rounds * panel.run["cohort"] * examples * rule.evaluations(per_client, nbytes) / steps
    tested = min(rounds, evaluations) * test / 3  # a forward pass takes a third of a training step
    cores = 1 if contender.rounds_of is not None else CORES
    return SECONDS.get((panel.model["name"], panel.model.get("width", 1.0)), 1e-4) * (trained / cores + tested / CORES)


def catalogue_facts(panel: Panel) -> tuple[DataFacts, int]:
    """Return the facts of a panel's data set and its number of test images, without loading it."""
    known = KNOWN.get(panel.data["name"])
    if known is None:  # the embedded images
        shape, classes, train, test = (1, 28, 28), 10, 10_000, 2_000
    else:
        shape, classes, train, test = known.shape, known.classes, known.train, known.test
    if side := panel.data.get("crop") or panel.data.get("resize"):
        shape = (shape[0], side, side)
    return DataFacts(shape, 2 if "positive" in panel.data else classes, train), test
