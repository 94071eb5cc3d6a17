"""Damaged messages of every kind: no exception leaves, the model stays finite, each costs little."""

import pytest

pytest.importorskip("flwr", reason="the extra flower is not installed")

import fedbcgd.flower

from .fuzz import Mutator, fuzz
from .grids import LocalGrid
from .test_federation import CLIENTS, LOCAL, M, app, make_model

HOSTILE = (1, 3, 4)


def attack(name, messages, seed, **options):
    federation = fedbcgd.flower.strategy(
        name, make_model(), clients=M, evaluate_clients=1.0, min_clients=1, seed=3, max_norm="off", **LOCAL, **options
    )
    grid = LocalGrid(app(load_test=lambda client: CLIENTS[client]), M)
    return fuzz(federation, grid, Mutator(seed), messages, HOSTILE, M)


KINDS = {
    "fedbcgd+": {"blocks": 2},
    "fedavg": {"weighting": "examples"},
    "fedadam": {},
    "topk": {"fraction": 0.2},
}


@pytest.mark.parametrize("name", KINDS)
def test_damaged_messages(name):
    cost = attack(name, 80, 0, **KINDS[name])
    assert cost.bytes < 100e6


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_thousands_of_damaged_messages(name):
    cost = attack(name, 1500, 1, **KINDS[name])
    assert cost.bytes < 100e6
    assert cost.seconds < 1
