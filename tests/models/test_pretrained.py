from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fedbcgd.models import LeNet5
from fedbcgd.models.pretrained import load_pretrained
from tests.models.vits import SHAPE, body, check_refused, classical, same, small

# timm's names


def test_timm_names_with_another_head(tmp_path):
    theirs, ours = small(classes=9), small(seed=1)
    save_file(theirs.state_dict(), tmp_path / "vit.safetensors")
    loaded = load_pretrained(ours, str(tmp_path / "vit.safetensors"))
    assert same(body(ours), body(theirs))
    assert loaded.source == str(tmp_path / "vit.safetensors")
    assert not loaded.interpolated
    assert loaded.reinitialised == ("head.weight", "head.bias")
    assert sorted(loaded.unused) == ["head.bias", "head.weight"]
    assert "head.weight, head.bias" in str(loaded)


def test_head_is_drawn_from_the_seed(tmp_path):
    """Also when the file has one of the right size, and whatever was drawn before."""
    save_file(small().state_dict(), tmp_path / "vit.safetensors")
    heads = []
    for seed in (3, 3, 4):
        model = small(seed=len(heads))
        load_pretrained(model, tmp_path / "vit.safetensors", seed=seed)
        assert not model.head.bias.any()
        heads.append(model.head.weight.detach())
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
    assert 0.01 < heads[0].std() < 0.03


def test_unused_tensors_are_listed(tmp_path):
    state = small().state_dict() | {"pre_logits.fc.weight": torch.ones(2), "blocks.2.norm1.weight": torch.ones(12)}
    torch.save({"model": state, "optimizer": {"state": {0: {"step": torch.ones(1)}}}, "epoch": 3}, tmp_path / "vit.pt")
    assert load_pretrained(small(), tmp_path / "vit.pt").unused == (
        "model.head.weight",
        "model.head.bias",
        "model.pre_logits.fc.weight",
        "model.blocks.2.norm1.weight",
        "optimizer.state.0.step",
    )


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
@pytest.mark.parametrize("nest", [lambda s: s, lambda s: {"state_dict": s}, lambda s: {"model": s, "epoch": 1}])
def test_wrappers_are_taken_off(tmp_path, prefix, nest):
    theirs, ours = small(), small(seed=1)
    torch.save(nest({prefix + name: p for name, p in theirs.state_dict().items()}), tmp_path / "vit.pth")
    load_pretrained(ours, tmp_path / "vit.pth")
    assert same(body(ours), body(theirs))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_become_the_models(tmp_path, dtype):
    theirs, ours = small(), small(seed=1)
    save_file({name: p.to(dtype) for name, p in theirs.state_dict().items()}, tmp_path / "vit.safetensors")
    load_pretrained(ours, tmp_path / "vit.safetensors")
    assert same(body(ours), {name: p.to(dtype).float() for name, p in body(theirs).items()})


# Hugging Face's names


@pytest.mark.parametrize("prefix", ["", "vit."])
def test_classical_names_in_a_pytorch_file(tmp_path, prefix):
    theirs, ours = small(), small(seed=1)
    extra = {"classifier.weight": torch.ones(7, 12), "classifier.bias": torch.ones(7)}
    extra |= {prefix + "pooler.dense.weight": torch.ones(12, 12), prefix + "pooler.dense.bias": torch.ones(12)}
    torch.save({prefix + name: p for name, p in classical(theirs).items()} | extra, tmp_path / "pytorch_model.bin")
    loaded = load_pretrained(ours, tmp_path)
    assert same(body(ours), body(theirs))
    assert loaded.unused == tuple(extra)


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers", reason="parity with Hugging Face's ViT needs the extra hf")


@pytest.fixture(scope="module")
def theirs(transformers):
    torch.manual_seed(0)
    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 48}
    config = transformers.ViTConfig(**sizes, image_size=32, patch_size=8, layer_norm_eps=1e-6, num_labels=5)
    model = transformers.ViTForImageClassification(config).eval()
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    return model


