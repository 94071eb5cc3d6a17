"""Blocks to clients: the optimum against brute force, fairness, and sizes that fit."""

from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbcgd import UserError, make_algorithm, simulate
from fedbcgd.algorithms.uplinks import Blocks, Matched
from fedbcgd.algorithms.uplinks.assignment import fastest, fitted_sizes
from fedbcgd.rng import stream

speed = st.floats(0.01, 100)


def costs_of(uplinks, sizes, base=0.0):
    return np.asarray(base).reshape(-1, 1) + np.asarray(sizes) / np.asarray(uplinks).reshape(-1, 1)


def makespan(costs, blocks):
    return max(costs[k, j] for k, j in enumerate(blocks))


def test_by_hand():
    """Uplinks 1, 4, 2 and blocks of 6, 2, 1: the larger block to the faster uplink takes 1/1, 6/4, 2/2: 1.5 s."""
    costs = costs_of([1, 4, 2], [6, 2, 1])
    assert fastest(costs, [0, 1, 2], stream(0, "test"), slack=0) == [2, 0, 1]


@settings(max_examples=60)
@given(st.data())
def test_the_makespan_is_the_least_there_is(data):
    """Also where downloads and computing differ, so that sorting by uplinks alone would not do."""
    clients, blocks = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
    base = data.draw(st.lists(st.floats(0, 50), min_size=clients, max_size=clients))
    uplinks = data.draw(st.lists(speed, min_size=clients, max_size=clients))
    sizes = data.draw(st.lists(speed, min_size=blocks, max_size=blocks))
    slots = Blocks(blocks=blocks).assign(np.arange(clients), data.draw(st.integers(0, 9)), blocks)
    costs = costs_of(uplinks, sizes, base)
    best = min(makespan(costs, order) for order in set(permutations(slots)))
    found = fastest(costs, slots, stream(0, "test"), slack=0)
    assert makespan(costs, found) == pytest.approx(best)
    assert makespan(costs, fastest(costs, slots, stream(1, "test"))) <= 1.01 * best * (1 + 1e-9)


@given(st.integers(1, 40), st.integers(1, 8), st.integers(0, 30), st.floats(0, 1), st.integers(0, 99))
def test_every_block_keeps_its_clients_whatever_the_links(cohort, blocks, round, haste, seed):
    rng = stream(seed, "test")
    costs = costs_of(rng.lognormal(0, 2, cohort), np.sort(rng.lognormal(0, 2, blocks)), rng.random(cohort))
    plain = Blocks(blocks=blocks).assign(np.arange(cohort), round, blocks)
    matched = Matched(blocks=blocks, haste=haste).assign(np.arange(cohort), round, blocks, costs, rng)
    assert sorted(Counter(matched).values()) == sorted(Counter(plain).values())
    if cohort >= blocks:
        assert min(Counter(matched)[j] for j in range(blocks)) >= cohort // blocks


def test_of_all_fastest_assignments_each_is_equally_likely():
    """Limit 2 s: client 0 can have blocks 0 and 1, clients 1 and 2 all: 4 assignments of three blocks, a quarter each."""
    costs = np.array([[1.0, 2.0, 9.0], [1.0, 1.0, 2.0], [1.0, 1.0, 2.0]])
    rng = stream(0, "test")
    counts = Counter(tuple(fastest(costs, [0, 1, 2], rng)) for _ in range(4000))
    assert set(counts) == {(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0)}
    assert all(abs(n - 1000) < 120 for n in counts.values())  # 4 standard deviations


def test_equal_blocks_are_dealt_at_random():
    """Where blocks take everybody equally long there is nothing to gain: a slow client serves each of them."""
    rng, served = stream(0, "test"), Counter()
    for _ in range(400):
        served[fastest(costs_of([1, 2, 50, 100], [1000, 1001, 1000, 1001]), [0, 1, 2, 3], rng)[0]] += 1
    assert all(60 < served[j] < 140 for j in range(4))


@pytest.mark.parametrize(("haste", "of_ten"), [(0.0, 10), (0.5, 5), (0.8, 2), (0.9, 1), (1.0, 0)])
def test_a_share_of_the_rounds_is_dealt_at_random(haste, of_ten):
    uplink = Matched(haste=haste)
    for start in (0, 10, 90):
        assert sum(uplink.fair(round) for round in range(start, start + 10)) == of_ten


def test_every_client_serves_every_block_often_enough():
    """haste 0.5: of 600 rounds half are fair, in which each of 6 clients serves each of 3 blocks a third of the time: 100
    times, whatever the links; less than 70 would be four standard deviations off."""
    uplink, rng, served = Matched(blocks=3, haste=0.5), stream(0, "test"), Counter()
    costs = costs_of([0.01, 0.1, 1, 10, 100, 1000], [1, 20, 400])
    for round in range(600):
        cohort = rng.permutation(6)
        for client, block in zip(cohort, uplink.assign(cohort, round, 3, costs[cohort], rng), strict=True):
            served[client, block] += 1
    assert min(served[i, j] for i in range(6) for j in range(3)) > 70


