"""Exact equivalences: to the last bit, under the same seed."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedbcgd
from fedbcgd.rng import stream

ROUNDS, COHORT, SEED = 4, 4, 5


def train(net, toys, algorithm, **options):
    settings = {"lr": 0.2, "batch_size": 3, "local_epochs": 2, "weight_decay": 0.01, "lr_decay": 0.9} | options
    result = fedbcgd.simulate(net(), toys(), algorithm, rounds=ROUNDS, cohort=COHORT, seed=SEED, workers=0, **settings)
    return result.module.state_dict()


def same(a, b):
    return all(torch.equal(a[key], b[key]) for key in a) and a.keys() == b.keys()


in_both_precisions = pytest.mark.parametrize("precision", ["fp32", "bf16"])


@in_both_precisions
def test_one_block_is_fedavgm(net, toys, precision):
    bcgd = train(net, toys, "fedbcgd", blocks=1, momentum=0.7, precision=precision)
    assert same(bcgd, train(net, toys, "fedavgm", momentum=0.7, precision=precision))
    assert not same(bcgd, train(net, toys, "fedavg", precision=precision))


@in_both_precisions
def test_one_block_without_momentum_is_fedavg(net, toys, precision):
    bcgd = train(net, toys, "fedbcgd", blocks=1, momentum=0, precision=precision)
    assert same(bcgd, train(net, toys, "fedavg", precision=precision))


@pytest.mark.parametrize("option", [{"divider": "even"}, {"divider": "layers"}, {"shared": None}, {"clip_norm": 0.5}])
def test_one_block_is_fedavgm_however_it_is_cut(net, toys, option):
    clip = {k: v for k, v in option.items() if k == "clip_norm"}
    assert same(train(net, toys, "fedbcgd", blocks=1, **option), train(net, toys, "fedavgm", **clip))


def plain_fedavg(model, clients, weight_decay, precision="fp32"):
    """FedAvg with torch.optim.SGD and state_dicts, as anyone would write it."""
    for r in range(ROUNDS):
        cohort = stream(SEED, "cohort", r).choice(len(clients), COHORT, replace=False)
        before = {k: v.clone() for k, v in model.state_dict().items()}
        change = {k: torch.zeros_like(v) for k, v in before.items()}
        for i in cohort:
            local, (x, y) = copy.deepcopy(model), clients[i]
            optimizer = torch.optim.SGD(local.parameters(), lr=0.2 * 0.9**r, weight_decay=weight_decay)
            order = stream(SEED, "batches", r, int(i))
            for _ in range(2):
                for rows in torch.from_numpy(order.permutation(len(x))).split(3):
                    optimizer.zero_grad()
                    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                        loss = F.cross_entropy(local(x[rows]), y[rows])
                    loss.backward()
                    optimizer.step()
            for k, v in local.state_dict().items():
                change[k] += v - before[k]
        model.load_state_dict({k: before[k] + change[k] / COHORT for k in before})
    return model.state_dict()


@in_both_precisions
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_fedavg_is_a_dozen_lines_of_plain_pytorch(net, toys, weight_decay, precision):
    expected = plain_fedavg(net(), toys(), weight_decay, precision)
    assert same(train(net, toys, "fedavg", weight_decay=weight_decay, precision=precision), expected)


def test_fedavg_is_plain_pytorch_on_convolutions():
    """channels_last sums in another order than the plain loop, so here equality is to rounding, in float64."""

    def model():
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 9, 3)).double()

    g = torch.Generator().manual_seed(1)
    clients = [
        (torch.randn(n, 2, 5, 5, generator=g, dtype=torch.float64), torch.randint(3, (n,), generator=g))
        for n in (4, 6, 3, 5, 8)
    ]
    got = fedbcgd.simulate(
        model(), clients, "fedavg", rounds=ROUNDS, cohort=COHORT, seed=SEED, workers=0,
        lr=0.2, lr_decay=0.9, batch_size=3, local_epochs=2, weight_decay=0.01,
    ).module.state_dict()  # fmt: skip
    expected = plain_fedavg(model(), clients, 0.01)
    for key in expected:
        torch.testing.assert_close(got[key], expected[key], rtol=1e-11, atol=1e-13)


def test_the_same_seed_gives_the_same_model_and_another_seed_another(net, toys):
    def go(seed):
        options = {"codec": "qsgd", "batch_size": 2, "blocks": 2}
        return fedbcgd.simulate(net(), toys(), "fedbcgd", rounds=3, seed=seed, workers=0, **options)

    assert same(go(0).module.state_dict(), go(0).module.state_dict())
    assert not same(go(0).module.state_dict(), go(1).module.state_dict())


def test_dropout_draws_from_the_seed_and_leaves_the_global_generator_alone(toys):
    def model():
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))

    torch.manual_seed(123)
    before = torch.get_rng_state()
    a = fedbcgd.simulate(model(), toys(), "fedavg", rounds=2, workers=0).module.state_dict()
    assert torch.equal(before, torch.get_rng_state())
    torch.rand(7)
    b = fedbcgd.simulate(model(), toys(), "fedavg", rounds=2, workers=0).module.state_dict()
    assert same(a, b)


def test_uploads_are_summed_in_the_order_of_the_plan(federation, net, toys):
    """Whatever the order of arrival: the same bits."""
    finals = []
    for shuffle in (lambda t: t, lambda t: t[::-1], lambda t: t[1::2] + t[::2]):
        f = federation(fedbcgd.make_algorithm("fedbcgd", blocks=2, lr=0.5), net(), toys(), cohort=6)
        for _ in range(3):
            plan = f.server.plan()
            for task in shuffle(list(plan.tasks)):
                upload, _ = f.client.fit(plan.broadcast, task, *sources(toys, task), {})
                assert f.server.receive(upload).accepted
            assert f.server.settled == 6
            f.server.commit()
        finals.append(f.server.x.clone())
    assert torch.equal(finals[0], finals[1])
    assert torch.equal(finals[0], finals[2])


def sources(toys, task):
    from fedbcgd.data.sources import as_source

    return (as_source(toys()[task.client], "client"),)
