"""Networks of the paper."""

from collections.abc import Callable

from torch import nn

from fedbcgd.models.lenet import LeNet5
from fedbcgd.models.logistic import Logistic

# By the name in configurations; each takes (classes, shape).
MODELS: dict[str, Callable[[int, tuple[int, int, int]], nn.Module]] = {"lenet5": LeNet5, "logistic": Logistic}

__all__ = ["MODELS", "LeNet5", "Logistic"]
