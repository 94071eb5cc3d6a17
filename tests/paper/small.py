"""An item that runs in a second, for tests of the engine."""

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from fedbcgd.paper import engine
from fedbcgd.paper.engine import Request
from fedbcgd.paper.items import ITEMS
from fedbcgd.paper.spec import SCALES, Contender, Effort, Item, Panel

LINEAR = next(iter(ITEMS["figure8"].panels["smoke"]))


class Shown:
    """A display that remembers which runs were begun and which were finished before."""

    def __init__(self):
        self.begun, self.skipped, self.names = [], [], []

    @contextmanager
    def display(self, names):
        self.names = names
        yield self

    def begin(self, index):
        self.begun.append(self.names[index])

    def skip(self, index, why):
        self.skipped.append((self.names[index], why))

    def __call__(self, info):
        pass


def small(*contenders, rates=(0.003, 0.01), seeds=1) -> Panel:
    contenders = contenders or (Contender("fedavg", "FedAvg", {"name": "fedavg"}),)
    effort = Effort({"lr": rates, "momentum": (0.5,)}, seeds=seeds, share=0.5, min_rounds=1, evaluations=4)
    return replace(LINEAR, contenders=contenders, effort=effort)


def item(panel: Panel, name: str = "item") -> Item:
    return Item(name, "An item", dict.fromkeys(SCALES, (panel,)))


def run(it: Item, out: Path, **request):
    shown = Shown()
    (result,) = engine.run(it, Request("smoke", out, **request), shown.display, lambda results: None)
    return result, shown
