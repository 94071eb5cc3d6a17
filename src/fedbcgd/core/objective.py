"""Loss and metrics: two functions of (model, batch), with defaults for classification."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbcgd.errors import UserError

Loss = Callable[[nn.Module, Any], Tensor]
Metrics = Callable[[nn.Module, Any], Mapping[str, Any]]
Precision = Literal["fp32", "bf16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
T = TypeVar("T")


@dataclass(frozen=True)
class Objective:
    """The loss of a batch, and its metrics by name, of which one is `loss`.

    A metric is a mean over the batch, or a boolean tensor whose true entries are counted.
    """

    loss: Loss
    metrics: Metrics
    precision: Precision = "fp32"  # of both functions


def outputs(model: nn.Module, x: Any) -> Tensor:
    """Return the model's output for x; of a transformers model, its logits."""
    output = model(x)
    return getattr(output, "logits", output)


def supervised(criterion: Callable[[Tensor, Tensor], Tensor]) -> Loss:
    """Return a loss for (x, y) batches.

    Args:
        criterion: a function of (outputs, targets), such as `torch.nn.functional.mse_loss`.
    """

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, y = pair(batch)
        return criterion(outputs(model, x), y)

    return loss


def pair(batch: Any) -> tuple[Any, Any]:
    """Return x and y of a batch.

    Raises:
        UserError: the batch is something else.
    """
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    kind = (
        f"a dictionary with keys {', '.join(map(repr, batch))}" if isinstance(batch, Mapping) else type(batch).__name__
    )
    raise UserError(f"batch: expected (x, y) with the default loss, got {kind}; pass loss=f(model, batch)")


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Return the mean cross entropy; y has classes, or a probability for each class.

    Raises:
        UserError: y has other numbers, as in regression, or several labels for an example.
    """
    if y.is_floating_point():
        _refuse_no_probabilities(logits, y)
    return F.cross_entropy(logits, y if y.is_floating_point() else y.long())


def _refuse_no_probabilities(logits: Tensor, y: Tensor) -> None:
    if y.ndim < 2 or y.shape[1] < 2:
        raise UserError(
            f"loss: expected class labels (integers) as targets of the default loss, got {y.dtype} of shape "
            f"{tuple(y.shape[1:])} for each example; for regression pass "
            "loss=fedbcgd.supervised(torch.nn.functional.mse_loss)"
        )
    if y.shape == logits.shape and not bool(((y.sum(1) - 1).abs() < 1e-3).all()):
        raise UserError(
            "loss: expected class labels (integers) or a probability for each class as targets of the default loss, got "
            "numbers that do not sum to 1; for several labels of an example pass "
            "loss=fedbcgd.supervised(torch.nn.functional.binary_cross_entropy_with_logits)"
        )


def classification_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the cross entropy of (x, y) batches, or the loss that a transformers model computes itself."""
    if isinstance(batch, Mapping) and "labels" in batch:
        output = model(**batch)
        if hasattr(output, "loss"):  # transformers' models compute it themselves
            return output.loss
    x, y = pair(batch)
    return cross_entropy(outputs(model, x), y)


def classification_metrics(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """Return the loss, and which examples are classified correctly."""
    if isinstance(batch, Mapping) and "labels" in batch:
        output, y = model(**batch), batch["labels"]
        if hasattr(output, "loss"):
            values = {"loss": output.loss}
            if output.logits.ndim == 2 and y.ndim == 1:
                values["accuracy"] = output.logits.argmax(1) == y
            return values
    x, y = pair(batch)
    logits = outputs(model, x)
    loss = cross_entropy(logits, y)
    correct = logits.argmax(1) == (y.argmax(1) if y.is_floating_point() and y.ndim > 1 else y)
    return {"loss": loss, "accuracy": correct}


def objective(
    loss: Loss | nn.Module | None = None, metrics: Metrics | None = None, precision: Precision = "fp32"
) -> Objective:
    """Return an objective with the defaults filled in.

    Args:
        loss: a function of (model, batch); or a criterion for (x, y) batches, which is an nn.Module or a function of
            torch.nn.functional; default: cross entropy.
        metrics: a function of (model, batch); default: loss and accuracy, or for a user's own loss that loss only.
        precision: "fp32" leaves both as they are. With "bf16" they run under PyTorch's autocast: products of matrices and
            convolutions take and give bfloat16, the usual losses are computed in float32, and the backward pass follows.
            Parameters and gradients stay in float32, and so does everything that is computed from them.
    """
    if loss is None:
        chosen: Loss = classification_loss
        measured = _with_loss(chosen, metrics) if metrics else classification_metrics
    else:
        criterion = isinstance(loss, nn.Module) or getattr(loss, "__module__", None) == "torch.nn.functional"
        chosen = supervised(loss) if criterion else loss  # type: ignore[arg-type]
        measured = _with_loss(chosen, metrics or _no_metrics)
    if precision == "bf16":
        chosen, measured = _in_bf16(chosen), _in_bf16(measured)
    return Objective(chosen, measured, precision)


def _in_bf16(compute: Callable[[nn.Module, Any], T]) -> Callable[[nn.Module, Any], T]:
    def computed(model: nn.Module, batch: Any) -> T:
        # If the caller has an autocast of its own, its cache may hold bfloat16 copies of parameters from earlier steps.
        torch.clear_autocast_cache()
        with torch.autocast(next(model.parameters()).device.type, torch.bfloat16):
            return compute(model, batch)

    return computed


def _no_metrics(model: nn.Module, batch: Any) -> dict[str, Any]:
    return {}


def _with_loss(loss: Loss, metrics: Metrics) -> Metrics:
    def both(model: nn.Module, batch: Any) -> dict[str, Any]:
        values = dict(metrics(model, batch))
        return values if "loss" in values else {"loss": loss(model, batch), **values}

    return both
