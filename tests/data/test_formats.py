"""Every format, read from small files: pixels, labels and names of classes are right."""

import gzip
import io
import json
import os
import pickle
import struct
import zipfile

import numpy as np
import pytest

from fedbcgd.data.formats import read
from fedbcgd.errors import UserError
from tests.data.archives import (
    CONTAINERS,
    cifar10_binary,
    cifar10_python,
    cifar100_python,
    cifar_sheets,
    every_format,
    image,
    memory_below,
    mnist,
    npy,
    npz,
    own_cache,
    pack,
    pictures,
    python2,
    refusal,
    zip_bytes,
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    return own_cache(tmp_path, monkeypatch)


def a_row():
    """CIFAR's row of 3072 bytes: 1024 of red, then green, then blue, each 32 lines of 32."""
    row = np.zeros((1, 3072), np.uint8)
    row[0, 1] = 7
    row[0, 1024 + 2 * 32 + 3] = 8
    row[0, 2048 + 31 * 32 + 31] = 9
    return row


def check_planes(pixels):
    assert pixels.shape == (32, 32, 3)
    assert pixels[0, 1].tolist() == [7, 0, 0]
    assert pixels[2, 3].tolist() == [0, 8, 0]
    assert pixels[31, 31].tolist() == [0, 0, 9]
    assert pixels.sum() == 24


BLANK = np.full((2, 3072), 5, np.uint8)


@pytest.mark.parametrize("kind", CONTAINERS)
def test_cifar10_as_python_2_wrote_it(tmp_path, kind):
    files = cifar10_python([BLANK, a_row(), a_row()], [[1, 0], [2], [1]], [b"plane", b"car", b"bird"])
    raw = read(pack(files, tmp_path / "c", kind))
    assert raw.train.labels.tolist() == [1, 0, 2]
    assert raw.train.labels.dtype == np.int64
    assert raw.test.labels.tolist() == [1]
    assert raw.classes == ("plane", "car", "bird")
    assert (raw.train.pixels[:2] == 5).all()
    check_planes(raw.train.pixels[2])
    check_planes(raw.test.pixels[0])


@pytest.mark.parametrize("kind", ["folder", "zip", "tar.gz"])
@pytest.mark.parametrize("protocol", [2, 4])
def test_cifar100_has_its_fine_labels(tmp_path, kind, protocol):
    files = cifar100_python((a_row(), [1], [0]), (BLANK, [0, 2], [1, 1]), ["apple", "bear", "élan"], protocol)
    raw = read(pack(files, tmp_path / "c", kind))
    check_planes(raw.train.pixels[0])
    assert raw.train.labels.tolist() == [1]
    assert raw.test.labels.tolist() == [0, 2]
    assert raw.classes == ("apple", "bear", "élan")


@pytest.mark.parametrize("kind", CONTAINERS)
def test_cifar10_binary(tmp_path, kind):
    files = cifar10_binary([a_row(), BLANK, a_row()], [[2], [1, 0], [1]], ["plane", "car", "bird"])
    raw = read(pack(files, tmp_path / "c", kind))
    check_planes(raw.train.pixels[0])
    assert (raw.train.pixels[1:] == 5).all()
    assert raw.train.labels.tolist() == [2, 1, 0]
    assert raw.test.labels.tolist() == [1]
    assert raw.classes == ("plane", "car", "bird")


def test_cifar100_binary_has_two_labels_of_which_the_second_counts(tmp_path):
    record = bytes([1, 3]) + a_row().tobytes()
    files = {"c/train.bin": record * 2, "c/test.bin": record, "c/fine_label_names.txt": b"a\nb\nc\nd\n"}
    raw = read(pack(files, tmp_path / "c", "zip"))
    assert raw.train.labels.tolist() == [3, 3]
    check_planes(raw.test.pixels[0])
    assert raw.classes == ("a", "b", "c", "d")


def test_both_forms_of_one_data_set_have_one_digest(tmp_path):
    rows, labels = [pictures(3, 3072), pictures(2, 3072, seed=1)], [[0, 2, 1], [1, 1]]
    python = read(pack(cifar10_python(rows, labels, [b"a", b"b", b"c"]), tmp_path / "p", "tar.gz"))
    binary = read(pack(cifar10_binary(rows, labels, ["a", "b", "c"]), tmp_path / "b", "tar.gz"))
    assert (python.train.digest, python.test.digest) == (binary.train.digest, binary.test.digest)
    assert python.train.digest != python.test.digest


def test_sheets_have_an_image_in_each_row(tmp_path):
    sheets = [np.full((1, 1024, 3), k, np.uint8) for k in range(6)]
    sheets[4][0, 32 * 1 + 2] = (7, 8, 9)  # the second line, the third pixel
    raw = read(pack(cifar_sheets(sheets, ([0, 1, 2, 3, 4], [5])), tmp_path / "s", "tar.gz"))
    assert raw.train.pixels.shape == (5, 32, 32, 3)
    assert raw.train.pixels[:4, 0, 0, 0].tolist() == [0, 1, 2, 3]
    assert raw.train.pixels[4, 1, 2].tolist() == [7, 8, 9]
    assert raw.train.pixels[4, 2, 1].tolist() == [4, 4, 4]
    assert raw.train.labels.tolist() == [0, 1, 2, 3, 4]
    assert raw.test.labels.tolist() == [5]


X = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)


