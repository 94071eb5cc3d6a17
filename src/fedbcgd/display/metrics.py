"""Which metric of a run is shown first, and whether it should rise or fall."""

import re
from collections.abc import Collection

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
