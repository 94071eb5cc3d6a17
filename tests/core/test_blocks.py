"""Dividers: every coordinate in exactly one block, and errors that name the culprit."""

from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedbcgd import UserError, divide
from fedbcgd.core.blocks import _warn, contiguous
from fedbcgd.models import MODELS, LeNet5


def mlp(widths: list[int]) -> nn.Module:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(3, 4, bias=False)
        self.middle = nn.Linear(4, 4)
        self.decoder = nn.Linear(3, 4, bias=False)
        self.decoder.weight = self.encoder.weight


widths = st.lists(st.integers(1, 6), min_size=2, max_size=7)


@given(widths, st.integers(1, 8), st.sampled_from(["auto", "even", "layers"]), st.sampled_from(["last", None]))
def test_every_coordinate_is_in_exactly_one_block(widths, blocks, divider, shared):
    model = mlp(widths)
    try:
        d = divide(model, blocks, divider, shared)
    except UserError as error:
        assert "blocks" in str(error)
        return
    assert sorted(d.names) == sorted(n for n, _ in model.named_parameters())
    assert d.dim == sum(p.numel() for p in model.parameters())
    assert d.bounds[0] == 0
    assert list(d.bounds) == sorted(d.bounds)
    assert d.blocks == blocks
    assert min(d.sizes()) >= 1
    assert sum(d.sizes()) + d.shared == d.dim


@given(widths, st.integers(1, 12))
def test_even_blocks_differ_by_at_most_one_element(widths, blocks):
    model = mlp(widths)
    room = sum(p.numel() for p in model.parameters())
    if blocks <= room:
        sizes = divide(model, blocks, "even", None).sizes()
        assert max(sizes) - min(sizes) <= 1


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(1, 8))
def test_contiguous_groups_have_the_smallest_largest_sum(sizes, groups):
    if groups > len(sizes):
        return
    got = contiguous(sizes, groups)
    assert len(got) == groups
    assert sum(got) == sum(sizes)
    best = min(
        max(sum(sizes[a:b]) for a, b in zip((0, *cuts), (*cuts, len(sizes)), strict=True))
        for cuts in combinations(range(1, len(sizes)), groups - 1)
    )
    assert max(got) == best


def test_layers_keep_layers_whole():
    """Layers 4·6+6 = 30, 6·5+5 = 35, then 5·3+3 = 18 shared: two blocks are 30 and 35."""
    d = divide(mlp([4, 6, 5, 3]), 2, "layers")
    assert d.sizes() == [30, 35]
    assert d.shared == 18
    assert d.names == ("0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias")


def test_auto_takes_layers_when_they_are_balanced_and_even_cuts_otherwise():
    assert divide(mlp([4, 6, 5, 3]), 2).divider == "layers"  # the largest is 35 of 83: below 1.5·83/2
    lenet = divide(LeNet5(), 4)
    assert lenet.divider == "even"  # fc1 alone is three quarters of LeNet-5
    assert divide(mlp([4, 6, 5, 3]), 20).divider == "even"  # fewer layers than blocks


def test_the_shared_block_is_the_last_layer_unless_told_otherwise():
    model = mlp([4, 6, 5, 3])
    assert divide(model, 2).shared == 18
    assert divide(model, 2, shared=None).shared == 0
    d = divide(model, 1, shared=["0", "2.bias"])
    assert d.shared == 30 + 3
    assert d.names[-3:] == ("0.weight", "0.bias", "2.bias")


def test_a_single_layer_has_no_shared_block():
    assert divide(nn.Linear(4, 3), 5).shared == 0


def test_patterns():
    model = mlp([4, 6, 5, 3])
    d = divide(model, 2, [["1.*"], ["0"]], shared=["2"])
    assert d.names == ("1.weight", "1.bias", "0.weight", "0.bias", "2.weight", "2.bias")
    assert d.sizes() == [35, 30]
    assert divide(model, 2, ["0", "1"]).shared == 18  # what no pattern names may be the shared block by default
    assert divide(model, 3, ["0", "1", "2"]).shared == 0  # an explicit claim is stronger than that default


