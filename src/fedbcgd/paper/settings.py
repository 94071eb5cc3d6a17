"""The panels at each scale: the paper's settings to the letter, a miniature for two cores, and a trial of the machinery."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fedbcgd.paper import printed as paper
from fedbcgd.paper.spec import Contender, Effort, Panel, Printed, Scale

NETWORKS = {"lenet5": "LeNet-5", "vgg11": "VGG-11", "resnet18": "ResNet-18", "vgg19": "VGG-19"}
DATA = {
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "tiny-imagenet": "Tiny ImageNet",
    "emnist-byclass": "EMNIST (byclass)",
}
BOTH = ("lr", "momentum")

CPU_EFFORT = Effort({"lr": (0.1, 0.03, 0.3), "momentum": (0.5,)}, seeds=2, share=0.25, evaluations=25)
CPU_SHORT = replace(CPU_EFFORT, seeds=1, least=6)  # for networks that are slow even when they are narrow
CPU_LINEAR = replace(CPU_EFFORT, grid={"lr": (0.01, 0.003, 0.03), "momentum": (0.5,)})
SMOKE_EFFORT = Effort({"lr": (0.05, 0.1), "momentum": (0.5,)}, seeds=1, share=0.5, least=1, evaluations=2)
SMOKE_UNTRIED = replace(SMOKE_EFFORT, grid={"lr": (0.05,), "momentum": (0.5,)})  # one search is trial enough

Changes = Mapping[str, Any]  # of a panel's fields; mappings are updated, the rest replaced

_NARROW: Changes = {
    "model": {"width": 0.125},
    "local": {"local_epochs": 1},
    "budget": 4.0,
    "effort": CPU_SHORT,
}
# What a network becomes where there is no GPU.
CPU: dict[str, Changes] = {
    "lenet5": {"model": {"width": 0.25}, "local": {"local_epochs": 1}, "budget": 20.0},
    "vgg11": _NARROW,
    "resnet18": _NARROW,
    "vgg19": _NARROW,
    "vit-base": {
        "title": "small ViT, CIFAR-100",
        "model": {"name": "vit-small", "weights": None, "options": {"dim": 48, "depth": 4, "heads": 3}},
        "data": {"resize": None, "crop": None},
        "budget": 12.0,
        "effort": CPU_SHORT,
    },
    "binary-logistic": {"budget": 60.0, "effort": CPU_LINEAR},
    "binary-sigmoid": {"budget": 60.0, "effort": CPU_LINEAR},
}
_SMOKE_LINEAR: Changes = {
    "local": {"weight_decay": 1e-4 * paper.SMOOTHNESS["embedded"]},
    "effort": replace(SMOKE_UNTRIED, grid={"lr": (0.01,), "momentum": (0.5,)}),
}
SMOKE: dict[str, Changes] = {
    "lenet5": {"model": {"width": 0.04}, "data": {"resize": 16}},
    "resnet18": {"model": {"width": 0.04}, "data": {"resize": 8}, "effort": SMOKE_UNTRIED},
    "vit-base": {
        "model": {"name": "vit-small", "weights": None, "options": {"dim": 12, "depth": 1, "heads": 1}},
        "data": {"resize": 8, "crop": None},
        "effort": SMOKE_UNTRIED,
    },
    "binary-logistic": _SMOKE_LINEAR,
    "binary-sigmoid": _SMOKE_LINEAR,
}
SMOKE_ALL: Changes = {
    "data": {"name": "embedded", "augment": False},
    "local": {"local_steps": 1},
    "budget": 2.0,
    "run": {"workers": 0},
    "effort": SMOKE_EFFORT,
}


def changed(panel: Panel, changes: Changes) -> Panel:
    """The panel with some fields changed; None takes a key out of a mapping."""
    new: dict[str, Any] = {}
    for name, value in changes.items():
        old = getattr(panel, name)
        if isinstance(old, Mapping) and name != "printed":
            value = {k: v for k, v in {**old, **value}.items() if v is not None}
        new[name] = value
    return replace(panel, **new)


def at(panel: Panel, scale: Scale) -> Panel:
    """The panel of the paper at another scale. Targets of the paper are out of reach there: FedAvg's end is the target.
    So is convergence, which is what centralised training is printed for: it is left to the scale of the paper."""
    name = panel.model["name"]
    if scale == "paper":
        return panel
    if scale == "cpu":
        few = tuple(c for c in panel.contenders if c.rounds_of is None)
        return changed(panel, {"effort": CPU_EFFORT, "target": None, "contenders": few, **CPU[name]})
    title = f"trial in the place of {panel.title}"
    return changed(changed(panel, {**SMOKE_ALL, "target": None, "title": title}), SMOKE[name])


def scaled(*panels: Panel, cpu: Changes | None = None) -> dict[Scale, tuple[Panel, ...]]:
    """At each scale, with changes of its own at `cpu`. For a trial of the machinery one panel is enough."""
    smoke = next(panel for panel in panels if panel.model["name"] in SMOKE)
    return {
        "paper": panels,
        "cpu": tuple(changed(at(p, "cpu"), cpu or {}) for p in panels if p.data["name"] != "tiny-imagenet"),
        "smoke": (at(smoke, "smoke"),),
    }


# -- contenders


def blocks(network: str) -> dict[str, Any]:
    """The division of Appendix F."""
    return {"blocks": paper.BLOCKS[network], "divider": "paper"} if network in paper.BLOCKS else {"blocks": 5}


def baselines() -> tuple[Contender, ...]:
    """What sends d instead of 2d trains the same models in the same rounds, so one search is enough for both forms."""
    return (
        Contender("fedavg", "FedAvg", {"name": "fedavg"}),
        Contender("fedavgm", "FedAvgM", {"name": "fedavgm"}, BOTH),
        Contender("fedadam", "FedAdam", {"name": "fedadam", "beta1": 0.9}),
        Contender("scaffold", "SCAFFOLD", {"name": "scaffold"}, tuned_as="scaffold-derived"),
        Contender("scaffold-derived", "SCAFFOLD, sending d", {"name": "scaffold", "derived": True}),
        Contender("feddc", "FedDC", {"name": "feddc", "alpha": 0.01}, tuned_as="feddc-derived"),
        Contender("feddc-derived", "FedDC, sending d", {"name": "feddc", "alpha": 0.01, "derived": True}),
    )


def ours(network: str) -> tuple[Contender, ...]:
    return (
        Contender("fedbcgd", "FedBCGD", {"name": "fedbcgd", **blocks(network)}, BOTH),
        Contender("fedbcgd+", "FedBCGD+", {"name": "fedbcgd+", **blocks(network)}, BOTH),
    )


def central() -> Contender:
    return Contender("central", "Centralised SGD", {"name": "central"}, rounds_of="fedbcgd")


def compressed(network: str) -> tuple[Contender, ...]:
    return (
        Contender("fedavg", "FedAvg", {"name": "fedavg"}),
        Contender("topk", "Top-k, 18 %", {"name": "topk", "fraction": 0.18}),
        Contender("topk-5", "Top-k, 5 %", {"name": "topk", "fraction": 0.05}),
        Contender("fedpaq", "FedPAQ, 8 bits", {"name": "fedpaq", "levels": 127}),
        *ours(network),
        Contender("qsgd+fedbcgd", "QSGD+FedBCGD", {"name": "qsgd+fedbcgd", "levels": 127, **blocks(network)}, BOTH),
        Contender("qsgd+fedbcgd+", "QSGD+FedBCGD+", {"name": "qsgd+fedbcgd+", "levels": 127, **blocks(network)}, BOTH),
    )


def numbers_of_blocks() -> tuple[Contender, ...]:
    """N = 1 is FedAvgM, to the last bit."""
    one = Contender("N=1", "N = 1 (FedAvgM)", {"name": "fedavgm"}, BOTH, tuned_as="N=5")
    more = (
        Contender(f"N={n}", f"N = {n}", {"name": "fedbcgd", "blocks": n}, BOTH, tuned_as=None if n == 5 else "N=5")
        for n in (2, 5, 10, 20)
    )
    return (one, *more)


def ablations() -> tuple[Contender, ...]:
    """LeNet-5's fifth block is shared, or is a block like the others."""
    shared = blocks("lenet5")
    alone = {"blocks": 5, "divider": [["conv1"], ["conv2"], ["fc1"], ["fc2"], ["fc3"]], "shared": "none"}
    tuned = "share-momentum"
    return (
        Contender(
            "freezing-nonshare",
            "freezing, not shared",
            {"name": "fedbcgd-frozen", "momentum": 0.0, **alone},
            tuned_as=tuned,
        ),
        Contender(
            "freezing-share", "freezing, shared", {"name": "fedbcgd-frozen", "momentum": 0.0, **shared}, tuned_as=tuned
        ),
        Contender("nonshare", "not shared", {"name": "fedbcgd", "momentum": 0.0, **alone}, tuned_as=tuned),
        Contender("share", "shared", {"name": "fedbcgd", "momentum": 0.0, **shared}, tuned_as=tuned),
        Contender(tuned, "shared, momentum (FedBCGD)", {"name": "fedbcgd", **shared}, BOTH),
    )