@given(st.integers(1, 12), st.integers(1, 8), st.floats(0, 1), st.integers(1, 120))
def test_fair_rounds_deal_every_block_equally_often(cohort, blocks, haste, rounds):
    """In a fair round a client has block j with probability (places of j)/S, since the cohort comes in random order. The
    places of all fair rounds together are dealt evenly, so that is (1 − haste)/N in the mean, for any S, N and haste; and
    no block is served less often than another in the hasty rounds either."""
    uplink, served = Matched(blocks=blocks, haste=haste), {True: Counter(), False: Counter()}
    for round in range(rounds):
        costs = np.ones((cohort, blocks))
        served[uplink.fair(round)].update(uplink.assign(np.arange(cohort), round, blocks, costs, stream(0, "test")))
    for dealt in served.values():
        assert min(dealt[j] for j in range(blocks)) == dealt.total() // blocks
    assert served[True].total() // cohort == uplink.fair_before(rounds)
    assert abs(uplink.fair_before(rounds) - (1 - haste) * rounds) < 1


def test_fair_rounds_by_hand():
    """N = 4, S = 2, haste ½: rounds 1, 3, 5, … are fair. With one turn for all rounds they would deal blocks 3 and 4 alone;
    with their own they deal 1 and 2, then 3 and 4, and so on."""
    uplink = Matched(blocks=4, haste=0.5)
    dealt = [uplink.assign(np.arange(2), round, 4, np.ones((2, 4)), stream(0, "test")) for round in (1, 3, 5, 7)]
    assert dealt == [[0, 1], [2, 3], [0, 1], [2, 3]]


def test_fitted_sizes_take_less_time_than_even_ones():
    """Uplinks spread a hundredfold: matched rounds with fitted blocks are at least 4 times faster, uploads alone."""
    uplinks = 100 ** np.linspace(0, 1, 100)
    sizes = np.array(fitted_sizes(uplinks, 10, 5, 1.0, stream(0, "fit")))
    assert sizes.sum() == pytest.approx(1)
    assert (np.diff(sizes) > 0).all()
    rng, even, fitted = stream(1, "test"), [], []
    for _ in range(100):
        cohort = rng.choice(uplinks, 10, replace=False)
        slots = [k % 5 for k in range(10)]
        even.append(makespan(costs_of(cohort, [0.2] * 5), slots))
        costs = costs_of(cohort, sizes)
        fitted.append(makespan(costs, fastest(costs, slots, rng)))
    assert np.mean(even) / np.mean(fitted) > 4


def test_sizes_are_as_unequal_as_the_links_want_them(monkeypatch):
    """Uplinks a thousandfold apart, haste 1: the best power is about 1.8, and takes less time than 1.25 would."""
    uplinks, rng, seconds = 1000 ** np.linspace(0, 1, 100), stream(1, "test"), []
    cohorts = [rng.choice(uplinks, 10, replace=False) for _ in range(100)]
    for most in (5, 1.25):
        monkeypatch.setattr(
            "fedbcgd.algorithms.uplinks.assignment._POWERS", np.linspace(0, most, round(most / 0.05) + 1)
        )
        costs = [costs_of(c, fitted_sizes(uplinks, 10, 5, 1.0, stream(0, "fit"))) for c in cohorts]
        slots = [k % 5 for k in range(10)]
        seconds.append(np.mean([makespan(c, fastest(c, slots, rng)) for c in costs]))
    assert seconds[0] < 0.97 * seconds[1]


def test_sizes_are_even_where_nothing_can_be_gained():
    assert fitted_sizes(np.ones(30), 10, 5, 1.0, stream(0, "fit")) == pytest.approx([0.2] * 5)
    slow_computers = fitted_sizes(100 ** np.linspace(0, 1, 100), 10, 5, 1.0, stream(0, "fit"), fixed=1e4, volume=1.0)
    assert slow_computers == pytest.approx([0.2] * 5)
    fair = fitted_sizes(100 ** np.linspace(0, 1, 100), 10, 5, 0.0, stream(0, "fit"))
    assert max(fair) < 0.25


def test_fair_to_the_end_is_fedbcgd_to_the_bit(net, toys):
    common = {"rounds": 3, "cohort": 5, "batch_size": 3, "workers": 0, "blocks": 3, "divider": "even", "seed": 2}
    plain = simulate(net(), toys(), "fedbcgd", **common)
    fair = simulate(net(), toys(), "fedbcgd", uplink="matched", haste=0.0, network="4g", **common)
    for a, b in zip(plain.module.state_dict().values(), fair.module.state_dict().values(), strict=True):
        assert a.equal(b)


def test_without_links_it_is_said(net, toys):
    for options in ({}, {"divider": "even"}):
        with pytest.raises(UserError, match="network: expected one with uplink 'matched'"):
            simulate(net(), toys(), "fedbcgd", uplink="matched", blocks=3, rounds=1, workers=0, **options)


@pytest.mark.parametrize(("median", "unequal"), [(0.001, True), (1.0, False)])
def test_blocks_are_fitted_to_the_links_of_the_run(net, toys, median, unequal):
    """A block of 22 floats: at 1 kbit/s the upload decides; at 1 Mbit/s download and computing do, and blocks stay even."""
    seen = []
    network = {"uplink_mbit": {"median": median, "spread": 100.0, "shape": "loguniform"}}
    simulate(
        net(), toys(), "fedbcgd", uplink="matched", blocks=3, rounds=2, workers=0, network=network, cohort=6,
        callbacks=[lambda info: seen.append(np.diff(info.server.layout.bounds))],
    )  # fmt: skip
    assert (seen[0][2] > 2 * seen[0][0]) == unequal
    assert make_algorithm("fedbcgd", uplink="matched").uplink.haste == 0.9
