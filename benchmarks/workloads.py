"""The workloads of the comparisons: a model, the images of a client, and its local steps.

The images are noise: their content does not change the time of a step.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbcgd.data.images import Images
from fedbcgd.models import LeNet5, Logistic, ResNet18

LR, DECAY = 0.01, 1e-3


class CNN(nn.Module):
    """Two convolutions, a pool, two dense layers, as in many tutorials on federated learning."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.fc1 = nn.Linear(12544, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu_(self.conv1(x))
        x = torch.relu_(F.max_pool2d(self.conv2(x), 2))
        return self.fc2(torch.relu_(self.fc1(x.flatten(1))))


class UsualCNN(CNN):
    """The same in the usual order: ReLU, then the pool."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


class UsualLeNet5(LeNet5):
    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc3(F.relu(self.fc2(x)))


@dataclass(frozen=True)
class Workload:
    model: Callable[[], nn.Module]
    shape: tuple[int, int, int]
    images: int  # of each client
    batch: int
    clients: int
    cohort: int
    rounds: int = 1  # in a turn
    convolutional: bool = True
    usual: Callable[[], nn.Module] | None = None  # the same network in its usual form

    def module(self, usual: bool = False) -> nn.Module:
        torch.manual_seed(0)
        return (self.usual if usual and self.usual else self.model)()

    @property
    def held(self) -> int:
        """The number of images in memory; clients share them if their own would take gigabytes."""
        return min(self.clients * self.images, 20_000)

    def pixels(self) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(0)
        channels, height, width = self.shape
        bytes_ = torch.randint(0, 256, (self.held, height, width, channels), generator=draw, dtype=torch.uint8)
        return bytes_.permute(0, 3, 1, 2), torch.randint(0, 10, (self.held,), generator=draw)

    def rows(self, client: int) -> Tensor:
        return (torch.arange(self.images) + client * self.images) % self.held

    def sources(self) -> list[Images]:
        """Return the clients' images as the simulator has them: bytes, scaled batch by batch."""
        x, y = self.pixels()
        channels = self.shape[0]
        whole = Images(x, y, torch.full((channels,), 0.5), torch.full((channels,), 0.25))
        return [whole.subset(self.rows(k)) for k in range(self.clients)]

    def floats(self) -> tuple[Tensor, Tensor]:
        """Return the images as raw loops have them: scaled floats."""
        x, y = self.pixels()
        scaled = x.float().div_(255).sub_(0.5).div_(0.25)
        return scaled.contiguous(memory_format=torch.channels_last) if self.convolutional else scaled, y


WORKLOADS = {
    "logistic": Workload(lambda: Logistic(10, (1, 28, 28)), (1, 28, 28), 60, 10, 1000, 10, 20, False),
    "lenet5": Workload(LeNet5, (3, 32, 32), 500, 50, 100, 4, usual=UsualLeNet5),
    "cnn": Workload(CNN, (3, 32, 32), 50, 10, 100, 50, usual=UsualCNN),
    "resnet18": Workload(lambda: ResNet18(10, (3, 32, 32), width=0.5), (3, 32, 32), 50, 50, 100, 4),
}
