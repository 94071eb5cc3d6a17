"""The model, the data, and how to train and test: nothing here knows of Flower."""

from functools import cache

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fedbcgd.data.embedded import fashion_mnist

load_images = cache(fashion_mnist)


class Net(nn.Module):
    """Two convolutions and two linear layers."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 5)
        self.conv2 = nn.Conv2d(8, 16, 5)
        self.fc1 = nn.Linear(16 * 4 * 4, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def load_data(partition_id, num_partitions, batch_size, examples):
    """Loaders of this client's training and validation images."""
    images, _ = load_images()
    rows = torch.arange(partition_id, len(images.labels), num_partitions)[:examples]
    x, y = images.images[rows].float() / 255, images.labels[rows]
    cut = len(rows) * 4 // 5
    training, validation = TensorDataset(x[:cut], y[:cut]), TensorDataset(x[cut:], y[cut:])
    return DataLoader(training, batch_size, shuffle=True), DataLoader(validation, batch_size)


def train(net, loader, epochs, lr, device):
    """Train in place; return the mean loss of the minibatches."""
    net.to(device).train()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    total, steps = 0.0, 0
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            total, steps = total + loss.item(), steps + 1
    return total / steps


def test(net, loader, device):
    """Return mean loss and accuracy."""
    net.to(device).eval()
    loss, correct, count = 0.0, 0, 0
    with torch.no_grad():
        for x, y in loader:
            scores = net(x.to(device))
            loss += F.cross_entropy(scores, y.to(device), reduction="sum").item()
            correct += int((scores.argmax(1) == y.to(device)).sum())
            count += len(y)
    return loss / count, correct / count
