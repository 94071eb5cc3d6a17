"""Networks of the paper."""

from fedbcgd.models.lenet import LeNet5

MODELS = {"lenet5": LeNet5}  # by the name in configurations; each takes (classes, shape)

__all__ = ["MODELS", "LeNet5"]
