"""ResNet-18 in its CIFAR form: a 3×3 stem without pooling, four stages of two blocks, GroupNorm with 2 groups."""

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from fedbcgd.models.width import normalisation, scaled


class Block(nn.Module):
    """A residual block: two 3×3 convolutions and a shortcut, with a 1×1 convolution where the shape changes."""

    def __init__(self, channels: int, out_channels: int, stride: int, norm: str):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out_channels, 3, stride, 1, bias=False)
        self.norm1 = normalisation(norm, out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, 1, 1, bias=False)
        self.norm2 = normalisation(norm, out_channels)
        same = stride == 1 and channels == out_channels
        self.shortcut = (
            nn.Identity()
            if same
            else nn.Sequential(
                nn.Conv2d(channels, out_channels, 1, stride, bias=False), normalisation(norm, out_channels)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu_(self.norm1(self.conv1(x)))
        return F.relu_(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18.

    Args:
        classes: how many classes.
        shape: channels, height and width of an image.
        width: factor on all channels.
        norm: the normalisation after each convolution, see `width.normalisation`.
    """

    paper_blocks: ClassVar = [["stem", "stages.0"], ["stages.1"], ["stages.2"], ["stages.3.0"], ["stages.3.1"]]
    paper_shared: ClassVar = ["fc"]

    def __init__(
        self, classes: int = 10, shape: tuple[int, int, int] = (3, 32, 32), width: float = 1.0, norm: str = "group"
    ):
        super().__init__()
        self.classes, self.shape, self.width, self.norm = classes, shape, width, norm
        channels = scaled(64, width)
        self.stem = nn.Sequential(
            nn.Conv2d(shape[0], channels, 3, 1, 1, bias=False), normalisation(norm, channels), nn.ReLU(inplace=True)
        )
        stages = []
        for stage, size in enumerate((64, 128, 256, 512)):
            out_channels = scaled(size, width)
            first = Block(channels, out_channels, 1 if stage == 0 else 2, norm)
            stages.append(nn.Sequential(first, Block(out_channels, out_channels, 1, norm)))
            channels = out_channels
        self.stages = nn.Sequential(*stages)
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.stages(self.stem(x)).mean((2, 3)))
