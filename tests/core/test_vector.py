"""The vector: views that share memory, exact round trips, the layout in memory."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedbcgd import FlatModel, Layout, UserError, divide, simulate
from fedbcgd.models import LeNet5


class Odd(nn.Module):
    """Tied weights, float and integer buffers, a scalar, a frozen layer, a buffer that is not saved."""

    def __init__(self, width: int):
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3)
        self.norm = nn.BatchNorm2d(width)
        self.a = nn.Linear(width, width)
        self.b = nn.Linear(width, width)
        self.b.weight = self.a.weight
        self.gain = nn.Parameter(torch.tensor(2.0))
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.register_buffer("mask", torch.ones(3), persistent=False)
        self.head = nn.Linear(width, 3)


def flat(model: nn.Module, blocks: int = 2, divider: str = "even", shared: str | None = "last") -> FlatModel:
    return FlatModel(copy.deepcopy(model), Layout.of(model, divide(model, blocks, divider, shared)))


@given(
    width=st.integers(1, 4),
    blocks=st.integers(1, 5),
    divider=st.sampled_from(["even", "layers", "auto"]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    channels_last=st.booleans(),
)
def test_state_dict_round_trip_is_exact(width, blocks, divider, dtype, channels_last):
    model = Odd(width).to(dtype)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    try:
        model_flat = flat(model, blocks, divider)
    except UserError:
        return  # too few layers
    after = model_flat.state_dict()
    assert list(after) == list(before)
    for key, value in before.items():
        assert torch.equal(after[key], value)
        assert after[key].dtype == value.dtype
        assert after[key].is_contiguous()
    # through the vector alone, into another instance
    other = flat(Odd(width).to(dtype), blocks, divider)
    if not channels_last:
        other.load(model_flat.layout.vector(before))
        for key, value in other.state_dict().items():
            assert key.startswith("frozen") or torch.equal(value, before[key])


@given(st.integers(1, 5), st.sampled_from(["even", "auto"]))
def test_parameters_are_views_of_the_vector(blocks, divider):
    model = flat(Odd(3), blocks, divider)
    base = model.vector.untyped_storage().data_ptr()
    for p in model.module.parameters():
        if p.requires_grad:
            assert p.untyped_storage().data_ptr() == base
    assert model.module.norm.running_mean.untyped_storage().data_ptr() == base
    model.vector.fill_(7)
    assert all((p == 7).all() for p in model.module.parameters() if p.requires_grad)
    assert (model.module.norm.running_var == 7).all()
    with torch.no_grad():
        for p in model.parameters:
            p.fill_(3)
    assert (model.vector[: model.layout.dim] == 3).all()
    assert (model.vector[model.layout.dim :] == 7).all()


@given(st.integers(1, 5), st.sampled_from(["even", "auto"]), st.sampled_from(["last", None]))
def test_blocks_shared_and_buffers_tile_the_vector(blocks, divider, shared):
    layout = flat(Odd(3), blocks, divider, shared).layout
    seen = torch.zeros(layout.size, dtype=torch.int)
    for j in range(layout.blocks):
        seen[layout.block(j)] += 1
    seen[layout.shared] += 1
    seen[layout.buffer_slice] += 1
    assert (seen == 1).all()
    covered = torch.zeros(layout.size, dtype=torch.int)
    for entry in (*layout.parameters, *layout.buffers):
        covered[entry.offset : entry.offset + entry.numel] += 1
    assert (covered == 1).all()


def test_ties_hold_after_flattening():
    model = flat(Odd(3)).module
    assert model.b.weight is model.a.weight
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == flat(Odd(3)).layout.dim


def test_memory_format_is_the_models_own():
    model = LeNet5().to(memory_format=torch.channels_last)
    module = flat(model).module
    assert module.conv2.weight.is_contiguous(memory_format=torch.channels_last)
    assert not module.conv2.weight.is_contiguous()
    # One input channel is ambiguous to torch: the strides must survive, or the first convolution leaves the format.
    grey = flat(LeNet5(shape=(1, 28, 28)).to(memory_format=torch.channels_last)).module
    assert grey.conv1.weight.stride() == (25, 1, 5, 1)
    x = torch.randn(2, 1, 28, 28)
    assert grey.conv1(x).is_contiguous(memory_format=torch.channels_last)


def test_output_does_not_change():
    model = LeNet5()
    x = torch.randn(4, 3, 32, 32)
    assert torch.equal(flat(model).module(x), model(x))


def test_equal_models_have_equal_layouts():
    assert flat(Odd(3)).layout == flat(Odd(3)).layout
    assert flat(Odd(3)).layout.digest == flat(Odd(3)).layout.digest
    assert flat(Odd(3)).layout.digest != flat(Odd(3), blocks=3).layout.digest


def test_counters_start_afresh_with_every_load():
    model = flat(Odd(3))
    start = model.vector.clone()
    model.module.train()
    model.module.norm(torch.randn(4, 3, 5, 5))
    assert model.module.norm.num_batches_tracked == 1
    assert not torch.equal(model.vector, start)
    model.load(start)
    assert model.module.norm.num_batches_tracked == 0
    assert torch.equal(model.vector, start)


def test_a_buffer_that_is_replaced_comes_back_into_the_vector():
    class Replaces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(2))
            self.register_buffer("mean", torch.zeros(2))

    model = flat(Replaces(), 1, shared=None)
    model.module.mean = torch.tensor([1.0, 2.0])
    model.gather_buffers()
    assert model.vector.tolist() == [0, 0, 1, 2]
    model.vector[2] = 5
    assert model.module.mean[0] == 5


def test_flattening_twice_is_possible():
    once = flat(Odd(3)).module
    assert torch.equal(flat(once).vector, flat(Odd(3)).layout.vector(once.state_dict()))


class TwoOverOne(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(4))
        self.b = nn.Parameter(self.a.detach()[2:])


class TwoTypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.b = nn.Linear(2, 2).double()


@pytest.mark.parametrize(
    ("model", "words"), [(TwoOverOne(), ["'a'", "'b'", "same memory"]), (TwoTypes(), ["'b.weight'", "float64", "one"])]
)
def test_models_that_cannot_be_laid_out_are_refused(model, words):
    with pytest.raises(UserError) as error:
        flat(model, 1, shared=None)
    assert all(word in str(error.value) for word in words)


def test_weights_that_do_not_fit_are_refused():
    layout = flat(nn.Linear(2, 3), 1).layout
    with pytest.raises(UserError, match="expected an entry 'bias'"):
        layout.vector({"weight": torch.zeros(3, 2)})
    with pytest.raises(UserError, match=r"expected shape \(3, 2\) for 'weight', as in the model, got \(2, 2\)"):
        layout.vector({"weight": torch.zeros(2, 2), "bias": torch.zeros(3)})


@pytest.mark.parametrize(("value", "what"), [(float("nan"), "NaN"), (float("-inf"), "infinity")])
def test_no_run_begins_from_weights_that_are_no_numbers(value, what):
    """It is said before the first round, and the learning rate is not blamed."""
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    clients = [(torch.randn(4, 4), torch.randint(3, (4,))) for _ in range(2)]
    with torch.no_grad():
        model[2].weight[1, 2] = value
    rounds = []
    for options in ({}, {"weights": model.state_dict()}):
        start = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)) if options else model
        with pytest.raises(
            UserError, match=f"model: expected finite initial weights, got {what} in parameter '2.weight'"
        ):
            simulate(start, clients, "fedavg", rounds=5, workers=0, callbacks=[rounds.append], **options)
    assert not rounds
    model[2].weight.data.zero_()
    model[1].running_mean[0] = value
    with pytest.raises(UserError, match=f"got {what} in buffer '1.running_mean'"):
        simulate(model, clients, "fedavg", rounds=5, workers=0)
