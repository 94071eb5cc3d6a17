"""When a round closes, and who is late."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Closing:
    seconds: float  # after the beginning of the round
    in_time: np.ndarray  # for each task, whether its upload is there by then
    waited: bool  # whether the server waited to the deadline, for uploads that did not come


def close(
    arrivals: np.ndarray, blocks: Sequence[int], gone: np.ndarray, minimum: int | None, deadline: float | None
) -> Closing:
    """The end of a round whose uploads, one for each task, would be there after `arrivals` seconds.

    It closes as soon as each block has `minimum` uploads (without one: all that were asked for), at the deadline at the
    latest. Clients that are `gone` never answer. Where a block can no longer have its minimum, the server waits for the
    deadline; without one, for all that still come: a connection that breaks is noticed.
    """
    limit = math.inf if deadline is None else deadline
    served = np.asarray(blocks)
    enough = 0.0
    for block in np.unique(served):
        mine = served == block
        coming = np.sort(arrivals[mine & ~gone])
        need = mine.sum() if minimum is None else min(minimum, mine.sum())
        enough = max(enough, float(coming[need - 1]) if len(coming) >= need else math.inf)
    seconds = min(enough, limit)
    waited = seconds == limit and enough > limit
    if seconds == math.inf:  # nobody sets an end: all that come are waited for
        seconds = float(arrivals[~gone].max(initial=0.0))
    return Closing(seconds, (arrivals <= seconds) & ~gone, waited)
