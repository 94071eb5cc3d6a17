"""Gradients of large dense layers as factors: the same as ordinary ones, wherever they go and however a layer is used."""

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedbcgd import make_algorithm, simulate
from fedbcgd.errors import UserError
from fedbcgd.flat import FlatModel
from fedbcgd.local import backward
from fedbcgd.local.backward import Backward, Gradient


@pytest.fixture(autouse=True)
def small_is_large(monkeypatch):
    monkeypatch.setattr(backward, "LARGE", 12)


class Net(nn.Module):
    """A dense layer that is large, one that is not, and one that nobody calls."""

    def __init__(self, bias=True):
        super().__init__()
        self.wide = nn.Linear(4, 6, bias=bias)
        self.narrow = nn.Linear(6, 1)
        self.idle = nn.Linear(5, 5)

    def forward(self, x):
        return self.narrow(torch.relu_(self.wide(x)))


class Twice(Net):
    def __init__(self):
        super().__init__()
        self.square = nn.Linear(6, 6)

    def forward(self, x):
        return self.narrow(self.square(torch.tanh(self.square(self.wide(x)))))


class Tied(Twice):
    """Two layers with one weight, which is used by itself too."""

    def __init__(self):
        super().__init__()
        self.other = nn.Linear(6, 6)
        self.other.weight = self.square.weight

    def forward(self, x):
        return self.narrow(self.other(torch.tanh(self.square(self.wide(x))))) + self.square.weight.square().sum()


class Elsewhere(Net):
    def forward(self, x):
        return self.narrow(F.linear(x, self.wide.weight, self.wide.bias))


class Sequences(Net):
    def forward(self, x):
        return super().forward(x[:, None, :].expand(-1, 3, -1)).mean(1)


class One(Net):
    def forward(self, x):
        return torch.stack([super(One, self).forward(row) for row in x])


class Penalty(Net):
    """A gradient within the loss: what is asked for there is no factor, and goes on to be differentiated."""

    def forward(self, x):
        y = super().forward(x)
        g = torch.autograd.grad(y.sum(), list(self.wide.parameters()), create_graph=True)
        return y + sum(t.square().sum() for t in g)


class Scaled(Net):
    """With a hook on the weight's gradient, which is to see it."""

    def __init__(self):
        super().__init__()
        self.wide.weight.register_hook(lambda g: 2 * g)


class Narrow(Net):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x.float()).double()


class Frozen(Net):
    def __init__(self):
        super().__init__()
        self.wide.bias.requires_grad_(False)


NETS = [Net, lambda: Net(bias=False), Twice, Tied, Elsewhere, Sequences, One, Penalty, Scaled, Frozen]


def made(net, **options):
    torch.manual_seed(0)
    model = net().double()
    layout = make_algorithm("fedavg", **options).uplink.layout(model)
    return FlatModel(model, layout)


def loss(model):
    torch.manual_seed(1)
    return model.module(torch.randn(7, 4, dtype=torch.float64)).square().mean()


def ordinary(net):
    """The gradient as autograd gives it, before anything was changed about the model."""
    model = made(net)
    grads = torch.autograd.grad(loss(model), model.parameters, allow_unused=True)
    g = torch.zeros_like(model.vector[: model.layout.dim])
    for e, part in zip(model.layout.parameters, grads, strict=True):
        e.view(g).copy_(torch.zeros(e.shape) if part is None else part)
    return model.vector[: model.layout.dim].clone(), g


