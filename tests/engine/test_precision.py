"""Whether bfloat16 is slower here, and how that is said."""

import logging

import pytest
import torch

from fedbcgd import simulate
from fedbcgd.engine import precision


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("processor : 0\nflags\t\t: fpu avx2 avx512_bf16 amx_bf16\n", "amx_bf16, avx512_bf16"),
        ("flags : fpu avx2\n", ""),
        ("Features : fp asimd svebf16 bf16\n", "bf16, svebf16"),
        ("", ""),
    ],
)
def test_what_the_processor_says(tmp_path, text, expected):
    path = tmp_path / "cpuinfo"
    path.write_text(text)
    assert precision.native_bf16(torch.device("cpu"), path) == expected
    assert precision.native_bf16(torch.device("cpu"), tmp_path / "missing") == ""


def test_a_matrix_product_is_timed():
    assert 0.001 < precision.product_ratio(torch.device("cpu")) < 1000


def run(net, toys, caplog, **options):
    with caplog.at_level(logging.WARNING, "fedbcgd"):
        simulate(net(), toys(), "fedavg", rounds=1, workers=0, **options)
    return [r.getMessage() for r in caplog.records if "slower" in r.getMessage()]


def test_one_line_says_that_bf16_is_slower_here(net, toys, caplog, monkeypatch):
    monkeypatch.setattr(precision, "_ratio", lambda *_: 2.5)
    line = 'precision: "bf16" is slower than "fp32" here: a step of this model takes 2.5 times as long'
    assert run(net, toys, caplog, precision="bf16") == [line]
    caplog.clear()
    assert run(net, toys, caplog, precision="fp32") == []
    monkeypatch.setattr(precision, "_ratio", lambda *_: 0.6)
    assert run(net, toys, caplog, precision="bf16") == []


def test_a_step_that_takes_long_is_not_tried(net, toys, caplog, monkeypatch):
    monkeypatch.setattr(precision, "MAX_STEP_SECONDS", 0.0)
    monkeypatch.setattr(precision, "_ratio", lambda *_: 3.0)
    assert "a matrix product takes 3.0 times as long" in run(net, toys, caplog, precision="bf16")[0]


def test_a_trial_changes_nothing(net, toys, monkeypatch):
    """Neither the model nor torch's generator; and a trial that fails ends nothing."""

    def train(**patched):
        for name, value in patched.items():
            monkeypatch.setattr(precision, name, value)
        torch.manual_seed(1)
        result = simulate(net(), toys(), "fedavg", rounds=1, workers=0, precision="bf16")
        return [*(p.detach().clone() for p in result.module.parameters()), torch.rand(1)]

    def fail(*_):
        raise RuntimeError("no such product")

    tried, untried = train(), train(product_ratio=fail)
    assert all(torch.equal(a, b) for a, b in zip(tried, untried, strict=True))
