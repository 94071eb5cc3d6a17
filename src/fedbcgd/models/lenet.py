"""LeNet-5 as in the paper's Appendix F: two 5×5 convolutions of 64 channels; dense layers of 384, 192, classes."""

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from fedbcgd.errors import UserError
from fedbcgd.models.width import scaled


class LeNet5(nn.Module):
    """LeNet-5. For 32×32×3 images its layers have 4,800, 102,400, 614,400, 73,728 and 1,920 weights, as in the paper.

    Args:
        classes: how many classes.
        shape: channels, height and width of an image.
        width: factor on all channels and dense layers.
    """

    # The paper says N = 5 and counts the shared layer as the fifth block.
    paper_blocks: ClassVar = [["conv1"], ["conv2"], ["fc1"], ["fc2"]]
    paper_shared: ClassVar = ["fc3"]

    def __init__(self, classes: int = 10, shape: tuple[int, int, int] = (3, 32, 32), width: float = 1.0):
        super().__init__()
        self.classes, self.shape, self.width = classes, shape, width
        channels, height, breadth = shape
        side = [((n - 4) // 2 - 4) // 2 for n in (height, breadth)]
        if min(side) < 1:
            raise UserError(f"LeNet5: expected images of at least 16×16, got {height}×{breadth}")
        c, wide, narrow = scaled(64, width), scaled(384, width), scaled(192, width)
        self.conv1 = nn.Conv2d(channels, c, 5)
        self.conv2 = nn.Conv2d(c, c, 5)
        self.fc1 = nn.Linear(c * side[0] * side[1], wide)
        self.fc2 = nn.Linear(wide, narrow)
        self.fc3 = nn.Linear(narrow, classes)

    def forward(self, x: Tensor) -> Tensor:
        # Pooling before ReLU gives the same values at a quarter of the ReLUs.
        x = F.relu_(F.max_pool2d(self.conv1(x), 2))
        x = F.relu_(F.max_pool2d(self.conv2(x), 2))
        x = x.flatten(1)
        x = F.relu_(self.fc1(x))
        x = F.relu_(self.fc2(x))
        return self.fc3(x)
