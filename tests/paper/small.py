"""An item that runs in a second, for tests of the engine."""

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from fedbcgd.paper.engine import Engine, gather
from fedbcgd.paper.items import ITEMS
from fedbcgd.paper.request import Request, panels_for
from fedbcgd.paper.spec import SCALES, Contender, Effort, Item, Panel

LINEAR = next(iter(ITEMS["figure8"].panels["smoke"]))


class Shown:
    """A display that remembers which runs were begun."""

    def __init__(self):
        self.begun, self.names = [], []

    @contextmanager
    def display(self, names):
        self.names = names
        yield self

    def begin(self, index):
        self.begun.append(self.names[index])

    def skip(self, index, why):
        pass

    def __call__(self, info):
        pass


def small(*contenders, rates=(0.003, 0.01), seeds=1) -> Panel:
    contenders = contenders or (Contender("fedavg", "FedAvg", {"name": "fedavg"}),)
    effort = Effort({"lr": rates, "momentum": (0.5,)}, seeds=seeds, share=0.5, min_rounds=1, evaluations=4)
    return replace(LINEAR, contenders=contenders, effort=effort)


def item(panel: Panel, name: str = "item") -> Item:
    return Item(name, "An item", dict.fromkeys(SCALES, (panel,)))


def run(it: Item, out: Path, **request):
    """Do all that is left; return the results of all panels, and what was begun."""
    shown, asked = Shown(), Request("smoke", out, **request)
    Engine([it], asked).run(shown.display, lambda line: None, lambda it, results: None)
    return gather(panels_for(it, asked), asked), shown
