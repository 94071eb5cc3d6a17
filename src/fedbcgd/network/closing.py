"""When a round closes, and who is late."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


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
) -> Closing:
    """The end of a round. `moments`: for each task, after how many seconds its upload is there, or, for a client that is
    `gone`, the server notices that the connection broke.

    A block is done as soon as it has `minimum` uploads that are whole (`damaged` ones arrive and do not count); without a
    minimum, and where it cannot have that many any more, when all of its clients have answered or are known to be gone. The
    round closes when all blocks are done, at the deadline at the latest: so a deadline makes no round longer.
    """
    served = np.asarray(blocks)
    whole = ~gone if damaged is None else ~(gone | damaged)
    done = 0.0
    for block in np.unique(served):
        mine = served == block
        good = np.sort(moments[mine & whole])
        last = float(moments[mine].max())
        done = max(done, last if minimum is None or len(good) < minimum else float(good[minimum - 1]))
    seconds = min(done, math.inf if deadline is None else deadline)
    in_time = (moments <= seconds) & ~gone
    return Closing(seconds, in_time, seconds > float(moments[in_time].max(initial=0.0)))
