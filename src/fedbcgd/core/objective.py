"""What is minimised and what is measured: two callables of (model, batch), with defaults for classification."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from fedbcgd.errors import UserError

Loss = Callable[[nn.Module, Any], Tensor]
Metrics = Callable[[nn.Module, Any], Mapping[str, Any]]


@dataclass(frozen=True)
class Objective:
    loss: Loss
    metrics: Metrics  # means over the batch, or boolean tensors to be counted; `loss` among them


def outputs(model: nn.Module, x: Any) -> Tensor:
    """What the model says about x; of a transformers model, its logits."""
    said = model(x)
    return said.logits if hasattr(said, "logits") else said


def supervised(criterion: Callable[[Tensor, Tensor], Tensor]) -> Loss:
    """A loss from a criterion of (outputs, targets), such as `torch.nn.functional.mse_loss`, for (x, y) batches."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, y = pair(batch)
        return criterion(outputs(model, x), y)

    return loss


def pair(batch: Any) -> tuple[Any, Any]:
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    what = (
        f"a dictionary with keys {', '.join(map(repr, batch))}" if isinstance(batch, Mapping) else type(batch).__name__
    )
    raise UserError(f"the default loss wants batches of (x, y), but a batch is {what}: pass loss=f(model, batch)")


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y if y.is_floating_point() else y.long())


def classification_loss(model: nn.Module, batch: Any) -> Tensor:
    if isinstance(batch, Mapping) and "labels" in batch:
        said = model(**batch)
        if hasattr(said, "loss"):  # transformers' models compute it themselves
            return said.loss
    x, y = pair(batch)
    return cross_entropy(outputs(model, x), y)


def classification_metrics(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    if isinstance(batch, Mapping) and "labels" in batch:
        said, y = model(**batch), batch["labels"]
        if hasattr(said, "loss"):
            values = {"loss": said.loss}
            if said.logits.ndim == 2 and y.ndim == 1:
                values["accuracy"] = said.logits.argmax(1) == y
            return values
    x, y = pair(batch)
    logits = outputs(model, x)
    right = logits.argmax(1) == (y.argmax(1) if y.is_floating_point() and y.ndim > 1 else y)
    return {"loss": cross_entropy(logits, y), "accuracy": right}


def objective(loss: Loss | nn.Module | None = None, metrics: Metrics | None = None) -> Objective:
    """Fill in the defaults: classification; or, for a loss of one's own, that loss alone as the metric."""
    if loss is None:
        return Objective(
            classification_loss, _with_loss(classification_loss, metrics) if metrics else classification_metrics
        )
    criterion = isinstance(loss, nn.Module) or getattr(loss, "__module__", None) == "torch.nn.functional"
    chosen = supervised(loss) if criterion else loss  # type: ignore[arg-type]
    return Objective(chosen, _with_loss(chosen, metrics or _nothing))


def _nothing(model: nn.Module, batch: Any) -> dict[str, Any]:
    return {}


def _with_loss(loss: Loss, metrics: Metrics) -> Metrics:
    def both(model: nn.Module, batch: Any) -> dict[str, Any]:
        values = dict(metrics(model, batch))
        return values if "loss" in values else {"loss": loss(model, batch), **values}

    return both
