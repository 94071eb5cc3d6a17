import os
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fedbcgd import UserError
from fedbcgd.models import LeNet5
from fedbcgd.models.pretrained import load_pretrained
from fedbcgd.models.vit import ViT

SHAPE = (3, 32, 32)


def small(classes=5, seed=0, **changes):
    """Weights from a wide normal: with those of the start, layers do so little that a mistake would not show."""
    torch.manual_seed(seed)
    model = ViT(classes, **{"shape": SHAPE, "patch": 8, "dim": 12, "depth": 2, "heads": 3} | changes)
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    return model


def body(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if not name.startswith("head.")}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def classical(model):
    """The body under the names of Hugging Face's files."""
    inside = {
        "norm1": "layernorm_before",
        "attn.proj": "attention.output.dense",
        "norm2": "layernorm_after",
        "mlp.fc1": "intermediate.dense",
        "mlp.fc2": "output.dense",
    }
    out = {
        "embeddings.cls_token": model.cls_token,
        "embeddings.position_embeddings": model.pos_embed,
        "embeddings.patch_embeddings.projection.weight": model.patch_embed.proj.weight,
        "embeddings.patch_embeddings.projection.bias": model.patch_embed.proj.bias,
        "layernorm.weight": model.norm.weight,
        "layernorm.bias": model.norm.bias,
    }
    for i, layer in enumerate(model.blocks):
        for kind in ("weight", "bias"):
            for ours, theirs in inside.items():
                out[f"encoder.layer.{i}.{theirs}.{kind}"] = layer.get_parameter(f"{ours}.{kind}")
            parts = layer.get_parameter(f"attn.qkv.{kind}").chunk(3)
            for part, value in zip(("query", "key", "value"), parts, strict=True):
                out[f"encoder.layer.{i}.attention.attention.{part}.{kind}"] = value
    return {name: p.detach().clone() for name, p in out.items()}


def refused(path, message, model=None):
    """Loading ends in a UserError, and the model is as before."""
    model = model or small(seed=1)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    with pytest.raises(UserError, match=message) as caught:
        load_pretrained(model, path)
    assert same(model.state_dict(), before)
    return str(caught.value)


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


def test_every_tensor_that_was_not_used_is_told(tmp_path):
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
    """What a published file holds: the saved file's names must be those, or this test tests nothing."""
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
    """A model that took `values` as positions, and what loading reported."""
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
    """What grows along the rows of the file's grid alone grows so in the model's, which is not square."""
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
        (16, SHAPE, r"pos_embed holds 16 positions \(a square grid alone, without the class token's\)"),
        (18, SHAPE, "pos_embed holds 18 positions, where the class token's and a square grid's are wanted"),
        (1, SHAPE, "pos_embed holds 1 positions"),
        (17, (3, 16, 64), "pos_embed may be of 4×4 patches or of the model's 2×8"),
    ],
)
def test_positions_that_cannot_be_placed(tmp_path, count, shape, message):
    save_file(small().state_dict() | {"pos_embed": torch.zeros(1, count, 12)}, tmp_path / "vit.safetensors")
    refused(tmp_path / "vit.safetensors", message, small(seed=1, shape=shape))


# files that do not fit


def test_missing_layers(tmp_path):
    save_file(small().state_dict(), tmp_path / "vit.safetensors")
    message = refused(tmp_path / "vit.safetensors", "does not fit ViT", small(seed=1, depth=3))
    assert "whose body has 42 tensors, in 12 of them: blocks.2.norm1.weight is missing; " in message
    assert message.count("is missing") == 8
    assert message.endswith("; and 4 more")


def test_wrong_dimension(tmp_path):
    save_file(small(dim=15).state_dict(), tmp_path / "vit.safetensors")
    message = refused(tmp_path / "vit.safetensors", "cls_token is 1×1×15 in the file, 1×1×12 in the model")
    assert "pos_embed is 1×17×15 in the file, 1×17×12 in the model" in message
    assert message.endswith("; and 22 more")