def test_tied_parameters_stand_once_in_the_block_of_their_first_name():
    d = divide(Tied(), 1, shared=None)
    assert d.names == ("encoder.weight", "middle.weight", "middle.bias")
    assert d.dim == 12 + 20


def test_frozen_parameters_are_not_counted():
    model = mlp([4, 6, 5, 3])
    model[0].requires_grad_(False)
    assert divide(model, 1).dim == 35 + 18


def frozen_mlp() -> nn.Module:
    model = mlp([4, 6, 5, 3])
    model[0].requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: divide(mlp([4, 6, 5, 3]), 2, ["0", "nope*"]),
            ["block 2", "got 'nope*'", "0.weight"],
        ),
        (lambda: divide(mlp([4, 6, 5, 3]), 2, ["0", ["1", "0.bias"]]), ["'0.bias' in block 1 and block 2"]),
        (lambda: divide(mlp([4, 6, 5, 3]), 1, ["0"], shared=["2"]), ["2 in none: 1.weight, 1.bias"]),
        (lambda: divide(mlp([4, 6, 5, 3]), 1, ["0", "1"]), ["patterns for 1 blocks", "got 2"]),
        (lambda: divide(mlp([4, 6, 5, 3]), 84), ["blocks: expected at most 83", "got 84"]),
        (lambda: divide(mlp([4, 6, 5, 3]), 70), ["70", "65", "2.weight", "shared"]),
        (lambda: divide(mlp([4, 6, 5, 3]), 3, "layers"), ["expected at most 2, the number of layers", "got 3", "even"]),
        (lambda: divide(mlp([4, 6, 5, 3]), 0), ["at least 1", "0"]),
        (lambda: divide(mlp([4, 6]), 2, "evenn"), ["'evenn'", "Did you mean 'even'"]),
        (lambda: divide(nn.ReLU(), 1), ["expected trainable parameters, got a ReLU"]),
        (lambda: divide(nn.Linear(3, 2).requires_grad_(False), 1), ["expected trainable parameters, got a Linear"]),
        (lambda: divide(frozen_mlp(), 1, ["0"]), ["'0'", "not trained", "'0.weight'"]),
        (lambda: divide(Tied(), 1, ["decoder"]), ["'decoder.weight'", "tied to 'encoder.weight'"]),
        (lambda: divide(nn.LazyLinear(3), 1), ["got 'weight' without one", "lazy"]),
        (lambda: divide(Complex(), 1), ["'w'", "complex"]),
    ],
)
def test_errors_name_the_culprit(call, words):
    with pytest.raises(UserError) as error:
        call()
    for word in words:
        assert word in str(error.value)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2, dtype=torch.complex64))


@given(st.integers(1, 8), st.data())
def test_blocks_of_chosen_sizes(blocks, data):
    """In these proportions to one element, cut anywhere; no block is empty, whatever the proportions."""
    shares = data.draw(st.lists(st.floats(0.001, 1000), min_size=blocks, max_size=blocks))
    division = divide(nn.Linear(30, 10, bias=False), blocks, shares, shared=None)
    assert division.divider == "sizes"
    assert sum(division.sizes()) == 300
    assert min(division.sizes()) >= 1
    wanted = [300 * share / sum(shares) for share in shares]
    if min(wanted) >= 1:
        assert all(abs(size - w) <= 1 for size, w in zip(division.sizes(), wanted, strict=True))


def test_sizes_by_hand():
    """28 elements outside the shared block of 4, as 1 : 2 : 10."""
    division = divide(nn.Sequential(nn.Linear(12, 2), nn.Linear(2, 1, bias=False), nn.Linear(1, 2)), 3, [1, 2, 10])
    assert (division.sizes(), division.shared) == ([2, 4, 22], 4)


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ([1, 2], "expected 3 sizes, as many as blocks, got 2"),
        ([1, 0, 2], "positive"),
        ([1, 2, float("inf")], "positive"),
    ],
)
def test_sizes_that_are_none(shares, words):
    with pytest.raises(UserError, match=words):
        divide(nn.Linear(30, 10), 3, shares, shared=None)


