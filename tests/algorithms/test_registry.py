"""Names, options and the errors that explain them."""

import itertools

import pytest
import torch

from fedbcgd import UserError, algorithm_names, make_algorithm
from fedbcgd.algorithms.codecs import QSGD, Plain
from fedbcgd.algorithms.local_rules import SGD, Scaffold
from fedbcgd.algorithms.registry import _REGISTRIES, register
from fedbcgd.algorithms.server_rules import SERVERS, Average, Momentum
from fedbcgd.algorithms.uplinks import Blocks, Matched, Whole


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("fedavg", (Whole, SGD, Average, Plain)),
        ("fedavgm", (Whole, SGD, Momentum, Plain)),
        ("fedbcgd", (Blocks, SGD, Momentum, Plain)),
        ("scaffold", (Whole, Scaffold, Average, Plain)),
        ("fedbcgd-matched", (Matched, SGD, Momentum, Plain)),
        ("fedpaq", (Whole, SGD, Average, QSGD)),
    ],
)
def test_an_algorithm_is_four_parts(name, parts):
    a = make_algorithm(name)
    assert (type(a.uplink), type(a.local), type(a.server), type(a.codec)) == parts
    assert algorithm_names()[name]


def test_options_find_their_part():
    a = make_algorithm("fedbcgd", blocks=10, lr=0.3, momentum=0.5, codec="qsgd", levels=7, weighting="examples")
    assert (a.uplink.blocks, a.local.lr, a.server.momentum, a.codec.levels) == (10, 0.3, 0.5, 7)
    assert a.weighting == "examples"


def test_a_part_can_be_given_ready_made():
    assert make_algorithm("fedavg", codec=QSGD(levels=1)).codec.levels == 1


def test_options_make_the_same_algorithm_again():
    a = make_algorithm("fedbcgd", blocks=3, codec="qsgd", levels=7, lr=0.02, divider="even")
    assert make_algorithm(**a.options()) == a


def test_no_two_kinds_of_parts_share_an_option():
    options = {kind: {o for n in registry for o in registry.get(n).options()} for kind, registry in _REGISTRIES.items()}
    for (kind, mine), (other, theirs) in itertools.combinations(options.items(), 2):
        assert not mine & theirs, f"{kind} and {other} share {mine & theirs}"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: make_algorithm("fedbgcd"), ["'fedbgcd'", "Did you mean 'fedbcgd'", "scaffold"]),
        (lambda: make_algorithm("fedavg", learning_rate=1), ["learning_rate: no such option; it is called lr"]),
        (lambda: make_algorithm("fedavg", momentun=1), ["'momentun'"]),
        (lambda: make_algorithm("fedavg", momentum=0.9), ["momentum: expected only with", "server='momentum'"]),
        (lambda: make_algorithm("fedavg", blocks=5), ["'blocks'", "uplink='blocks'"]),
        (lambda: make_algorithm("fedavg", lr=-1), ["lr", "greater than 0", "-1"]),
        (lambda: make_algorithm("fedavg", lr=float("nan")), ["lr", "nan"]),
        (lambda: make_algorithm("fedavg", lr="fast"), ["lr", "number", "'fast'"]),
        (lambda: make_algorithm("fedbcgd", momentum=1), ["momentum", "less than 1"]),
        (lambda: make_algorithm("fedbcgd", blocks=2.5), ["blocks", "2.5"]),
        (lambda: make_algorithm("fedbcgd", blocks=0), ["blocks: expected an integer ≥ 1 or 'auto', got 0"]),
        (
            lambda: make_algorithm("fedbcgd", divider=3),
            ["divider: expected 'auto', 'layers', 'even', 'paper', or a list"],
        ),
        (
            lambda: make_algorithm("fedbcgd+", damping="x"),
            ["damping: expected a number from 0 to 1, or 'adaptive', got 'x'"],
        ),
        (
            lambda: make_algorithm("fedbcgd", Lr=0.1),
            ["option of fedbcgd: expected one of", "got 'Lr'. Did you mean 'lr'?"],
        ),
        (
            lambda: SERVERS.add("average", Momentum),
            ["server rule: expected a name that is not registered yet", "'average'"],
        ),
        (lambda: make_algorithm("fedavg", codec="zip"), ["codec", "'zip'", "plain", "qsgd"]),
        (lambda: make_algorithm("fedavg", codec=5), ["codec", "plain", "Codec", "5"]),
        (lambda: make_algorithm("fedavg", codec=SGD()), ["codec", "Codec"]),
        (lambda: make_algorithm("fedavg", weighting="size"), ["'size'", "examples", "uniform"]),
        (lambda: register("fedavg", uplink="whole", local="sgd", server="average", codec="plain"), ["'fedavg'"]),
        (lambda: register("new", uplink="whole", local="sdg", server="average", codec="plain"), ["'sdg'", "'sgd'"]),
    ],
)
def test_errors_say_what_would_be_right(call, words):
    with pytest.raises(UserError) as error:
        call()
    for word in words:
        assert word in str(error.value)
    assert SERVERS.get("average") is Average


