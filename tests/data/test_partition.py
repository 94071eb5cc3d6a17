import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbcgd import UserError
from fedbcgd.data import dirichlet, iid, label_counts
from fedbcgd.data.partition import Heterogeneity, by_group, dirichlet_unequal, quantity, shards


@given(st.integers(1, 200), st.integers(1, 20), st.sampled_from([0.01, 0.1, 0.6, 100]), st.integers(0, 9))
def test_every_example_is_handed_out_once_in_equal_parts(examples, clients, rho, seed):
    if examples < clients:
        return
    labels = np.random.default_rng(seed).integers(0, 5, examples)
    for parts in (iid(examples, clients, seed), dirichlet(labels, clients, rho, seed)):
        assert len(parts) == clients
        assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(examples))
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1


def labels(n=10_000, kinds=10):
    return np.arange(n) % kinds


def test_small_rho_means_few_labels_and_large_rho_all():
    def effective(rho):
        share = label_counts(labels(), dirichlet(labels(), 100, rho, 0)) / 100
        return float(np.mean(1 / (share**2).sum(1)))  # the number of labels that would give this concentration

    assert effective(0.05) < 2.5 < effective(0.6) < 6 < effective(100)
    assert effective(100) > 8.5


def test_the_shares_are_those_of_the_dirichlet_distribution():
    """With labels in plenty hardly anybody goes without, so the mean sum of squared shares is that of Dirichlet(ρ),
    (1 + ρ)/(1 + Cρ), plus what drawing n examples adds: (1 − that)/n."""
    rho, kinds, clients, n = 0.6, 10, 400, 50
    plenty = np.arange(clients * n * 20) % kinds
    parts = dirichlet(plenty, clients * 20, rho, 3)
    share = label_counts(plenty, parts) / n
    expected = (1 + rho) / (1 + kinds * rho)
    expected += (1 - expected) / n
    assert (share**2).sum(1).mean() == pytest.approx(expected, rel=0.05)


def test_the_seed_decides():
    a, b, c = (dirichlet(labels(), 10, 0.6, seed) for seed in (1, 1, 2))
    assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
    assert not all(np.array_equal(x, y) for x, y in zip(a, c, strict=True))


UNEQUAL = {
    "dirichlet-unequal": lambda labels, clients, seed: dirichlet_unequal(labels, clients, 0.3, seed),
    "shards": lambda labels, clients, seed: shards(labels, clients, 1, seed),
    "quantity": lambda labels, clients, seed: quantity(len(labels), clients, 0.2, seed),
    "group": lambda labels, clients, seed: by_group(np.arange(len(labels)) // 2 % max(clients, 1), clients, seed),
}


@given(st.integers(2, 120), st.integers(1, 12), st.sampled_from(list(UNEQUAL)), st.integers(0, 9))
def test_every_example_is_handed_out_once_and_nobody_is_empty(examples, clients, name, seed):
    labels = np.random.default_rng(seed).integers(0, 5, examples)
    if examples < 2 * clients:
        return
    parts = UNEQUAL[name](labels, clients, seed)
    assert len(parts) == clients
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(examples))
    assert min(map(len, parts)) >= 1
    again = UNEQUAL[name](labels, clients, seed)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


def test_shards_give_each_client_few_labels_and_equal_sizes():
    parts = shards(labels(1000), 50, 2, 0)
    counts = label_counts(labels(1000), parts)
    assert {len(part) for part in parts} == {20}
    assert (counts > 0).sum(1).max() <= 2  # 100 shards of 10: a label's 100 examples are ten whole shards


def test_unequal_dirichlet_varies_sizes_and_labels_where_quantity_varies_sizes_alone():
    wide, many = dirichlet_unequal(labels(), 100, 0.3, 0), quantity(10_000, 100, 0.5, 0)
    for parts in (wide, many):
        sizes = [len(part) for part in parts]
        assert max(sizes) > 2 * np.mean(sizes)
    apart, alike = (Heterogeneity.of(label_counts(labels(), parts)) for parts in (wide, many))
    assert apart.distance > 2 * apart.by_chance
    assert alike.distance < 1.3 * alike.by_chance


def test_groups_stay_together():
    groups = np.array(["b", "a", "c", "a", "b", "d"])
    parts = by_group(groups, 2, 0)
    homes = {g: {k for k, part in enumerate(parts) if g in groups[part]} for g in "abcd"}
    assert all(len(home) == 1 for home in homes.values())
    assert sorted(len(set(groups[part])) for part in parts) == [2, 2]


def test_heterogeneity_by_hand():
    """Two clients with one label each of two: total variation ½(½ + ½) = ½ each, one effective label."""
    h = Heterogeneity.of(np.array([[4, 0], [0, 4]]))
    assert (h.clients, h.smallest, h.median, h.largest, h.kinds) == (2, 4, 4, 4, 2)
    assert h.distance == 0.5
    assert h.labels == 1.0
    even = Heterogeneity.of(np.array([[3, 3], [1, 1]]))
    assert even.distance == 0
    assert even.labels == pytest.approx(2)
    assert "1 to" not in str(h)
    assert "2 to 6 (median 4) examples" in str(even)
    assert "heterogeneity 0.500" in str(h)


def test_by_chance_is_what_an_iid_split_has():
    """`by_chance` is the distance of an IID split of the same sizes."""
    counts = label_counts(labels(), iid(10_000, 100, 3))
    h = Heterogeneity.of(counts)
    assert h.distance == pytest.approx(h.by_chance, rel=0.1)


def test_label_counts_by_hand():
    assert label_counts(np.array([0, 0, 2, 2, 2]), [np.array([0, 2]), np.array([1, 3, 4])]).tolist() == [[1, 1], [1, 2]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: iid(3, 4), "expected at most 3, one for each example, got 4"),
        (lambda: iid(3, 0), "expected an integer ≥ 1"),
        (lambda: dirichlet(labels(), 5, 0), "expected a finite number > 0"),
        (lambda: dirichlet(labels(), 5, float("nan")), "expected a finite number > 0"),
        (lambda: dirichlet_unequal(labels(), 5, -1), "expected a finite number > 0"),
        (lambda: quantity(10, 5, 0), "expected a finite number > 0"),
        (lambda: quantity(3, 5, 1), "expected at most 3, one for each example, got 5"),
        (lambda: shards(labels(), 5, 0), "expected an integer ≥ 1"),
        (lambda: shards(np.arange(9), 5, 2), "expected at most 9, one for each example, got 5 × 2"),
        (lambda: by_group(np.array([0, 0, 1]), 3), "expected at most 2, one for each group, got 3"),
    ],
)
def test_mistakes(call, message):
    with pytest.raises(UserError, match=message):
        call()
