"""What the paper prints: the numbers of Tables 2 to 6 and the settings of Section 5.1 and Appendix F."""

from collections.abc import Mapping
from math import inf
from typing import Any

from fedbcgd.paper.spec import Effort, Printed

CLIENTS, COHORT = 100, 10
RATES = (0.01, 0.03, 0.05, 0.1, 0.2, 0.3)
MOMENTA = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
# The paper prints deviations, but does not say over how many runs, nor how it searched: three seeds are taken here. It
# prints floats in whole d, so a run of 1000 d is evaluated once in each d.
EFFORT = Effort({"lr": RATES, "momentum": MOMENTA}, seeds=3, share=1.0, evaluations=1000)

CNN_LOCAL: dict[str, Any] = {"local_epochs": 5, "batch_size": 50, "lr_decay": 0.998, "weight_decay": 0.001}
VIT_LOCAL = CNN_LOCAL | {"local_epochs": 1, "batch_size": 16}
LINEAR_LOCAL = CNN_LOCAL | {"local_epochs": 1}

# The regulariser of logistic regression is 1e-4·L, where L = λ_max(AᵀA/n)/4 is the smoothness of the loss. For the images
# of EMNIST, scaled to mean 0 and deviation 1, L = 55.1.
SMOOTHNESS = {"emnist-byclass": 55.1, "embedded": 75.8}

BLOCKS = {"lenet5": 4, "vgg11": 5, "resnet18": 5, "vgg19": 5, "vit-base": 6}  # LeNet-5: erratum 8

Table = Mapping[str, Mapping[str, Printed]]  # by panel and contender


def _table(panels: list[str], rows: Mapping[str, list[tuple[float, ...]]]) -> Table:
    return {panel: {key: Printed(*cells[k]) for key, cells in rows.items()} for k, panel in enumerate(panels)}


_NETWORKS = ["lenet5", "vgg11", "resnet18", "vgg19"]
TABLE_2 = _table(
    [f"cifar100-{network}" for network in _NETWORKS],
    {
        "central": [(53.7, 0.2), (56.3, 0.3), (62.2, 0.1), (58.9, 0.1)],
        "fedavg": [(41.2, 0.2, 558), (48.7, 0.4, 720), (54.2, 0.2, 927), (47.6, 0.1, 735)],
        "fedavgm": [(48.2, 0.5, 277), (51.7, 0.6, 299), (61.8, 0.8, 398), (56.0, 0.3, 403)],
        "fedadam": [(46.2, 0.8, 391), (50.9, 0.5, 597), (53.9, 0.4, inf), (58.7, 0.2, 367)],
        "scaffold": [(50.3, 0.2, 214), (47.9, 0.2, inf), (52.3, 0.2, inf), (58.3, 0.5, 556)],
        "feddc": [(53.2, 0.3, 302), (48.2, 0.2, 956), (46.6, 0.1, inf), (56.8, 0.4, 321)],
        "fedbcgd": [(55.7, 0.4, 77), (62.2, 0.4, 107), (68.1, 0.5, 277), (61.1, 0.3, 206)],
        "fedbcgd+": [(55.6, 0.3, 75), (58.7, 0.3, 105), (65.1, 1.8, 154), (63.6, 0.4, 176)],
    },
)
TABLE_3 = _table(
    [f"cifar10-{network}" for network in _NETWORKS],
    {
        "central": [(83.1, 0.2), (87.4, 0.3), (90.1, 0.1), (88.6, 0.1)],
        "fedavg": [(79.6, 0.3, 498), (83.3, 0.7, 630), (89.0, 0.5, 698), (84.9, 0.7, 499)],
        "fedavgm": [(81.1, 0.6, 360), (83.7, 0.4, 830), (89.1, 0.7, 882), (87.4, 0.5, 252)],
        "fedadam": [(78.3, 1.2, 860), (85.4, 1.1, 478), (81.1, 1.3, inf), (87.5, 0.9, 298)],
        "scaffold": [(82.8, 0.7, 540), (86.9, 0.6, 278), (89.0, 0.4, 747), (85.5, 0.5, 358)],
        "feddc": [(83.0, 0.2, 280), (83.1, 0.6, 866), (88.0, 0.6, 1985), (78.0, 0.9, inf)],
        "fedbcgd": [(84.7, 0.7, 249), (88.4, 0.7, 292), (92.1, 0.3, 398), (87.8, 0.4, 117)],
        "fedbcgd+": [(83.5, 0.3, 182), (88.3, 0.4, 209), (90.3, 0.5, 266), (87.1, 0.4, 207)],
    },
)
TABLE_4 = _table(
    ["cifar100-resnet18", "cifar10-resnet18"],
    {
        "fedavg": [(45.8, 0.3, 741), (78.1, 0.4, 952)],
        "fedavgm": [(48.3, 0.6, 769), (78.6, 0.8, 997)],
        "fedadam": [(49.9, 0.5, 610), (71.4, 1.1, inf)],
        "scaffold": [(44.3, 0.3, inf), (76.3, 1.4, inf)],
        "feddc": [(46.6, 0.8, 278), (79.1, 0.8, 948)],
        "fedbcgd": [(59.5, 0.3, 147), (86.2, 0.9, 212)],
        "fedbcgd+": [(59.9, 0.4, 200), (80.2, 1.3, 768)],
    },
)
TABLE_5 = _table(
    ["cifar100-vit", "tiny-imagenet-vit"],
    {
        "central": [(81.5, 0.3), (76.7, 0.2)],
        "fedavg": [(90.4, 0.1, 24), (71.2, 0.1, 67)],
        "fedavgm": [(88.7, 0.3, 32), (76.7, 0.4, 10)],
        "fedadam": [(87.6, 0.2, inf), (65.5, 0.6, inf)],
        "scaffold": [(88.2, 0.3, 88), (56.8, 1.1, inf)],
        "feddc": [(85.8, 0.4, 25), (55.0, 1.2, inf)],
        "fedbcgd": [(92.0, 0.2, 7), (83.5, 0.2, 5.8)],
        "fedbcgd+": [(90.6, 0.3, 14), (81.3, 0.2, 4.6)],
    },
)
TABLE_6 = _table(
    ["cifar100-lenet5", "cifar10-lenet5"],
    {
        "fedavg": [(35.4, 0.1, inf), (73.2, 0.1, 133)],
        "topk": [(42.2, 0.5, 112), (74.5, 0.4, 92)],
        "fedpaq": [(43.3, 0.2, 110), (75.2, 0.4, 121)],
        "fedbcgd": [(48.7, 0.2, 91), (77.2, 0.2, 65)],
        "fedbcgd+": [(49.6, 0.3, 89), (80.6, 0.2, 57)],
        "qsgd+fedbcgd": [(52.2, 0.4, 61), (82.6, 0.1, 32)],
        "qsgd+fedbcgd+": [(53.1, 0.2, 56), (83.2, 0.3, 29)],
    },
)
TARGETS = {
    "table2": {"lenet5": 40, "vgg11": 48, "resnet18": 54, "vgg19": 45},
    "table3": {"lenet5": 78, "vgg11": 83, "resnet18": 88, "vgg19": 84},
    "table4": {"cifar100": 45, "cifar10": 78},
    "table5": {"cifar100": 88, "tiny-imagenet": 70},
    "table6": {"cifar100": 40, "cifar10": 70},
    "figure4": 53,
}
