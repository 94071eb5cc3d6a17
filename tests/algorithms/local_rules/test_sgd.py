"""Local SGD: rate, decay, weight decay, clipping, steps."""

import pytest
import torch

from fedbcgd import make_algorithm
from fedbcgd.algorithms.local_rules import SGD


def one_round(federation, point, pull_loss, at_point, start, goal, rounds=1, **options):
    options = {"lr": 0.5, "lr_decay": 1, "weight_decay": 0, "local_steps": 1, **options}
    f = federation(make_algorithm("fedavg", **options), point(*start), [at_point(*goal)], cohort=1, loss=pull_loss)
    for _ in range(rounds):
        f.round()
    return f.server.x.tolist()


def test_a_step(federation, point, pull_loss, at_point):
    """w = 4 pulled to 0 with η = ½: 4 − ½·4 = 2."""
    assert one_round(federation, point, pull_loss, at_point, [4.0], [0.0]) == [2.0]


def test_weight_decay_is_part_of_the_gradient(federation, point, pull_loss, at_point):
    """g = (4 − 2) + ½·4 = 4, so 4 − ½·4 = 2."""
    assert one_round(federation, point, pull_loss, at_point, [4.0], [2.0], weight_decay=0.5) == [2.0]


def test_clipping_is_of_the_whole_gradient_weight_decay_included(federation, point, pull_loss, at_point):
    """g = (3, 4) has norm 5, cut to 1: (0.6, 0.8). With weight decay 1 it is (6, 8), cut to the same."""
    expected = pytest.approx([3 - 0.3, 4 - 0.4])
    assert one_round(federation, point, pull_loss, at_point, [3.0, 4.0], [0.0, 0.0], clip_norm=1) == expected
    both = one_round(federation, point, pull_loss, at_point, [3.0, 4.0], [0.0, 0.0], clip_norm=1, weight_decay=1)
    assert both == expected
    small = one_round(federation, point, pull_loss, at_point, [0.3, 0.4], [0.0, 0.0], clip_norm=1)
    assert small == pytest.approx([0.15, 0.2])  # below the bound nothing is cut


def test_a_zero_gradient_survives_clipping(federation, point, pull_loss, at_point):
    assert one_round(federation, point, pull_loss, at_point, [1.0], [1.0], clip_norm=1) == [1.0]


def test_the_rate_decays_by_the_round(federation, point, pull_loss, at_point):
    """η = ½ then ¼: 4 → 2 → 2 − ¼·2 = 1.5."""
    assert one_round(federation, point, pull_loss, at_point, [4.0], [0.0], rounds=2, lr_decay=0.5) == [1.5]


@pytest.mark.parametrize(
    ("n", "options", "steps"),
    [(10, {}, 5), (50, {}, 5), (51, {}, 10), (1, {}, 5), (51, {"local_steps": 3}, 3), (7, {"batch_size": 2}, 20)],
)
def test_steps(n, options, steps):
    assert SGD(**options).steps(n) == steps


def test_minibatches_cover_the_data_once_an_epoch(federation, toys):
    """Every row once per epoch, in a new order each time; the last batch is what is left."""
    seen = []

    def loss(model, batch):
        seen.append(batch[1].tolist())
        return model(batch[0]).sum()

    clients = [(torch.zeros(5, 2), torch.arange(5))]
    options = {"batch_size": 2, "local_epochs": 3}
    federation(make_algorithm("fedavg", **options), torch.nn.Linear(2, 1), clients, cohort=1, loss=loss).round()
    assert [len(batch) for batch in seen] == [2, 2, 1] * 3
    epochs = [[row for batch in seen[k : k + 3] for row in batch] for k in (0, 3, 6)]
    assert all(sorted(epoch) == [0, 1, 2, 3, 4] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_a_parameter_that_the_loss_does_not_use_only_decays(federation, at_point):
    class Half(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.used = torch.nn.Parameter(torch.tensor([4.0], dtype=torch.float64))
            self.unused = torch.nn.Parameter(torch.tensor([4.0], dtype=torch.float64))

    def loss(model, batch):
        return 0.5 * (model.used - batch[0]).square().mean()

    algorithm = make_algorithm("fedavg", lr=0.5, lr_decay=1, weight_decay=0.5, local_steps=1)
    f = federation(algorithm, Half(), [at_point(4.0)], cohort=1, loss=loss)
    f.round()
    assert f.server.x.tolist() == [3.0, 3.0]


def test_gradients_that_share_memory_do_not_corrupt_each_other(federation, at_point):
    """d(a + b)/da and d(a + b)/db may be the very same tensor; weight decay must not be added to it twice."""

    class Sum(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
            self.b = torch.nn.Parameter(torch.tensor([4.0], dtype=torch.float64))

    def loss(model, batch):
        return (model.a + model.b).sum()

    algorithm = make_algorithm("fedavg", lr=0.5, lr_decay=1, weight_decay=0.5, local_steps=1)
    f = federation(algorithm, Sum(), [at_point(0.0)], cohort=1, loss=loss)
    f.round()
    assert f.server.x.tolist() == [2 - 0.5 * (1 + 1), 4 - 0.5 * (1 + 2)]
