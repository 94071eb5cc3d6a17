"""The panels at each scale: the paper's exact settings, a part of them for a few cores and days (`desk`), a miniature
(`cpu`), and a trial of the machinery (`smoke`).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fedbcgd.paper import printed as paper
from fedbcgd.paper.spec import Contender, Effort, Halving, Panel, Printed, Scale

NETWORKS = {"lenet5": "LeNet-5", "vgg11": "VGG-11", "resnet18": "ResNet-18", "vgg19": "VGG-19"}
DATA = {
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "tiny-imagenet": "Tiny ImageNet",
    "emnist-byclass": "EMNIST (byclass)",
}
LR_AND_MOMENTUM = ("lr", "momentum")

_DESK_GRID: dict[str, tuple[float, ...]] = {
    "lr": paper.RATES,
    "momentum": (0.0, *paper.MOMENTA),
    "alpha": (0.001, 0.01, 0.1),
    "server_lr": (0.003, 0.01, 0.03),
}
DESK_EFFORT = Effort(_DESK_GRID, seeds=3, share=1.0, evaluations=100, halving=Halving(rounds=120))
DESK_FIGURE: "Changes" = {"budget": 40.0, "target": None, "effort": replace(DESK_EFFORT, seeds=1)}
_DESK_LINEAR = replace(
    DESK_EFFORT, grid=_DESK_GRID | {"lr": (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)}, halving=Halving(rounds=400)
)
CPU_EFFORT = Effort({"lr": (0.1, 0.03, 0.3), "momentum": (0.5,)}, seeds=2, share=0.25, evaluations=25)
CPU_SHORT = replace(CPU_EFFORT, seeds=1, min_rounds=6)  # for networks that are slow even when narrow
CPU_LINEAR = replace(CPU_EFFORT, grid={"lr": (0.01, 0.003, 0.03), "momentum": (0.5,)})
SMOKE_EFFORT = Effort({"lr": (0.05, 0.1), "momentum": (0.5,)}, seeds=1, share=0.5, min_rounds=1, evaluations=2)
SMOKE_NO_SEARCH = replace(SMOKE_EFFORT, grid={"lr": (0.05,), "momentum": (0.5,)})  # one panel tries the search

Changes = Mapping[str, Any]  # new values of a panel's fields; see `with_changes`

# Changes at scale `desk`, by model; other models are left out at that scale.
DESK_CHANGES: dict[str, Changes] = {
    "lenet5": {"budget": 200.0, "effort": DESK_EFFORT},
    "resnet18": {
        "model": {"width": 0.25},
        "budget": 40.0,
        "target": None,
        "effort": replace(DESK_EFFORT, seeds=1, halving=Halving(rounds=36, candidates=6)),
    },
    "binary-logistic": {"effort": _DESK_LINEAR},
    "binary-sigmoid": {"effort": _DESK_LINEAR},
}
_NARROW: Changes = {"model": {"width": 0.125}, "local": {"local_epochs": 1}, "budget": 4.0, "effort": CPU_SHORT}
# Changes at scale `cpu`, by model.
CPU_CHANGES: dict[str, Changes] = {
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
    "effort": replace(SMOKE_NO_SEARCH, grid={"lr": (0.01,), "momentum": (0.5,)}),
}
SMOKE_CHANGES: dict[str, Changes] = {
    "lenet5": {"model": {"width": 0.04}, "data": {"resize": 16}},
    "resnet18": {"model": {"width": 0.04}, "data": {"resize": 8}, "effort": SMOKE_NO_SEARCH},
    "vit-base": {
        "model": {"name": "vit-small", "weights": None, "options": {"dim": 12, "depth": 1, "heads": 1}},
        "data": {"resize": 8, "crop": None},
        "effort": SMOKE_NO_SEARCH,
    },
    "binary-logistic": _SMOKE_LINEAR,
    "binary-sigmoid": _SMOKE_LINEAR,
}
SMOKE_COMMON: Changes = {
    "data": {"name": "embedded", "augment": False},
    "local": {"local_steps": 1},
    "budget": 2.0,
    "run": {"workers": 0},
    "effort": SMOKE_EFFORT,
}


def with_changes(panel: Panel, changes: Changes) -> Panel:
    """Return a panel with changed fields.

    Args:
        panel: the panel.
        changes: new values by field. A mapping updates the panel's, and None in it removes a key; other values replace
            the panel's.
    """
    new: dict[str, Any] = {}
    for name, value in changes.items():
        old = getattr(panel, name)
        if isinstance(old, Mapping) and name != "printed":
            value = {k: v for k, v in {**old, **value}.items() if v is not None}
        new[name] = value
    return replace(panel, **new)


def at_scale(panel: Panel, scale: Scale) -> Panel:
    """Return the paper's panel at a scale.

    At scales `cpu` and `smoke` the printed targets are out of reach, so the target is FedAvg's final value. Centralised
    training is left out if the budget is small, since the paper prints its accuracy after convergence.
    """
    name = panel.model["name"]
    if scale == "paper":
        return panel
    uploading = tuple(c for c in panel.contenders if c.rounds_of is None)
    if scale == "desk":
        contenders = uploading if name == "resnet18" else panel.contenders
        return with_changes(panel, {"contenders": desk_contenders(contenders), **DESK_CHANGES[name]})
    if scale == "cpu":
        return with_changes(panel, {"effort": CPU_EFFORT, "target": None, "contenders": uploading, **CPU_CHANGES[name]})
    title = f"trial in the place of {panel.title}"
    return with_changes(with_changes(panel, {**SMOKE_COMMON, "target": None, "title": title}), SMOKE_CHANGES[name])


def at_all_scales(
    *panels: Panel, cpu: Changes | None = None, desk: Changes | None = None
) -> dict[Scale, tuple[Panel, ...]]:
    """Return the paper's panels at each scale.

    Args:
        panels: the panels at scale `paper`. Scale `desk` leaves out networks that have no entry in DESK_CHANGES, scale
            `cpu` leaves out Tiny ImageNet, scale `smoke` has one panel.
        cpu: further changes at scale `cpu`.
        desk: further changes at scale `desk`.
    """
    smoke = next(panel for panel in panels if panel.model["name"] in SMOKE_CHANGES)
    return {
        "paper": panels,
        "desk": tuple(with_changes(at_scale(p, "desk"), desk or {}) for p in panels if p.model["name"] in DESK_CHANGES),
        "cpu": tuple(with_changes(at_scale(p, "cpu"), cpu or {}) for p in panels if p.data["name"] != "tiny-imagenet"),
        "smoke": (at_scale(smoke, "smoke"),),
    }


# -- contenders


def block_options(network: str) -> dict[str, Any]:
    """Return the block division of Appendix F for a network; five blocks if the appendix has none for it."""
    return {"blocks": paper.BLOCKS[network], "divider": "paper"} if network in paper.BLOCKS else {"blocks": 5}


def baselines() -> tuple[Contender, ...]:
    """Return the baselines of Tables 2 to 5.

    SCAFFOLD and FedDC that send d instead of 2d train the same models, so one search serves both forms.
    """
    return (
        Contender("fedavg", "FedAvg", {"name": "fedavg"}),
        Contender("fedavgm", "FedAvgM", {"name": "fedavgm"}, LR_AND_MOMENTUM),
        Contender("fedadam", "FedAdam", {"name": "fedadam", "beta1": 0.9}),
        Contender("scaffold", "SCAFFOLD", {"name": "scaffold"}, tuned_as="scaffold-derived"),
        Contender("scaffold-derived", "SCAFFOLD, sending d", {"name": "scaffold", "derived": True}),
        Contender("feddc", "FedDC", {"name": "feddc", "alpha": 0.01}, tuned_as="feddc-derived"),
        Contender("feddc-derived", "FedDC, sending d", {"name": "feddc", "alpha": 0.01, "derived": True}),
    )


def fedbcgd_contenders(network: str) -> tuple[Contender, ...]:
    """Return FedBCGD and FedBCGD+ with the network's block division."""
    return (
        Contender("fedbcgd", "FedBCGD", {"name": "fedbcgd", **block_options(network)}, LR_AND_MOMENTUM),
        Contender("fedbcgd+", "FedBCGD+", {"name": "fedbcgd+", **block_options(network)}, LR_AND_MOMENTUM),
    )


