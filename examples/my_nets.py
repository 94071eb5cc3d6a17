"""A regression of your own: model, loss, metrics and clients, for compare_regression.py and regression.toml."""

from typing import Any

import torch
from torch import Tensor, nn


class Net(nn.Module):
    """A small network for prices of houses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)[:, 0]


def absolute_error(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean absolute error, which is the loss here."""
    x, y = batch
    return (model(x) - y).abs().mean()


def metrics(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """Return what is reported of the test data."""
    return {"mae": absolute_error(model, batch)}


def make() -> tuple[nn.Module, Any, Any]:
    """Return model, loss and metrics, for `[model] name`."""
    return Net(), absolute_error, metrics


def houses(clients: int = 20, seed: int = 0) -> tuple[list[tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]:
    """Return the towns' houses and those of the test, for `[data] clients_from`."""
    g = torch.Generator().manual_seed(seed)
    slope = torch.randn(8, generator=g)
    x = torch.randn(clients + 5, 40, 8, generator=g)
    y = torch.tanh(x @ slope) + 0.1 * torch.randn(clients + 5, 40, generator=g)
    return list(zip(x[:clients], y[:clients], strict=True)), (x[clients:].flatten(0, 1), y[clients:].flatten())
