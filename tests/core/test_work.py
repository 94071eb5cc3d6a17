"""Minibatches of a client: gathered together or one by one, they are the same."""

import numpy as np
import pytest
import torch
from torch import nn

import fedbcgd
from fedbcgd.data import sources
from fedbcgd.data.images import Images
from fedbcgd.data.sources import Items, Tensors, gather_ahead

CPU = torch.device("cpu")


def images(count=23):
    pixels = torch.randint(0, 256, (count, 7, 7, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
    return Images(pixels, torch.randint(0, 3, (count,)), torch.full((3,), 0.4), torch.full((3,), 0.3))


def flat(batch):
    return list(batch.values()) if isinstance(batch, dict) else list(batch)


@pytest.mark.parametrize(
    "source",
    [
        images(),
        Tensors((torch.randn(23, 5), torch.arange(23))),
        Tensors({"x": torch.randn(23, 2, 6, 6).to(memory_format=torch.channels_last), "y": torch.arange(23)}),
        Tensors((torch.randn(40, 5), torch.arange(40)), torch.randperm(40)[:23]),
    ],
    ids=["images", "tensors", "dictionary", "rows"],
)
def test_minibatches_gathered_ahead_are_those_gathered_one_by_one(source, monkeypatch):
    order, rng = torch.randperm(23), np.random.default_rng(0)
    ahead = gather_ahead(source, order, 5, rng, CPU)
    for batch, rows in zip(ahead, order.split(5), strict=True):
        alone = source.gather(rows, rng)
        assert type(batch) is type(alone)
        for a, b in zip(flat(batch), flat(alone), strict=True):
            assert torch.equal(a, b)
            assert a.stride() == b.stride()
    monkeypatch.setattr(sources, "GATHERED_AHEAD", 23 * source.example_size - 1)
    assert gather_ahead(source, order, 5, rng, CPU) is None


def test_nothing_is_gathered_ahead_where_gathering_may_draw():
    rng = np.random.default_rng(0)
    for source in (images().shown_as(augment=True), Items([(torch.zeros(2), 0)] * 23)):
        assert gather_ahead(source, torch.arange(23), 5, rng, CPU) is None


@pytest.mark.parametrize("options", [{}, {"local_steps": 3}, {"local_steps": 11}], ids=["epochs", "less", "more"])
@pytest.mark.parametrize("algorithm", ["fedbcgd", "fedbcgd+"])
def test_training_is_the_same(algorithm, options, monkeypatch):
    """Also with an epoch of which not all is used."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(147, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))
    torch.manual_seed(0)
    whole = images(60)
    clients = [whole.subset(torch.arange(k * 12, k * 12 + 12)) for k in range(5)]
    ends = []
    for most in (1 << 20, 0):
        monkeypatch.setattr(sources, "GATHERED_AHEAD", most)
        run = fedbcgd.simulate(
            net, clients, algorithm, rounds=2, cohort=3, batch_size=5, workers=0, blocks=2, **options
        )
        ends.append(run.module.state_dict())
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
