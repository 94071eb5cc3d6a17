"""What other programs get computes what the module computes."""

import json
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

from fedbcgd import UserError
from fedbcgd.files import write_tensors
from fedbcgd.models import LeNet5, ResNet18
from fedbcgd.models.export import export
from fedbcgd.models.stored import ModelInfo

X = torch.randn(5, 1, 28, 28, generator=torch.Generator().manual_seed(1))


def stored(path, module, x=X):
    path.mkdir(exist_ok=True)
    data = x if isinstance(x, dict) else (x, torch.zeros(len(x), dtype=torch.int64))
    info = ModelInfo.of_module(module).with_data(data)
    state = {name: t.clone() for name, t in module.state_dict().items()}
    write_tensors(path / "model.safetensors", state, info.metadata())
    return module.eval()


@pytest.fixture(params=["lenet5", "resnet18"])
def trained(tmp_path, request):
    net = LeNet5(10, (1, 28, 28), 0.1) if request.param == "lenet5" else ResNet18(10, (1, 28, 28), 0.05, "batch")
    return stored(tmp_path / "run", net)


@torch.no_grad()
def test_a_state_dict_needs_no_module_and_no_trust(tmp_path):
    module = stored(tmp_path / "run", nn.Sequential(nn.Flatten(), nn.Linear(784, 2)))
    assert export(tmp_path / "run", tmp_path / "m.pt", "state_dict") == ()
    fresh = nn.Sequential(nn.Flatten(), nn.Linear(784, 2))
    fresh.load_state_dict(torch.load(tmp_path / "m.pt", weights_only=True))
    assert torch.equal(fresh(X), module(X))


@torch.no_grad()
def test_torchscript_in_a_process_without_the_package(tmp_path, trained):
    assert export(tmp_path / "run", tmp_path / "m.pt", "torchscript") == ("input",)
    torch.save(X, tmp_path / "x.pt")
    code = """
        import sys, torch
        model = torch.jit.load("m.pt")
        torch.save(model(torch.load("x.pt")).detach(), "y.pt")
        assert "fedbcgd" not in sys.modules
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        capture_output=True, text=True, cwd=tmp_path, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    torch.testing.assert_close(torch.load(tmp_path / "y.pt"), trained(X), rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_onnx(tmp_path, trained):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    assert export(tmp_path / "run", tmp_path / "m.onnx", "onnx") == ("input",)
    session = runtime.InferenceSession(tmp_path / "m.onnx")
    (given,), (output,) = session.get_inputs(), session.get_outputs()
    assert (given.name, given.shape[1:], output.name) == ("input", [1, 28, 28], "output")
    for count in (1, 5):
        y = session.run(None, {"input": X[:count].numpy()})[0]
        torch.testing.assert_close(torch.from_numpy(y), trained(X[:count]), rtol=1e-4, atol=1e-5)


def test_onnx_without_its_packages_names_the_extra(tmp_path, monkeypatch):
    stored(tmp_path / "run", LeNet5(10, (1, 28, 28), 0.1))
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(UserError, match=r"onnx: needs the extra `onnx`: pip install 'fedbcgd\[onnx\]'"):
        export(tmp_path / "run", tmp_path / "m.onnx", "onnx")
    assert not (tmp_path / "m.onnx").exists()


@torch.no_grad()
@pytest.mark.parametrize("form", ["torchscript", "onnx"])
def test_a_transformers_model_of_tokens_gives_its_logits(tmp_path, form):
    transformers = pytest.importorskip("transformers")
    if form == "onnx":
        pytest.importorskip("onnxscript")
    small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=11, num_labels=3, max_position_embeddings=16, **small)
    tokens = torch.arange(12).view(2, 6) % 11
    data = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": torch.zeros(2, dtype=torch.int64)}
    module = stored(tmp_path / "run", transformers.BertForSequenceClassification(config), data)
    with pytest.raises(UserError, match="trust=True"):
        export(tmp_path / "run", tmp_path / "m", form)
    names = export(tmp_path / "run", tmp_path / "m", form, trust=True)
    assert sorted(names) == ["attention_mask", "input_ids"]
    expected = module(input_ids=tokens, attention_mask=data["attention_mask"]).logits
    if form == "torchscript":
        y = torch.jit.load(tmp_path / "m")(*(data[name] for name in names))
    else:
        runtime = pytest.importorskip("onnxruntime")
        y = torch.from_numpy(runtime.InferenceSession(tmp_path / "m").run(None, {n: data[n].numpy() for n in names})[0])
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)


class Branching(nn.Module):
    """Computes something else for three examples than for two."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x.flatten(1) * self.w * (2 if len(x) > 2 else 1)


def test_what_a_recording_would_get_wrong_is_refused(tmp_path):
    stored(tmp_path / "run", Branching())
    with pytest.raises(UserError, match="depends on its input in a way that cannot be recorded"):
        export(tmp_path / "run", tmp_path / "m", "torchscript", model=Branching())
    assert not (tmp_path / "m").exists()


def test_inputs_that_are_unknown_or_too_large(tmp_path):
    module = LeNet5(10, (1, 28, 28), 0.1)
    path = tmp_path / "model.safetensors"
    write_tensors(path, module.state_dict(), ModelInfo.of_module(module).metadata())
    with pytest.raises(UserError, match="does not say what the model's inputs are"):
        export(tmp_path, tmp_path / "m", "torchscript")
    for shape in ([1, 1 << 20, 1 << 20], [-1, -(1 << 40)]):
        values = json.loads(ModelInfo.of_module(module).metadata()["model"]) | {"inputs": {"": ["float32", shape]}}
        write_tensors(path, module.state_dict(), {"model": json.dumps(values)})
        with pytest.raises(UserError, match=r"expected examples of at most 67,108,864 values"):
            export(tmp_path, tmp_path / "m", "torchscript")
