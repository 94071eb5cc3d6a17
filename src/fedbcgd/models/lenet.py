"""LeNet-5 as in the paper's Appendix F: two 5×5 convolutions of 64 channels; dense layers of 384, 192, classes."""

import torch.nn.functional as F
from torch import Tensor, nn

from fedbcgd.errors import UserError


class LeNet5(nn.Module):
    """For 32×32×3 images its layers hold 4,800 / 102,400 / 614,400 / 73,728 / 1,920 weights, as the paper lists."""

    def __init__(self, classes: int = 10, shape: tuple[int, int, int] = (3, 32, 32)):
        super().__init__()
        channels, height, width = shape
        side = [((n - 4) // 2 - 4) // 2 for n in (height, width)]
        if min(side) < 1:
            raise UserError(f"LeNet5: images must be at least 16×16, given {height}×{width}")
        self.conv1 = nn.Conv2d(channels, 64, 5)
        self.conv2 = nn.Conv2d(64, 64, 5)
        self.fc1 = nn.Linear(64 * side[0] * side[1], 384)
        self.fc2 = nn.Linear(384, 192)
        self.fc3 = nn.Linear(192, classes)

    def forward(self, x: Tensor) -> Tensor:
        # Pooling before ReLU gives the same values at a quarter of the ReLUs.
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        x = x.flatten(1)
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.fc3(x)
