"""Problems with known optima, and how the algorithms converge on them."""

import pytest
import torch

import fedbcgd
from fedbcgd import make_algorithm
from fedbcgd.models.problems import quadratics
from fedbcgd.rng import stream
from tests.models.regression import logistic


def gradients(problem, w):
    out = []
    for a, t in problem.clients:
        out.append((a * (w - t)).mean(0))
    return torch.stack(out)


def test_quadratics_have_the_given_constants():
    p = quadratics(clients=30, dim=12, beta=8, mu=0.5, sigma=3, G=7, examples=6)
    curvature = torch.stack([a[0] for a, _ in p.clients])
    assert curvature.min() == pytest.approx(0.5)
    assert curvature.max() == pytest.approx(8)
    at_best = gradients(p, p.optimum)
    assert at_best.mean(0).norm() < 1e-12
    assert at_best.square().sum(1).mean().sqrt() == pytest.approx(7)
    noise = [(a * (p.optimum - t) - (a * (p.optimum - t)).mean(0)).square().sum(1).mean() for a, t in p.clients]
    assert torch.stack(noise).mean().sqrt() == pytest.approx(3)
    p.model.w.data.copy_(p.optimum)
    assert p.gap(p.model) == 0
    p.model.w.data[0] += 1
    assert p.gap(p.model) == pytest.approx(float(curvature[:, 0].mean()) / 2)


def test_the_optimum_of_logistic_regression_is_one(toys):
    p = logistic(toys(), classes=3, l2=0.01)
    model = p.model
    torch.nn.utils.vector_to_parameters(p.optimum, model.parameters())
    assert abs(p.gap(model)) < 1e-14
    loss = torch.stack([torch.nn.functional.cross_entropy(model(x), y) for x, y in p.clients]).mean()
    loss = loss + 0.005 * sum(q.square().sum() for q in model.parameters())
    norm = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]).norm()
    assert norm**2 / (2 * 0.01) < 1e-15  # which bounds f − f* of a 0.01-strongly convex f


def run(name, rounds, problem=None, **options):
    p = problem or quadratics(clients=40, dim=20, beta=10, mu=1, sigma=5, G=10, examples=10)
    settings = {"lr": 0.05, "lr_decay": 1, "weight_decay": 0.0, "batch_size": 5, "local_epochs": 1} | options
    if "fedbcgd" in name:
        settings = {"blocks": 4, "momentum": 0.0} | settings
    result = fedbcgd.simulate(
        p.model, p.clients, name, rounds=rounds, cohort=8, workers=0, loss=p.loss, metrics=p.metrics, test=p.test,
        evaluate_every=rounds, **settings,
    )  # fmt: skip
    return result.final["test_gap"]


@pytest.mark.parametrize("options", [{}, {"damping": "adaptive"}, {"derived": True}], ids=str)
def test_fedbcgd_plus_is_exact(options):
    """Heterogeneous, strongly convex, noisy; M = 16, S = 8, N = 4, float64."""
    problem = quadratics(clients=16, dim=20, beta=10, mu=1, sigma=5, G=10, examples=10)
    assert run("fedbcgd+", 225, problem, lr=0.02, **options) < 1e-12


@pytest.mark.parametrize(("name", "floor"), [("fedavg", 1e-2), ("fedbcgd", 1e-2), ("scaffold", 1e-6)])
def test_others_stall_at_their_noise_floors(name, floor):
    assert floor < run(name, 200)


@pytest.mark.parametrize("flag", ["printed", "printed_refresh"])
def test_fedbcgd_plus_as_printed_stalls(flag):
    """Errata 1 and 2."""
    assert run("fedbcgd+", 200, lr=0.02, **{flag: True}) > 1e-2


@pytest.mark.slow
def test_fedbcgd_plus_with_momentum_is_exact():
    assert run("fedbcgd+", 900, lr=0.02, momentum=0.5) < 1e-12


@pytest.mark.slow
def test_logistic_regression_is_solved_exactly(toys):
    p = logistic(toys((12, 9, 15, 8, 11, 14, 7, 10, 13, 9), features=4), classes=3, l2=0.05)
    assert run("fedbcgd+", 3000, p, lr=0.1, blocks=2, weight_decay=0.05) < 1e-12
    assert run("fedavg", 1000, p, lr=0.1, weight_decay=0.05) > 1e-7


@pytest.mark.parametrize("name", ["fedbcgd+", "feddc", "scaffold", "qsgd+fedbcgd+"])
@pytest.mark.parametrize(
    ("codec", "derived"),
    [(codec, derived) for codec in ("plain", "qsgd", "float16", "topk") for derived in (False, True)][:-1],
)
def test_controls_are_means_with_every_codec_and_a_third_of_the_uploads_lost(
    federation, net, toys, name, codec, derived
):
    """c = mean(c_i), and H = mean(h_i), to rounding after every round."""
    draw = stream(3, "lost")
    clients = [(x.double(), y) for x, y in toys()]
    algorithm = make_algorithm(name, codec=codec, derived=derived, batch_size=3, lr=0.05)
    f = federation(algorithm, net().double(), clients, 4, transport=lambda u: None if draw.random() < 1 / 3 else u)
    lost = 0
    for _ in range(12):
        lost += len(f.round().lost)
        for control in algorithm.local.controls:
            mean = f.controls(control).mean(0)
            torch.testing.assert_close(f.server.controls[control], mean, rtol=1e-11, atol=1e-12)
    assert lost > 5


def test_top_k_loses_nothing_in_the_long_run(federation, net, toys):
    """All changes of the clients are either in what the server received or still in a residual."""
    total = {}

    def watch(upload):
        from fedbcgd.algorithms.codecs import TopK

        codec = TopK(fraction=0.1)
        sent = torch.cat(
            [codec.decode(piece, n, torch.float64) for piece, n in zip(upload.payload["dx"], sizes, strict=True)]
        )
        total[upload.client] = total.get(upload.client, 0) + sent
        return upload

    clients = [(x.double(), y) for x, y in toys()]
    algorithm = make_algorithm("topk", fraction=0.1, batch_size=3)
    f = federation(algorithm, net().double(), clients, 3, transport=watch)
    sizes = [s.stop - s.start for s in f.layout.slices(0)]
    changed = {}
    from fedbcgd.algorithms.local_rules import SGD

    original = SGD.changes

    def changes(self, work, s):
        out = original(self, work, s)
        changed.setdefault(current[0], []).append(out["dx"].clone())
        return out

    current = [0]
    fit = f.job.fit

    def noted(broadcast, task, *rest):
        current[0] = task.client
        return fit(broadcast, task, *rest)

    f.job.fit = noted
    SGD.changes = changes
    try:
        for _ in range(20):
            f.round()
    finally:
        SGD.changes = original
    for client, changes_made in changed.items():
        owed = f.store.load(client, 0)["residual"]
        torch.testing.assert_close(total[client] + owed, torch.stack(changes_made).sum(0), rtol=1e-10, atol=1e-12)


def test_a_conditioned_quadratic_is_as_badly_conditioned_as_its_clients():
    """The mean of the curvatures 100^(u ± 0.1) over many clients is within a factor of 100^0.1 of 100^u."""
    for conditioned, low in ((True, 100 / 100**0.2), (False, 1.0)):
        p = quadratics(clients=200, dim=11, beta=100, mu=1, conditioned=conditioned)
        mean = torch.stack([a[0] for a, _ in p.clients]).mean(0)
        ratio = float(mean.max() / mean.min())
        assert low <= ratio <= 100 if conditioned else ratio < 3
