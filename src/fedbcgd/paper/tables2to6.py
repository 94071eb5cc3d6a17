"""Tables 2 to 6: algorithms compared on neural networks under an upload budget."""

from dataclasses import replace

from fedbcgd.paper import printed as paper
from fedbcgd.paper import settings as s
from fedbcgd.paper.claims import never_measured
from fedbcgd.paper.comparisons import ends_better, ends_no_better, reaches_sooner, times_sooner
from fedbcgd.paper.spec import AT_PAPER, LATE, Claim, Item, Panel, Scale

OUR_ALGORITHMS = (("fedbcgd", "FedBCGD"), ("fedbcgd+", "FedBCGD+"))
BASELINES = ("fedavg", "fedavgm", "fedadam", "scaffold", "feddc")

OPEN_CHOICES = (
    "The paper does not say on what the hyper-parameters were searched, nor how many runs its deviations are of: here a "
    "tenth of the training set is held out for the search; the tables say how many seeds were run.",
    "SCAFFOLD and FedDC send 2d a round, as published and as the paper's Table 1 counts; the rows 'sending d' derive the "
    "control change at the server and train the same models in the same rounds.",
    "FedAdam: the paper's α = 0.9 is taken as β₁; the server's learning rate is not given, 0.01 is taken.",
)
LENET_NOTES = (
    "LeNet-5 has four blocks and a shared layer where the caption says N = 5 (erratum 8): the table of Appendix F counts "
    "the shared layer as the fifth.",
)
NETWORK_NOTES = (
    "How images are augmented and how networks normalise is not said: images are padded by four pixels, cropped at random, "
    "and every other one is mirrored; ResNet-18 has GroupNorm with two groups, LeNet-5 and VGG normalise nothing.",
)
CENTRAL_NOTES = (
    "Centralised SGD: the paper does not say for how long. It gets as many minibatches as FedBCGD, on all "
    "data in one place.",
)
MINIMA_NOTE = (
    "That FedBCGD converges to sharp minima (5.2 iii) contradicts the paragraph after it, by which local steps leave sharp "
    "minima; neither is measured."
)


def _panels(item: str, data: str, printed: paper.Table) -> tuple[Panel, ...]:
    targets: dict[str, float] = paper.TARGETS[item]  # type: ignore[assignment]
    return tuple(
        s.network_panel(
            data,
            name,
            (s.central(), *s.baselines(), *s.fedbcgd_contenders(name)),
            target=targets[name],
            printed=printed[f"{data}-{name}"],
        )
        for name in s.NETWORKS
    )


def _panels_by_scale(item: str, data: str, printed: paper.Table) -> dict[Scale, tuple[Panel, ...]]:
    """Return the panels of Table 2 or 3 at each scale.

    At scale `desk`, LeNet-5 has the budget of Table 6 and therefore its target. A narrow ResNet-18 is run on CIFAR-10 only.
    """
    scales = s.at_all_scales(*_panels(item, data, printed))
    desk = {panel.model["name"]: panel for panel in scales["desk"]}
    target = paper.TARGETS["table6"][data]  # type: ignore[index]
    lenet = s.with_changes(desk["lenet5"], {"target": target})
    return scales | {"desk": (lenet, desk["resnet18"]) if data == "cifar10" else (lenet,)}


TABLE_2 = _panels_by_scale("table2", "cifar100", paper.TABLE_2)
TABLE_3 = _panels_by_scale("table3", "cifar10", paper.TABLE_3)


def _network_claims(item: str) -> tuple[Claim, ...]:
    """Return the claims that Tables 2 and 3 have in common."""
    return (
        Claim(
            f"{item}-sooner",
            "FedBCGD reaches the target accuracy with fewer floats than FedAvg, FedAvgM, FedAdam, SCAFFOLD and FedDC "
            "(5.2 i)",
            reaches_sooner("fedbcgd", BASELINES),
        ),
        Claim(
            f"{item}-better",
            "FedBCGD ends more accurate than each of them under the same upload budget (5.2 i)",
            ends_better("fedbcgd", BASELINES),
        ),
        Claim(
            f"{item}-plus-sooner",
            "FedBCGD+ reaches the target accuracy with fewer floats than FedBCGD (5.2 ii)",
            reaches_sooner("fedbcgd+", ["fedbcgd"]),
        ),
        Claim(
            f"{item}-plus-end",
            "FedBCGD+ does not end more accurate than FedBCGD (5.2 ii)",
            ends_no_better("fedbcgd+", ["fedbcgd"]),
            scales=LATE,
        ),
        Claim(
            f"{item}-central",
            "FedBCGD ends more accurate than centralised SGD (5.2 iii)",
            ends_better("fedbcgd", ["central"]),
            scales=LATE,
        ),
        *_plus_claims(item, "5.2 ii, iii"),
        Claim(
            f"{item}-minima",
            "FedBCGD and FedBCGD+ leave poor local minima and converge to sharp ones (5.2 iii)",
            never_measured("How sharp a minimum is, is not measured."),
        ),
    )


