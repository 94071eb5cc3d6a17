"""`fedbcgd options` and `fedbcgd export`."""

import re

import torch

from fedbcgd.files import write_tensors
from fedbcgd.models import LeNet5
from fedbcgd.models.stored import ModelInfo, load_model
from tests.command import fedbcgd, process


def test_options_of_all_algorithms_and_of_one(tmp_path):
    everything = fedbcgd("options", cwd=tmp_path)
    for text in ("weight_decay", "0.001", "fedprox", "server=momentum"):
        assert text in everything.stdout
    one = fedbcgd("options", "fedbcgd+derived", cwd=tmp_path)
    assert "damping" in one.stdout
    assert "haste " not in one.stdout
    wrong = fedbcgd("options", "fedbcdg", cwd=tmp_path, check=2)
    assert "Did you mean 'fedbcgd'" in wrong.stderr


def test_the_table_fits_80_columns(tmp_path, monkeypatch):
    for name, value in {"COLUMNS": "80", "FORCE_COLOR": "1", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)  # as on a terminal
    shown = process("options", cwd=tmp_path)
    shown.stdout = re.sub(r"\x1b\[[\d;]*m", "", shown.stdout)
    assert "weight_decay" in shown.stdout
    assert max(map(len, shown.stdout.splitlines())) <= 80


def test_export(tmp_path):
    module = LeNet5(10, (1, 28, 28), 0.1).eval()
    (tmp_path / "run").mkdir()
    info = ModelInfo.of_module(module, mean=(0.5,), std=(0.25,), inputs={"": ("float32", (1, 28, 28))})
    write_tensors(tmp_path / "run" / "model.safetensors", module.state_dict(), info.metadata())
    done = fedbcgd("export", "run", "--format", "torchscript", "--out", "m.pt", cwd=tmp_path)
    assert done.stdout == "m.pt written; inputs: input\npixels from 0 to 1, less the mean 0.5, divided by 0.25\n"
    assert done.stderr == ""
    x = torch.randn(3, 1, 28, 28)
    with torch.no_grad():
        expected = load_model(tmp_path / "run")(x)
        torch.testing.assert_close(torch.jit.load(tmp_path / "m.pt")(x), expected, rtol=1e-5, atol=1e-6)
    nothing = fedbcgd("export", "nowhere", "--out", "m.pt", cwd=tmp_path, check=2)
    assert "nowhere does not exist" in nothing.stderr