def momenta(network: str) -> tuple[Contender, ...]:
    return tuple(
        Contender(f"λ={value}", f"λ = {value}", {"name": "fedbcgd", "momentum": value, **blocks(network)})
        for value in paper.MOMENTA
    )


# -- panels


def network(
    data: str,
    name: str,
    contenders: tuple[Contender, ...],
    budget: float = 1000.0,
    rho: float = 0.6,
    target: float | None = None,
    printed: Mapping[str, Printed] | None = None,
    reference: str = "fedavg",
    drawn: tuple[str, ...] = (),
) -> Panel:
    """A convolutional network on CIFAR."""
    return Panel(
        f"{data}-{name}",
        f"{NETWORKS[name]}, {DATA[data]}",
        {"name": data, "clients": paper.CLIENTS, "dirichlet": rho, "augment": True},
        {"name": name},
        paper.CNN_LOCAL,
        {"cohort": paper.COHORT},
        budget,
        contenders,
        paper.EFFORT,
        target=target,
        reference=reference,
        printed=printed or {},
        drawn=drawn,
    )


def transformer(data: str) -> Panel:
    """ViT-Base at 224 pixels, from published weights."""
    images = {"resize": 256, "crop": 224} if data == "tiny-imagenet" else {"resize": 224}
    key = f"{data}-vit"
    return Panel(
        key,
        f"ViT-Base, {DATA[data]}",
        {"name": data, "clients": paper.CLIENTS, "dirichlet": 0.6, "augment": True, **images},
        {"name": "vit-base", "weights": "google/vit-base-patch16-224-in21k"},
        paper.VIT_LOCAL,
        {"cohort": paper.COHORT},
        100.0,
        (central(), *baselines(), *ours("vit-base")),
        paper.EFFORT,
        target=paper.TARGETS["table5"][data],  # type: ignore[index]
        printed=paper.TABLE_5[key],
    )


def linear(key: str, title: str, model: str) -> Panel:
    """One class of EMNIST against all others."""
    data = "emnist-byclass"
    return Panel(
        key,
        title,
        {"name": data, "clients": paper.CLIENTS, "dirichlet": 0.1, "positive": 0},
        {"name": model},
        paper.LINEAR_LOCAL | {"weight_decay": 1e-4 * paper.SMOOTHNESS[data]},
        {"cohort": paper.COHORT},
        100.0,
        (*baselines(), *ours(model)),
        paper.EFFORT,
        metric="loss",
        drawn=("train_loss",),
    )