def desk_contenders(contenders: tuple[Contender, ...]) -> tuple[Contender, ...]:
    """Return the contenders as they are at scale `desk`.

    α of FedDC and the server's learning rate of FedAdam are searched, too. An algorithm with quantisation to eight bits
    takes the hyper-parameters of the one without. A contender that sends so little in a round that 200 d are thousands of
    rounds is run only until the target. The forms of FedBCGD+ that send half as much are added after it.
    """
    out = []
    for contender in contenders:
        fixed = dict(contender.algorithm)
        if fixed["name"] == "feddc":
            fixed.pop("alpha")
            contender = replace(contender, algorithm=fixed, grid=("lr", "alpha"))
        elif fixed["name"] == "fedadam":
            contender = replace(contender, grid=("lr", "server_lr"))
        elif contender.key == "topk-5":
            contender = replace(contender, until_target=True)
        elif contender.key in ("fedpaq", "qsgd+fedbcgd", "qsgd+fedbcgd+"):
            plain = {"fedpaq": "fedavg"}.get(contender.key, contender.key.removeprefix("qsgd+"))
            contender = replace(contender, tuned_as=plain, until_target=contender.key != "fedpaq")
        out.append(contender)
        if contender.key == "fedbcgd+":
            blocks = {k: v for k, v in fixed.items() if k != "name"}
            out += [
                Contender(
                    "fedbcgd+derived", "FedBCGD+ derived", {"name": "fedbcgd+derived", **blocks}, LR_AND_MOMENTUM
                ),
                Contender(
                    "scaffold-blocks",
                    "SCAFFOLD on blocks, derived, with momentum",
                    {"name": "scaffold", "uplink": "blocks", "server": "momentum", "derived": True, **blocks},
                    LR_AND_MOMENTUM,
                ),
            ]
    return tuple(out)


