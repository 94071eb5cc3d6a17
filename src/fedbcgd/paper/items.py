"""The items of the paper: what is run for each, what it claims, and what the paper leaves open. Tables 2 to 6 are in
tables2to6.py.
"""

from fedbcgd.paper import printed as paper
from fedbcgd.paper import settings as s
from fedbcgd.paper import table1
from fedbcgd.paper.claims import all_of, on_train_loss
from fedbcgd.paper.comparisons import ahead_early, each_sooner, ends_best, ends_better, ends_no_worse, reaches_sooner
from fedbcgd.paper.spec import AT_PAPER, SCALES, Claim, Item, Panel
from fedbcgd.paper.tables2to6 import (
    BASELINES,
    LENET_NOTES,
    NETWORK_NOTES,
    OPEN_CHOICES,
    OUR_ALGORITHMS,
    TABLE_2,
    TABLE_3,
    TABLES,
)


def _momenta(network: str) -> Panel:
    return s.network_panel("cifar100", network, s.momenta(network), drawn=("train_loss",))


_FIGURES = (
    Item(
        "figure3",
        "Figure 3: curves of Tables 2 and 3",
        {scale: TABLE_3[scale] + TABLE_2[scale] if scale != "smoke" else TABLE_3[scale] for scale in SCALES},
        (
            Claim(
                "figure3-early", "FedBCGD is ahead of FedAvg from early on (Figure 3)", ahead_early("fedbcgd", "fedavg")
            ),
        ),
        ("The runs are those of Tables 2 and 3.",),
        runs_of=("table2", "table3"),
    ),
    Item(
        "figure4",
        "Figure 4: number of blocks 1, 2, 5, 10, 20",
        {
            "paper": (
                s.network_panel(
                    "cifar100",
                    "resnet18",
                    s.numbers_of_blocks(),
                    budget=200.0,
                    target=paper.TARGETS["figure4"],  # type: ignore[arg-type]
                ),
            ),
            "desk": (s.with_changes(s.network_panel("cifar100", "lenet5", s.numbers_of_blocks()), s.DESK_FIGURE),),
            "cpu": (s.at_scale(s.network_panel("cifar10", "lenet5", s.numbers_of_blocks()), "cpu"),),
            "smoke": (s.at_scale(s.network_panel("cifar10", "lenet5", s.numbers_of_blocks()), "smoke"),),
        },
        (
            Claim(
                "figure4-sooner",
                "The more blocks, the fewer floats to the target (5.2)",
                each_sooner(["N=1", "N=2", "N=5", "N=10", "N=20"]),
            ),
            Claim(
                "figure4-least",
                "20 blocks need the fewest floats to the target (5.2)",
                reaches_sooner("N=20", ["N=1", "N=2", "N=5", "N=10"]),
            ),
            Claim(
                "figure4-best",
                "20 blocks end most accurate at the same upload (5.2)",
                ends_best(["N=1", "N=2", "N=5", "N=10", "N=20"], ["N=20"]),
            ),
        ),
        (
            *NETWORK_NOTES,
            "Network and data set are not named. A target of 53 % and cuts into 20 fit ResNet-18 on CIFAR-100.",
            "With S = 10 clients and N = 20 blocks there are fewer clients than blocks, which the paper's Figure 1 "
            "excludes: blocks take turns.",
            "One learning rate and momentum for all N, those chosen for N = 5; layers are cut where N needs it.",
        ),
    ),
    Item(
        "figure5",
        "Figure 5: what freezing, sharing and momentum do, LeNet-5",
        s.at_all_scales(
            *(s.network_panel(data, "lenet5", s.ablations(), reference="share") for data in ("cifar10", "cifar100")),
            desk=s.DESK_FIGURE,
        ),
        (
            Claim(
                "figure5-freezing",
                "Freezing all but the uploaded block in local training ends worse than training everything (5.2)",
                all_of(ends_better("nonshare", ["freezing-nonshare"]), ends_better("share", ["freezing-share"])),
            ),
            Claim(
                "figure5-sharing",
                "With the shared block FedBCGD ends better than without (5.2)",
                ends_better("share", ["nonshare"]),
            ),
            Claim(
                "figure5-sharing-sooner",
                "With the shared block FedBCGD converges faster than without (5.2)",
                reaches_sooner("share", ["nonshare"]),
            ),
            Claim(
                "figure5-momentum",
                "Momentum speeds FedBCGD up significantly (5.2)",
                reaches_sooner("share-momentum", ["share"]),
            ),
        ),
        (
            *NETWORK_NOTES,
            *LENET_NOTES,
            "The budget is not given: that of Tables 2 and 3. One learning rate for all, that of FedBCGD. Without sharing, "
            "the fifth layer is a block like the others.",
        ),
    ),
    Item(
        "figure6",
        "Figure 6: curves of Table 5",
        s.at_all_scales(s.transformer_panel("cifar100"), s.transformer_panel("tiny-imagenet")),
        (
            Claim(
                "figure6-early",
                "With a vision transformer FedBCGD is ahead of FedAvg from early on (Figure 6)",
                ahead_early("fedbcgd", "fedavg"),
            ),
        ),
        ("The runs are those of Table 5.",),
        runs_of=("table5",),
    ),
    Item(
        "figure7",
        "Figure 7: momentum λ from 0.4 to 0.9",
        {
            "paper": (_momenta("resnet18"),),
            "desk": (s.with_changes(_momenta("lenet5"), s.DESK_FIGURE),),
            "cpu": (s.at_scale(_momenta("lenet5"), "cpu"),),
            "smoke": (s.at_scale(_momenta("lenet5"), "smoke"),),
        },
        (
            Claim("figure7-early", "λ = 0.4 is ahead of λ = 0.8 early on (5.2)", ahead_early("λ=0.4", "λ=0.8")),
            Claim(
                "figure7-end",
                "λ = 0.8 ends more accurate than λ = 0.4 (5.2)",
                ends_better("λ=0.8", ["λ=0.4"]),
                scales=AT_PAPER,
            ),
            Claim(
                "figure7-best",
                "λ around 0.8 is best; much smaller or larger is worse (5.2)",
                ends_best([f"λ={v}" for v in paper.MOMENTA], ["λ=0.7", "λ=0.8"]),
                scales=AT_PAPER,
            ),
        ),
        (*NETWORK_NOTES, "The learning rate is chosen for each λ. The budget is not given: that of Table 2."),
    ),
)

