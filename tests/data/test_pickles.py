"""CIFAR's pickles: all versions are read, and no code in them is executed."""

import builtins
import os
import pickle
import struct
from contextlib import suppress

import numpy as np
import pytest

from fedbcgd.data import pickles
from fedbcgd.errors import UserError
from tests.data.archives import cifar10_python, memory_below, own_cache, pack, pictures, python2, refusal

ROWS = pictures(2, 3072)


def old_numpy(data):
    """Convert to numpy 1's pickle; in protocol 4 the lengths of the name and of the frame are one byte less."""
    new = b"numpy._core.multiarray"
    if data.startswith(b"\x80\x04\x95"):
        (frame,) = struct.unpack("<Q", data[3:11])
        data = data[:3] + struct.pack("<Q", frame - 1) + data[11:].replace(b"\x8c\x16" + new, b"\x8c\x15" + new)
    assert new in data
    return data.replace(new, b"numpy.core.multiarray")


@pytest.mark.parametrize("rename", [old_numpy, bytes], ids=["numpy 1", "numpy 2"])
@pytest.mark.parametrize("protocol", [1, 2, 3, 4])
@pytest.mark.parametrize("key", [str, str.encode], ids=["text", "bytes"])
@pytest.mark.parametrize("order", [np.ascontiguousarray, np.asfortranarray])
def test_what_python_3_writes(protocol, key, rename, order):
    made = {key("data"): order(ROWS), key("labels"): [7, 300, 70_000, 0], key("filenames"): [b"a.png", b"b.png"]}
    found = pickles.load(rename(pickle.dumps(made, protocol)), "batch")
    assert found.keys() == {"data", "labels"}
    assert found["labels"] == [7, 300, 70_000, 0]
    assert found["data"].dtype == np.uint8
    np.testing.assert_array_equal(found["data"], ROWS)


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("names", [["apple", "élan"], [b"apple", b"bear"]])
def test_names_of_classes(protocol, names):
    found = pickles.load(pickle.dumps({b"num_vis": 3072, b"fine_label_names": names}, protocol), "meta")
    assert found == {"fine_label_names": [n if isinstance(n, str) else n.decode() for n in names]}


@pytest.mark.parametrize("numpy", [b"numpy.core.multiarray", b"numpy._core.multiarray"])
def test_what_python_2_writes(numpy):
    made = {b"batch_label": b"training batch 1 of 5", b"labels": [6, 9], b"data": ROWS}
    data = python2(made, numpy)
    assert pickle.loads(data, encoding="bytes")[b"labels"] == [6, 9]  # it is a pickle like theirs
    found = pickles.load(data, "batch")
    assert found["labels"] == [6, 9]
    np.testing.assert_array_equal(found["data"], ROWS)


class Call:
    """Pickled as a call."""

    def __init__(self, function, *arguments):
        self.made_by = function, arguments

    def __reduce__(self):
        return self.made_by


def text(value):
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def calls(marker):
    """Pickles that leave the marker file when they are unpickled by pickle, in many ways."""
    command = f"touch {marker}"
    python = f"open({str(marker)!r}, 'w')"
    for protocol in range(6):
        yield f"os.system {protocol}", pickle.dumps({"data": Call(os.system, command)}, protocol)
        yield f"eval {protocol}", pickle.dumps({"data": Call(builtins.eval, python)}, protocol)
    yield "a key", pickle.dumps({"data": 1, Call(builtins.exec, python): 2}, 2)
    yield "INST", b"(S'" + command.encode() + b"'\nios\nsystem\n."
    yield "OBJ", b"(cos\nsystem\n" + text(command) + b"o."
    yield "STACK_GLOBAL", b"\x80\x04" + text("os") + text("system") + b"\x93" + text(command) + b"\x85R."
    yield "a dotted name", b"\x80\x04" + text("numpy") + text("os.system") + b"\x93" + text(command) + b"\x85R."
    yield (
        "beside a batch",
        python2({b"labels": [1, 2], b"data": ROWS})[:-2] + text("x") + b"cos\nsystem\n" + text(command) + b"\x85Ru.",
    )


def test_nothing_is_run(tmp_path):
    """What a pickle holds beside its images and labels is ignored, whatever it would do."""
    marker = tmp_path / "marker"
    for name, data in calls(marker):
        try:
            found = pickles.load(data, name)
        except UserError as error:
            assert name in str(error)
        else:
            assert "data" not in found or name == "beside a batch", name
        assert not marker.exists(), name


