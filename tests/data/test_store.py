"""The store: what is added is loaded unchanged, is checked, and is written completely or not at all."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors import safe_open

from fedbcgd import files
from fedbcgd.data import store
from fedbcgd.data.catalog import KNOWN, KnownDataSet
from fedbcgd.data.raw import Split
from fedbcgd.errors import UserError
from tests.data.archives import image_folder, mnist, npz, own_cache, pack, pictures, plain, refusal

X, Y = pictures(6, 4, 5, 3), [0, 1, 2, 0, 1, 2]
X_TEST, Y_TEST = pictures(2, 4, 5, 3, seed=1), [2, 1]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    return own_cache(tmp_path, monkeypatch)


@pytest.fixture
def file(tmp_path):
    """An .npz file with these arrays; others can be added or, with None, left out."""

    def write(**changes):
        arrays = {"x_train": X, "y_train": Y, "x_test": X_TEST, "y_test": Y_TEST} | changes
        path = tmp_path / "mine.npz"
        path.write_bytes(npz(**{key: value for key, value in arrays.items() if value is not None}))
        return path

    return write


@pytest.fixture
def known(monkeypatch):
    """Register the content of `file` as a known data set."""

    def make(**changes):
        digests = Split(X, np.array(Y)).digest, Split(X_TEST, np.array(Y_TEST)).digest
        facts = {"shape": (3, 4, 5), "classes": 3, "train": 6, "test": 2, "by_hand": "a file", "digests": digests}
        monkeypatch.setitem(KNOWN, "small", KnownDataSet("The Small One", **(facts | changes)))

    return make


def test_what_is_added_comes_back(file, cache):
    added = store.add("mine", file(classes=["a", "b", "c"]))
    assert os.listdir(cache) == ["mine.safetensors"]
    assert store.stored_names() == ["mine"]
    for found in (added, store.load("mine")):
        assert found.name == "mine"
        assert found.shape == (3, 4, 5)
        assert found.classes == ("a", "b", "c")
        assert found.about == "mine.npz"
        assert found.groups is None
        np.testing.assert_array_equal(found.train.images.permute(0, 2, 3, 1), X)
        np.testing.assert_array_equal(found.test.images.permute(0, 2, 3, 1), X_TEST)
        assert found.train.labels.tolist() == Y
        assert found.test.labels.tolist() == Y_TEST
        assert found.digest == f"{Split(X, np.array(Y)).digest}:{Split(X_TEST, np.array(Y_TEST)).digest}"


def test_mean_and_standard_deviation_by_hand(file):
    """Two channels: 0, 51, … 255 are 0, 0.2, … 1, with a variance of 2 (0.25 + 0.09 + 0.01) / 6; and one colour."""
    x = np.zeros((6, 1, 1, 3), np.uint8)
    x[:, 0, 0, 0] = np.arange(0, 256, 51)
    x[:, 0, 0, 1] = 255
    x[:3, 0, 0, 2] = 255
    found = store.add("mine", file(x_train=x, x_test=x[:2]))
    assert found.train.mean.tolist() == pytest.approx([0.5, 1, 0.5], abs=1e-7)
    assert found.train.std.tolist() == pytest.approx([(0.7 / 6) ** 0.5, 1, 0.5], abs=1e-7)  # 1: nothing to scale
    torch.testing.assert_close(found.test.mean, found.train.mean)  # the training set's, for both
    x, _ = found.train.gather(torch.arange(6), np.random.default_rng(0))
    torch.testing.assert_close(x[:, 2, 0, 0], torch.tensor([1.0, 1, 1, -1, -1, -1]))


def test_moments_of_many_images(file):
    """They are counted in parts."""
    x = np.zeros((4097, 1, 1), np.uint8)
    x[-1] = 255
    found = store.add("mine", file(x_train=x, y_train=np.zeros(4097, int), x_test=x[:1], y_test=[0]))
    assert float(found.train.mean) == pytest.approx(1 / 4097)
    assert float(found.train.std) == pytest.approx((4096 / 4097**2) ** 0.5)


def test_the_digest_is_of_labelled_images_whatever_their_order():
    one = Split(X, np.array(Y)).digest
    order = np.array([3, 0, 5, 1, 2, 4])
    assert Split(X, np.array(Y)).take(order).digest == one
    assert Split(np.asfortranarray(X), np.array(Y)).digest == one
    assert Split(X, np.array([1, 0, 2, 0, 1, 2])).digest != one  # two labels swapped
    assert Split(X[:5], np.array(Y[:5])).digest != one
    other = X.copy()
    other[4, 3, 2, 1] ^= 1
    assert Split(other, np.array(Y)).digest != one


def test_a_known_data_set_that_is_the_published_one(file, known):
    known(names=("x", "y", "z"))
    order = np.array([5, 4, 3, 2, 1, 0])
    found = store.add("small", file(x_train=X[order], y_train=np.array(Y)[order], classes=["p", "q", "r"]))
    assert found.classes == ("x", "y", "z")


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"shape": (1, 4, 5)}, "shape: expected (1, 4, 5), got (3, 4, 5)"),
        ({"train": 7}, "train: expected 7, got 6"),
        ({"test": 1}, "test: expected 1, got 2"),
        ({"classes": 4}, "classes: expected 4, got 3"),
        ({"digests": ("0" * 32, "1" * 32)}, "train images or labels are damaged, altered or mislabelled"),
    ],
)
def test_a_known_data_set_that_is_something_else(tmp_path, file, known, facts, words):
    known(**facts)
    message = refusal(tmp_path, file(), "small")
    assert "mine.npz is not The Small One" in message
    assert words in message
    assert "`fedbcgd data add my-small …`" in message
    assert store.add("my-small", tmp_path / "mine.npz").name == "my-small"


@pytest.mark.parametrize("change", [{"y_test": [1, 2]}, {"x_test": X_TEST ^ 1}, {"x_test": X[:2]}])
def test_a_known_data_set_altered_or_mislabelled(tmp_path, file, known, change):
    known()
    message = refusal(tmp_path, file(**change), "small")
    assert "test images or labels are damaged, altered or mislabelled" in message
    assert "damaged, altered or mislabelled" in message


@pytest.mark.parametrize("name", ["mnist", "cifar100", "tiny-imagenet"])
def test_a_small_file_is_none_of_the_published_ones(tmp_path, name):
    path = pack(mnist(X[..., 0], Y, X_TEST[..., 0], Y_TEST), tmp_path / "set", "folder")
    assert f"is not {KNOWN[name].title}" in refusal(tmp_path, path, name)


def test_groups_become_numbers(file):
    found = store.add("mine", file(group_train=["w7", "w1", "w7", "w3", "w1", "w7"]))
    assert found.groups.tolist() == [2, 0, 2, 1, 0, 2]


def test_a_share_held_out(tmp_path, file):
    path = file(x_test=None, y_test=None, group_train=[10, 11, 12, 13, 14, 15])
    found = store.add("mine", path, test_share=1 / 3)
    assert (len(found.train), len(found.test)) == (4, 2)
    both = torch.cat([found.train.images, found.test.images]).permute(0, 2, 3, 1).numpy()
    assert sorted(image.tobytes() for image in both) == sorted(image.tobytes() for image in X)
    for image, label in zip(found.train.images.permute(0, 2, 3, 1), found.train.labels, strict=True):
        (at,) = [k for k in range(6) if np.array_equal(X[k], image)]
        assert Y[at] == label
    assert store.add("again", path, test_share=1 / 3).digest == found.digest
    assert len(found.groups) == 4


@pytest.mark.parametrize("share", [0.0, 0.01, 0.99, 1.0, 2.0, -1.0, float("nan"), float("inf")])
def test_shares_that_leave_nothing_are_refused(tmp_path, file, share):
    message = refusal(tmp_path, file(x_test=None, y_test=None), test_share=share)
    assert "leaves images in train and test, got" in message


def test_a_share_of_what_has_test_images_is_refused(tmp_path, file):
    assert "has 2 test images, got 0.5; leave it out" in refusal(tmp_path, file(), test_share=0.5)


@pytest.mark.parametrize(
    "name", ["", "A", "../up", "a/b", "/abs", ".hidden", "-x", "a b", "a\n", "é", "x" * 65, "embedded", "quadratics"]
)
def test_names_that_are_refused(tmp_path, file, name):
    path = file()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=r"expected a name of small letters|not reserved"):
        store.add(name, path)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_file_whose_name_is_in_no_encoding(tmp_path, file):
    """File names and names of classes in foreign archives may be any bytes."""
    path = tmp_path / os.fsdecode(b"caf\xe9.npz")
    file().rename(path)
    assert store.add("mine", path).about == "caf?.npz"
    files = {name.replace("cat", os.fsdecode(b"c\xe9")): data for name, data in image_folder().items()}
    assert store.add("folder", pack(files, tmp_path / "folder", "tar")).classes == ("c?", "dog")


def header_only(path, **about):
    """Write a file of the store with other metadata."""
    with safe_open(path, "pt") as old:
        tensors = {key: old.get_tensor(key) for key in old.keys()}  # noqa: SIM118
        metadata = old.metadata() | about
    metadata["checksum"] = files.tensors_checksum(tensors, metadata)
    return safetensors.torch.save(tensors, metadata)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: b"",
        lambda path: b"hello",
        lambda path: path.read_bytes()[:100],
        lambda path: path.read_bytes()[:-1],
        lambda path: b"\xff" * 8 + path.read_bytes()[8:],
        lambda path: path.read_bytes().replace(b'"mean"', b'"nean"'),
        lambda path: path.read_bytes().replace(b'"y_test"', b'"z_test"'),
        lambda path: path.read_bytes().replace(b'"digest"', b'"digust"'),
        lambda path: path.read_bytes().replace(b"[6,4,5,3]", b"[6,4,15] "),
        lambda path: header_only(path, classes="[1, 2"),
        lambda path: header_only(path, classes="7"),
        lambda path: header_only(path, digest="[1, 2]"),
    ],
)
def test_a_damaged_file_in_the_cache(cache, file, damage):
    store.add("mine", file())
    path = cache / "mine.safetensors"
    data = damage(path)
    assert data != path.read_bytes()
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"mine\.safetensors is damaged: .*; delete it and add the data set again"):
        store.load("mine")


@pytest.mark.parametrize("seed", range(20))
def test_a_flipped_bit_in_the_cache_is_noticed(cache, file, seed):
    store.add("mine", file(group_train=[1, 2, 1, 2, 1, 2]))
    path = cache / "mine.safetensors"
    data = bytearray(path.read_bytes())
    draw = np.random.default_rng(seed)
    data[draw.integers(len(data))] ^= 1 << draw.integers(8)
    path.write_bytes(data)
    with pytest.raises(UserError, match="damaged"):
        store.load("mine")


def test_a_file_of_another_version(cache, file):
    store.add("mine", file())
    path = cache / "mine.safetensors"
    path.write_bytes(header_only(path, version="999"))
    with pytest.raises(UserError, match=r"expected a data set of version 2, got version 999; delete it and add"):
        store.load("mine")


def test_what_is_not_there(file):
    with pytest.raises(
        UserError, match="CIFAR-10 is not on this machine yet: `fedbcgd data get cifar10` fetches it, or"
    ):
        store.load("cifar10")
    with pytest.raises(UserError, match="got 'minee'"):
        store.load("minee")
    store.add("mine", file())
    with pytest.raises(UserError, match="Did you mean 'mine'"):
        store.load("minee")


def test_only_whole_data_sets_are_listed(cache, file):
    store.add("mine", file())
    for name in (".other-abc.safetensors", "notes.txt", "Upper.safetensors", ".get-xyz"):
        (cache / name).write_bytes(b"")
    assert store.stored_names() == ["mine"]


def test_where_the_folder_is(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert store.folder() == tmp_path / "cache"
    monkeypatch.setenv("FEDBCGD_DATA", "~/data")
    assert store.folder() == tmp_path / "home" / "data"
    monkeypatch.setenv("FEDBCGD_DATA", "~nobody-of-this-name/data")
    assert store.folder() == Path("~nobody-of-this-name/data")
    for unset in ("", None):
        monkeypatch.setenv("FEDBCGD_DATA", "") if unset == "" else monkeypatch.delenv("FEDBCGD_DATA")
        monkeypatch.setattr(sys, "platform", "linux")
        assert store.folder() == tmp_path / "xdg" / "fedbcgd"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert store.folder() == tmp_path / "home" / ".cache" / "fedbcgd"


def test_a_cache_folder_that_cannot_be_made(tmp_path, monkeypatch, file):
    (tmp_path / "taken").write_text("")
    monkeypatch.setenv("FEDBCGD_DATA", str(tmp_path / "taken" / "cache"))
    assert "could not be created: Not a directory" in refusal(tmp_path, file())


@pytest.fixture
def no_room():
    """No file may be larger than 4 KiB, as on a disk that becomes full while writing."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def fill():
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))

    yield fill
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_leaves_what_was_there(cache, file, no_room):
    old = store.add("mine", file())
    path = file(x_train=pictures(6, 40, 50, 3), x_test=pictures(2, 40, 50, 3))
    no_room()
    for name in ("mine", "other"):
        with pytest.raises(UserError, match=rf"{name}\.safetensors could not be written: .*File too large"):
            store.add(name, path)
    assert os.listdir(cache) == ["mine.safetensors"]
    assert store.load("mine").digest == old.digest


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError(28, "No space left on device"), MemoryError])
def test_whatever_stops_the_writing_leaves_nothing(cache, file, monkeypatch, failure):
    def half(tensors, path, metadata):
        Path(path).write_bytes(b"half")
        raise failure

    monkeypatch.setattr(safetensors.torch, "save_file", half)
    with pytest.raises(UserError if isinstance(failure, OSError) else failure):
        store.add("mine", file())
    assert not os.listdir(cache)