def test_contributing_shows_ten_lines_that_work():
    """The example in CONTRIBUTING.md, run as it stands there."""
    from pathlib import Path

    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    code = text.split("```python\n")[1].split("```")[0]
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) <= 12
    from fedbcgd.algorithms import registry as algorithm
    from fedbcgd.algorithms.server_rules import SERVERS

    before = dict(algorithm._RECIPES), dict(SERVERS._parts)
    try:
        exec(compile(code, "CONTRIBUTING.md", "exec"), {"__name__": "contributing"})
        added = set(algorithm._RECIPES) - set(before[0])
        assert len(added) == 1
        assert make_algorithm(added.pop())
    finally:
        algorithm._RECIPES, SERVERS._parts = before


def contributed(heading: str) -> str:
    """The code under a heading of CONTRIBUTING.md."""
    from pathlib import Path

    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    return text[text.index(heading) :].split("```python\n")[1].split("```")[0]


def test_contributing_shows_a_codec_that_works(net, toys):
    from fedbcgd import simulate
    from fedbcgd.algorithms.codecs import CODECS

    before = dict(CODECS._parts)
    try:
        exec(compile(contributed("## A codec"), "CONTRIBUTING.md", "exec"), {"__name__": "contributing"})
        results = [
            simulate(net(), toys(), "fedavg", rounds=2, workers=0, batch_size=3, codec=codec)
            for codec in ("plain", "bfloat16")
        ]
    finally:
        CODECS._parts = before
    assert results[0].ledger.upload_bytes == 2 * results[1].ledger.upload_bytes
    plain, half = (torch.cat([p.flatten() for p in r.module.parameters()]) for r in results)
    torch.testing.assert_close(plain, half, rtol=0.02, atol=0.01)


def test_contributing_shows_a_data_set_that_is_checked(tmp_path, monkeypatch):
    import numpy as np

    from fedbcgd.data import catalog, store

    monkeypatch.setitem(catalog.KNOWN, "digits", None)  # so that the entry goes afterwards
    monkeypatch.setenv("FEDBCGD_DATA", str(tmp_path / "cache"))
    exec(compile(contributed("## A data set"), "CONTRIBUTING.md", "exec"), {"__name__": "contributing"})
    rng = np.random.default_rng(0)

    def made(n: int) -> dict:
        sizes = {"train": n, "test": 360}
        arrays = {f"x_{k}": rng.integers(0, 256, (m, 8, 8), dtype=np.uint8) for k, m in sizes.items()}
        return arrays | {f"y_{k}": np.arange(m) % 10 for k, m in sizes.items()}

    np.savez(tmp_path / "digits.npz", **made(1437))
    np.savez(tmp_path / "other.npz", **made(1000))
    store.add("digits", tmp_path / "digits.npz")
    with pytest.raises(UserError, match="is not Digits 8×8: train: expected 1437, got 1000"):
        store.add("digits", tmp_path / "other.npz")