@pytest.mark.parametrize("kind", CONTAINERS)
@pytest.mark.parametrize("gz", [False, True])
def test_idx(tmp_path, kind, gz):
    raw = read(pack(mnist(X, [3, 0], X[1:], [2], "raw/", gz), tmp_path / "m", kind))
    assert raw.train.pixels.shape == (2, 2, 3, 1)
    assert raw.train.pixels[0, :, :, 0].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert raw.train.pixels[1, 1, 0, 0] == 9
    assert raw.train.labels.tolist() == [3, 0]
    assert raw.test.pixels[0, 0, 1, 0] == 7
    assert raw.classes == ("0", "1", "2", "3")


def test_idx_files_named_with_a_dot(tmp_path):
    files = {name.replace("-idx", ".idx"): data for name, data in mnist(X, [3, 0], X, [2, 1]).items()}
    assert read(pack(files, tmp_path / "m", "folder")).test.labels.tolist() == [2, 1]


def test_emnist_is_put_upright(tmp_path):
    """Its images are stored transposed."""
    files = mnist(X, [0, 1], X, [1, 0], "gzip/emnist-balanced-", gz=True)
    raw = read(pack(files, tmp_path / "e", "zip"))
    assert raw.train.pixels.shape == (2, 3, 2, 1)
    assert raw.train.pixels[0, :, :, 0].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_one_of_several_data_sets_is_picked_by_its_name(tmp_path):
    files = mnist(X, [0, 1], X, [1, 0], "emnist-letters-") | mnist(X, [5, 1], X, [1, 0], "emnist-balanced-")
    path = pack(files, tmp_path / "e", "zip")
    assert read(path, "emnist-balanced").train.labels.tolist() == [5, 1]
    message = refusal(tmp_path, path, "mine")
    assert "expected one data set, got emnist-balanced, emnist-letters; add one of them under its name" in message


def test_files_that_macos_adds_are_passed_over(tmp_path):
    files = mnist(X, [0, 1], X, [1, 0], "emnist-digits-")
    hidden = {f"__MACOSX/._{name}": b"\0\5\x16\7" for name in files}
    assert read(pack(files | hidden, tmp_path / "e", "zip")).train.labels.tolist() == [0, 1]
    assert "got none of these" in refusal(tmp_path, pack(hidden, tmp_path / "h", "zip"))


