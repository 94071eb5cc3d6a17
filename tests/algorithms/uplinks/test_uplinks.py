"""Who uploads which block."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbcgd import UserError, make_algorithm
from fedbcgd.algorithms.uplinks import Blocks, Matched
from fedbcgd.core.server import Conditions
from fedbcgd.models import LeNet5


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
    f = federation(make_algorithm("fedbcgd", blocks=3, local_steps=1), net(), toys(), cohort=6)
    met = set()
    for _ in range(40):
        met |= {(task.client, task.block) for task in f.server.plan().tasks}
        f.server.round += 1
    assert len(met) == 6 * 3


UPLINKS = [Blocks(blocks=3), Matched(blocks=3, divider="even", haste=0.5), Matched(blocks=3, divider="even", haste=0.9)]


def server_of(federation, net, toys, uplink):
    online = []
    conditions = Conditions(available=lambda round: online, costs=np.ones((6, 3)))
    algorithm = make_algorithm("fedbcgd", uplink=uplink, local_steps=1)
    f = federation(algorithm, net(), toys(), cohort=6, conditions=conditions)
    f.server.online = online
    return f.server


def next_round(server, online, commit=True):
    """The blocks of a round with so many clients online."""
    server.online[:] = range(online)
    tasks = server.plan().tasks
    assert server.next_tasks() == tasks  # a preview, which may be asked for at any time
    server.commit() if commit else server.abandon()
    return [task.block for task in tasks]


@pytest.mark.parametrize("uplink", UPLINKS, ids=repr)
def test_turns_go_on_across_cohorts_of_changing_size(federation, net, toys, uplink):
    """After every round no block has had more than one client more than another, in each of the uplink's turns."""
    server, rng, served = server_of(federation, net, toys, uplink), np.random.default_rng(0), {}
    for round in range(60):
        if round % 7 == 3:
            next_round(server, 5, commit=False)
        dealt = served.setdefault(uplink.turn(round)[0], Counter({0: 0, 1: 0, 2: 0}))
        dealt.update(next_round(server, int(rng.integers(1, 7))))
        assert max(dealt.values()) - min(dealt.values()) <= 1
    assert len(served) == (1 if type(uplink) is Blocks else 2)


@pytest.mark.parametrize("uplink", UPLINKS, ids=repr)
def test_turns_go_on_after_a_checkpoint(federation, net, toys, uplink):
    server, again = (server_of(federation, net, toys, uplink) for _ in range(2))
    for round in range(25):
        next_round(server, 1 + round % 4)
    again.restore(*server.snapshot())
    assert [next_round(server, n) for n in (2, 5, 4)] == [next_round(again, n) for n in (2, 5, 4)]


def test_a_checkpoint_without_the_count_goes_on_as_it_was_made(federation, net, toys):
    """Such counts were not kept once: the turn of round t began at t times the cohort."""
    server, again = (server_of(federation, net, toys, Blocks(blocks=3)) for _ in range(2))
    for _ in range(4):
        next_round(server, 5)
    tensors, values = server.snapshot()
    del values["dealt"]
    again.restore(tensors, values)
    assert next_round(again, 5) == next_round(server, 5) == [2, 0, 1, 2, 0]  # from 4·5 = 20 on
    assert next_round(again, 4) == next_round(server, 4) == [1, 2, 0, 1]  # and from then on it counts


@pytest.mark.parametrize(("cohort", "wanted"), [(2, 2), (4, 4), (5, 5), (50, 5)])
def test_auto_takes_no_more_blocks_than_clients(cohort, wanted):
    assert Blocks().for_cohort(cohort).blocks == wanted
    assert Blocks(blocks=5).for_cohort(cohort) == Blocks(blocks=5)
    assert Blocks(divider=[1, 2, 3]).for_cohort(cohort).blocks == 3


def test_auto_follows_the_divider_and_is_five_without_a_cohort():
    model = LeNet5(10, (3, 32, 32))
    assert Blocks().layout(model) == Blocks(blocks=5).layout(model)
    assert Blocks(divider="paper").for_cohort(2).layout(model) == Blocks(blocks=4, divider="paper").layout(model)
    assert Blocks(divider=[1, 2, 3]).layout(model).blocks == 3


@pytest.mark.parametrize("blocks", [0, -1, "many", 1.5])
def test_other_numbers_of_blocks_are_refused(blocks):
    with pytest.raises(UserError, match=r"blocks: .*an integer ≥ 1"):
        make_algorithm("fedbcgd", blocks=blocks)
