"""The formulas of Table 1 against values worked by hand.

With β = 16, μ = 1, σ = 2, G = 3, M = 27, S = 8, N = 4 (so K = 2), T = 4, ε = 0.01, λ = 0.5 (so α = 2), F = 5, τ = 7:
√ε = 0.1, ε^1.5 = 0.001, ε² = 0.0001, √β = 4, √(β/T) = 2, L = log 100 = 4.60517…
"""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbcgd import UserError
from fedbcgd.paper import theory
from fedbcgd.paper.theory import CASES, Setting, order, orders

S = Setting(
    beta=16, mu=1, sigma=2, G=3, clients=27, cohort=8, blocks=4, steps=4, epsilon=0.01, momentum=0.5, F=5, tau=7
)
L = math.log(100)

BY_HAND = {
    # (4 + 9)/(1·8·4·0.01) = 13/0.32; (2 + 3)/0.1
    ("FedAvg", 0): ((40.625, 50.0, 16 * L), 1.0),
    # 16·4/(4·8·0.0001) = 64/0.0032; (4·3 + 2·2)/0.001; 5·16/0.01
    ("FedAvg", 1): ((20_000.0, 16_000.0, 8_000.0), 1.0),
    # 13/(1·2·4·0.01) = 13/0.08; 5/(2·0.1); a quarter of d a round
    ("FedBCGD", 0): ((162.5, 25.0, 16 * L), 0.25),
    # 64/(4·2·0.0001) = 64/0.0008
    ("FedBCGD", 1): ((80_000.0, 16_000.0, 8_000.0), 0.25),
    # 4/0.32; 2/0.1; 27/8 + 16
    ("SCAFFOLD", 0): ((12.5, 20.0, 19.375 * L), 2.0),
    # 2·2/0.001; 8000·(27/8)^(2/3) = 8000·(3/2)²
    ("SCAFFOLD", 1): ((20_000.0, 4_000.0, 18_000.0), 2.0),
    ("FedLin", 0): ((16 * L,), 2.0),
    ("S-Local-GD", 0): ((16 * L,), 2.0),
    # 3·5·7/(27·0.001) = 105/0.027
    ("CE-LSGD", 1): ((105 / 0.027,), 3.0),
    # 35/0.01; 80/(2·0.01); 4/(27·4·0.01) = 4/1.08; (2·5·16/1.08)^1.5 = 148.148…^1.5
    ("BVR-L-SGD", 1): ((3_500.0, 4_000.0, 3.703704, 1803.2032), 3.0),
    # 27/2; 16
    ("FedBCGD+", 0): ((13.5 * L, 16 * L), 0.5),
    # 8000·(27/2)^(2/3) = 8000·9/4^(1/3)
    ("FedBCGD+", 1): ((72_000 / 4 ** (1 / 3),), 0.5),
}


@pytest.mark.parametrize(("name", "case"), BY_HAND)
def test_by_hand(name, case):
    terms, per_round = BY_HAND[name, case]
    found = order(name, S, CASES[case])
    assert found.terms == pytest.approx(terms)
    assert found.floats_per_round == per_round
    assert found.floats == pytest.approx(sum(terms) * per_round)


def test_every_entry_of_the_table_is_worked_by_hand():
    there = {(o.name, k) for k, case in enumerate(CASES) for o in theory.orders(S, case)}
    assert there == set(BY_HAND)


settings = st.builds(
    Setting,
    beta=st.floats(1, 1e3),
    mu=st.floats(0.01, 1),
    sigma=st.floats(0, 10),
    G=st.floats(0, 10),
    clients=st.integers(50, 500),
    cohort=st.integers(1, 50),
    blocks=st.integers(1, 40),
    steps=st.integers(1, 50),
    epsilon=st.floats(1e-6, 0.5),
    momentum=st.floats(0, 0.95),
)


@given(settings)
def test_the_theorems_com_is_the_rounds_times_d_over_n(s):
    """Com as Theorems 1 and 2 print it, in d; ours counts FedBCGD+'s 2d/N and so is twice that."""
    noise = (s.sigma**2 + s.G**2) / (s.mu * s.cohort * s.steps * s.epsilon)
    drift = (s.sigma + s.G) / (s.alpha * s.mu * s.blocks * math.sqrt(s.epsilon))
    com = noise + drift + s.beta / (s.mu * s.blocks) * s.log
    assert order("fedbcgd", s).floats == pytest.approx(com)
    com = (s.clients / s.cohort + s.beta / (s.mu * s.blocks)) * s.log
    assert order("fedbcgd+", s).floats == pytest.approx(2 * com)
    com = s.beta * s.F / s.epsilon * (s.clients / s.cohort) ** (2 / 3) * s.blocks ** (-1 / 3)
    assert order("fedbcgd+", s, CASES[1]).floats == pytest.approx(2 * com)


@given(settings)
def test_one_block_without_momentum_is_fedavg(s):
    plain = Setting(**{**vars(s), "blocks": 1, "momentum": 0.0})
    for case in CASES:
        assert order("fedbcgd", plain, case).terms == pytest.approx(order("fedavg", plain, case).terms)


def test_the_tables_entry_of_fedbcgd_plus_holds_at_its_n():
    s = Setting(beta=16, mu=1, clients=27, cohort=8, blocks=4, epsilon=0.01)
    assert math.sqrt(s.beta / s.mu) == s.blocks
    assert order("fedbcgd+", s).floats / 2 == pytest.approx((27 / 8 + math.sqrt(16)) * L)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"epsilon": 1}, "epsilon: expected less than 1"),
        ({"epsilon": 0}, "epsilon: expected a number from 1e-30 to"),
        ({"mu": 200}, "mu: expected at most beta = 100"),
        ({"cohort": 200}, "cohort: expected at most clients = 100, got 200"),
        ({"blocks": 0}, r"blocks: expected an integer from 1 to 1e\+30, got 0"),
        ({"momentum": 1}, "momentum: expected less than 1, got 1"),
        ({"sigma": math.nan}, "sigma: expected a number from 0 to .*, got nan"),
        ({"epsilon": 1e-200}, "epsilon: expected a number from 1e-30 to .*, got 1e-200"),
        ({"sigma": 1e200}, "sigma: expected a number from 0 to"),
        ({"beta": 0}, "beta: expected a number from 1e-30 to .*, got 0"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong, words):
    with pytest.raises(UserError, match=words):
        Setting(**wrong)


def test_the_ends_of_the_range_give_numbers():
    far = Setting(beta=1e30, mu=1e-30, sigma=1e30, G=1e30, F=1e30, tau=1e30, epsilon=1e-30)
    for case in CASES:
        assert all(math.isfinite(o.floats) for o in orders(far, case))
