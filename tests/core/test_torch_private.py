"""What is not public in PyTorch: the public forms give the same bits, and stand in where a version differs."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import fedbcgd
from fedbcgd.core import torch_private
from fedbcgd.models.resnet import ResNet18

PRIVATE = ("_fused_sgd_", "_foreach_copy_")
PROBES = (torch_private.has_fused_step, torch_private._has_foreach_copy, torch_private._has_engine)


class OtherEngine:
    """As where a version's engine differs."""

    def __init__(self, way):
        if way == "renamed":
            self.run_backward = lambda *_, another: None
        elif way == "wrong":
            self.run_backward = lambda *_, **__: (torch.zeros(3), torch.zeros(3))


@pytest.mark.parametrize("way", ["", "gone", "renamed", "wrong"])
def test_gradients_are_those_of_autograd(probes, monkeypatch, way):
    """Also where the loss is a parameter, or its gradient one number seen often; and of a version that differs."""
    if way:
        monkeypatch.setattr(torch.autograd.Variable, "_execution_engine", OtherEngine(way))
        monkeypatch.setattr(torch_private, "plain_differentiate", lambda loss, parameters: "plain")
    assert torch_private._has_engine() is not bool(way)
    draw = torch.Generator().manual_seed(0)
    losses = (
        lambda a, b, c: ((a @ b).tanh() * c).sum(),
        lambda a, b, c: a.sum(),
        lambda a, b, c: c,
        lambda a, b, c: (a @ b).mean()[None],
    )
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        abc = tuple(nn.Parameter(torch.randn(n, generator=draw).to(dtype)) for n in ((3, 4), (4, 2), ()))
        for loss in losses:
            found = torch_private.differentiate(loss(*abc), abc)
            if way:
                assert found == "plain"
                continue
            for mine, theirs in zip(found, torch.autograd.grad(loss(*abc), abc, allow_unused=True), strict=True):
                assert (mine is None) == (theirs is None)
                assert mine is None or torch.equal(mine, theirs)


def gone(monkeypatch, name):
    monkeypatch.delattr(torch, name)


def renamed(monkeypatch, name):
    """As where a version gives an argument another name."""

    def other(*_args, another):
        raise AssertionError("never called")

    monkeypatch.setattr(torch, name, other)


def wrong(monkeypatch, name):
    """As where a version gives an argument another meaning."""
    monkeypatch.setattr(torch, name, lambda *_args, **_options: None)


@pytest.fixture
def probes():
    """The private functions are tried anew, before and after."""
    for probe in PROBES:
        probe.cache_clear()
    yield
    for probe in PROBES:
        probe.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("plain", [False, True])
def test_a_step_is_that_of_torchs_optimizer_however_gradients_lie(dtype, decay, plain):
    """Gradients in the parameter's order, in another order, as one number seen often, and one for two parameters."""
    assert torch_private.has_fused_step("cpu", dtype) == (dtype != torch.bfloat16)
    draw = torch.Generator().manual_seed(0)
    values = [
        torch.randn(4, 3, 5, 5, generator=draw).to(dtype).to(memory_format=torch.channels_last),
        torch.randn(4, 3, 5, 5, generator=draw).to(dtype).to(memory_format=torch.channels_last),
        torch.randn(7, 6, generator=draw).to(dtype),
        torch.randn(9, generator=draw).to(dtype),
        torch.randn(9, generator=draw).to(dtype),
        torch.randn(2, 1, 3, 3, generator=draw).to(dtype).to(memory_format=torch.channels_last),
    ]
    one = torch.randn(9, generator=draw).to(dtype)
    gradients = [
        torch.randn(4, 3, 5, 5, generator=draw).to(dtype).to(memory_format=torch.channels_last),
        torch.randn(4, 3, 5, 5, generator=draw).to(dtype),
        torch.full((), 0.3, dtype=dtype).expand(7, 6),
        one,
        one,
        torch.randn(2, 1, 3, 3, generator=draw).to(dtype),
    ]
    for chosen in (range(6), (0, 3, 5), (2,), (1,), (3, 4)):
        ours = [values[k].clone() for k in chosen]
        theirs = [nn.Parameter(values[k].clone()) for k in chosen]
        given = [gradients[k] for k in chosen]
        before = [g.clone() for g in given]
        for p, g in zip(theirs, given, strict=True):
            p.grad = g
        torch.optim.SGD(theirs, lr=0.18, weight_decay=decay, foreach=False).step()
        if plain:
            torch_private.plain_sgd_step(ours, given, 0.18, decay)
        else:
            torch_private.sgd_step(ours, [v.stride() for v in ours], given, 0.18, decay)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True)), "gradients are not ours to change"


