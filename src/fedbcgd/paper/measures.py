"""The numbers that are taken from a run: the mean over its last tenth, and the upload at which it reached a target."""

import math
import statistics
from collections.abc import Sequence

from fedbcgd.engine.loop import Row

TENTH = 0.1
# Allowance for rounding in single precision: 0.1 becomes 0.10000000149, and the mean of equal values may differ from them.
ROUNDING = 1e-6


def last_tenth(rows: Sequence[Row], metric: str) -> float:
    """Return the mean of a metric over the evaluations in the last 10 % of the rounds; NaN without evaluations."""
    return last_share(rows, metric, TENTH)


def last_share(rows: Sequence[Row], metric: str, share: float) -> float:
    """Return the mean of a metric over the evaluations in the last share of the rounds; NaN without evaluations."""
    if not rows:
        return math.nan
    last = rows[-1]["round"]
    return statistics.fmean(row[metric] for row in rows if row["round"] > last * (1 - share) + 1e-9)


def floats_to(rows: Sequence[Row], metric: str, target: float, higher_is_better: bool = True) -> float:
    """Return the upload in d at the first evaluation that reached the target, up to rounding; infinity if none did."""
    slack = ROUNDING * max(1.0, abs(target))
    for row in rows:
        if row[metric] >= target - slack if higher_is_better else row[metric] <= target + slack:
            return row["upload_d"]
    return math.inf


def step_before(rows: Sequence[Row], upload: float) -> float:
    """Return the upload in d between the evaluation at `upload` and the one before it, or the start."""
    earlier = [row["upload_d"] for row in rows if row["upload_d"] < upload]
    return upload - (earlier[-1] if earlier else 0.0)


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float | None]:
    """Return mean and standard deviation; None for the deviation of one value or of values that are not all finite."""
    if not values:
        return math.nan, None
    finite = all(map(math.isfinite, values))
    return sum(values) / len(values), statistics.stdev(values) if finite and len(values) > 1 else None
