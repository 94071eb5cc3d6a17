"""What an item would cost: minibatches counted from its description, times what one took on a core like ours."""

import json
import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn

from fedbcgd.algorithms.registry import make_algorithm
from fedbcgd.core.algorithm import Algorithm
from fedbcgd.data.catalog import KNOWN
from fedbcgd.paper.plan import model, points
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
EMBEDDED = ((1, 28, 28), 10, 10_000, 2_000)  # shape, classes, training and test images


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
        rounds = max(1, math.floor(panel.budget / upload_d(panel, paying) * (1 + 1e-9)))
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
    _, _, train, test = _facts(panel)
    rule = _algorithm(panel, contender).local
    each = train // panel.data["clients"]
    steps = rule.steps(each)
    examples = steps * rule.batch_size if rule.local_steps else rule.local_epochs * each
    nbytes = sum(p.nbytes for p in _model(panel).parameters())
    trained = rounds * panel.run["cohort"] * examples * rule.evaluations(each, nbytes) / steps
    tested = min(rounds, evaluations) * test / 3
    cores = 1 if contender.rounds_of is not None else CORES
    return SECONDS.get((panel.model["name"], panel.model.get("width", 1.0)), 1e-4) * (trained / cores + tested / CORES)


def upload_d(panel: Panel, contender: Contender) -> float:
    """The mean upload of a client in a round, in d; for which the data set need not be here."""
    algorithm = _algorithm(panel, contender)
    return algorithm.upload_d(algorithm.uplink.layout(_model(panel)))


def _algorithm(panel: Panel, contender: Contender) -> Algorithm:
    return make_algorithm(**{**panel.local, **contender.algorithm})


def _model(panel: Panel) -> nn.Module:
    return _on_meta(json.dumps(dict(panel.model)), *_facts(panel)[:2])


@cache
def _on_meta(named: str, shape: tuple[int, int, int], classes: int) -> nn.Module:
    """A model with shapes and no memory."""
    with torch.device("meta"):
        return model(json.loads(named), shape, classes)


def _facts(panel: Panel) -> tuple[tuple[int, int, int], int, int, int]:
    """Of the data set: shape and classes of its images, how many there are to train on and to test with."""
    known = KNOWN.get(panel.data["name"])
    shape, classes, train, test = (known.shape, known.classes, known.train, known.test) if known else EMBEDDED
    if side := panel.data.get("crop") or panel.data.get("resize"):
        shape = (shape[0], side, side)
    return shape, 2 if "positive" in panel.data else classes, train, test
