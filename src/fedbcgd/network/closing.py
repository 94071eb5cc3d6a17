"""When a simulated round closes, and which uploads arrive in time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedbcgd.engine.closing import Quorum


@dataclass(frozen=True)
class Closing:
    """The end of a round.

    Attributes:
        seconds: when the round closes, in seconds after its beginning.
        in_time: for each task, whether its upload has arrived by then.
        waited: whether, after the last of these uploads, the server waited for others that did not arrive.
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
    close_at: float = 1.0,
) -> Closing:
    """Decide when a round closes: when all blocks are complete (see `Quorum`), and at the deadline at the latest.

    Args:
        moments: for each task, after how many seconds its upload arrives or, if its client is gone, the server notices
            that the connection broke.
        blocks: the block of each task.
        gone: for each task, whether its client drops out.
        minimum: valid uploads that complete a block; None: `close_at` decides.
        deadline: in seconds; None: no deadline.
        damaged: for each task, whether its upload arrives damaged, and so does not count.
        close_at: the share of a block's clients whose valid uploads complete it; 1 waits for all.

    Returns:
        When the round closes, and which uploads are in time.
    """
    valid = ~gone if damaged is None else ~(gone | damaged)
    quorum = Quorum(blocks, minimum, close_at)
    complete = 0.0
    for k in np.argsort(moments, kind="stable"):
        if quorum.complete:
            break
        quorum.answered(blocks[k], bool(valid[k]))
        complete = float(moments[k])
    seconds = min(complete, math.inf if deadline is None else deadline)
    in_time = (moments <= seconds) & ~gone
    return Closing(seconds, in_time, seconds > float(moments[in_time].max(initial=0.0)))