@pytest.mark.parametrize("change", [gone, renamed, wrong])
def test_a_version_that_differs_is_noticed(probes, monkeypatch, change):
    for name in PRIVATE:
        change(monkeypatch, name)
    assert not torch_private.has_fused_step("cpu", torch.float32)
    value, to = torch.ones(3), torch.zeros(3)
    torch_private.sgd_step([value], [value.stride()], [torch.ones(3)], 0.5, 0.0)
    torch_private.copy_each([to], [value])
    assert torch.equal(value, torch.full((3,), 0.5))
    assert torch.equal(to, value)


def with_backward(loss, parameters):
    """Without the engine, which the test has taken away from all of Python."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.autograd.Variable, "_execution_engine", ENGINE)
        return torch.autograd.grad(loss, parameters, allow_unused=True)


ENGINE = torch.autograd.Variable._execution_engine


def trained(algorithm, net, toys):
    return fedbcgd.simulate(net(), toys(), algorithm, rounds=2, batch_size=3, workers=0).module.state_dict()


@pytest.mark.parametrize("algorithm", ["fedbcgd", "fedbcgd+"])
def test_training_without_private_functions(probes, monkeypatch, net, toys, algorithm):
    """FedBCGD steps parameter by parameter, FedBCGD+ copies its gradients into vectors."""
    expected = trained(algorithm, net, toys)
    for probe in PROBES:
        probe.cache_clear()
    for name in PRIVATE:
        gone(monkeypatch, name)
    monkeypatch.setattr(torch.autograd.Variable, "_execution_engine", OtherEngine("gone"))
    monkeypatch.setattr(torch_private, "plain_differentiate", with_backward)
    found = trained(algorithm, net, toys)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_saved_buffers(monkeypatch):
    module = nn.Sequential(nn.BatchNorm1d(2))
    module.register_buffer("kept", torch.zeros(1))
    module.register_buffer("left_out", torch.zeros(1), persistent=False)
    answers = {"kept": True, "left_out": False}
    assert {name: torch_private.is_saved(module, name) for name in answers} == answers
    model = ResNet18(10, (1, 8, 8), width=0.125, norm="batch")
    pairs = [(owner, name) for owner in model.modules() for name, _ in owner.named_buffers(recurse=False)]
    assert pairs
    before = [torch_private.is_saved(*pair) for pair in pairs]
    # a version that keeps no such set: the state_dict is asked
    monkeypatch.setattr(torch_private, "getattr", lambda *_: None, raising=False)
    assert {name: torch_private.is_saved(module, name) for name in answers} == answers
    assert [torch_private.is_saved(*pair) for pair in pairs] == before


def test_nothing_private_elsewhere():
    package = Path(fedbcgd.__file__).parent
    private = re.compile(
        r"\btorch\._[a-z]|_execution_engine|\b_foreach_|\._(buffers|parameters|modules|forward\w*hooks)\b|_non_persistent"
    )
    files = [path for path in package.rglob("*.py") if path.name != "torch_private.py"]
    assert [str(path) for path in files if private.search(path.read_text(encoding="utf-8"))] == []