@pytest.mark.parametrize("net", NETS)
def test_the_gradient_in_a_vector(net):
    _, expected = ordinary(net)
    model = made(net)
    pass_ = Backward(model)
    out = Gradient(torch.full_like(expected, torch.nan), pass_.entries)
    for _ in range(2):  # nothing of the first time is left
        parts = pass_.of(loss(model))
        assert not parts.complete  # nobody calls the idle layer
        parts.put(out)
        torch.testing.assert_close(out.vector, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("net", NETS)
def test_a_step(net, decay):
    def busy():
        one = net()
        del one.idle
        return one

    y, g = ordinary(busy)
    model = made(busy)
    pass_ = Backward(model)
    parts = pass_.of(loss(model))
    assert parts.complete
    pass_.step(parts, 0.1, decay)
    now = model.vector[: model.layout.dim]
    torch.testing.assert_close(now, y - 0.1 * (g + decay * y), rtol=1e-12, atol=1e-14)
    assert not now.requires_grad


def test_which_layers(monkeypatch):
    """Ordinary dense layers with a large weight that is trained: no subclass, nothing that has another forward pass."""

    class Mine(nn.Linear):
        pass

    def net():
        one = nn.Sequential(
            nn.Linear(4, 4), Mine(4, 4), nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 4), nn.Linear(4, 4)
        )
        one[2].forward = lambda x: x
        one[4].weight.requires_grad_(False)
        return one

    pass_ = Backward(made(net))
    assert [e.name for e in pass_.entries[-2:]] == ["0.weight", "5.weight"]
    assert len(pass_._factors) == 2


def test_half_a_precision_is_left_to_autograd():
    model = FlatModel(Net().bfloat16(), make_algorithm("fedavg").uplink.layout(Net().bfloat16()))
    assert not Backward(model)._factors


def test_autocast_is_left_to_autograd():
    torch.manual_seed(0)
    net = Narrow()
    model = FlatModel(copy.deepcopy(net), make_algorithm("fedavg").uplink.layout(net))
    x = torch.randn(7, 4)
    expected = torch.autograd.grad(net(x).mean(), net.wide.weight)[0]
    pass_ = Backward(model)
    out = Gradient(torch.zeros(model.layout.dim), pass_.entries)
    pass_.of(model.module(x).mean()).put(out)
    place = next(e for e in model.layout.parameters if e.name == "wide.weight")
    assert torch.equal(place.view(out.vector), expected)


def test_nothing_is_kept_from_step_to_step():
    """Factors hold activations: they go with the step."""
    model = made(Net)
    pass_ = Backward(model)
    parts = pass_.of(loss(model))
    seen = [weakref.ref(t) for f in pass_._factors for pair in f.pairs for t in pair]
    assert seen
    parts.put(Gradient(model.vector.clone(), pass_.entries))
    gc.collect()
    assert not any(ref() is not None for ref in seen)


def test_a_loss_of_nothing():
    model = made(Net)
    with pytest.raises(UserError, match="does not depend on any trainable parameter"):
        Backward(model).of(torch.ones((), requires_grad=True) * 2)
    with pytest.raises(UserError, match=r"a tensor of shape \(2,\)"):
        Backward(model).of(torch.ones(2, requires_grad=True))


@pytest.mark.parametrize("algorithm", ["fedavg", "fedbcgd", "scaffold", "fedbcgd+", "fedprox", "feddc"])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_algorithms_train_as_without(monkeypatch, algorithm, clip):
    def trained(large):
        monkeypatch.setattr(backward, "LARGE", large)
        torch.manual_seed(0)
        net = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
        clients = [(torch.randn(8, 4).double() + k, torch.randint(3, (8,))) for k in range(4)]
        options = {"rounds": 3, "cohort": 3, "batch_size": 3, "lr": 0.1, "clip_norm": clip, "workers": 0}
        result = simulate(net, clients, algorithm, **options)
        return torch.cat([p.detach().flatten() for p in result.module.parameters()])

    torch.testing.assert_close(trained(12), trained(10**9), rtol=1e-11, atol=1e-13)


def test_the_model_that_is_given_back_is_an_ordinary_one():
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    result = simulate(net, [(torch.randn(8, 4), torch.randint(3, (8,)))], "fedavg", rounds=1, cohort=1, workers=0)
    assert all("forward" not in vars(layer) for m in (net, result.module) for layer in m.modules())