def test_one_wrong_tensor_is_enough(tmp_path):
    state = classical(small())
    state["encoder.layer.1.attention.attention.key.bias"] = torch.zeros(11)
    save_file(state, tmp_path / "vit.safetensors")
    message = refused(tmp_path / "vit.safetensors", "in 1 of them")
    assert message.endswith("encoder.layer.1.attention.attention.key.bias is 11 in the file, 12 in the model")


def test_incomplete_attention(tmp_path):
    state = classical(small())
    del state["encoder.layer.0.attention.attention.key.weight"]
    save_file(state, tmp_path / "vit.safetensors")
    refused(tmp_path / "vit.safetensors", r"blocks.0.attn.qkv.weight is missing its key$")


@pytest.mark.parametrize("value", [torch.zeros(12, dtype=torch.int8), torch.zeros(12).to_sparse()])
def test_not_plain_floating_point(tmp_path, value):
    torch.save(small().state_dict() | {"norm.bias": value}, tmp_path / "vit.pt")
    refused(tmp_path / "vit.pt", r"norm.bias is torch\.\w+ of torch\.\w+ on cpu, where dense floating point")


def test_two_models_in_one_file(tmp_path):
    state = small().state_dict()
    torch.save({"model": state, "state_dict": dict(state)}, tmp_path / "vit.pt")
    refused(tmp_path / "vit.pt", "both 'model.cls_token' and 'state_dict.cls_token' are cls_token")


def test_attention_whole_and_in_parts(tmp_path):
    state = small().state_dict() | {"layers.0.attention.k_proj.bias": torch.zeros(12)}
    torch.save(state, tmp_path / "vit.pt")
    refused(tmp_path / "vit.pt", "both 'blocks.0.attn.qkv.bias' and 'layers.0.attention.k_proj.bias' are blocks.0")


@pytest.mark.parametrize("content", [LeNet5().state_dict(), {}, [1, 2]])
def test_another_model(tmp_path, content):
    torch.save(content, tmp_path / "other.pt")
    refused(tmp_path / "other.pt", "no tensor has a name of timm's or Hugging Face's ViT; the file holds (conv1|no te)")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["blocks.1.mlp.fc2.weight", "head.bias"])
def test_values_that_are_not_finite(tmp_path, bad, name):
    state = small().state_dict()
    state[name].view(-1)[-1] = bad
    save_file(state, tmp_path / "vit.safetensors")
    refused(tmp_path / "vit.safetensors", f"tensor '{name}' holds values that are not finite")


def test_another_kind_of_model(tmp_path):
    refused(tmp_path, "given a LeNet5", LeNet5())


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
    refused(tmp_path / "vit.pt", "holds more than tensors.* it was not loaded")
    assert not target.exists()
    torch.load(tmp_path / "vit.pt", weights_only=False)
    assert target.exists()  # so the file was dangerous


def test_a_whole_module_in_a_file(tmp_path):
    torch.save(small(), tmp_path / "vit.pt")
    refused(tmp_path / "vit.pt", "holds more than tensors")


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
    refused(path, "may be damaged or cut short|is no PyTorch file")


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
@pytest.mark.parametrize("content", [b"<html>404</html>", b"version https://git-lfs.github.com/spec/v1\n", b"hello"])
def test_something_else_under_that_name(tmp_path, suffix, content):
    path = tmp_path / f"vit{suffix}"
    path.write_bytes(content)
    refused(path, "may be damaged or cut short|is no PyTorch file")


def test_a_dictionary_that_holds_itself(tmp_path):
    content = {"state_dict": small().state_dict()}
    content["self"] = content
    torch.save(content, tmp_path / "vit.pt")
    ours = small(seed=1)
    load_pretrained(ours, tmp_path / "vit.pt")
    assert same(body(ours), body(small()))


def test_paths_that_lead_nowhere(tmp_path):
    refused(tmp_path, "the folder holds neither model.safetensors nor pytorch_model.bin")
    refused(tmp_path / "vit.safetensors", "no such file or folder; give")
    refused("weights/vit.pth", "weights/vit.pth: no such file or folder; give")  # not a name on the hub
    (tmp_path / "vit.onnx").touch()
    refused(tmp_path / "vit.onnx", "ends in one of .safetensors, .bin, .pt, .pth")
    refused("x" * 5000, "could not be read")


