"""Clients weighted by their examples: means, control variates and the optimum they lead to."""

import pytest
import torch

from fedbcgd import UserError, make_algorithm

SIZES = (1, 2, 7, 20)
CURVATURES = torch.tensor([[1.0, 2.0], [3.0, 1.0], [2.0, 2.0], [1.0, 4.0]], dtype=torch.float64)
TARGETS = torch.tensor([[40.0, -10.0], [-20.0, 5.0], [3.0, 30.0], [-60.0, 80.0]], dtype=torch.float64)


def clients():
    """f_i(w) = ½·Σ a_i·(w − t_i)², the same for each example of a client."""
    return [
        (torch.stack([a, t]).expand(n, 2, 2).clone(), torch.zeros(n))
        for a, t, n in zip(CURVATURES, TARGETS, SIZES, strict=True)
    ]


def quadratic(model, batch):
    a, t = batch[0][:, 0], batch[0][:, 1]
    return 0.5 * (a * (model.w - t).square()).sum(1).mean()


def optimum(weights) -> torch.Tensor:
    w = torch.tensor(weights, dtype=torch.float64)[:, None]
    return (w * CURVATURES * TARGETS).sum(0) / (w * CURVATURES).sum(0)


RULES = [
    ("scaffold", {}), ("scaffold", {"derived": True}), ("scaffold", {"uplink": "blocks", "blocks": 2, "shared": "none"}),
    ("feddc", {"alpha": 0.1}), ("feddc", {"alpha": 0.1, "derived": True}),
    ("fedbcgd+", {"blocks": 2, "shared": "none", "momentum": 0.0}),
    ("fedbcgd+derived", {"blocks": 2, "shared": "none", "momentum": 0.5}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options"), RULES, ids=str)
@pytest.mark.parametrize(("cohort", "lr", "rounds"), [(4, 0.1, 150), (2, 0.05, 250)])
def test_control_variates_lead_to_the_weighted_optimum(federation, point, name, options, cohort, lr, rounds):
    """f = Σ n_i·f_i/Σn, whose optimum is far from that of the mean of the f_i, with all clients or half of them a round."""
    settings = {"lr": lr, "lr_decay": 1, "weight_decay": 0, "local_steps": 3, **options}
    if "blocks" in options:
        settings["divider"] = "even"
    algorithm = make_algorithm(name, weighting="examples", **settings)
    f = federation(algorithm, point(0.0, 0.0), clients(), cohort, loss=quadratic)
    for _ in range(rounds):
        f.round()
    assert (optimum(SIZES) - optimum([1] * 4)).norm() > 5
    torch.testing.assert_close(f.server.x, optimum(SIZES), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("name", "options"), RULES, ids=str)
def test_controls_are_weighted_means(federation, net, toys, name, options):
    """c = Σ n_i·c_i/Σn after every round; of clients that were not seen yet, n is reckoned as the mean of the others."""
    data = [(x.double(), y) for x, y in toys()]
    algorithm = make_algorithm(name, weighting="examples", batch_size=3, lr=0.02, **options)
    f = federation(algorithm, net().double(), data, cohort=3)
    for _ in range(6):
        f.round()
        seen = f.server.examples
        assert seen == {i: len(data[i][0]) for i in f.store.clients()}
        in_all = sum(seen.values()) / len(seen) * len(data)
        for control in algorithm.local.controls:
            held = f.controls(control)
            mean = sum(n * held[i] for i, n in seen.items()) / in_all
            torch.testing.assert_close(f.server.controls[control], mean, rtol=1e-10, atol=1e-13)


def test_weighted_controls_survive_a_restore(federation, net, toys):
    algorithm = make_algorithm("scaffold", weighting="examples", batch_size=3)
    whole, other = (federation(algorithm, net(), toys(), cohort=4) for _ in range(2))
    for _ in range(2):
        whole.round(), other.round()
    tensors, values = whole.server.snapshot()
    other.server.restore(tensors, values)
    whole.round(), other.round()
    assert torch.equal(whole.server.x, other.server.x)
    assert torch.equal(whole.server.controls["c"], other.server.controls["c"])


@pytest.mark.parametrize("name", ["scaffold", "feddc", "fedbcgd+"])
def test_a_derived_control_change_is_refused_with_residuals(name):
    with pytest.raises(UserError, match=r"derived: expected False with codec 'topk'"):
        make_algorithm(name, derived=True, codec="topk")


def test_controls_with_residuals_are_warned_of(caplog):
    make_algorithm("feddc", codec="topk")
    assert "become outdated" in caplog.text
    caplog.clear()
    make_algorithm("topk")
    assert not caplog.text
