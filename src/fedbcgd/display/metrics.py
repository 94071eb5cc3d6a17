"""Which metric of a run is shown first, whether it should rise or fall, and targets."""

import re
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from fedbcgd.errors import UserError

if TYPE_CHECKING:
    from fedbcgd.engine.loop import Outcome

ACCURACIES = ("test_accuracy", "validation_accuracy")
_LOSSES = ("test_loss", "validation_loss", "train_loss")
_FALLING = re.compile(r"loss|gap|error|mae|mse|mape|perplexity|nll|deviation|_std$")  # as in report/page/numbers.js

_OF_CLIENTS = re.compile(r"_(mean|worst_tenth|lowest_quarter)$")  # ends a column about clients (clients_…)


def main_metric(columns: Collection[str], stated: str | None = None) -> str | None:
    """Return the most telling metric among these columns.

    Args:
        columns: names of columns.
        stated: the metric that the run names, such as `mae`.

    Returns:
        The stated one, else an accuracy, else another one of test or validation data, else a loss; None if there is none.
        Without test data the mean over the clients' own.
    """
    named = [f"{kind}{stated}" for kind in ("test_", "validation_", "")] if stated else []
    means = [name for name in columns if name.startswith("clients_") and name.endswith("_mean")]
    own = [name for name in columns if name.startswith(("test_", "validation_")) and name not in _LOSSES]
    return next((name for name in (*named, *ACCURACIES, *own, *_LOSSES[:2], *means, *_LOSSES) if name in columns), None)


def falls(metric: str, stated: str | None = None, goal: str | None = None) -> bool:
    """Return whether a metric should fall.

    Args:
        metric: the column of the metric.
        stated: the metric that the run names as its own, such as `mae`.
        goal: "min" or "max", if the run says what the stated metric should do; other metrics are judged by their names.
    """
    metric = _OF_CLIENTS.sub("", metric)
    if goal and stated and (metric == stated or metric.endswith(f"_{stated}")):
        return goal == "min"
    return bool(_FALLING.search(metric))


def metric_of(outcomes: Iterable["Outcome"]) -> str | None:
    """Return the metric that these runs are about, such as test_mae; None if none has been evaluated."""
    metrics = [metric for o in outcomes if (metric := main_metric(o.final, o.metric)) is not None]
    return next((metric for metric in metrics if metric != "train_loss"), next(iter(metrics), None))


def in_words(metric: str) -> str:
    """Return the name of a metric for people; that it is of test data goes without saying."""
    return metric.removeprefix("test_").replace("_", " ")


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