@pytest.mark.parametrize(
    "layout", ["x_train y_train x_test y_test", "train_images train_labels test_images test_labels"]
)
def test_npz(tmp_path, layout):
    values = pictures(3, 4, 5), [[2], [0], [1]], pictures(1, 4, 5, 1), [1]
    path = tmp_path / "a.npz"
    path.write_bytes(npz(**dict(zip(layout.split(), values, strict=True)), group_train=["b", "a", "b"]))
    raw = read(path)
    np.testing.assert_array_equal(raw.train.pixels[..., 0], values[0])
    np.testing.assert_array_equal(raw.test.pixels, values[2])
    assert raw.train.labels.tolist() == [2, 0, 1]
    assert raw.train.groups.tolist() == ["b", "a", "b"]
    assert raw.classes == ("0", "1", "2")


def test_npz_with_channels_first_and_names(tmp_path):
    x = pictures(2, 3, 5, 6)
    np.savez_compressed(tmp_path / "a.npz", x_train=x, y_train=[1, 0], classes=["cat", "dog"])
    raw = read(tmp_path / "a.npz")
    assert raw.train.pixels.shape == (2, 5, 6, 3)
    assert raw.train.pixels[1, 4, 3, 2] == x[1, 2, 4, 3]
    assert raw.classes == ("cat", "dog")
    assert raw.test is None


def test_what_a_terminal_would_follow_is_taken_out_of_names(tmp_path):
    np.savez(tmp_path / "a.npz", x_train=X, y_train=[0, 1], classes=["\x1b[31mred", "a\nb" + "x" * 999])
    assert read(tmp_path / "a.npz").classes == ("?[31mred", "a?b" + "x" * 197)


GOOD = {"x_train": X, "y_train": [0, 1], "x_test": X, "y_test": [1, 1]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x_train": None}, "expected an array x_train, got x_test, y_test, y_train"),
        (
            {"x_train": X / 255},
            "expected train images as uint8 of shape (n, height, width) or (n, height, width, channels), got float64",
        ),
        ({"x_train": X[0]}, "expected train images as uint8"),
        ({"x_train": X[:0], "y_train": np.array([], int)}, "train: expected images, got none"),
        ({"x_test": X[:, :1]}, "expected test images of shape (2, 3, 1), as in training, got (1, 3, 1)"),
        ({"y_train": [0, 1, 1]}, "train: expected 2 labels, as many as images, got 3"),
        ({"y_train": [0, -1]}, "expected labels from 0, got -1"),
        ({"y_train": [0, 10**6]}, "expected labels from 0 to at most 99,999, got 1000000"),
        ({"y_train": np.array([0, 2**64 - 1], np.uint64)}, "expected labels from 0, got -1"),
        ({"y_train": [0.0, 1.0]}, "expected labels that are integers ≥ 0"),
        ({"y_train": ["cat", "dog"]}, "expected labels that are integers ≥ 0"),
        ({"y_test": None}, "expected both x_test and y_test or neither"),
        ({"classes": ["cat"]}, "expected labels below 1, the number of class names, got 1"),
        ({"classes": "cat"}, "classes: expected a list"),
        ({"classes": np.full((2, 2), "a")}, "classes: expected a list"),
        ({"classes": np.zeros(100_001, "S1")}, "expected at most 100,000 classes, got 100,001"),
        ({"group_train": 3}, "group_train: expected a list"),
        ({"group_train": [[1, 2], [3, 4]]}, "group_train: expected a list"),
        ({"group_train": [1, 2, 3]}, "train: expected 2 groups, as many as images, got 3"),
    ],
)
def test_npz_files_that_do_not_fit_together(tmp_path, change, words):
    path = tmp_path / "a.npz"
    path.write_bytes(npz(**{key: value for key, value in (GOOD | change).items() if value is not None}))
    assert words in refusal(tmp_path, path)