def gap(ours, theirs, side=32):
    """The largest difference of the outputs, once our head has their classifier's weights."""
    ours.head.load_state_dict(theirs.classifier.state_dict())
    x = torch.randn(4, 3, side, side, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(x, interpolate_pos_encoding=side != 32).logits
        assert expected.std() > 0.1
        return (ours(x) - expected).abs().max()


def test_parity_by_a_saved_folder(tmp_path, theirs):
    theirs.save_pretrained(tmp_path)
    ours = small(seed=1)
    loaded = load_pretrained(ours, tmp_path)
    assert gap(ours, theirs) < 1e-5
    assert sorted(loaded.unused) == ["classifier.bias", "classifier.weight"]


def test_parity_without_the_classifier(tmp_path, transformers, theirs):
    model = transformers.ViTModel(theirs.config)
    model.load_state_dict(theirs.vit.state_dict(), strict=False)
    model.save_pretrained(tmp_path)
    ours = small(seed=1)
    loaded = load_pretrained(ours, tmp_path)
    assert gap(ours, theirs) < 1e-5
    assert sorted(loaded.unused) == ["pooler.dense.bias", "pooler.dense.weight"]


@pytest.mark.parametrize("part", ["whole", "vit"])
def test_parity_by_a_state_dict(tmp_path, theirs, part):
    """Since transformers 5 the names in memory are not those in files."""
    torch.save((theirs if part == "whole" else theirs.vit).state_dict(), tmp_path / "vit.pt")
    ours = small(seed=1)
    load_pretrained(ours, tmp_path / "vit.pt")
    assert gap(ours, theirs) < 1e-5


def test_parity_by_classical_names(tmp_path, theirs):
    """The names of published files. The assertion makes sure that the saved file uses them."""
    theirs.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    assert {"vit." + name for name in classical(small())} <= state.keys()
    torch.save(state, tmp_path / "vit.bin")
    ours = small(seed=1)
    load_pretrained(ours, tmp_path / "vit.bin")
    assert gap(ours, theirs) < 1e-5


@pytest.mark.parametrize("side", [48, 24])
def test_parity_on_another_grid(tmp_path, theirs, side):
    theirs.save_pretrained(tmp_path)
    ours = small(seed=1, shape=(3, side, side))
    assert load_pretrained(ours, tmp_path).interpolated
    assert gap(ours, theirs, side) < 1e-5


# positions


def positions(tmp_path, values, **changes):
    """Load a file with these positions; return the model's positions and the report of loading."""
    save_file(small().state_dict() | {"pos_embed": values}, tmp_path / "vit.safetensors")
    model = small(seed=1, **changes)
    return model.pos_embed.detach(), load_pretrained(model, tmp_path / "vit.safetensors")


@pytest.mark.parametrize("shape", [(3, 64, 64), (3, 16, 16), (3, 24, 48), (3, 8, 8)])
def test_constant_positions_stay_constant(tmp_path, shape):
    values = torch.arange(12.0).repeat(1, 17, 1)
    values[:, 0] = -7
    out, loaded = positions(tmp_path, values, shape=shape)
    assert loaded.interpolated
    assert "interpolated" in str(loaded)
    assert out.shape == (1, 1 + shape[1] * shape[2] // 64, 12)
    assert (out[:, 0] == -7).all()
    torch.testing.assert_close(out[:, 1:], values[:, 1:2].expand_as(out[:, 1:]))


def test_rows_stay_rows(tmp_path):
    """Positions that grow along the rows of the file's grid only do so in the model's grid too, which is not square."""
    values = torch.zeros(1, 17, 12)
    values[0, 1:] = torch.arange(4.0).repeat_interleave(4)[:, None]
    out, _ = positions(tmp_path, values, shape=(3, 64, 24))
    grid = out[0, 1:, 0].reshape(8, 3)
    torch.testing.assert_close(grid, grid[:, :1].expand(8, 3))
    assert (grid[1:, 0] > grid[:-1, 0]).all()


def test_the_same_grid_is_taken_as_it_is(tmp_path):
    values = torch.randn(1, 17, 12)
    out, loaded = positions(tmp_path, values)
    assert torch.equal(out, values)
    assert not loaded.interpolated


def test_a_file_of_the_same_oblong_grid(tmp_path):
    theirs, ours = small(shape=(3, 16, 24)), small(seed=1, shape=(3, 16, 24))
    save_file(theirs.state_dict(), tmp_path / "vit.safetensors")
    assert not load_pretrained(ours, tmp_path / "vit.safetensors").interpolated
    assert same(body(ours), body(theirs))


@pytest.mark.parametrize(
    ("count", "shape", "message"),
    [
        (16, SHAPE, r"pos_embed: expected .* got 16 \(a square grid without the class token\)"),
        (18, SHAPE, "pos_embed: expected positions of the class token and a square grid, got 18$"),
        (1, SHAPE, r"pos_embed: expected .* got 1 "),
        (17, (3, 16, 64), "pos_embed fits 4×4 patches and the model's 2×8"),
    ],
)
def test_positions_that_cannot_be_placed(tmp_path, count, shape, message):
    save_file(small().state_dict() | {"pos_embed": torch.zeros(1, count, 12)}, tmp_path / "vit.safetensors")
    check_refused(tmp_path / "vit.safetensors", message, small(seed=1, shape=shape))


# files that do not fit


def test_missing_layers(tmp_path):
    save_file(small().state_dict(), tmp_path / "vit.safetensors")
    message = check_refused(tmp_path / "vit.safetensors", "expected the 42 tensors of ViT", small(seed=1, depth=3))
    assert "'s body, got 12 that do not fit: blocks.2.norm1.weight is missing; " in message
    assert message.count("is missing") == 8
    assert message.endswith("; and 4 more")


def test_wrong_dimension(tmp_path):
    save_file(small(dim=15).state_dict(), tmp_path / "vit.safetensors")
    message = check_refused(tmp_path / "vit.safetensors", "cls_token is 1×1×15 in the file, 1×1×12 in the model")
    assert "pos_embed is 1×17×15 in the file, 1×17×12 in the model" in message
    assert message.endswith("; and 22 more")


def test_one_wrong_tensor_is_enough(tmp_path):
    state = classical(small())
    state["encoder.layer.1.attention.attention.key.bias"] = torch.zeros(11)
    save_file(state, tmp_path / "vit.safetensors")
    message = check_refused(tmp_path / "vit.safetensors", "got 1 that do not fit")
    assert message.endswith("encoder.layer.1.attention.attention.key.bias is 11 in the file, 12 in the model")


def test_incomplete_attention(tmp_path):
    state = classical(small())
    del state["encoder.layer.0.attention.attention.key.weight"]
    save_file(state, tmp_path / "vit.safetensors")
    check_refused(tmp_path / "vit.safetensors", r"blocks.0.attn.qkv.weight.key is missing$")


@pytest.mark.parametrize("value", [torch.zeros(12, dtype=torch.int8), torch.zeros(12).to_sparse()])
def test_not_plain_floating_point(tmp_path, value):
    torch.save(small().state_dict() | {"norm.bias": value}, tmp_path / "vit.pt")
    check_refused(
        tmp_path / "vit.pt", r"norm.bias: expected dense floating point .* got torch\.\w+ of torch\.\w+ on cpu"
    )


def test_two_models_in_one_file(tmp_path):
    state = small().state_dict()
    torch.save({"model": state, "state_dict": dict(state)}, tmp_path / "vit.pt")
    check_refused(tmp_path / "vit.pt", "both 'model.cls_token' and 'state_dict.cls_token' for cls_token")


def test_attention_whole_and_in_parts(tmp_path):
    state = small().state_dict() | {"layers.0.attention.k_proj.bias": torch.zeros(12)}
    torch.save(state, tmp_path / "vit.pt")
    check_refused(
        tmp_path / "vit.pt", "both 'blocks.0.attn.qkv.bias' and 'layers.0.attention.k_proj.bias' for blocks.0"
    )


@pytest.mark.parametrize("content", [LeNet5().state_dict(), {}, [1, 2]])
def test_another_model(tmp_path, content):
    torch.save(content, tmp_path / "other.pt")
    check_refused(
        tmp_path / "other.pt", "expected tensors with the names of timm's or Hugging Face's ViT, got (conv1|no te)"
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["blocks.1.mlp.fc2.weight", "head.bias"])
def test_values_that_are_not_finite(tmp_path, bad, name):
    state = small().state_dict()
    state[name].view(-1)[-1] = bad
    save_file(state, tmp_path / "vit.safetensors")
    check_refused(tmp_path / "vit.safetensors", f"expected finite values, got others in tensor '{name}'")


def test_another_kind_of_model(tmp_path):
    check_refused(tmp_path, "got a LeNet5", LeNet5())


# files that cannot be read


class Malicious:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return Path.touch, (self.target,)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_that_would_run_code(tmp_path, zipped):
    target = tmp_path / "ran"
    content = small().state_dict() | {"extra": Malicious(target)}
    torch.save(content, tmp_path / "vit.pt", _use_new_zipfile_serialization=zipped)
    check_refused(tmp_path / "vit.pt", "holds more than tensors.* it was not loaded")
    assert not target.exists()
    torch.load(tmp_path / "vit.pt", weights_only=False)
    assert target.exists()  # the file was dangerous indeed


def test_a_whole_module_in_a_file(tmp_path):
    torch.save(small(), tmp_path / "vit.pt")
    check_refused(tmp_path / "vit.pt", "holds more than tensors")


@pytest.mark.parametrize("name", ["vit.safetensors", "vit.pt", "legacy.pt"])
@pytest.mark.parametrize("part", [0, 0.001, 0.01, 0.1, 0.5, 0.99])
def test_files_cut_short(tmp_path, name, part):
    path, state = tmp_path / name, small().state_dict()
    if name == "vit.safetensors":
        save_file(state, path)
    else:
        torch.save(state, path, _use_new_zipfile_serialization=name == "vit.pt")
    content = path.read_bytes()
    path.write_bytes(content[: int(part * len(content))])
    check_refused(path, "may be damaged or cut short|is no PyTorch file")


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
@pytest.mark.parametrize("content", [b"<html>404</html>", b"version https://git-lfs.github.com/spec/v1\n", b"hello"])
def test_something_else_under_that_name(tmp_path, suffix, content):
    path = tmp_path / f"vit{suffix}"
    path.write_bytes(content)
    check_refused(path, "may be damaged or cut short|is no PyTorch file")


def test_a_dictionary_that_holds_itself(tmp_path):
    content = {"state_dict": small().state_dict()}
    content["self"] = content
    torch.save(content, tmp_path / "vit.pt")
    ours = small(seed=1)
    load_pretrained(ours, tmp_path / "vit.pt")
    assert same(body(ours), body(small()))


def test_paths_that_lead_nowhere(tmp_path):
    check_refused(tmp_path, "expected a folder with model.safetensors or pytorch_model.bin, got one with neither")
    check_refused(tmp_path / "vit.safetensors", "expected a .safetensors")
    check_refused("weights/vit.pth", "expected a .safetensors.*got weights/vit.pth")  # not a name on the hub
    (tmp_path / "vit.onnx").touch()
    check_refused(tmp_path / "vit.onnx", "ends in one of .safetensors, .bin, .pt, .pth")
    check_refused("x" * 5000, "could not be read")
