"""What an item would cost: minibatches counted from its description, times what one took on a core like ours."""

import math
from dataclasses import dataclass

from fedbcgd.paper.plan import points
from fedbcgd.paper.spec import Contender, Item, Panel, Scale

CORES = 2
RUN_SECONDS = 3.3  # to begin and end a run
# Seconds to train on one example, on one core. Measured where a width stands; whole networks but LeNet-5 are reckoned from
# their multiplications at 100 GFLOP/s.
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
EXAMPLES = {"cifar10": 500, "cifar100": 500, "tiny-imagenet": 1000, "emnist-byclass": 6979, "embedded": 500}
TESTED = {"tiny-imagenet": 10_000, "cifar10": 10_000, "cifar100": 10_000, "emnist-byclass": 116_323, "embedded": 2_000}


@dataclass(frozen=True)
class Cost:
    runs: int
    hours: float  # on two cores

    def __str__(self) -> str:
        minutes = self.hours * 60
        if minutes < 1:
            return f"{self.runs} runs, under a minute"
        return f"{self.runs} runs, {f'{minutes:.0f} minutes' if minutes < 120 else f'{self.hours:,.0f} hours'}"


def cost(item: Item, scale: Scale) -> Cost:
    """Of everything, nothing being shared with other items or finished before."""
    each = [_panel(panel) for panel in item.panels[scale]]
    return Cost(sum(c.runs for c in each), sum(c.hours for c in each))


def _panel(panel: Panel) -> Cost:
    runs, seconds = 0, 0.0
    for contender in panel.contenders:
        paying = contender if contender.rounds_of is None else panel.contender(contender.rounds_of)
        rounds = max(1, math.floor(panel.budget / share(paying)))
        tried = len(points(panel, contender))
        tried = tried if tried > 1 else 0
        short = min(rounds, max(panel.effort.least, math.ceil(panel.effort.share * rounds)))
        runs += tried + panel.effort.seeds
        every = panel.effort.seeds * _run(panel, contender, rounds, panel.effort.evaluations) + tried * _run(
            panel, contender, short, panel.effort.evaluations * 2 // 5
        )
        seconds += every + RUN_SECONDS * (tried + panel.effort.seeds) * (panel.run.get("workers") != 0)
    return Cost(runs, seconds / 3600)


def _run(panel: Panel, contender: Contender, rounds: int, evaluations: int) -> float:
    name = panel.data["name"]
    local = panel.local
    each = local["local_steps"] * local["batch_size"] if "local_steps" in local else None
    examples = each or local["local_epochs"] * EXAMPLES.get(name, 500)
    work = 2.0 if "fedbcgd+" in contender.algorithm["name"] else 1.0
    trained = rounds * panel.run["cohort"] * examples * work
    tested = min(rounds, evaluations) * TESTED.get(name, 10_000) / 3
    cores = 1 if contender.rounds_of is not None else CORES
    return SECONDS.get((panel.model["name"], panel.model.get("width", 1.0)), 1e-4) * (trained / cores + tested / CORES)


def share(contender: Contender) -> float:
    """Upload of a round in d, near enough."""
    options = contender.algorithm
    name = options["name"]
    out = 1.0 / options.get("blocks", 5) if "fedbcgd" in name else 1.0
    if name in ("scaffold", "feddc", "fedbcgd+", "qsgd+fedbcgd+") and not options.get("derived"):
        out *= 2
    if "qsgd" in name or name == "fedpaq":
        out /= 4
    return options["fraction"] + 0.3 / 32 if name == "topk" else out