def central() -> Contender:
    """Return centralised SGD, with as many minibatches as FedBCGD."""
    return Contender("central", "Centralised SGD", {"name": "central"}, rounds_of="fedbcgd")


def compressed(network: str) -> tuple[Contender, ...]:
    """Return the contenders of Table 6."""
    return (
        Contender("fedavg", "FedAvg", {"name": "fedavg"}),
        Contender("topk", "Top-k, 18 %", {"name": "topk", "fraction": 0.18}),
        Contender("topk-5", "Top-k, 5 %", {"name": "topk", "fraction": 0.05}),
        Contender("fedpaq", "FedPAQ, 8 bits", {"name": "fedpaq", "levels": 127}),
        *fedbcgd_contenders(network),
        Contender(
            "qsgd+fedbcgd",
            "QSGD+FedBCGD",
            {"name": "qsgd+fedbcgd", "levels": 127, **block_options(network)},
            LR_AND_MOMENTUM,
        ),
        Contender(
            "qsgd+fedbcgd+",
            "QSGD+FedBCGD+",
            {"name": "qsgd+fedbcgd+", "levels": 127, **block_options(network)},
            LR_AND_MOMENTUM,
        ),
    )


def numbers_of_blocks() -> tuple[Contender, ...]:
    """Return the contenders of Figure 4. N = 1 is FedAvgM, bit for bit."""
    undivided = Contender("N=1", "N = 1 (FedAvgM)", {"name": "fedavgm"}, LR_AND_MOMENTUM, tuned_as="N=5")
    divided = (
        Contender(
            f"N={n}", f"N = {n}", {"name": "fedbcgd", "blocks": n}, LR_AND_MOMENTUM, tuned_as=None if n == 5 else "N=5"
        )
        for n in (2, 5, 10, 20)
    )
    return (undivided, *divided)


def ablations() -> tuple[Contender, ...]:
    """Return the contenders of Figure 5: LeNet-5's last layer is the shared block, or a block like the others."""
    shared = block_options("lenet5")
    not_shared = {"blocks": 5, "divider": [["conv1"], ["conv2"], ["fc1"], ["fc2"], ["fc3"]], "shared": "none"}
    tuned = "share-momentum"
    return (
        Contender(
            "freezing-nonshare",
            "freezing, not shared",
            {"name": "fedbcgd-frozen", "momentum": 0.0, **not_shared},
            tuned_as=tuned,
        ),
        Contender(
            "freezing-share", "freezing, shared", {"name": "fedbcgd-frozen", "momentum": 0.0, **shared}, tuned_as=tuned
        ),
        Contender("nonshare", "not shared", {"name": "fedbcgd", "momentum": 0.0, **not_shared}, tuned_as=tuned),
        Contender("share", "shared", {"name": "fedbcgd", "momentum": 0.0, **shared}, tuned_as=tuned),
        Contender(tuned, "shared, momentum (FedBCGD)", {"name": "fedbcgd", **shared}, LR_AND_MOMENTUM),
    )


def momenta(network: str) -> tuple[Contender, ...]:
    """Return the contenders of Figure 7."""
    return tuple(
        Contender(f"λ={value}", f"λ = {value}", {"name": "fedbcgd", "momentum": value, **block_options(network)})
        for value in paper.MOMENTA
    )


# -- panels


def network_panel(
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
    """Return the panel of a convolutional network on CIFAR; `rho` is the Dirichlet parameter of the label split."""
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


def transformer_panel(data: str) -> Panel:
    """Return the panel of ViT-Base at 224 pixels, from published weights."""
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
        (central(), *baselines(), *fedbcgd_contenders("vit-base")),
        paper.EFFORT,
        target=paper.TARGETS["table5"][data],  # type: ignore[index]
        printed=paper.TABLE_5[key],
    )


def linear_panel(key: str, title: str, model: str) -> Panel:
    """Return a panel that tells one class of EMNIST from all others."""
    data = "emnist-byclass"
    return Panel(
        key,
        title,
        {"name": data, "clients": paper.CLIENTS, "dirichlet": 0.1, "positive": 0},
        {"name": model},
        paper.LINEAR_LOCAL | {"weight_decay": 1e-4 * paper.SMOOTHNESS[data]},
        {"cohort": paper.COHORT},
        100.0,
        (*baselines(), *fedbcgd_contenders(model)),
        paper.EFFORT,
        metric="loss",
        drawn=("train_loss",),
    )
