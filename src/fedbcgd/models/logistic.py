"""Multinomial logistic regression: one linear layer, from zero."""

import math

import torch
from torch import Tensor, nn


class Logistic(nn.Module):
    def __init__(self, classes: int = 10, shape: tuple[int, int, int] = (1, 28, 28)):
        super().__init__()
        self.fc = nn.Linear(math.prod(shape), classes)
        nn.init.zeros_(self.fc.weight)
        nn.init.zeros_(self.fc.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.flatten(1))

    @staticmethod
    def stacked_gradient(values: dict[str, Tensor], x: Tensor, y: Tensor, out: dict[str, Tensor]) -> Tensor:
        """Of the cross entropy, for many clients at once (local.stack): (softmax − one-hot)ᵀ·x."""
        x = x.flatten(2)
        losses, error = _errors(values, x, y)
        error.div_(x.shape[1])
        torch.bmm(error.mT, x, out=out["fc.weight"])
        torch.sum(error, 1, out=out["fc.bias"])
        return losses

    @staticmethod
    def stacked_step(values: dict[str, Tensor], x: Tensor, y: Tensor, eta: float, decay: float) -> Tensor:
        """The same as a step: the multiplication adds to the weights."""
        x = x.flatten(2)
        losses, error = _errors(values, x, y)
        kept, step = 1 - eta * decay, -eta / x.shape[1]
        values["fc.weight"].baddbmm_(error.mT, x, beta=kept, alpha=step)
        values["fc.bias"].mul_(kept).add_(error.sum(1), alpha=step)
        return losses


def _errors(values: dict[str, Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of each example, and softmax − one-hot."""
    labels = y[..., None]
    log_likely = torch.bmm(x, values["fc.weight"].mT).add_(values["fc.bias"][:, None]).log_softmax(2)
    losses = log_likely.gather(2, labels).squeeze(2).neg_()
    return losses, log_likely.exp_().scatter_(2, labels, -1.0, reduce="add")
