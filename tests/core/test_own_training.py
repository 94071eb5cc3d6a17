"""A user's own training function in the place of the local steps: `simulate(…, train=my_train)`."""

import copy
import random
import re
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from fedbcgd import UserError, algorithm_names, make_algorithm, simulate
from fedbcgd.algorithms.local_rules import SGD
from fedbcgd.core.algorithm import Algorithm
from fedbcgd.data.sources import examples_in
from fedbcgd.rng import stream

SEED = 3
FREE = ["fedavg", "fedavgm", "fedbcgd", "fedpaq", "qsgd+fedbcgd", "topk", "fedadam", "fedyogi"]
CORRECTED = ["fedprox", "scaffold", "feddc", "fedbcgd-frozen"]
ANCHORED = ["fedbcgd+", "fedbcgd+derived", "qsgd+fedbcgd+"]


def go(net, clients, name="fedavg", train=None, model=None, **options):
    blocks = {"blocks": 2, "shared": "none"} if "fedbcgd" in name else {}
    options = blocks | {"lr": 0.1, "batch_size": 3, "local_epochs": 2, "rounds": 3, "cohort": 4, "workers": 0} | options
    return simulate(net() if model is None else model, clients, name, seed=SEED, train=train, **options)


def same(a, b, exact=True):
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.equal(p, q) if exact else torch.allclose(p, q, atol=1e-6) for p, q in pairs)


def minibatches(data, config, fixed=False):
    """Those of the built-in rules: a new order in every epoch, or the same one."""
    rng = stream(SEED, "batches", config.round - 1, config.client)
    x, y = data
    order = rng.permutation(len(x))
    for epoch in range(config.local_epochs):
        if epoch and not fixed:
            order = rng.permutation(len(x))
        for rows in torch.from_numpy(order).split(config.batch_size):
            yield x[rows], y[rows]


def step(model, optimizer, x, y):
    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return closure


def plain_sgd(model, data, config):
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, weight_decay=config.weight_decay)
    losses = []
    for x, y in minibatches(data, config):
        losses.append(step(model, optimizer, x, y)())
        optimizer.step()
    return {"loss": sum(losses) / len(losses)}


def through_config(model, data, config):
    optimizer = config.optimizer(model.parameters())
    for x, y in minibatches(data, config):
        step(model, optimizer, x, y)()
        optimizer.step()


def by_closures(model, data, config):
    optimizer = config.optimizer(model.parameters())
    for x, y in minibatches(data, config, fixed=True):
        optimizer.step(step(model, optimizer, x, y))


