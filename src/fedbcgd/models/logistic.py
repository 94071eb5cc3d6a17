"""Multinomial logistic regression: one linear layer, initially zero."""

import math

import torch
from torch import Tensor, nn


class Logistic(nn.Module):
    """One linear layer over the flattened input, trained with the cross entropy."""

    def __init__(self, classes: int = 10, shape: tuple[int, int, int] = (1, 28, 28)):
        super().__init__()
        self.classes, self.shape = classes, shape
        self.fc = nn.Linear(math.prod(shape), classes)
        nn.init.zeros_(self.fc.weight)
        nn.init.zeros_(self.fc.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.flatten(1))

    @staticmethod
    def stacked_gradient(values: dict[str, Tensor], x: Tensor, y: Tensor, out: dict[str, Tensor]) -> Tensor:
        """Write the mean gradient of each client to `out`, for many clients at once (core/stack.py).

        The gradient of the cross entropy by the weights is (softmax − one-hot)ᵀ·x. Returns the loss of each example;
        shapes are as in `BinaryLogistic.stacked_gradient`.
        """
        x = x.flatten(2)
        losses, error = _errors(values, x, y)
        error.div_(x.shape[1])
        torch.bmm(error.mT, x, out=out["fc.weight"])
        torch.sum(error, 1, out=out["fc.bias"])
        return losses

    @staticmethod
    def stacked_step(values: dict[str, Tensor], x: Tensor, y: Tensor, eta: float, decay: float) -> Tensor:
        """Make a gradient step of each client in one multiplication that adds to the weights; return the losses."""
        x = x.flatten(2)
        losses, error = _errors(values, x, y)
        shrink, step = 1 - eta * decay, -eta / x.shape[1]
        values["fc.weight"].baddbmm_(error.mT, x, beta=shrink, alpha=step)
        values["fc.bias"].mul_(shrink).add_(error.sum(1), alpha=step)
        return losses


def _errors(values: dict[str, Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the loss of each example, and softmax − one-hot."""
    labels = y[..., None]
    log_probabilities = torch.bmm(x, values["fc.weight"].mT).add_(values["fc.bias"][:, None]).log_softmax(2)
    losses = log_probabilities.gather(2, labels).squeeze(2).neg_()
    return losses, log_probabilities.exp_().scatter_(2, labels, -1.0, reduce="add")