def entry(value):
    return b"\x80\x02}" + text("labels") + value + b"s."


def nested(first, levels):
    """Nested tuples, each of which contains the previous one ten times."""
    return b"(" * levels + first + (b"q\x00" + b"h\x00" * 9 + b"t") * levels


BOMBS = {
    "a place far off in the memo": entry(b"K\x01r\xff\xff\xff\x7f]]aa"),
    "more bytes than there are": entry(b"\x8e" + struct.pack("<Q", 2**40)),
    "a byte array": entry(b"\x96" + struct.pack("<Q", 2**34)),
    "more text than there is": entry(b"\x8d" + struct.pack("<Q", 2**62)),
    "a negative length": entry(b"T\xff\xff\xff\xff"),
    "a huge frame": b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"].",
    "a tuple nested ten times ten times": entry(nested(b"K\x01", 40)),
    "as a key": b"\x80\x02}" + nested(b"K\x01", 40) + b"K\x01s.",
    "a list nested ten times ten times": entry(b"]" + nested(b"]K\x01a", 30) + b"a"),
    "a key of a million nested tuples": b"\x80\x02}K\x01" + b"\x85" * 10**6 + b"K\x01s.",
    "as an encoding": entry(b"c_codecs\nencode\n" + text("a") + nested(b"K\x01", 30) + b"\x86R"),
    "a list in itself": entry(b"]q\x00h\x00a"),
    "a deep list": entry(b"]" * 20_000 + b"a" * 19_999),
    "an array in itself": entry(b"cnumpy.core.multiarray\n_reconstruct\n)Rq\x00(K\x01h\x00h\x00h\x00h\x00tb"),
    "a huge array": entry(
        b"cnumpy.core.multiarray\n_reconstruct\n)R(K\x01J\xff\xff\xff\x7fJ\xff\xff\xff\x7f\x86"
        b"cnumpy\ndtype\nU\x02u1\x85R\x89U\x01atb"
    ),
    "many marks": b"(" * 20_000 + b".",
    "nothing on the stack": b"\x80\x02s.",
    "an unknown place in the memo": entry(b"h\x05"),
    "no dictionary": b"\x80\x02]K\x01a.",
    "too many entries": b"\x80\x02}(" + b"".join(text(str(k)) + b"K\x01" for k in range(40)) + b"u.",
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_take_no_memory(name):
    with memory_below(4), suppress(UserError):
        assert "data" not in pickles.load(BOMBS[name], "batch")


def test_instructions_are_counted(monkeypatch):
    monkeypatch.setattr(pickles, "MAX_INSTRUCTIONS", 1000)
    data = b"]" * 2**22
    with memory_below(2), pytest.raises(UserError, match="more than 1,000 instructions"):
        pickles.load(data, "batch")


@pytest.mark.parametrize("protocol", [2, 4])
def test_cut_short_anywhere(protocol):
    data = pickle.dumps({"label_names": [b"a", "b"], "labels": [3, 4]}, protocol)
    for length in range(len(data)):
        with pytest.raises(UserError, match="batch: expected a CIFAR batch"):
            pickles.load(data[:length], "batch")


@pytest.mark.parametrize(
    "array",
    [ROWS.astype(np.int64), ROWS.astype(np.float32), np.array([{}]), np.array(["a"]), ROWS[:, :99], "text", 7],
    ids=lambda array: str(getattr(array, "dtype", array)),
)
def test_something_else_than_images(array):
    with pytest.raises(UserError, match="expected images of 3072 bytes as an array of uint8"):
        pickles.load(pickle.dumps({"data": array}, 2), "batch")


@pytest.mark.parametrize("kind", ["folder", "zip", "tar.gz"])
def test_a_hostile_batch_is_refused_and_nothing_is_kept(tmp_path, monkeypatch, kind):
    own_cache(tmp_path, monkeypatch)
    files = cifar10_python([ROWS, ROWS], [[0, 1], [1, 0]], [b"a", b"b"])
    files["cifar-10-batches-py/test_batch"] = pickle.dumps(Call(os.system, f"touch {tmp_path}/marker"))
    message = refusal(tmp_path, pack(files, tmp_path / "cifar", kind))
    assert "cifar-10-batches-py/test_batch: expected images" in message
    assert not (tmp_path / "marker").exists()
