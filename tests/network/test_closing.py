"""When a round closes: by hand, and what always holds."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbcgd.network.closing import close

NOBODY = np.zeros(4, bool)
ARRIVALS = np.array([4.0, 1.0, 2.0, 3.0])
BLOCKS = [0, 1, 0, 1]

# minimum, deadline, gone → seconds, who is in time, waited
CASES = {
    "all are waited for": (None, None, [], 4.0, [0, 1, 2, 3], False),
    "the deadline cuts one off": (None, 3.5, [], 3.5, [1, 2, 3], True),
    "a deadline that nobody needs": (None, 9.0, [], 4.0, [0, 1, 2, 3], False),
    "one of each block is enough": (1, None, [], 2.0, [1, 2], False),
    "and the deadline comes first": (1, 1.5, [], 1.5, [1], True),
    "somebody has gone, which is noticed": (None, None, [0], 3.0, [1, 2, 3], False),
    "or only at the deadline": (None, 8.0, [0], 8.0, [1, 2, 3], True),
    "one has gone, another is enough": (1, 8.0, [2], 4.0, [0, 1, 2, 3], False),
    "a block has nobody": (1, None, [0, 2], 3.0, [1, 3], False),
    "all have gone": (1, None, [0, 1, 2, 3], 0.0, [], False),
    "more than there are": (9, None, [], 4.0, [0, 1, 2, 3], False),
}


@pytest.mark.parametrize("case", CASES)
def test_by_hand(case):
    """Block 0: clients 0 (after 4 s) and 2 (2 s); block 1: clients 1 (1 s) and 3 (3 s)."""
    minimum, deadline, left, seconds, kept, waited = CASES[case]
    gone = NOBODY.copy()
    gone[left] = True
    closing = close(ARRIVALS, BLOCKS, gone, minimum, deadline)
    assert closing.seconds == seconds
    assert np.flatnonzero(closing.in_time).tolist() == [k for k in kept if k not in left]
    assert closing.waited == waited


@given(st.data())
def test_what_always_holds(data):
    n = data.draw(st.integers(1, 12))
    arrivals = np.array(data.draw(st.lists(st.floats(0, 100), min_size=n, max_size=n)))
    blocks = data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    gone = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    minimum = data.draw(st.none() | st.integers(1, 4))
    deadline = data.draw(st.none() | st.floats(0.1, 100))
    closing = close(arrivals, blocks, gone, minimum, deadline)
    assert 0 <= closing.seconds <= (math.inf if deadline is None else deadline)
    assert math.isfinite(closing.seconds)
    assert not (closing.in_time & gone).any()
    assert (arrivals[closing.in_time] <= closing.seconds).all()
    if not closing.waited:  # each block has its minimum, or all that came
        for block in set(blocks):
            mine = np.array(blocks) == block
            need = mine.sum() if minimum is None else min(minimum, mine.sum())
            coming = (mine & ~gone).sum()
            assert (closing.in_time & mine).sum() >= min(need, coming)
