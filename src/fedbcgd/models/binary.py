"""Two classes and one linear score z = aᵀx, from zero: logistic regression, and ERM with the non-convex sigmoid loss.

Labels are 0 and 1, standing for b = −1 and +1. The regulariser λ/2·‖x‖² is the local rule's weight decay.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbcgd.core.objective import pair
from fedbcgd.errors import UserError


class _Score(nn.Module):
    def __init__(self, classes: int = 2, shape: tuple[int, int, int] = (1, 28, 28)):
        super().__init__()
        if classes != 2:
            raise UserError(
                f"{type(self).__name__} tells two classes apart, not {classes}; data.positive makes two of many"
            )
        self.fc = nn.Linear(math.prod(shape), 1, bias=False)
        nn.init.zeros_(self.fc.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.flatten(1)).squeeze(1)

    @staticmethod
    def criterion(margin: Tensor) -> Tensor:
        """Of b·z, for each example."""
        raise NotImplementedError

    @staticmethod
    def slope(margin: Tensor) -> Tensor:
        """The derivative of the criterion."""
        raise NotImplementedError

    @classmethod
    def stacked_gradient(cls, values: dict[str, Tensor], x: Tensor, y: Tensor, out: dict[str, Tensor]) -> Tensor:
        """For many clients at once (local.stack)."""
        x = x.flatten(2)
        losses, slopes = cls._slopes(values, x, y)
        torch.bmm(slopes.div_(x.shape[1]), x, out=out["fc.weight"])
        return losses

    @classmethod
    def stacked_step(cls, values: dict[str, Tensor], x: Tensor, y: Tensor, eta: float, decay: float) -> Tensor:
        """The same as a step: the multiplication adds to the weights."""
        x = x.flatten(2)
        losses, slopes = cls._slopes(values, x, y)
        values["fc.weight"].baddbmm_(slopes, x, beta=1 - eta * decay, alpha=-eta / x.shape[1])
        return losses

    @classmethod
    def _slopes(cls, values: dict[str, Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of each example, and its derivative by the score."""
        sign = (2 * y - 1).to(x.dtype)
        margin = torch.bmm(x, values["fc.weight"].mT).squeeze(2).mul_(sign)
        return cls.criterion(margin), cls.slope(margin).mul_(sign)[:, None]

    @classmethod
    def own_loss(cls, model: nn.Module, batch: Any) -> Tensor:
        x, y = pair(batch)
        return cls.criterion((2 * y - 1) * model(x)).mean()

    @classmethod
    def own_metrics(cls, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        x, y = pair(batch)
        score = model(x)
        right = (score > 0) == (y > 0)
        return {"loss": cls.criterion((2 * y - 1) * score).mean(), "accuracy": right}


class BinaryLogistic(_Score):
    """log(1 + exp(−b·z)): convex."""

    @staticmethod
    def criterion(margin: Tensor) -> Tensor:
        return F.softplus(-margin)

    @staticmethod
    def slope(margin: Tensor) -> Tensor:
        return (-margin).sigmoid_().neg_()


class BinarySigmoid(_Score):
    """1 / (1 + exp(b·z)): not convex."""

    @staticmethod
    def criterion(margin: Tensor) -> Tensor:
        return (-margin).sigmoid()

    @staticmethod
    def slope(margin: Tensor) -> Tensor:
        return margin.sigmoid().mul_((-margin).sigmoid_()).neg_()