@pytest.mark.parametrize(
    "member",
    [
        b"not an array",
        npy("{[]: 1}"),
        npy("{'descr': ("),
        npy("1 +"),
        npy("{" * 5000),
        npy("{'descr': '|u1', 'fortran_order': False, 'shape': (2, 2, 3)}", b"short"),
        npy("{'descr': '|u1', 'fortran_order': False, 'shape': (-2, -2, 3)}", bytes(12)),
        npy("{'descr': '|u1', 'fortran_order': False, 'shape': (4000000000, 4000000000)}", bytes(12)),
        npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}", pickle.dumps(print)),
        npy("{'descr': [('a', '|O')], 'fortran_order': False, 'shape': (1,)}", pickle.dumps(print)),
        npy("{'descr': '|V0', 'fortran_order': False, 'shape': (999999999999,)}"),
    ],
)
def test_npz_files_with_damaged_or_hostile_arrays(tmp_path, member):
    path = tmp_path / "a.npz"
    path.write_bytes(zip_bytes({"x_train.npy": member, "y_train.npy": npy("{}")}))
    message = refusal(tmp_path, path)
    assert "expected an .npz file of plain arrays" in message


def test_objects_in_an_npz_file_are_not_unpickled(tmp_path):
    body = b"cposix\nsystem\n(S'touch %s/marker'\ntR." % os.fsencode(tmp_path)
    array = npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}", body)
    (tmp_path / "a.npz").write_bytes(zip_bytes({"x_train.npy": array, "y_train.npy": array}))
    assert "Object arrays cannot be loaded" in refusal(tmp_path, tmp_path / "a.npz")
    assert not (tmp_path / "marker").exists()


def test_an_npz_file_with_endless_names_of_no_length(tmp_path):
    endless = npy("{'descr': '<U0', 'fortran_order': False, 'shape': (999999999999,)}")
    with zipfile.ZipFile(io.BytesIO(npz(**GOOD))) as good:
        files = {name: good.read(name) for name in good.namelist()}
    (tmp_path / "a.npz").write_bytes(zip_bytes(files | {"classes.npy": endless}))
    assert "classes: expected a list" in refusal(tmp_path, tmp_path / "a.npz")


def test_an_npz_file_that_unpacks_to_more_than_it_says(tmp_path):
    data = bytearray(zip_bytes({"x_train.npy": bytes(64 * 2**20)}))
    for magic, at in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):
        start = data.find(magic) + at
        data[start : start + 4] = struct.pack("<I", 1000)
    (tmp_path / "a.npz").write_bytes(data)
    with memory_below(8):
        assert "damaged" in refusal(tmp_path, tmp_path / "a.npz")


def change(which, **files):
    """Return a valid data set with some files changed or, with None, removed."""
    found = every_format()[which]
    for end, data in files.items():
        name = next(name for name in found if name.rpartition("/")[2].split(".")[0].replace("-", "_") == end)
        if data is None:
            del found[name]
        else:
            found[name] = data
    return found