_LINEAR_NOTES = (
    *OPEN_CHOICES,
    "One class of EMNIST (the digit 0) against all others, as the appendix says of the non-convex problem; the formula of "
    "the logistic regression has two classes too. The regulariser 1e-4·L contradicts the weight decay 0.001 of the list "
    "of settings: 1e-4·L is taken, L = 55.1 for images scaled to mean 0 and deviation 1. The budget is not given: 100d.",
    "The train loss is the mean over the minibatches of the round's clients, as they train.",
)


def _linear_item(name: str, title: str, panel: Panel, runs_of: tuple[str, ...] = ()) -> Item:
    """Return an item of Section 5.3 or Appendix F, with its claims on the test loss and on the training loss."""
    plus = all_of(reaches_sooner("fedbcgd+", ["fedbcgd"]), ends_better("fedbcgd+", ["fedbcgd"]))
    tests = {
        f"{key}-sooner": (
            f"{algorithm} converges faster than the baselines",
            all_of(reaches_sooner(key, BASELINES), ends_no_worse(key, BASELINES)),
        )
        for key, algorithm in OUR_ALGORITHMS
    } | {"plus": ("FedBCGD+ converges faster than FedBCGD", plus)}
    claims = [
        Claim(f"{name}-{key}", f"{text} (5.3, Appendix F: test loss)", test) for key, (text, test) in tests.items()
    ] + [
        Claim(f"{name}-{key}-train", f"{text} (5.3, Appendix F: train loss)", on_train_loss(test))
        for key, (text, test) in tests.items()
    ]
    return Item(name, title, s.at_all_scales(panel), tuple(claims), _LINEAR_NOTES, runs_of)


_LOGISTIC = s.linear_panel("logistic", "logistic regression, EMNIST", "binary-logistic")
_ERM = s.linear_panel("erm", "sigmoid loss, EMNIST", "binary-sigmoid")

ITEMS: dict[str, Item] = {
    item.name: item
    for item in (
        table1.ITEM,
        *TABLES,
        *_FIGURES,
        _linear_item("figure8", "Figure 8: logistic regression on EMNIST, ρ = 0.1", _LOGISTIC),
        _linear_item("appendix-logistic", "Appendix F (a): logistic regression, as Figure 8", _LOGISTIC, ("figure8",)),
        _linear_item("appendix-erm", "Appendix F (b): non-convex sigmoid loss on EMNIST, ρ = 0.1", _ERM),
    )
}
