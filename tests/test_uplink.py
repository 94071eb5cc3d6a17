"""Who uploads which block."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbcgd.uplink import Blocks


@given(st.integers(1, 30), st.integers(1, 12), st.integers(0, 50))
def test_groups_differ_by_at_most_one_client(cohort, blocks, round):
    served = Counter(Blocks(blocks=blocks).assign(np.arange(cohort), round, blocks))
    counts = [served[j] for j in range(blocks)]
    assert sum(counts) == cohort
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(("cohort", "blocks"), [(10, 5), (7, 5), (3, 5), (1, 4), (12, 5)])
def test_over_time_each_block_is_served_equally_often(cohort, blocks):
    served = Counter()
    for round in range(blocks):
        served.update(Blocks(blocks=blocks).assign(np.arange(cohort), round, blocks))
    assert set(served.values()) == {cohort}


def test_a_client_is_not_tied_to_a_block(federation, net, toys):
    """The cohort comes in random order, so over the rounds every client uploads every block."""
    from fedbcgd import make_algorithm

    f = federation(make_algorithm("fedbcgd", blocks=3, local_steps=1), net(), toys(), cohort=6)
    met = set()
    for _ in range(40):
        met |= {(task.client, task.block) for task in f.server.plan().tasks}
        f.server.round += 1
    assert len(met) == 6 * 3