# the hub


def test_hub_without_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    refused("owner/model", r"pip install 'fedbcgd\[hf\]'")


CHILD = """
import sys, time
import torch
from safetensors.torch import save_file
from fedbcgd import UserError
from fedbcgd.models.pretrained import load_pretrained
from fedbcgd.models.vit import ViT

time.sleep = lambda seconds: None  # the hub's client asks a silent server again and again, half a minute in all
for k, name in enumerate(sys.argv[1:]):
    model = ViT(5, (3, 32, 32), patch=8, dim=12, depth=2, heads=3)
    try:
        print(load_pretrained(model, name).lines()[0])
        save_file(model.state_dict(), f"{k}.safetensors")
    except UserError as error:
        print(error)
"""


def child(tmp_path, port, *names):
    """A line for each model from a process with its own cache and a hub at `port`; and what its hub's client said."""
    pytest.importorskip("huggingface_hub", reason="the hub's client comes with the extra hf")
    env = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    env |= {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(tmp_path / "home"), "NO_PROXY": "127.0.0.1"}
    env |= {"PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_DISABLE_XET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CHILD, *names]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as its client asks for to get one file."""

    files: dict[str, bytes] = {}

    def do_HEAD(self):
        owner, model, *rest = self.path.strip("/").split("/")
        content = self.files.get(f"{owner}/{model}/{rest[-1]}") if rest else None
        if content is not None:
            self.send_response(200)
            self.send_header("ETag", f'"{abs(hash(content)):x}"')
        else:
            known = any(name.startswith(f"{owner}/{model}/") for name in self.files)
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound" if known else "RepoNotFound")
        self.send_header("X-Repo-Commit", "c" * 40)
        self.send_header("Content-Length", str(len(content or b"")))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content or b"")

    do_GET = do_HEAD

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(tmp_path):
    a, b = small(), small(seed=1)
    save_file(a.state_dict(), tmp_path / "a.safetensors")
    torch.save(classical(b), tmp_path / "b.bin")
    Hub.files = {
        "owner/new/model.safetensors": (tmp_path / "a.safetensors").read_bytes(),
        "owner/old/pytorch_model.bin": (tmp_path / "b.bin").read_bytes(),
        "owner/text/README.md": b"hello",
    }
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server, a, b
    server.shutdown()
    server.server_close()


def test_models_on_the_hub(tmp_path, hub):
    """From the hub; and with the hub gone, from the client's cache, which for the second model has no first choice."""
    server, a, b = hub
    names = ["owner/new", "owner/old", "owner/text", "owner/none", "owner/no--name"]
    (new, old, text, none, bad), _ = child(tmp_path, server.server_port, *names)
    assert new.startswith("pretrained weights from owner/new (")
    assert old.endswith("pytorch_model.bin)")
    assert "owner/text: the model on the Hugging Face hub has neither model.safetensors nor" in text
    assert "owner/none: no such file or folder here, and no such model on the Hugging Face hub" in none
    assert "owner/no--name: no such file or folder here, and no such model" in bad
    assert same(body(a), {name: p for name, p in load_file(tmp_path / "0.safetensors").items() if "head" not in name})
    loaded = load_file(tmp_path / "1.safetensors")
    assert all(torch.equal(loaded[name], p) for name, p in body(b).items())
    server.shutdown()
    server.server_close()
    assert child(tmp_path, server.server_port, "owner/new", "owner/old")[0] == [new, old]


def test_hub_out_of_reach(tmp_path):
    with socket.socket() as taken:  # bound, so nobody else has the port, and not listening
        taken.bind(("127.0.0.1", 0))
        (line,), said = child(tmp_path, taken.getsockname()[1], "owner/model")
    assert "owner/model: no such file or folder here, the Hugging Face hub could not be reached" in line
    assert line.endswith("a path to a downloaded file or folder works too")
    assert "pytorch_model.bin" not in said  # it did not wait a second time