def test_kill_9_while_writing_leaves_nothing_that_is_listed(cache, file):
    code = (
        "import os, pathlib, signal, sys, safetensors.torch\n"
        "from fedbcgd.data import store\n"
        "def half(tensors, path, metadata):\n"
        "    pathlib.Path(path).write_bytes(safetensors.torch.save(tensors, metadata)[:-50])\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "safetensors.torch.save_file = half\n"
        "store.add('mine', pathlib.Path(sys.argv[1]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(file())], timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert len(os.listdir(cache)) == 1  # the half file, which nobody will take for a data set
    assert store.stored_names() == []
    assert store.add("mine", file()).train.labels.tolist() == Y


def test_one_picture_of_each_split(tmp_path):
    path = pack({"train/a/0.png": plain((1, 2, 3)), "test/a/0.png": plain((1, 2, 3))}, tmp_path / "one", "zip")
    assert len(store.add("one", path).train) == 1


def test_what_a_kill_left_behind_is_removed_a_day_later(cache):
    old, fresh = cache / ".get-old", cache / ".get-fresh"
    for path in (old, fresh):
        path.mkdir(parents=True)
    half = cache / ".cifar10-abc.safetensors"
    half.write_bytes(b"x")
    yesterday = time.time() - 90_000
    for path in (old, half):
        os.utime(path, (yesterday, yesterday))
    store.remove_leftovers()
    assert fresh.exists()
    assert not old.exists()
    assert not half.exists()
