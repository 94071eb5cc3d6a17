import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbcgd import UserError
from fedbcgd.data import dirichlet, iid, label_counts


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


def test_label_counts_by_hand():
    assert label_counts(np.array([0, 0, 2, 2, 2]), [np.array([0, 2]), np.array([1, 3, 4])]).tolist() == [[1, 1], [1, 2]]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: iid(3, 4), "3 examples cannot be split over 4"),
        (lambda: iid(3, 0), "at least 1"),
        (lambda: dirichlet(labels(), 5, 0), "positive"),
        (lambda: dirichlet(labels(), 5, float("nan")), "positive"),
    ],
)
def test_mistakes(call, words):
    with pytest.raises(UserError, match=words):
        call()
