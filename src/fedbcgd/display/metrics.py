"""Which metric of a run is shown first, whether it should rise or fall, and targets."""

import re
from collections.abc import Collection
from typing import Any

from fedbcgd.errors import UserError

ACCURACIES = ("test_accuracy", "validation_accuracy")
_LOSSES = ("test_loss", "validation_loss", "train_loss")
_FALLING = re.compile(r"loss|gap|error|mae|mse|mape|perplexity|nll|deviation|_std$")  # as in report/page/numbers.js


def main_metric(columns: Collection[str], stated: str | None = None) -> str | None:
    """Return the most telling metric among these columns.

    Args:
        columns: names of columns.
        stated: the metric that the run names, such as `mae`.

    Returns:
        The stated one, else an accuracy, else a loss; None if there is none of them.
    """
    own = [f"{kind}{stated}" for kind in ("test_", "validation_", "")] if stated else []
    return next((name for name in (*own, *ACCURACIES, *_LOSSES) if name in columns), None)


def falls(metric: str, stated: str | None = None, goal: str | None = None) -> bool:
    """Return whether a metric should fall.

    Args:
        metric: the column of the metric.
        stated: the metric that the run names as its own, such as `mae`.
        goal: "min" or "max", if the run says what the stated metric should do; other metrics are judged by their names.
    """
    if goal and stated and (metric == stated or metric.endswith(f"_{stated}")):
        return goal == "min"
    return bool(_FALLING.search(metric))


def accuracy_column(columns: Collection[str]) -> str | None:
    """Return the accuracy among these columns; None if there is none."""
    return next((name for name in ACCURACIES if name in columns), None)


def make_target(
    target: Any, prefix: str = "test", stated: str | None = None, goal: str | None = None
) -> tuple[str, str, float] | None:
    """Return a target in the form (metric, "<=" or ">=", value).

    Args:
        target: in any form that `fedbcgd.simulate` takes.
        prefix: begins the metrics' names in a row.
        stated: the metric that the run names as its own, which a bare number is about; None: the accuracy.
        goal: see `falls`.

    Raises:
        UserError: it has another form.
    """
    if isinstance(target, dict) and len(target) == 1:
        (target,) = target.items()
    match target:
        case None:
            return None
        case str(name), (int() | float()) as value:
            return name, "<=" if falls(name, stated, goal) else ">=", float(value)
        case str(name), ("<=" | ">=") as how, (int() | float()) as value:
            return name, how, float(value)
    name = stated or f"{prefix}_accuracy"
    try:
        return name, "<=" if falls(name, stated, goal) else ">=", float(target)
    except (TypeError, ValueError):
        raise UserError(
            'target: expected an accuracy such as 0.9, a metric and its value such as {"mae": 0.3} or ("test_loss", 0.5), '
            f'or ("test_score", "<=", 0.1), got {target!r}'
        ) from None
