import pickle

import pytest
import torch
from torch import nn

from fedbcgd import UserError, divide
from fedbcgd.models.vit import Layer, ViT, ViTBase16, ViTSmall

SHAPE = (3, 8, 12)


def tiny(**changes):
    torch.manual_seed(0)
    return ViT(**{"classes": 5, "shape": SHAPE, "patch": 4, "dim": 12, "depth": 2, "heads": 3} | changes)


@pytest.fixture(scope="module")
def base():
    with torch.device("meta"):
        return ViTBase16(200)


def test_base_counts_to_the_unit(base):
    counts = {name: p.numel() for name, p in base.named_parameters()}
    assert sum(n for name, n in counts.items() if not name.startswith(("norm.", "head."))) == 85_797_120
    assert counts["norm.weight"] + counts["norm.bias"] == 1_536
    assert counts["head.weight"] == 153_600
    assert sum(counts.values()) == 85_797_120 + 1_536 + 153_600 + 200


def test_the_papers_division(base):
    """The body is cut evenly into six; norm and head follow it in the vector."""
    division = divide(base, base.paper_blocks, "even", base.paper_shared)
    assert division.sizes() == [14_299_520] * 6
    assert division.shared == 1_536 + 153_600 + 200
    assert division.names == tuple(name for name, _ in base.named_parameters())
    assert [name for name in division.names if name.startswith(("norm.", "head."))] == list(division.names[-4:])


def test_names_and_order_are_those_of_timm():
    layer = ["norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2"]
    modules = ["patch_embed.proj", *(f"blocks.{i}.{name}" for i in range(2) for name in layer), "norm", "head"]
    expected = ["cls_token", "pos_embed", *(f"{name}.{kind}" for name in modules for kind in ("weight", "bias"))]
    assert [name for name, _ in tiny().named_parameters()] == expected
    assert list(tiny().state_dict()) == expected


def test_gradient_reaches_every_parameter():
    model = tiny()
    out = model(torch.randn(4, *SHAPE))
    assert out.shape == (4, 5)
    nn.functional.cross_entropy(out, torch.tensor([0, 1, 2, 3])).backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in model.parameters())


def test_channels_last_gives_the_same():
    model, x = tiny(), torch.randn(4, *SHAPE)
    expected = model(x)
    last = x.to(memory_format=torch.channels_last)
    assert not last.is_contiguous()
    torch.testing.assert_close(model(last), expected)
    torch.testing.assert_close(model.to(memory_format=torch.channels_last)(last), expected)


def test_a_layer_is_pytorchs_own_pre_norm_layer():
    torch.manual_seed(0)
    ours = Layer(12, 3, 48)
    theirs = nn.TransformerEncoderLayer(12, 3, 48, 0.0, "gelu", 1e-6, batch_first=True, norm_first=True)
    names = {"self_attn.in_proj_": "attn.qkv.", "self_attn.out_proj": "attn.proj", "linear": "mlp.fc"}
    state = {}
    for name in theirs.state_dict():
        other = name
        for their, our in names.items():
            other = other.replace(their, our)
        state[name] = torch.randn_like(ours.state_dict()[other])
        ours.state_dict()[other].copy_(state[name])
    theirs.load_state_dict(state)
    x = torch.randn(2, 7, 12)
    torch.testing.assert_close(ours(x), theirs(x))


def test_tokens_are_the_patches_row_by_row():
    """With a filter that selects the first pixel of a patch, each token shows the value of its patch."""
    model = tiny()
    nn.init.zeros_(model.patch_embed.proj.weight)
    model.patch_embed.proj.weight.data[:, 0, 0, 0] = 1
    x = torch.arange(8 * 12.0).reshape(1, 1, 8, 12).repeat(1, 3, 1, 1)
    assert model.patch_embed(x)[0, :, 0].tolist() == [0, 4, 8, 48, 52, 56]
    assert model.grid == (2, 3)
    assert model.pos_embed.shape == (1, 7, 12)


def test_start():
    model = ViTSmall()
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            assert not p.any()
        elif "norm" in name:
            assert (p == 1).all()
        else:
            assert 0.017 < p.std() < 0.023, name
            assert p.abs().max() <= 2
    assert {module.eps for module in model.modules() if isinstance(module, nn.LayerNorm)} == {1e-6}


@pytest.mark.parametrize(("shape", "grid"), [((3, 32, 32), (8, 8)), ((3, 64, 64), (8, 8)), ((1, 8, 12), (8, 12))])
def test_small_has_eight_rows(shape, grid):
    model = ViTSmall(7, shape)
    assert model.grid == grid
    assert model(torch.zeros(2, *shape)).shape == (2, 7)


def test_pickled_by_its_class():
    model, x = ViTSmall(4, (1, 8, 8)), torch.randn(1, 1, 8, 8)
    other = pickle.loads(pickle.dumps(model))
    assert type(other) is ViTSmall
    assert torch.equal(other(x), model(x))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tiny(shape=(3, 8, 10)), r"ViT: .* multiples of the patch's 4 pixels, got 8×10"),
        (lambda: tiny(shape=(3, 0, 8)), "got 0×8"),
        (lambda: tiny(heads=5), "expected dim to be a multiple of heads, got 12 and 5"),
        (lambda: ViTBase16(10, (3, 32, 40)), r"ViTBase16: .* 16 pixels, got 32×40"),
        (lambda: ViTSmall(10, (1, 28, 28)), "ViTSmall: expected images whose height is a multiple of 8, got 28×28"),
        (lambda: ViTSmall(10, (3, 64, 36)), r"ViTSmall: .* 8 pixels, got 64×36"),
        (lambda: tiny()(torch.zeros(1, 3, 9, 12)), "expected images of 3×8×12, got 3×9×12"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(UserError, match=message):
        make()
