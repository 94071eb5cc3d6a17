"""When a round closes: cases worked by hand, and properties."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbcgd.engine.closing import share_of
from fedbcgd.network.closing import close

NOBODY = np.zeros(4, bool)
MOMENTS = np.array([4.0, 1.0, 2.0, 3.0])
BLOCKS = [0, 1, 0, 1]

# minimum, deadline, gone, damaged → seconds, who is in time, waited
CASES = {
    "all are waited for": (None, None, [], [], 4.0, [0, 1, 2, 3], False),
    "the deadline cuts one off": (None, 3.5, [], [], 3.5, [1, 2, 3], True),
    "a deadline that nobody needs": (None, 9.0, [], [], 4.0, [0, 1, 2, 3], False),
    "one of each block is enough": (1, None, [], [], 2.0, [1, 2], False),
    "and the deadline comes first": (1, 1.5, [], [], 1.5, [1], True),
    "somebody has gone, which is noticed last": (None, None, [0], [], 4.0, [1, 2, 3], True),
    "alike with a deadline": (None, 8.0, [0], [], 4.0, [1, 2, 3], True),
    "somebody has gone, which is noticed early": (None, 8.0, [1], [], 4.0, [0, 2, 3], False),
    "one has gone, another is enough": (1, 8.0, [2], [], 4.0, [0, 1, 3], False),
    "a block has nobody": (1, None, [1, 3], [], 3.0, [2], True),
    "all have gone": (1, None, [0, 1, 2, 3], [], 4.0, [], True),
    "more than there are": (9, None, [], [], 4.0, [0, 1, 2, 3], False),
    "a damaged upload is not enough": (1, None, [], [2], 4.0, [0, 1, 2, 3], False),
    "nor are two, and nobody else comes": (1, None, [], [1, 3], 3.0, [1, 2, 3], False),
    "where all are asked, damaged ones have answered": (None, None, [], [0], 4.0, [0, 1, 2, 3], False),
}


@pytest.mark.parametrize("case", CASES)
def test_by_hand(case):
    """Block 0: clients 0 (after 4 s) and 2 (2 s); block 1: clients 1 (1 s) and 3 (3 s)."""
    minimum, deadline, gone_clients, damaged_clients, seconds, in_time, waited = CASES[case]
    gone, damaged = NOBODY.copy(), NOBODY.copy()
    gone[gone_clients] = damaged[damaged_clients] = True
    closing = close(MOMENTS, BLOCKS, gone, minimum, deadline, damaged)
    assert closing.seconds == seconds
    assert np.flatnonzero(closing.in_time).tolist() == in_time
    assert closing.waited == waited


@given(st.data())
def test_properties(data):
    n = data.draw(st.integers(1, 12))
    arrivals = np.array(data.draw(st.lists(st.floats(0, 100), min_size=n, max_size=n)))
    blocks = data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    gone = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    minimum = data.draw(st.none() | st.integers(1, 4))
    deadline = data.draw(st.none() | st.floats(0.1, 100))
    damaged = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    closing = close(arrivals, blocks, gone, minimum, deadline, damaged)
    assert 0 <= closing.seconds <= (math.inf if deadline is None else deadline)
    assert math.isfinite(closing.seconds)
    assert not (closing.in_time & gone).any()
    assert (arrivals[closing.in_time] <= closing.seconds).all()
    without = close(arrivals, blocks, gone, minimum, None, damaged)
    assert closing.seconds == min(without.seconds, math.inf if deadline is None else deadline)
    assert set(np.flatnonzero(closing.in_time)) <= set(np.flatnonzero(without.in_time))
    for block in set(blocks):  # each block has its minimum, or all uploads that arrived
        in_block = np.array(blocks) == block
        need = n if minimum is None else minimum
        assert (without.in_time & in_block & ~damaged).sum() >= min(need, (in_block & ~gone & ~damaged).sum())


@pytest.mark.parametrize(
    ("close_at", "seconds", "kept"), [(0.5, 2.0, [1, 2]), (0.51, 4.0, [0, 1, 2, 3]), (0.01, 2.0, [1, 2])]
)
def test_a_share_of_each_block_is_enough(close_at, seconds, kept):
    """Rounded up: of the two clients of a block, one with 0.5, both with 0.51, and always one at least."""
    closing = close(MOMENTS, BLOCKS, NOBODY, None, None, close_at=close_at)
    assert closing.seconds == seconds
    assert np.flatnonzero(closing.in_time).tolist() == kept


@given(st.integers(1, 1000), st.floats(0.001, 1))
def test_a_share_is_rounded_up(count, share):
    assert share_of(count, share) in (math.ceil(count * share), math.ceil(count * share) - 1, 1)
    assert 1 <= share_of(count, share) <= count
    assert share_of(10, 0.7) == 7  # 0.7 · 10 is a little more than 7 in binary
    assert share_of(10, 1.25) == 13