def test_an_unknown_divider_is_explained():
    words = "divider: expected auto, layers, even, paper, or a list of name patterns or sizes for each block, got 'evn'"
    with pytest.raises(UserError, match=f"{words}. Did you mean 'even'?"):
        divide(nn.Linear(3, 3), 2, "evn")


class Tagger(nn.Module):
    """A recurrent model; the order in which layers are registered says nothing about which one makes the output."""

    def __init__(self, order: str, cell: type[nn.Module] = nn.LSTM) -> None:
        super().__init__()
        layers = {"e": ("embed", nn.Embedding(50, 16)), "h": ("head", nn.Linear(32, 5)), "r": ("rnn", cell(16, 32))}
        for letter in order:
            self.add_module(*layers[letter])


@pytest.mark.parametrize("order", ["ehr", "hre", "erh", "her", "hr", "rh"])
@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU, nn.LSTMCell])
def test_the_shared_block_makes_the_output_whatever_is_registered_last(order, cell):
    """head: 165 of about 7,000; the LSTM would be 88 % of d, and every client would upload it."""
    d = divide(Tagger(order, cell), 2)
    assert d.names[-2:] == ("head.weight", "head.bias")
    assert d.shared == 165


def test_patterns_leave_the_layer_that_is_registered_last_to_the_shared_block():
    d = divide(Tagger("her"), 2, ["head", "embed"])
    assert d.names[-1].startswith("rnn.")
    assert d.shared == 4 * 32 * (16 + 32 + 2)


def test_a_last_layer_that_is_most_of_the_model_gives_way_to_a_smaller_one():
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2), nn.Linear(20, 30))
    assert divide(model, 2).names[-2:] == ("1.weight", "1.bias")
    assert divide(nn.Sequential(nn.Linear(20, 31), nn.Linear(20, 30)), 2).shared == 630  # it is not: 651 and 630
    assert divide(nn.Sequential(nn.Linear(40, 30), nn.LSTM(4, 4)), 2).shared == 160  # the other one is larger


@pytest.mark.parametrize(
    ("name", "classes", "options", "chosen"),
    [
        *((name, classes, {"width": w}, layer) for w in (1.0, 0.25, 0.1) for classes in (10, 100, 200)
          for name, layer in (("lenet5", "fc3"), ("vgg11", "fc3"), ("vgg19", "fc3"), ("resnet18", "fc"))),
        *((name, classes, {}, "head") for name in ("vit-base", "vit-small") for classes in (10, 200)),
        ("logistic", 10, {}, None), ("binary-logistic", 2, {}, None), ("binary-sigmoid", 2, {}, None),
    ],
)  # fmt: skip
def test_the_papers_networks_share_their_last_layer(name, classes, options, chosen):
    with torch.device("meta"):
        model = MODELS[name](classes, (3, 224, 224) if name == "vit-base" else (3, 32, 32), **options)
    d = divide(model, 2)
    last = [n for n, _ in model.named_parameters() if n.rpartition(".")[0] == chosen]
    assert d.shared == sum(model.get_parameter(n).numel() for n in last)
    assert list(d.names[len(d.names) - len(last) :]) == last


def test_a_large_shared_block_that_nobody_chose_is_warned_about_once(caplog):
    _warn.cache_clear()
    divide(mlp([40, 40, 20, 10]), 2)  # 210 of 2,670
    model = mlp([4, 6, 5, 3])
    for shared in ("last", "last", None, ["2"]):
        divide(model, 2, shared=shared)
    (record,) = (r for r in caplog.records if "shared" in r.getMessage())
    assert "2, is 22% of the model" in record.getMessage()
