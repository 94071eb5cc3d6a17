"""Linear models for two classes, z = aᵀx, initially zero: logistic regression, and the non-convex sigmoid loss.

Labels are 0 and 1, for b = −1 and +1. The regulariser λ/2·‖x‖² is the local rule's weight decay.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbcgd.core.objective import pair
from fedbcgd.errors import UserError


class _LinearScore(nn.Module):
    def __init__(self, classes: int = 2, shape: tuple[int, int, int] = (1, 28, 28)):
        super().__init__()
        if classes != 2:
            raise UserError(
                f"classes: expected 2 for {type(self).__name__}, got {classes}; set data.positive to the label that is "
                "told apart from all others"
            )
        self.classes, self.shape = classes, shape
        self.fc = nn.Linear(math.prod(shape), 1, bias=False)
        nn.init.zeros_(self.fc.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.flatten(1)).squeeze(1).to(self.fc.weight.dtype)  # under autocast the product is in bfloat16

    @staticmethod
    def criterion(margin: Tensor) -> Tensor:
        """Compute the loss of each example from its margin b·z."""
        raise NotImplementedError

    @staticmethod
    def slope(margin: Tensor) -> Tensor:
        """Compute the derivative of the criterion with respect to the margin."""
        raise NotImplementedError

    @classmethod
    def stacked_gradient(cls, values: dict[str, Tensor], x: Tensor, y: Tensor, out: dict[str, Tensor]) -> Tensor:
        """Write the mean gradient of each client to `out`, for many clients at once (core/stack.py).

        Args:
            values: the parameters of all clients, stacked.
            x: the examples (clients, batch, …).
            y: the labels (clients, batch).
            out: a tensor for the gradient of each parameter.

        Returns:
            The loss of each example (clients, batch).
        """
        x = x.flatten(2)
        losses, slopes = cls._slopes(values, x, y)
        torch.bmm(slopes.div_(x.shape[1]), x, out=out["fc.weight"])
        return losses

    @classmethod
    def stacked_step(cls, values: dict[str, Tensor], x: Tensor, y: Tensor, eta: float, decay: float) -> Tensor:
        """Make a gradient step of each client in one multiplication that adds to the weights; return the losses."""
        x = x.flatten(2)
        losses, slopes = cls._slopes(values, x, y)
        values["fc.weight"].baddbmm_(slopes, x, beta=1 - eta * decay, alpha=-eta / x.shape[1])
        return losses

    @classmethod
    def _slopes(cls, values: dict[str, Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the loss of each example, and its derivative with respect to the score."""
        sign = (2 * y - 1).to(x.dtype)
        margin = torch.bmm(x, values["fc.weight"].mT).squeeze(2).mul_(sign)
        return cls.criterion(margin), cls.slope(margin).mul_(sign)[:, None]

    @classmethod
    def own_loss(cls, model: nn.Module, batch: Any) -> Tensor:
        """Compute the mean loss of a batch."""
        x, y = pair(batch)
        return cls.criterion((2 * y - 1) * model(x)).mean()

    @classmethod
    def own_metrics(cls, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Compute the mean loss of a batch, and whether each example is classified correctly."""
        x, y = pair(batch)
        score = model(x)
        return {"loss": cls.criterion((2 * y - 1) * score).mean(), "accuracy": (score > 0) == (y > 0)}


class BinaryLogistic(_LinearScore):
    """Logistic regression: the loss is log(1 + exp(−b·z)), which is convex."""

    @staticmethod
    def criterion(margin: Tensor) -> Tensor:
        return F.softplus(-margin)

    @staticmethod
    def slope(margin: Tensor) -> Tensor:
        return (-margin).sigmoid_().neg_()


class BinarySigmoid(_LinearScore):
    """Sigmoid loss 1 / (1 + exp(b·z)), which is not convex."""

    @staticmethod
    def criterion(margin: Tensor) -> Tensor:
        return (-margin).sigmoid()

    @staticmethod
    def slope(margin: Tensor) -> Tensor:
        return margin.sigmoid().mul_((-margin).sigmoid_()).neg_()