def _plus_claims(item: str, where: str) -> tuple[Claim, ...]:
    """Return the claims on FedBCGD+ against all others but FedBCGD; `where` is their place in the paper."""
    return (
        Claim(
            f"{item}-plus-others-sooner",
            f"FedBCGD+ reaches the target with fewer floats than the baselines ({where})",
            reaches_sooner("fedbcgd+", BASELINES),
        ),
        Claim(
            f"{item}-plus-others-better",
            f"FedBCGD+ ends more accurate than the baselines ({where})",
            ends_better("fedbcgd+", BASELINES),
        ),
        Claim(
            f"{item}-plus-central",
            f"FedBCGD+ ends more accurate than centralised SGD ({where})",
            ends_better("fedbcgd+", ["central"]),
            scales=LATE,
        ),
    )


TABLES = (
    Item(
        "table2",
        "Table 2: networks on CIFAR-100, ρ = 0.6",
        TABLE_2,
        (
            *_network_claims("table2"),
            Claim(
                "table2-7.3",
                "LeNet-5 on CIFAR-100: FedBCGD reaches 40 % 7.3 times sooner than FedAvg (5.2 i)",
                times_sooner("fedbcgd", "fedavg", 7.3),
                panels="lenet5",
                scales=AT_PAPER,
            ),
            Claim(
                "table2-1.8",
                "ResNet-18 on CIFAR-100: FedBCGD+ reaches 54 % 1.8 times sooner than FedBCGD (5.2 ii)",
                times_sooner("fedbcgd+", "fedbcgd", 1.8),
                panels="resnet18",
                scales=AT_PAPER,
            ),
        ),
        (
            *OPEN_CHOICES,
            *NETWORK_NOTES,
            *LENET_NOTES,
            *CENTRAL_NOTES,
            "The table itself has FedBCGD+ end more accurate than FedBCGD with VGG-19 (63.6 against 61.1).",
            "558d are 7.2 times 77d, not 7.3: a factor counts as reached where floats in whole d can stand for it.",
            MINIMA_NOTE,
        ),
    ),
    Item(
        "table3",
        "Table 3: networks on CIFAR-10, ρ = 0.6",
        TABLE_3,
        _network_claims("table3"),
        (
            *OPEN_CHOICES,
            *NETWORK_NOTES,
            *LENET_NOTES,
            *CENTRAL_NOTES,
            MINIMA_NOTE,
            "The table itself does not bear out every sentence. With VGG-11 SCAFFOLD reaches the target before FedBCGD "
            "(278d, 292d). With VGG-19 FedBCGD+ needs more floats than FedBCGD (207d, 117d), centralised SGD ends above "
            "both (88.6 against 87.8 and 87.1), and FedAvgM and FedAdam are level with both (87.4 ± 0.5, 87.5 ± 0.9). Level "
            "with FedBCGD+ are also SCAFFOLD with LeNet-5 (82.8 ± 0.7, 83.5 ± 0.3) and centralised SGD with ResNet-18 "
            "(90.1 ± 0.1, 90.3 ± 0.5).",
            "Printed in the table: FedDC with ResNet-18 reaching its target at 1985d, beyond the budget of 1000d.",
        ),
    ),
    Item(
        "table4",
        "Table 4: ResNet-18 at high heterogeneity, ρ = 0.1",
        s.at_all_scales(
            *(
                s.network_panel(
                    data,
                    "resnet18",
                    (*s.baselines(), *s.fedbcgd_contenders("resnet18")),
                    rho=0.1,
                    target=paper.TARGETS["table4"][data],  # type: ignore[index]
                    printed=paper.TABLE_4[f"{data}-resnet18"],
                )
                for data in ("cifar100", "cifar10")
            ),
            # As many local steps as in the paper, in smaller batches: with fewer steps all accuracies are near chance.
            cpu={"budget": 6.0, "local": {"batch_size": 10}, "effort": replace(s.CPU_SHORT, evaluations=12)},
        ),
        (
            *(
                claim
                for key, name in OUR_ALGORITHMS
                for claim in (
                    Claim(
                        f"table4-{key}-sooner",
                        f"At ρ = 0.1 {name} reaches the target with fewer floats than the baselines (5.2)",
                        reaches_sooner(key, BASELINES),
                    ),
                    Claim(
                        f"table4-{key}-better",
                        f"At ρ = 0.1 {name} ends more accurate than the baselines (5.2)",
                        ends_better(key, BASELINES),
                    ),
                )
            ),
            Claim(
                "table4-plus",
                "At ρ = 0.1 FedBCGD+ slightly outperforms FedBCGD (5.2)",
                ends_better("fedbcgd+", ["fedbcgd"]),
            ),
        ),
        (
            *OPEN_CHOICES,
            *NETWORK_NOTES,
            "The sentence that FedBCGD+ slightly outperforms FedBCGD is true of the printed CIFAR-100 column alone, and "
            "there within the deviations (59.9 ± 0.4, 59.5 ± 0.3); on CIFAR-10 the table has it six points behind, and "
            "level with FedDC (80.2 ± 1.3, 79.1 ± 0.8).",
        ),
    ),
    Item(
        "table5",
        "Table 5: vision transformer, ρ = 0.6",
        s.at_all_scales(s.transformer_panel("cifar100"), s.transformer_panel("tiny-imagenet")),
        (
            Claim(
                "table5-sooner",
                "With a vision transformer FedBCGD reaches the target with fewer floats than the baselines (5.2)",
                reaches_sooner("fedbcgd", BASELINES),
            ),
            Claim(
                "table5-better",
                "With a vision transformer FedBCGD ends most accurate of all (5.2)",
                ends_better("fedbcgd", (*BASELINES, "fedbcgd+")),
            ),
            Claim(
                "table5-3",
                "ViT-Base on CIFAR-100: more than 3 times sooner than FedAvg (5.2)",
                times_sooner("fedbcgd", "fedavg", 3.0, strictly=True),
                panels="cifar100",
                scales=AT_PAPER,
            ),
            Claim(
                "table5-11.5",
                "ViT-Base on Tiny ImageNet: more than 11.5 times sooner than FedAvg (5.2)",
                times_sooner("fedbcgd", "fedavg", 11.5, strictly=True),
                panels="tiny",
                scales=AT_PAPER,
            ),
            Claim(
                "table5-central",
                "With a vision transformer FedBCGD ends more accurate than centralised SGD (Table 5)",
                ends_better("fedbcgd", ["central"]),
                scales=AT_PAPER,
            ),
            *_plus_claims("table5", "Table 5"),
        ),
        (
            *OPEN_CHOICES,
            *CENTRAL_NOTES,
            "The table itself has FedAvg level with FedBCGD+ on CIFAR-100 (90.4 ± 0.1, 90.6 ± 0.3).",
            "Whether images are augmented is not said: they are cropped at random (those of Tiny ImageNet from 256 to 224 "
            "pixels) and mirrored.",
            "Which pretrained ViT-Base is not said ('the official website'): google/vit-base-patch16-224-in21k is taken, "
            "CIFAR images are scaled to 224 pixels. Six even blocks (erratum 11).",
        ),
    ),
    Item(
        "table6",
        "Table 6: compression, LeNet-5, ρ = 0.6",
        s.at_all_scales(
            *(
                s.network_panel(
                    data,
                    "lenet5",
                    s.compressed("lenet5"),
                    budget=200.0,
                    target=paper.TARGETS["table6"][data],  # type: ignore[index]
                    printed=paper.TABLE_6[f"{data}-lenet5"],
                )
                for data in ("cifar10", "cifar100")
            ),
            cpu={"effort": replace(s.CPU_EFFORT, seeds=1)},
        ),
        (
            Claim(
                "table6-sooner",
                "FedBCGD reaches the target with fewer floats than top-k and FedPAQ (5.2)",
                reaches_sooner("fedbcgd", ("topk", "topk-5", "fedpaq")),
            ),
            Claim(
                "table6-better",
                "FedBCGD ends more accurate than top-k and FedPAQ (5.2)",
                ends_better("fedbcgd", ("topk", "topk-5", "fedpaq")),
            ),
            Claim(
                "table6-qsgd",
                "Quantising FedBCGD's blocks with QSGD speeds it up further (5.2)",
                reaches_sooner("qsgd+fedbcgd", ["fedbcgd"]),
            ),
            Claim(
                "table6-qsgd-plus",
                "Quantising FedBCGD+'s blocks with QSGD speeds it up further (Table 6)",
                reaches_sooner("qsgd+fedbcgd+", ["fedbcgd+"]),
            ),
        ),
        (
            *OPEN_CHOICES[:1],
            *NETWORK_NOTES,
            *LENET_NOTES,
            "Neither k nor the bits of QSGD are given. Top-k stands twice: at 18 %, which sends about as much a round as a "
            "block, and at 5 %; a claim against top-k holds only if it holds against both. QSGD has 8 bits, buckets of "
            "512.",
        ),
    ),
)
