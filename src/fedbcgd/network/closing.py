"""When a round closes, and which uploads arrive before."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Closing:
    """The end of a round.

    Attributes:
        seconds: after the beginning of the round.
        in_time: for each task, whether its upload has arrived by then.
        waited: whether the server waited longer than for the last of these uploads, for others that did not arrive.
    """

    seconds: float
    in_time: np.ndarray
    waited: bool


def close(
    moments: np.ndarray,
    blocks: Sequence[int],
    gone: np.ndarray,
    minimum: int | None,
    deadline: float | None,
    damaged: np.ndarray | None = None,
) -> Closing:
    """Decide when a round closes.

    A block is complete as soon as it has `minimum` valid uploads. Without a minimum, or if it cannot get that many, it
    is complete when each of its clients has answered or is known to be gone. The round closes when all blocks are
    complete, and at the deadline at the latest.

    Args:
        moments: for each task, after how many seconds its upload arrives or, if its client is gone, the server notices
            that the connection broke.
        blocks: of each task.
        gone: for each task, whether its client drops out.
        minimum: valid uploads that complete a block; None waits for all.
        deadline: in seconds, if there is one.
        damaged: for each task, whether its upload arrives damaged, and so does not count towards the minimum.

    Returns:
        When the round closes, and which uploads are in time.
    """
    block_of = np.asarray(blocks)
    valid = ~gone if damaged is None else ~(gone | damaged)
    complete = 0.0
    for block in np.unique(block_of):
        in_block = block_of == block
        arrivals = np.sort(moments[in_block & valid])
        last = float(moments[in_block].max())
        complete = max(complete, last if minimum is None or len(arrivals) < minimum else float(arrivals[minimum - 1]))
    seconds = min(complete, math.inf if deadline is None else deadline)
    in_time = (moments <= seconds) & ~gone
    return Closing(seconds, in_time, seconds > float(moments[in_time].max(initial=0.0)))
