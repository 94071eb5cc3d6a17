"""The networks of the paper. Each takes (classes, shape) and, if it can be scaled, `width`."""

from collections.abc import Callable

from torch import nn

from fedbcgd.models.binary import BinaryLogistic, BinarySigmoid
from fedbcgd.models.lenet import LeNet5
from fedbcgd.models.logistic import Logistic
from fedbcgd.models.resnet import ResNet18
from fedbcgd.models.vgg import VGG11, VGG19
from fedbcgd.models.vit import ViTBase16, ViTSmall

# The networks by their names in configurations.
MODELS: dict[str, Callable[..., nn.Module]] = {
    "lenet5": LeNet5,
    "vgg11": VGG11,
    "vgg19": VGG19,
    "resnet18": ResNet18,
    "vit-base": ViTBase16,
    "vit-small": ViTSmall,
    "logistic": Logistic,
    "binary-logistic": BinaryLogistic,
    "binary-sigmoid": BinarySigmoid,
}

__all__ = [
    "MODELS",
    "VGG11",
    "VGG19",
    "BinaryLogistic",
    "BinarySigmoid",
    "LeNet5",
    "Logistic",
    "ResNet18",
    "ViTBase16",
    "ViTSmall",
]
