"""Every algorithm against numbers worked by hand: two clients, two steps."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedbcgd
from fedbcgd import UserError, make_algorithm
from fedbcgd.rng import stream

HAND = {"lr": 0.5, "lr_decay": 1, "weight_decay": 0, "batch_size": 1}


def points(*values):
    return torch.tensor(values, dtype=torch.float64)[:, None], torch.zeros(len(values))


@pytest.mark.parametrize("cache_mb", [512, 0])
def test_fedbcgd_plus(federation, point, pull_loss, cache_mb):
    """Client 1 holds 0 and 2, client 2 holds 5 and 7; ∇f_i(w; a) = w − a; x = 2, η = ½, B = 1, so T = 2; N = 1, λ = 0.

    The noise of a minibatch cancels: ∇f(y; ζ) − ∇f(x; ζ) = y − x, so every step is (y − x) + ∇f_i(x) − c_i + c.
    Round 1, controls 0. Client 1: ∇f = 1; y = 1.5, then −½ + 1 = ½, y = 1.25. Δx = −0.75, Δc = 1.
      Client 2: ∇f = −4; y = 4, then 2 − 4 = −2, y = 5. Δx = 3, Δc = −4.
      x = 2 + 2.25/2 = 3.125;  c = −1.5;  c_1 = 1, c_2 = −4
    Round 2. Client 1: ∇f = 2.125, c − c_1 = −2.5; step −0.375, y = 3.3125; step −0.1875, y = 3.40625. Δc = 1.125.
      Client 2: ∇f = −2.875, c − c_2 = 2.5: the same steps. Δc = 1.125.
      x = 3.40625;  c = −1.5 + 2.25/2 = −0.375;  c_1 = 2.125, c_2 = −2.875
    Gradients: two at the anchor and one more step for each client and round, 12; the first step is free. Without a cache
    the second step computes its gradient at the anchor again: 16.
    """
    algorithm = make_algorithm("fedbcgd+", blocks=1, momentum=0, local_epochs=1, cache_mb=cache_mb, **HAND)
    f = federation(algorithm, point(2.0), [points(0, 2), points(5, 7)], cohort=2, loss=pull_loss)
    f.round()
    assert f.server.x.tolist() == [3.125]
    assert f.server.controls["c"].tolist() == [-1.5]
    assert f.controls().flatten().tolist() == [1, -4]
    f.round()
    assert f.server.x.tolist() == [3.40625]
    assert f.server.controls["c"].tolist() == [-0.375]
    assert f.controls().flatten().tolist() == [2.125, -2.875]
    assert f.server.ledger.gradient_evaluations == (12 if cache_mb else 16)


def test_fedbcgd_plus_derived(federation, point, pull_loss):
    """As above, but Δc = −c + (x − y)/(Tη), Tη = 1. Round 1: Δc = 0.75 and −3, x as before; c = −1.125, c_i = 0.75, −3."""
    algorithm = make_algorithm("fedbcgd+", blocks=1, momentum=0, local_epochs=1, derived=True, **HAND)
    f = federation(algorithm, point(2.0), [points(0, 2), points(5, 7)], cohort=2, loss=pull_loss)
    f.round()
    assert f.server.x.tolist() == [3.125]
    assert f.server.controls["c"].tolist() == [-1.125]
    assert f.controls().flatten().tolist() == [0.75, -3]
    assert f.server.ledger.upload_d == 1


def test_adaptive_damping(federation, point, pull_loss):
    """Round 1: no client has a control, so w = 0 and the steps are those of round 1 above. Round 2: ∇f_1 = 2.125, c_1 = 1,
    so the fit is 2.125, cut to 1; ∇f_2 = −2.875, c_2 = −4: w = 2.875/4 = 0.71875, correction 2.5·w = 1.796875.
      Client 2: step −2.875 + 1.796875 = −1.078125, y = 3.6640625; step (0.5390625 − 1.078125), y = 3.93359375.
      Client 1 ends at 3.40625 as above. x = mean = 3.669921875."""
    algorithm = make_algorithm("fedbcgd+", blocks=1, momentum=0, local_epochs=1, damping="adaptive", **HAND)
    f = federation(algorithm, point(2.0), [points(0, 2), points(5, 7)], cohort=2, loss=pull_loss)
    f.round()
    assert f.server.x.tolist() == [3.125]
    f.round()
    assert f.server.x.tolist() == [3.669921875]


@pytest.mark.parametrize("derived", [False, True])
def test_feddc(federation, point, pull_loss, derived):
    """a = (0, 6), x = 2, η = ½, T = 2 (Tη = 1), α = ½.

    Round 1. Client 1: 2, y = 1; 1 + ½(1 − 2) = ½, y = 0.75. Δx = −1.25, Δc = 1.25, h_1 = −1.25.
      Client 2: −4, y = 4; −2 + ½·2 = −1, y = 4.5. Δx = 2.5, Δc = −2.5, h_2 = 2.5.
      H = 0.625; x = 2 + 0.625 + 0.625 = 3.25; c = −0.625
    Round 2. Client 1, c − c_1 = −1.875: 3.25 + ½(−1.25) − 1.875 = 0.75, y = 2.875; then
      2.875 + ½(−1.25 − 0.375) − 1.875 = 0.1875, y = 2.78125.
      Δx = −0.46875; c_1 = 1.25 + 0.625 + 0.46875 = 2.34375; h_1 = −1.71875.
      Client 2, c − c_2 = 1.875: −2.75 + 1.25 + 1.875 = 0.375, y = 3.0625; −2.9375 + 1.15625 + 1.875 = 0.09375, y = 3.015625.
      Δx = −0.234375; c_2 = −2.5 + 0.625 + 0.234375 = −1.640625; h_2 = 2.265625.
      H = 0.2734375; x = 3.25 − 0.3515625 + 0.2734375 = 3.171875; c = 0.3515625
    """
    algorithm = make_algorithm("feddc", alpha=0.5, local_steps=2, derived=derived, **HAND)
    f = federation(algorithm, point(2.0), [points(0), points(6)], cohort=2, loss=pull_loss)
    f.round()
    assert f.server.x.tolist() == [3.25]
    assert f.server.controls["h"].tolist() == [0.625]
    f.round()
    assert f.server.x.tolist() == [3.171875]
    assert f.server.controls["c"].tolist() == [0.3515625]
    assert f.controls("c").flatten().tolist() == [2.34375, -1.640625]
    assert f.controls("h").flatten().tolist() == [-1.71875, 2.265625]
    assert f.server.ledger.upload_d == (2 if derived else 4)
    assert (
        f.server.ledger.download_bytes == 2 * 2 * 2 * 8
    )  # x and c to two clients in two rounds; H stays at the server


@pytest.mark.parametrize(("name", "u2"), [("fedadam", 5.0), ("fedyogi", 5.5)])
def test_adaptive_servers(federation, point, pull_loss, name, u2):
    """One client at a, x = 0, one step with η = 1: Δ = a − x. β₁ = β₂ = ½, τ = 1 (so u = 1 at first), η_s = 2.

    Round 1, a = 1: Δ = 1; m = ½; u = 1 for both; x = 2·½/(1 + 1) = ½.
    Round 2, the same client now pulls by Δ = 3 (its data is moved to 3.5): m = ¼ + 1.5 = 1.75;
      Adam: u = ½ + 4.5 = 5; Yogi: u = 1 − ½·9·sign(1 − 9) = 5.5; x = ½ + 3.5/(√u + 1). No bias correction.
    """
    clients = [points(1)]
    options = {"lr": 1, "lr_decay": 1, "weight_decay": 0, "local_steps": 1}
    algorithm = make_algorithm(name, beta1=0.5, beta2=0.5, tau=1, server_lr=2, **options)
    f = federation(algorithm, point(0.0), clients, cohort=1, loss=pull_loss)
    f.round()
    assert f.server.x.tolist() == [0.5]
    clients[0] = points(3.5)
    f.round()
    assert f.server.x.item() == pytest.approx(0.5 + 3.5 / (math.sqrt(u2) + 1), rel=1e-12)


def one_client(federation, point, pull_loss, name, **options):
    algorithm = make_algorithm(name, local_steps=2, **HAND, **options)
    f = federation(algorithm, point(2.0), [points(0)], cohort=1, loss=pull_loss)
    f.round()
    return f.server.x.tolist()


def test_fedprox(federation, point, pull_loss):
    """x = 2, a = 0, μ = 1: 2, y = 1; 1 + (1 − 2) = 0, y = 1."""
    assert one_client(federation, point, pull_loss, "fedprox", mu=1) == [1.0]


def test_client_momentum(federation, point, pull_loss):
    """β = ½: v = 2, y = 1; v = 1 + 1 = 2, y = 0."""
    assert one_client(federation, point, pull_loss, "fedavg", client_momentum=0.5) == [0.0]


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.b = nn.Parameter(torch.ones(1, dtype=torch.float64))


def test_frozen_moves_only_what_is_uploaded(federation):
    """f = ½(a + b)², from (1, 1), η = ½, two steps. Frozen, the client of block a: 2, a = 0; 1, a = −½. Whole: both go to 0
    and stay. The client of block b likewise, so x = (−½, −½) frozen and (0, 0) whole."""

    def loss(model, batch):
        return 0.5 * (model.a + model.b).square().sum()

    for name, expected in (("fedbcgd-frozen", -0.5), ("fedbcgd", 0.0)):
        algorithm = make_algorithm(name, blocks=2, shared=None, momentum=0, local_steps=2, **HAND)
        f = federation(algorithm, Pair(), [points(0), points(0)], cohort=2, loss=loss)
        f.round()
        assert f.server.x.tolist() == [expected, expected]


def test_top_k_with_error_feedback(federation, point, pull_loss, at_point):
    """One client at (0, 0), x = (4, 2), η = ½, one step, k = 1.

    Δ = (−2, −1): sent (−2, 0), kept (0, −1); x = (2, 2). Δ = (−1, −1), with what was kept (−1, −2): sent (0, −2), kept
    (−1, 0); x = (2, 0). Δ = (−1, 0), with what was kept (−2, 0): sent; x = (0, 0), nothing is kept.
    """
    algorithm = make_algorithm("topk", fraction=0.5, local_steps=1, **HAND)
    f = federation(algorithm, point(4.0, 2.0), [at_point(0.0, 0.0)], cohort=1, loss=pull_loss)
    seen = []
    for _ in range(3):
        f.round()
        seen.append((f.server.x.tolist(), f.store.load(0, 0)["residual"].tolist()))
    assert seen == [([2, 2], [0, -1]), ([2, 0], [-1, 0]), ([0, 0], [0, 0])]


def test_a_lost_upload_leaves_the_residual(federation, point, pull_loss, at_point):
    algorithm = make_algorithm("topk", fraction=0.5, local_steps=1, **HAND)
    f = federation(algorithm, point(4.0, 2.0), [at_point(0.0, 0.0)], 1, loss=pull_loss, transport=lambda u: None)
    f.round()
    assert f.store.clients() == []


def test_central_is_sgd_on_all_data(net, toys):
    clients = toys()
    x, y = torch.cat([c[0] for c in clients]), torch.cat([c[1] for c in clients])
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-3)
    for r in range(2):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * 0.998**r
        for rows in torch.from_numpy(stream(0, "batches", r, 0).permutation(len(x))).split(5):
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    result = fedbcgd.simulate(net(), clients, "central", rounds=2, batch_size=5, local_epochs=1, workers=0)
    for key, value in model.state_dict().items():
        torch.testing.assert_close(result.module.state_dict()[key], value)
    assert result.ledger.upload_bytes == result.ledger.upload_d == result.ledger.download_bytes == 0
    assert result.ledger.gradient_evaluations == 2 * math.ceil(len(x) / 5)
    with pytest.raises(UserError, match="uploads nothing"):
        fedbcgd.simulate(net(), clients, "central", budget=5, workers=0)


def test_the_printed_server_step(federation, point, pull_loss):
    """Erratum 5: x ← x̄ + v moves twice by Δ: from 2 with Δ = −1.5, v = −1.5: 2 − 1.5 − 1.5 = −1."""
    algorithm = make_algorithm("fedavgm", printed_step=True, local_steps=2, **HAND)
    f = federation(algorithm, point(2.0), [points(0)], cohort=1, loss=pull_loss)
    f.round()
    assert f.server.x.tolist() == [-1.0]


def test_the_cache_changes_no_bit(net, toys):
    """Nothing kept, some kept, all kept; one epoch and three, whose minibatches are the same; dropout and all."""

    def model():
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))

    finals = []
    for cache in (0, 0.0005, 512):
        options = {"batch_size": 2, "local_epochs": 3, "cache_mb": cache, "blocks": 2}
        result = fedbcgd.simulate(model(), toys(), "fedbcgd+", rounds=2, workers=0, **options)
        finals.append((result.module.state_dict(), result.ledger.gradient_evaluations))
    assert all(torch.equal(finals[0][0][k], v) for state, _ in finals[1:] for k, v in state.items())
    assert finals[0][1] > finals[1][1] > finals[2][1]


def test_the_same_minibatch_means_the_same_draws(federation):
    """With y = x, SVRG's two gradients of one ζ cancel exactly, dropout and all: from an optimum nothing moves."""
    seen = []

    def loss(model, batch):
        out = model(torch.ones(1, 6))
        seen.append(out.detach().clone())
        return out.sum() * 0 + model[1].weight.sum()

    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 6, bias=False))
    options = {"blocks": 1, "local_epochs": 2, "batch_size": 1, "lr": 1e-12, "weight_decay": 0}
    f = federation(make_algorithm("fedbcgd+", **options), model, [(torch.zeros(3, 6), torch.zeros(3))], 1, loss=loss)
    f.round()
    anchors, steps = seen[:3], seen[3:]
    assert len(steps) == 5  # the first of six is free
    for k, out in enumerate(steps, start=1):
        torch.testing.assert_close(out, anchors[k % 3])
    assert not torch.equal(anchors[0], anchors[1])