ROWS = pictures(2, 3072)
WRONG = {
    "a row too long": (
        change("cifar10 python", data_batch_1=python2({b"labels": [0, 1], b"data": pictures(2, 3073)})),
        "data_batch_1: expected images of 3072 bytes",
    ),
    "no images": (change("cifar10 python", test_batch=python2({b"labels": [0]})), "test_batch: expected images"),
    "no labels": (
        change("cifar10 python", test_batch=python2({b"data": ROWS})),
        "expected labels that are integers ≥ 0",
    ),
    "a label too few": (
        change(
            "cifar10 python",
            data_batch_1=python2({b"labels": [0], b"data": ROWS}),
            data_batch_2=python2({b"labels": [0, 0, 0], b"data": ROWS}),
        ),
        "data_batch_1: expected 2 labels, as many as images, got 1",  # though together they are as many
    ),
    "labels as text": (
        change("cifar10 python", test_batch=python2({b"labels": [b"a", b"b"], b"data": ROWS})),
        "expected labels that are integers ≥ 0",
    ),
    "fewer names than classes": (
        change("cifar10 python", batches=python2({b"label_names": [b"a"]})),
        "expected labels below 1, the number of class names, got 1",
    ),
    "binary cut short": (
        change("cifar10 binary", data_batch_1=bytes(3072)),
        "expected a multiple of 3073 bytes, got 3,072: truncated?",
    ),
    "binary empty": (change("cifar10 binary", test_batch=b""), "expected a multiple of 3073 bytes, got 0"),
    "a sheet too narrow": (
        change("cifar sheets", data_batch_3=image(np.zeros((1, 1023, 3)))),
        "expected 1024 pixels in a row, got 1023",
    ),
    "a sheet gone": (
        change("cifar sheets", data_batch_3=None),
        "package/data_batch_3.png: expected this file, got none",
    ),
    "labels no JSON": (change("cifar sheets", train_lables=b"[1, 2"), "train_lables.json: expected JSON"),
    "labels too deep": (change("cifar sheets", train_lables=b"[" * 99_999), "expected JSON"),
    "labels an object": (change("cifar sheets", train_lables=json.dumps({"a": 1}).encode()), "integers ≥ 0"),
    "labels too large": (change("cifar sheets", test_lables=b"[1e999]"), "integers ≥ 0"),
    "idx gone": (change("idx", t10k_labels_idx1_ubyte=None), "expected a file with the labels of test"),
    "idx empty": (change("idx", t10k_labels_idx1_ubyte=b""), "expected an idx file"),
    "idx of floats": (
        change("idx", train_images_idx3_ubyte=b"\0\0\x0d\3" + bytes(12)),
        "expected an idx file of bytes in 3 dimensions",
    ),
    "idx swapped": (change("idx", train_images_idx3_ubyte=b"\0\0\x08\1" + bytes(12)), "in 3 dimensions"),
    "idx of nothing": (
        change("idx", train_images_idx3_ubyte=b"\0\0\x08\3" + struct.pack(">3I", 0, 2**32 - 1, 2**32 - 1)),
        "expected at least one value, got none",
    ),
    "idx too large": (
        change("idx", train_images_idx3_ubyte=b"\0\0\x08\3" + struct.pack(">3I", 2**32 - 1, 2**32 - 1, 2**32 - 1)),
        "expected at most 2,147,483,648 bytes",
    ),
    "idx cut short": (
        change("idx", train_labels_idx1_ubyte=b"\0\0\x08\1\0\0\0\3ab"),
        "according to its header, got fewer",
    ),
    "idx too long": (
        change("idx", train_labels_idx1_ubyte=b"\0\0\x08\1\0\0\0\3abcd"),
        "according to its header, got more",
    ),
    "idx.gz cut short": (
        change("idx.gz", train_labels_idx1_ubyte=gzip.compress(b"\0\0\x08\1\0\0\0\3abc")[:-1]),
        "is damaged or truncated",
    ),
    "idx.gz with another checksum": (
        change("idx.gz", train_labels_idx1_ubyte=gzip.compress(b"\0\0\x08\1\0\0\0\3abc")[:-8] + bytes(8)),
        "is damaged or truncated",
    ),
    "idx.gz that is none": (change("idx.gz", train_labels_idx1_ubyte=b"\0\0\x08\1\0\0\0\3abc"), "damaged"),
}


@pytest.mark.parametrize("kind", ["folder", "zip", "tar.gz"])
@pytest.mark.parametrize("name", WRONG)
def test_damaged_and_mislabelled_ones_are_refused(tmp_path, name, kind):
    files, words = WRONG[name]
    assert words in refusal(tmp_path, pack(files, tmp_path / "set", kind))


@pytest.mark.parametrize("declared", [100, 2**31])
def test_an_idx_file_that_unpacks_to_more_than_it_says(tmp_path, declared):
    bomb = gzip.compress(b"\0\0\x08\1" + struct.pack(">I", declared) + bytes(64 * 2**20))
    path = pack(change("idx.gz", train_labels_idx1_ubyte=bomb), tmp_path / "m", "folder")
    if declared == 100:
        with memory_below(8):
            assert "according to its header, got more" in refusal(tmp_path, path)
    else:
        assert "according to its header, got fewer" in refusal(tmp_path, path)


def test_a_size_for_what_has_one_already(tmp_path):
    path = tmp_path / "mine.npz"
    path.write_bytes(npz(x_train=np.zeros((2, 4, 4), np.uint8), y_train=[0, 1]))
    with pytest.raises(UserError, match="--size: expected none with"):
        read(path, "mine", 8)
