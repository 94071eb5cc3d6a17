"""When a round has enough uploads to close: one rule for the simulated network and for Flower's grid."""

import math
from collections import Counter
from collections.abc import Iterable


def share_of(count: int, share: float) -> int:
    """Return ceil(share · count), at least 1; the product is first rounded to six decimals, against rounding errors."""
    return max(1, math.ceil(round(count * share, 6)))


class Quorum:
    """Counts the answers of a round.

    A block is complete when it has enough valid uploads, or when all of its clients have answered or are known to be
    gone, since no more uploads can come.

    Args:
        blocks: for each client that is asked, the block that it is asked for.
        minimum: valid uploads that complete a block; None: `close_at` decides.
        close_at: the share of a block's clients whose valid uploads complete it; 1: all.
    """

    def __init__(self, blocks: Iterable[int], minimum: int | None = None, close_at: float = 1.0):
        self._waiting = Counter(blocks)
        self._missing = {b: share_of(n, close_at) if minimum is None else minimum for b, n in self._waiting.items()}

    def answered(self, block: int, valid: bool) -> None:
        """Count a client that has answered, or of which it is known that it will not.

        Args:
            block: the block that it was asked for.
            valid: whether its upload counts.
        """
        self._waiting[block] -= 1
        self._missing[block] -= valid

    @property
    def complete(self) -> bool:
        """Whether all blocks are complete, so that the round may close."""
        return all(self._missing[block] <= 0 or not waiting for block, waiting in self._waiting.items())
