"""The order of the runs of one or many items: those that decide most claims come first."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from fedbcgd.paper.request import Request, panels_for
from fedbcgd.paper.spec import Contender, Item, Panel

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
    """One repetition of one contender; the search for the contender's hyper-parameters comes before it."""

    group: str
    item: Item
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


def steps(items: Sequence[Item], request: Request) -> list[Step]:
    """Return all steps of some items, in order, each once."""
    out: dict[str, Step] = {}
    by_name = {item.name: item for item in items}
    alone = [Group(item.title, (item.name,), seeds=tuple(range(1, 100))) for item in items]
    for group in GROUPS if len(items) > 1 else alone:
        group_steps = [
            Step(group.title, by_name[name], panel, contender, seed)
            for name in group.items
            if name in by_name
            for panel in panels_for(by_name[name], request)
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