def shuffled(model, data, config):
    """Draws from every generator there is."""
    loader = DataLoader(TensorDataset(*data), batch_size=config.batch_size, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for x, y in loader:
        noise = torch.randn(x.shape) + random.random() + float(np.random.random())  # noqa: NPY002
        step(model, optimizer, x + 0.1 * noise, y)()
        optimizer.step()
    return 0.5


# -- the same as the built-in rules ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FREE)
def test_our_sgd_as_a_training_function_gives_the_bits_of_the_built_in_rule(net, toys, name):
    ours, theirs = go(net, toys(), name, plain_sgd), go(net, toys(), name)
    assert same(ours.module, theirs.module)
    assert ours.final["train_loss"] == pytest.approx(theirs.final["train_loss"])
    assert ours.ledger == theirs.ledger  # gradient evaluations among them


@pytest.mark.parametrize("name", [*FREE[:1], *CORRECTED])
@pytest.mark.parametrize("closure", [False, True])
def test_gradients_are_corrected_as_in_the_built_in_rules(net, toys, name, closure):
    def train(model, data, config):
        optimizer = config.optimizer(model.parameters())
        for x, y in minibatches(data, config):
            if closure:
                optimizer.step(step(model, optimizer, x, y))
            else:
                step(model, optimizer, x, y)()
                optimizer.step()

    ours, theirs = go(net, toys(), name, train), go(net, toys(), name)
    assert same(ours.module, theirs.module, exact=False)
    if name != "fedavg":  # and the correction is one
        assert not same(ours.module, go(net, toys()).module, exact=False)


@pytest.mark.parametrize("name", ["scaffold", "feddc"])
def test_derived_controls_are_those_of_the_built_in_rules(net, toys, name):
    ours, theirs = go(net, toys(), name, through_config, derived=True), go(net, toys(), name, derived=True)
    assert same(ours.module, theirs.module, exact=False)


@pytest.mark.parametrize("options", [{}, {"derived": True}, {"damping": 0.5}, {"printed": True}])
def test_svrg_by_closures_is_that_of_the_built_in_rule(net, toys, options):
    for model in (net(), nn.Sequential(net(), nn.Dropout(0.0))):
        ours = go(net, toys(), "fedbcgd+", by_closures, model=model, **options)
        theirs = go(net, toys(), "fedbcgd+", model=model, **options)
        assert same(ours.module, theirs.module, exact=False)


def test_svrg_takes_the_full_gradient_from_a_loader(net, toys):
    """Once through the loader; each step is then two gradients."""
    loaders = [DataLoader(TensorDataset(*data), batch_size=3) for data in toys()]

    def train(model, loader, config):
        optimizer = config.optimizer(model.parameters())
        for x, y in loader:
            optimizer.step(step(model, optimizer, x, y))

    result = go(net, loaders, "fedbcgd+", train, rounds=1)
    sizes = [entry.gradient_evaluations / 3 for entry in result.ledger.entries]
    assert sizes == [len(loaders[entry.client]) for entry in result.ledger.entries]
    assert same(result.module, go(net, toys(), "fedbcgd+", train_on_pair(train), rounds=1).module, exact=False)


def train_on_pair(train):
    return lambda model, data, config: train(model, DataLoader(TensorDataset(*data), batch_size=3), config)


def test_the_two_gradients_of_svrg_have_one_dropout_mask(toys):
    """With a mask of its own in each, the two gradients at y = x would differ, and the closure be refused."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3))
    result = go(None, toys(), "fedbcgd+", by_closures, model=model)
    assert result.rounds == 3


# -- by hand -----------------------------------------------------------------------------------------------------------


def halves(*rates):
    """Two steps on ½(w − a)², whose gradient is w − a, at these rates."""

    def train(model, data, config):
        optimizer = config.optimizer(model.parameters())
        for rate in rates:
            optimizer.param_groups[0]["lr"] = rate
            optimizer.zero_grad()
            (0.5 * model(data[0]).square().sum()).backward()
            optimizer.step()

    return train


HAND = {"lr": 0.5, "lr_decay": 1, "weight_decay": 0, "batch_size": 1, "local_steps": 2}


def test_scaffold_by_hand(federation, point, at_point):
    """a = (0, 6), x = 2, η = ½, T = 2, so Tη = 1.

    Round 1, controls 0. Client 1: y = 1, then ½. Client 2: y = 4, then 5. Δx = −1.5 and 3, so x = 2.75.
      c_i⁺ = (x − y)/1 = 1.5 and −3;  c = −0.75
    Round 2. Client 1, c − c_1 = −2.25: 2.75 − 2.25 = 0.5, y = 2.5; 2.5 − 2.25 = 0.25, y = 2.375.
      Client 2, c − c_2 = 2.25: −3.25 + 2.25 = −1, y = 3.25; −2.75 + 2.25 = −0.5, y = 3.5. x = 2.9375.
      c_1⁺ = 1.5 + 0.75 + 0.375 = 2.625;  c_2⁺ = −3 + 0.75 − 0.75 = −3;  c = −0.1875
    """
    clients = [at_point(0.0), at_point(6.0)]
    f = federation(make_algorithm("scaffold", **HAND), point(2.0), clients, 2, train=halves(0.5, 0.5))
    f.round()
    assert f.server.x.tolist() == [2.75]
    assert f.controls().flatten().tolist() == [1.5, -3]
    f.round()
    assert f.server.x.tolist() == [2.9375]
    assert f.controls().flatten().tolist() == [2.625, -3]
    assert f.server.controls["c"].tolist() == [-0.1875]


def test_scaffold_with_a_schedule_by_hand(federation, point, at_point):
    """As above with η = ½ and ¼: Ση = ¾. Client 1: y = 1, then 0.75; c_1 = 1.25/0.75 = 5/3. Client 2: y = 4, then 4.5;
    c_2 = −2.5/0.75 = −10/3. x = 2 + (−1.25 + 2.5)/2 = 2.625."""
    clients = [at_point(0.0), at_point(6.0)]
    f = federation(make_algorithm("scaffold", **HAND), point(2.0), clients, 2, train=halves(0.5, 0.25))
    f.round()
    assert f.server.x.tolist() == [2.625]
    assert f.controls().flatten().tolist() == pytest.approx([5 / 3, -10 / 3])


# -- refused where the control would be wrong --------------------------------------------------------------------------


def stepping(make_optimizer, closure=False, after=None):
    def train(model, data, config):
        optimizer = make_optimizer(model, config)
        for x, y in minibatches(data, config):
            closure_of_step = step(model, optimizer, x, y)
            if closure:
                optimizer.step(closure_of_step)
            else:
                closure_of_step()
                optimizer.step()
        if after is not None:
            after(model)

    return train


def own(model, config):
    return torch.optim.SGD(model.parameters(), lr=config.lr)


def ours(model, config):
    return config.optimizer(model.parameters())


@torch.no_grad()
def move(model):
    next(model.parameters()).add_(1.0)


@pytest.mark.parametrize("name", [*CORRECTED, *ANCHORED])
def test_an_optimiser_of_ones_own_is_refused(net, toys, name):
    with pytest.raises(
        UserError,
        match=r"client \d, round 1: expected steps of config.optimizer.* got none; step with config.optimizer",
    ):
        go(net, toys(), name, stepping(own))


@pytest.mark.parametrize("name", CORRECTED)
def test_other_moves_beside_corrected_steps_are_refused(net, toys, name):
    with pytest.raises(UserError, match=r"moved by steps of .* alone.*got other changes too"):
        go(net, toys(), name, stepping(ours, after=move))

    def between(model, data, config):
        through_config(model, data, config)
        stepping(own)(model, data, config)
        through_config(model, data, config)

    with pytest.raises(UserError, match="got other changes too"):
        go(net, toys(), name, between)


@pytest.mark.parametrize(
    ("make_optimizer", "why"),
    [
        (lambda m, c: c.optimizer(m.parameters(), momentum=0.9), "momentum: expected none"),
        (lambda m, c: c.optimizer(m.parameters(), torch.optim.Adam), "expected SGD.*plain SGD, got Adam"),
        (lambda m, c: c.optimizer(list(m.parameters())[:-1]), r"in the optimiser.*got one without '4.bias'"),
        (
            lambda m, c: c.optimizer([{"params": m[0].parameters()}, {"params": m[2:].parameters(), "lr": 1}]),
            "one rate for all parameters.*got 0.1, 1.0",
        ),
        (lambda m, c: c.optimizer(m.parameters(), lr=0.0), "lr: expected a step with lr > 0.*got 0 in every step"),
        (lambda m, c: c.optimizer(m.parameters(), fused=True), "fused"),
    ],
)
@pytest.mark.parametrize("name", ["scaffold", "feddc"])
def test_controls_need_plain_sgd_on_all_parameters(net, toys, name, make_optimizer, why):
    with pytest.raises(UserError, match=why):
        go(net, toys(), name, stepping(make_optimizer))


def test_derived_controls_need_the_algorithms_rate(net, toys):
    train = stepping(lambda m, c: c.optimizer(m.parameters(), lr=0.05))
    assert go(net, toys(), "scaffold", train).rounds == 3
    with pytest.raises(UserError, match=r"lr: expected 0.1 .*got 0.05 on average"):
        go(net, toys(), "scaffold", train, derived=True)


def test_svrg_needs_closures_of_one_minibatch(net, toys):
    with pytest.raises(UserError, match=r"optimizer.step\(closure\)"):
        go(net, toys(), "fedbcgd+", stepping(ours))
    with pytest.raises(UserError, match="weight decay in its full gradient"):
        go(net, toys(), "fedbcgd+", stepping(lambda m, c: c.optimizer(m.parameters(), weight_decay=0.5), closure=True))

    def another_batch_each_time(model, data, config):
        optimizer = config.optimizer(model.parameters())
        batches = minibatches(data, config)
        optimizer.step(lambda: step(model, optimizer, *next(batches))())

    with pytest.raises(UserError, match=r"the same gradient from both calls at one point.*got two"):
        go(net, toys((9,) * 4), "fedbcgd+", another_batch_each_time)


@pytest.mark.parametrize(
    ("make_optimizer", "name"),
    [
        (lambda m, c: c.optimizer(m.parameters(), torch.optim.AdamW, lr=0.01), "fedprox"),
        (lambda m, c: c.optimizer(m[4].parameters(), momentum=0.9), "fedprox"),
        (lambda m, c: c.optimizer(m.parameters(), torch.optim.Adam, lr=0.01), "fedbcgd-frozen"),
    ],
)
def test_prox_and_frozen_take_any_optimiser(net, toys, make_optimizer, name):
    result = go(net, toys(), name, stepping(make_optimizer))
    assert result.ledger.refused == 0


def test_frozen_moves_what_is_uploaded_and_nothing_else(net, toys):
    ends = []

    def train(model, data, config):
        begin = copy.deepcopy(model.state_dict())
        stepping(lambda m, c: c.optimizer(m.parameters(), torch.optim.AdamW, lr=0.1))(model, data, config)
        ends.append(sum(int((begin[n] != p).sum()) for n, p in model.named_parameters()))

    model = net()
    whole = sum(p.numel() for p in model.parameters())
    go(net, toys(), "fedbcgd-frozen", train, model=model, rounds=1)
    assert max(ends) < 0.7 * whole


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("fedavg", {"train": 3}, "train: expected a function"),
        ("fedavg", {"clip_norm": 1.0}, "clip_norm: expected none together with train"),
        ("fedavg", {"client_momentum": 0.9}, "client_momentum: expected none together with train"),
        ("fedavg", {"batch_clients": 2}, "batch_clients: expected none with train"),
        ("central", {}, "data of all clients at once"),
    ],
)
def test_what_does_not_go_together_with_train(net, toys, name, options, why):
    with pytest.raises(UserError, match=why):
        go(net, toys(), name, **({"train": plain_sgd} | options))


def test_a_rule_that_does_not_know_of_own_training_is_refused(net, toys):
    """A subclass steps in its own way: what its base says does not hold for it."""

    class Signs(SGD):
        def direction(self, work, batch):
            return super().direction(work, batch).sign_()

    base = make_algorithm("fedavg", lr=0.1)
    algorithm = Algorithm("signs", base.uplink, Signs(lr=0.1), base.server, base.codec)
    with pytest.raises(UserError, match="says how another function takes its steps"):
        simulate(net(), toys(), algorithm, rounds=1, workers=0, train=plain_sgd)


# -- seeds -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fedbcgd", "topk"])
def test_one_seed_gives_one_model_in_this_process_and_in_workers(net, toys, name):
    here, there = go(net, toys(), name, shuffled), go(net, toys(), name, shuffled, workers=2)
    assert same(here.module, there.module)
    assert here.ledger.totals() == there.ledger.totals()


def test_generators_are_seeded_for_each_client_and_round_and_restored(net, toys):
    drawn = {}

    def train(model, data, config):
        numbers = torch.rand(1).item(), random.random(), float(np.random.random())  # noqa: NPY002
        drawn.setdefault((config.round, config.client), []).append((*numbers, config.seed))
        return 0.0

    def draws():
        return torch.rand(1).item(), random.random(), float(np.random.random())  # noqa: NPY002

    random.seed(1), np.random.seed(1), torch.manual_seed(1)  # noqa: NPY002
    expected = draws()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)  # noqa: NPY002
    go(net, toys(), "fedavg", train)
    assert draws() == expected
    go(net, toys(), "fedavg", train)
    assert all(len(set(pair)) == 1 for pair in drawn.values())
    assert len({pair[0] for pair in drawn.values()}) == len(drawn) == 12


def test_a_loader_with_a_generator_of_its_own_is_seeded_too(net, toys):
    clients = [
        DataLoader(TensorDataset(*data), batch_size=2, shuffle=True, generator=torch.Generator()) for data in toys()
    ]

    def train(model, loader, config):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in loader:
            step(model, optimizer, x, y)()
            optimizer.step()

    assert same(go(net, clients, "fedavg", train).module, go(net, clients, "fedavg", train).module)


# -- what the function does to the model -------------------------------------------------------------------------------


def test_what_the_function_changes_about_the_model_does_not_stay(net, toys):
    seen = []

    def train(model, data, config):
        seen.append((model.training, all(p.requires_grad for p in model.parameters()), len(model._forward_hooks)))
        plain_sgd(model, data, config)
        model.eval()
        model.requires_grad_(False)
        model.register_forward_hook(lambda *call: None)
        model.mark = True

    result = go(net, toys(), "fedavg", train)
    assert set(seen) == {(True, True, 0)}
    assert not hasattr(result.module, "mark")
    assert same(result.module, go(net, toys()).module)


def test_parameters_may_be_replaced_moved_and_wrapped(net, toys):
    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, x):
            return self.module(x)

    def train(model, data, config):
        wrapped = Wrapper(model).to("cpu")
        for part in model:
            if isinstance(part, nn.Linear):
                part.weight = nn.Parameter(part.weight.detach().clone())
                part.bias.data = part.bias.data.clone()
        plain_sgd(wrapped, data, config)

    assert same(go(net, toys(), "fedbcgd", train).module, go(net, toys(), "fedbcgd").module)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 4)
        self.first = nn.Linear(4, 3, bias=False)
        self.second = nn.Linear(4, 3, bias=False)
        self.second.weight = self.first.weight
        self.body.bias.requires_grad_(False)

    def forward(self, x):
        return self.first(self.body(x)) + self.second(x)


def test_ties_and_frozen_parameters(toys):
    result = go(None, toys(), "fedbcgd", plain_sgd, model=Tied())
    assert same(result.module, go(None, toys(), "fedbcgd", model=Tied()).module, exact=False)
    assert torch.equal(result.module.body.bias, Tied().body.bias)
    assert result.module.second.weight is result.module.first.weight


def rename(model):
    model.third = model.second
    del model.second


def widen(model):
    model.first.weight = nn.Parameter(torch.zeros(5, 4))


@torch.no_grad()
def thaw(model):
    model.body.bias.add_(1.0)


def untie(model):
    model.second.weight = nn.Parameter(model.first.weight.detach() + 1)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (rename, r"got one without second.weight with third.weight besides"),
        (widen, r"'first.weight' of shape \(3, 4\), as before training, got \(5, 4\)"),
        (thaw, "'body.bias' as it was before training, since it is frozen or tied"),
        (untie, "'second.weight' as it was before training, since it is frozen or tied"),
    ],
)
def test_a_model_that_cannot_be_read_back_is_refused(toys, change, why):
    def train(model, data, config):
        change(model)

    with pytest.raises(UserError, match=why):
        go(None, toys(), "fedavg", train, model=Tied())


def test_statistics_of_batchnorm_travel(toys):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    clients = toys((6, 6, 9, 6))
    ours, theirs = (go(None, clients, "fedbcgd", train, model=model) for train in (plain_sgd, None))
    assert same(ours.module, theirs.module)
    assert ours.module[1].running_mean.abs().sum() > 0


def test_nan_is_refused_by_the_server_as_always(net, toys):
    def train(model, data, config):
        with torch.no_grad():
            next(model.parameters())[0] = torch.nan
        return 0.0

    result = go(net, toys(), "fedavg", train, rounds=1)
    assert result.ledger.refused == 4
    assert same(result.module, net())


# -- data, metrics, config ---------------------------------------------------------------------------------------------


class Stream(IterableDataset):
    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter(zip(*self.data, strict=True))


def test_data_reaches_the_function_as_it_was_given(net, toys):
    clients = [DataLoader(TensorDataset(*data), batch_size=4) for data in toys()]
    seen = []
    go(net, clients, "fedavg", lambda model, data, config: seen.append(clients[config.client] is data))
    assert set(seen) == {True}


def test_examples_are_counted_or_told(net, toys):
    data = toys()[0]
    loader = DataLoader(TensorDataset(*data), batch_size=4)
    assert (
        examples_in(loader)
        == examples_in((loader, None))
        == examples_in(data)
        == examples_in(TensorDataset(*data))
        == 7
    )
    stream_loader = DataLoader(Stream(data), batch_size=4)
    assert examples_in(stream_loader) is examples_in({"train": loader}) is examples_in(object()) is None
    with pytest.raises(UserError, match=r'return \{"num-examples": n\}'):
        go(net, [stream_loader], "fedavg", lambda model, data, config: None, cohort=1)
    result = go(net, [stream_loader], "fedavg", lambda model, data, config: {"num-examples": 7}, cohort=1)
    assert result.ledger.refused == 0


def test_weights_are_the_examples_that_the_function_tells(point, at_point):
    """Client i moves to its own index: 0 and 1, with weights 1 and 3, so x = ¾."""

    def train(model, data, config):
        with torch.no_grad():
            model.w.fill_(config.client)
        return {"num-examples": 1 + 2 * config.client}

    result = go(
        None,
        [at_point(0.0), at_point(0.0)],
        "fedavg",
        train,
        model=point(5.0),
        weighting="examples",
        rounds=1,
        cohort=2,
    )
    assert result.module.w.tolist() == [0.75]


def test_metrics_reach_the_rows(net, toys):
    def train(model, data, config):
        return {
            "train_loss": torch.tensor(2.0), "accuracy": np.float32(0.25), "train_f1": 1, "perplexity": float("inf"),
            **({"rare": 1.0} if config.client == 0 else {}),
        }  # fmt: skip

    row = go(net, toys(), "fedavg", train, cohort=6).final
    assert row["train_loss"] == 2
    assert row["train_accuracy"] == 0.25
    assert row["train_f1"] == 1
    assert "train_perplexity" not in row
    assert "train_rare" not in row  # of one client alone


def test_metrics_are_means_over_the_examples(net, toys):
    row = go(net, toys((1, 3)), "fedavg", lambda m, d, c: {"accuracy": float(c.client)}, cohort=2).final
    assert row["train_accuracy"] == 0.75


@pytest.mark.parametrize(("returned", "loss"), [(0.5, 0.5), (torch.tensor([0.5]), 0.5), (None, None), ({}, None)])
def test_a_number_is_the_loss_and_none_is_nothing(net, toys, returned, loss):
    row = go(net, toys(), "fedavg", lambda model, data, config: returned).final
    assert row["train_loss"] == loss if loss is not None else row["train_loss"] != row["train_loss"]


@pytest.mark.parametrize(
    ("returned", "why"),
    [
        ("loss", "got str"),
        ({"confusion": [1, 2]}, "'confusion' of type list"),
        ({"loss": torch.zeros(2)}, "'loss' of type Tensor"),
        ({"loss": torch.tensor(1j)}, "'loss' of type Tensor"),
        ({"steps": 10**400}, "'steps' of type int"),
        ({f"m{k}": 1.0 for k in range(33)}, "at most 32"),
        ({"x" * 101: 1.0}, "1 to 100 printable"),
        ({"a\nb": 1.0}, "1 to 100 printable"),
        ({"num-examples": 0}, "n ≥ 1"),
    ],
)
def test_other_results_are_refused(net, toys, returned, why):
    with pytest.raises(UserError, match=why):
        go(net, toys(), "fedavg", lambda model, data, config: returned)


def test_config_says_what_the_algorithm_asks_for(net, toys):
    seen = []

    def train(model, data, config):
        seen.append(config)
        config.optimizer(model.parameters(), torch.optim.Adam)

    go(net, toys(), "fedavg", train, lr=0.2, lr_decay=0.5, weight_decay=0.01, local_steps=7)
    first, last = seen[0], seen[-1]
    assert (first.round, last.round) == (1, 3)
    assert (first.lr, last.lr) == (0.2, 0.05)
    assert (first.weight_decay, first.local_steps, first.batch_size, first.device.type) == (0.01, 7, 3, "cpu")
    assert first["lr"] == first.get("lr") == 0.2
    assert first.get("warmup", 5) == 5
    assert "lr" in first
    assert "warmup" not in first
    with pytest.raises(KeyError, match="config has no 'warmup'; it has round, client"):
        first["warmup"]


def test_the_optimiser_has_the_algorithms_rate_and_weight_decay(net, toys):
    groups = []

    def train(model, data, config):
        for cls, options in ((torch.optim.SGD, {}), (torch.optim.AdamW, {"lr": 0.01}), (torch.optim.Rprop, {})):
            groups.append(config.optimizer(model.parameters(), cls, **options).param_groups[0])

    go(net, toys(), "fedavg", train, rounds=1, cohort=1, lr=0.2, weight_decay=0.02)
    assert [(g["lr"], g.get("weight_decay")) for g in groups] == [(0.2, 0.02), (0.01, 0.02), (0.2, None)]


def test_steps_without_an_optimiser_are_not_counted(net, toys):
    assert go(net, toys(), "fedavg", lambda m, d, c: 0.0).ledger.gradient_evaluations == 0


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_names_the_users_line_the_client_and_the_round(net, toys, workers):
    def train(model, data, config):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError) as raised:
        go(net, toys(), "fedavg", train, workers=workers)
    lines = "".join(traceback.format_exception(raised.value)).strip().splitlines()
    assert lines[-4].endswith(", in train")
    assert "test_own_training.py" in lines[-4]
    assert lines[-3:-1] == ['    raise ZeroDivisionError("mine")', "ZeroDivisionError: mine"]
    assert re.fullmatch(r"while client \d trained in round 1", lines[-1])
    ours = [line for line in lines if "/fedbcgd/" in line and "/tests/" not in line]
    assert len(ours) == 1
    assert "simulation.py" in ours[0]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_outside_of_the_users_function_keeps_its_whole_traceback(net, toys, workers):
    def broken(model, data):
        raise ZeroDivisionError("the loss")

    with pytest.raises(ZeroDivisionError) as raised:
        go(net, toys(), "fedavg", lambda m, d, c: 0.0, workers=workers, test=toys()[0], metrics=broken)
    assert "evaluation.py" in "".join(traceback.format_exception(raised.value))


def test_loaders_without_a_training_function_are_refused(net, toys):
    with pytest.raises(
        UserError,
        match=r"client 0: expected a data set, got a DataLoader; pass the data set in it \(loader.dataset\).*train=…",
    ):
        go(net, [DataLoader(TensorDataset(*data)) for data in toys()])


# -- trainers that people have -----------------------------------------------------------------------------------------


class Lightning(nn.Module):
    """A module in the manner of Lightning: it says how to step, and a loop does it."""

    def __init__(self, net, config):
        super().__init__()
        self.net, self.config = net, config

    def training_step(self, batch):
        x, y = batch
        return F.cross_entropy(self.net(x), y) + 0.01 * self.net(x).square().mean()

    def configure_optimizers(self):
        optimizer = self.config.optimizer(self.net.parameters(), lr=0.2)
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)


def loop(model, loader, config):
    """Mixed precision, clipping, a schedule: steps by closures, as Lightning takes them."""
    module = Lightning(model, config)
    optimizer, schedule = module.configure_optimizers()
    for _ in range(config.local_epochs):
        for batch in loader:

            def closure(batch=batch):
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = module.training_step(batch)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                return loss

            optimizer.step(closure)
            schedule.step()
    return {"loss": closure()}


@pytest.mark.parametrize(
    "name", [n for n in algorithm_names() if n not in ("central", "fedbcgd-matched", "fedbcgd+derived")]
)
def test_a_loop_in_the_manner_of_lightning(net, toys, name):
    clients = [DataLoader(TensorDataset(*data), batch_size=3, shuffle=True) for data in toys()]
    results = [go(net, clients, name, loop, test=toys((20,))[0]) for _ in range(2)]
    assert results[0].ledger.refused == 0
    assert same(results[0].module, results[1].module)


@pytest.fixture
def transformers():
    pytest.importorskip("accelerate", reason="Hugging Face's Trainer needs it")
    return pytest.importorskip("transformers", reason="the extra hf is not installed")


class Texts(torch.utils.data.Dataset):
    """Sequences of eight tokens; the label is whether the first is above the middle."""

    def __init__(self, seed):
        g = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(20, (12, 8), generator=g)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, k):
        return {"input_ids": self.tokens[k], "labels": (self.tokens[k, 0] > 9).long()}


@pytest.mark.parametrize("name", ["fedbcgd", "scaffold"])
def test_hugging_faces_trainer(transformers, tmp_path, name):
    sizes = {
        "vocab_size": 20,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**sizes, max_position_embeddings=8))

    def train(model, data, config):
        arguments = transformers.TrainingArguments(
            tmp_path, per_device_train_batch_size=4, num_train_epochs=config.local_epochs, learning_rate=config.lr,
            seed=config.seed, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True, logging_strategy="no",
        )  # fmt: skip
        optimizers = (config.optimizer(model.parameters()), None) if name == "scaffold" else (None, None)
        trainer = transformers.Trainer(model, arguments, train_dataset=data, optimizers=optimizers)
        return trainer.train().metrics

    clients = [Texts(seed) for seed in range(3)]
    options = {"lr": 0.01, "cohort": 3, "rounds": 2, "test": Texts(9)}
    results = [go(None, clients, name, train, model=model, **options) for _ in range(2)]
    assert same(results[0].module, results[1].module)
    assert not same(results[0].module, model)
    assert results[0].ledger.gradient_evaluations == 2 * 3 * 2 * 3  # rounds, clients, epochs, batches
    assert results[0].final["train_loss"] > 0
    assert "train_samples_per_second" in results[0].final


def test_the_examples_of_the_documentation(net, toys):
    text = (Path(__file__).parents[2] / "docs" / "own-training.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    model, loaders = net(), [DataLoader(TensorDataset(*data), batch_size=3, shuffle=True) for data in toys()]
    names = {"model": model, "loaders": loaders, "F": F}
    exec(blocks[0].replace("rounds=100", "rounds=1, workers=0"), names)
    assert names["result"].rounds == 1
    (corrected,) = [block for block in blocks if "config.optimizer" in block]
    exec(corrected, names)
    for name in ("fedbcgd", *CORRECTED, *ANCHORED):
        assert go(net, loaders, name, names["my_train"]).ledger.refused == 0


def test_loaders_on_a_network_with_blocks_that_fit_the_links(net, toys):
    """How long a client computes follows from the examples of its loader."""
    clients = [DataLoader(TensorDataset(*data), batch_size=3, shuffle=True) for data in toys()]

    def train(model, loader, config):
        return shuffled(model, loader.dataset.tensors, config)

    network = {"profile": "4g", "oversample": 1.5}
    result = go(net, clients, "fedbcgd-matched", train, network=network)
    assert result.final["hours"] > 0
    assert result.ledger.refused == 0
