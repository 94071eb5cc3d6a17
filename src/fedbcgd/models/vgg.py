"""VGG-11 and VGG-19 for small images: 3×3 convolutions, four poolings, three dense layers.

After four poolings a 32×32 image has 512 channels of 2×2: the 2,048 inputs that the paper's table lists for VGG-19.
"""

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from fedbcgd.errors import UserError
from fedbcgd.models.width import normalisation, scaled

POOLS = 4


class VGG(nn.Module):
    """The base of both networks.

    Args:
        classes: how many classes.
        shape: channels, height and width of an image.
        width: factor on all channels and dense layers.
        norm: the normalisation after each convolution, see `width.normalisation`.

    Attributes:
        stages: the channels of the convolutions in each stage; a pooling follows each stage but the last.
        dense: units of the two hidden dense layers.
    """

    stages: ClassVar[tuple[tuple[int, ...], ...]]
    dense: ClassVar[tuple[int, int]]

    def __init__(
        self, classes: int = 10, shape: tuple[int, int, int] = (3, 32, 32), width: float = 1.0, norm: str = "none"
    ):
        super().__init__()
        self.classes, self.shape, self.width, self.norm = classes, shape, width, norm
        channels, height, breadth = shape
        side = [n >> POOLS for n in (height, breadth)]
        if min(side) < 1:
            raise UserError(f"{type(self).__name__}: expected images of at least 16×16, got {height}×{breadth}")
        self.convs = nn.ModuleList()
        self._pooled: list[bool] = []
        for stage, sizes in enumerate(self.stages):
            for k, size in enumerate(sizes):
                out_channels = scaled(size, width)
                conv = nn.Conv2d(channels, out_channels, 3, padding=1)
                # With PyTorch's default the signal fades in so deep a network without normalisation.
                nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
                nn.init.constant_(conv.bias, 0.0)  # type: ignore[arg-type]
                self.convs.append(nn.Sequential(conv, normalisation(norm, out_channels)))
                self._pooled.append(k == len(sizes) - 1 and stage < POOLS)
                channels = out_channels
        first, second = (scaled(n, width) for n in self.dense)
        self.fc1 = nn.Linear(channels * side[0] * side[1], first)
        self.fc2 = nn.Linear(first, second)
        self.fc3 = nn.Linear(second, classes)

    def forward(self, x: Tensor) -> Tensor:
        for conv, pooled in zip(self.convs, self._pooled, strict=True):
            x = conv(x)
            x = F.relu_(F.max_pool2d(x, 2) if pooled else x)
        x = x.flatten(1)
        x = F.relu_(self.fc1(x))
        x = F.relu_(self.fc2(x))
        return self.fc3(x)


def _convs(*numbers: int) -> list[str]:
    return [f"convs.{k}" for k in numbers]


class VGG11(VGG):
    """VGG-11 with dense layers 2048 → 1024 → 1024 → classes.

    The paper's counts for its classifier (2,359,296 twice, then 102,400) fit no network. Here the last layer has the
    printed 102,400 weights for 100 classes, and the dense block is about as large as the others.
    """

    stages = ((64,), (128,), (256, 256), (512, 512), (512, 512))
    dense = (1024, 1024)
    paper_blocks: ClassVar = [_convs(0, 1), _convs(2, 3), _convs(4, 5), _convs(6, 7), ["fc1", "fc2"]]
    paper_shared: ClassVar = ["fc3"]


class VGG19(VGG):
    """VGG-19 with dense layers 2048 → 512 → 256 → classes, as the paper says."""

    stages = ((64, 64), (128, 128), (256,) * 4, (512,) * 4, (512,) * 4)
    dense = (512, 256)
    paper_blocks: ClassVar = [
        _convs(*range(8)),
        _convs(8, 9),
        _convs(10, 11),
        _convs(12, 13),
        [*_convs(14, 15), "fc1", "fc2"],
    ]
    paper_shared: ClassVar = ["fc3"]