def test_batchnorm_is_refused_with_advice(toys):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    with pytest.raises(UserError, match=r"BatchNorm in training mode.* got '1'.*GroupNorm"):
        fedbcgd.simulate(model, toys((6, 6)), "fedbcgd+", rounds=1, blocks=2, workers=0)
    with pytest.raises(UserError, match="BatchNorm"):  # the whole model in evaluation mode is trained all the same
        fedbcgd.simulate(copy.deepcopy(model).eval(), toys((6, 6)), "fedbcgd+", rounds=1, blocks=2, workers=0)
    model[1].eval()
    assert fedbcgd.simulate(model, toys((6, 6)), "fedbcgd+", rounds=1, blocks=2, workers=0).rounds == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"derived": True, "damping": 0.3}, ["derived", "damping"]),
        ({"damping": 2.0}, ["damping", "from 0 to 1"]),
        ({"damping": "some"}, ["damping", "adaptive"]),
        ({"client_momentum": 0.5}, ["client_momentum", "sgd"]),
    ],
)
def test_combinations_that_make_no_sense_are_refused(options, words):
    with pytest.raises(UserError) as error:
        make_algorithm("fedbcgd+", **options)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("name", fedbcgd.algorithm_names())
def test_every_algorithm_has_the_same_bits_on_workers(net, toys, name):
    def go(workers):
        options = {"rounds": 3, "cohort": 5, "batch_size": 3, "workers": workers}
        options["network"] = "4g" if name == "fedbcgd-matched" else None
        return fedbcgd.simulate(net(), toys(), name, **options).module.state_dict()

    alone, spread = go(0), go(2)
    assert all(torch.equal(alone[k], v) for k, v in spread.items())
