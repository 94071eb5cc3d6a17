"""When a round closes, and who is late."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedbcgd.engine.closing import Quorum


@dataclass(frozen=True)
class Closing:
    seconds: float  # after the beginning of the round
    in_time: np.ndarray  # for each task, whether its upload is there by then
    waited: bool  # whether the server waited beyond the last of these uploads, for others that did not come


def close(
    moments: np.ndarray,
    blocks: Sequence[int],
    gone: np.ndarray,
    minimum: int | None,
    deadline: float | None,
    damaged: np.ndarray | None = None,
    close_at: float = 1.0,
) -> Closing:
    """The end of a round: when each block has enough uploads that are whole, as `Quorum` says, at the deadline at the
    latest. So a deadline makes no round longer.

    Args:
        moments: for each task, after how many seconds its upload is there, or, for a client that is `gone`, the server
            notices that the connection broke.
        blocks: of each task.
        gone: for each task, whether its client vanishes.
        minimum: uploads that are enough for a block; None: `close_at` decides.
        deadline: seconds after which a round closes; None: there is none.
        damaged: for each task, whether its upload arrives and does not count.
        close_at: the share of a block's clients that is enough for it.
    """
    whole = ~gone if damaged is None else ~(gone | damaged)
    quorum = Quorum(blocks, minimum, close_at)
    done = 0.0
    for k in np.argsort(moments, kind="stable"):
        if quorum.done:
            break
        quorum.answered(blocks[k], bool(whole[k]))
        done = float(moments[k])
    seconds = min(done, math.inf if deadline is None else deadline)
    in_time = (moments <= seconds) & ~gone
    return Closing(seconds, in_time, seconds > float(moments[in_time].max(initial=0.0)))
