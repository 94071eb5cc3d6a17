"""CIFAR's pickles: all versions are read, and no code in them is executed."""

import builtins
import os
import pickle
import struct
import subprocess
import sys

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
def test_what_python_3_writes(protocol, key, rename):
    made = {key("data"): ROWS, key("labels"): [7, 300, 70_000, 0], key("filenames"): [b"a.png", b"b.png"]}
    found = pickles.load(rename(pickle.dumps(made, protocol)), "batch")
    assert found.keys() == {"data", "labels", "filenames"}
    assert found["labels"] == [7, 300, 70_000, 0]
    assert found["filenames"] == [b"a.png", b"b.png"]
    assert found["data"].dtype == np.uint8
    np.testing.assert_array_equal(found["data"], ROWS)


@pytest.mark.parametrize("numpy", [b"numpy.core.multiarray", b"numpy._core.multiarray"])
def test_what_python_2_writes(numpy):
    made = {b"batch_label": b"training batch 1 of 5", b"labels": [6, 9], b"data": ROWS}
    data = python2(made, numpy)
    assert pickle.loads(data, encoding="bytes")[b"labels"] == [6, 9]  # it is a pickle like theirs
    found = pickles.load(data, "batch")
    assert found["batch_label"] == b"training batch 1 of 5"
    assert found["labels"] == [6, 9]
    np.testing.assert_array_equal(found["data"], ROWS)


def test_an_array_in_fortran_order():
    found = pickles.load(pickle.dumps({"data": np.asfortranarray(ROWS)}, 4), "batch")
    np.testing.assert_array_equal(found["data"], ROWS)


def test_several_arrays():
    """numpy pickles equal tuples for each array, which must not be refused."""
    made = {f"data{k}": pictures(k + 1, 12) for k in range(8)}
    for protocol in (2, 4):
        found = pickles.load(pickle.dumps(made, protocol), "batch")
        for name, array in made.items():
            np.testing.assert_array_equal(found[name], array)


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
    marker = tmp_path / "marker"
    for name, data in calls(marker):
        with pytest.raises(UserError, match="which no data set needs"):
            pickles.load(data, name)
        assert not marker.exists(), name


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"cnumpy\nload\n.", "'numpy.load'"),
        (b"cnumpy\nmemmap\n.", "'numpy.memmap'"),
        (b"cnumpy.core.multiarray\nscalar\n.", "'numpy.core.multiarray.scalar'"),
        (b"c__builtin__\ngetattr\n.", "'__builtin__.getattr'"),
        (b"c\x1b[2J\nx\n.", r"'\\x1b[2J.x'"),
        (b"c" + b"a" * 10**6 + b"\nx\n.", "aaaa"),
        (b"\x80\x02cnumpy\ndtype\n)\x81.", "NEWOBJ"),
        (b"\x80\x02\x82\x01.", "EXT1"),
        (b"Pname\n.", "PERSID"),
        (b"\x80\x05\x8f.", "EMPTY_SET"),
        (b"\x80\x05\x97.", "NEXT_BUFFER"),
    ],
)
def test_names_and_instructions_that_no_data_set_needs(data, words):
    with pytest.raises(UserError) as refused:
        pickles.load(data, "batch")
    message = str(refused.value)
    assert words.replace(r"\\", "\\") in message
    assert message.startswith("batch: expected arrays and plain values, got ")
    assert message.endswith("which no data set needs")
    assert message.isprintable()
    assert len(message) < 200


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02cnumpy\ndtype\n}q\x00X\x04\x00\x00\x00nameK\x01sb.",
        b"\x80\x02cnumpy\nndarray\nX\x01\x00\x00\x00ab.",
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n}b.",
        b"\x80\x02]}b.",
    ],
)
def test_nothing_can_be_set_on_a_class_or_a_function(data):
    before = {name: dict(vars(kind)) for name, kind in vars(pickles).items() if isinstance(kind, type)}
    with pytest.raises(UserError, match="batch: expected a CIFAR batch"):
        pickles.load(data, "batch")
    assert before == {name: dict(vars(kind)) for name, kind in vars(pickles).items() if isinstance(kind, type)}


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
    with memory_below(4), pytest.raises(UserError) as refused:
        pickles.load(BOMBS[name], "batch")
    assert "batch" in str(refused.value)
    assert len(str(refused.value)) < 300


def test_a_text_cannot_be_encoded_again_and_again():
    """Each time would make another copy of it."""
    data = b"\x80\x02}" + text("a") + b"](c_codecs\nencode\nq\x00" + text("é" * 2**19) + b"q\x01"
    data += b"h\x00h\x01X\x06\x00\x00\x00latin1\x86R" * 200 + b"es."
    with memory_below(16), pytest.raises(UserError, match="more text is encoded than the file contains"):
        pickles.load(data, "batch")


def test_a_call_has_few_arguments():
    """A million of them, copied for each of a million calls, would take hours."""
    many = b"\x80\x02}" + text("a") + b"cnumpy\ndtype\n(" + b"K\x01" * 1000 + b"tRs."
    with pytest.raises(UserError, match="more arguments than numpy's functions have"):
        pickles.load(many, "batch")


def test_instructions_are_counted(monkeypatch):
    """Each instruction is one byte, and makes a list of 56 bytes."""
    monkeypatch.setattr(pickles, "MAX_INSTRUCTIONS", 1000)
    data = b"]" * 2**22
    with memory_below(2), pytest.raises(UserError, match="more than 1,000 instructions"):
        pickles.load(data, "batch")


def test_bombs_in_a_process_that_has_little_memory():
    """With a limit of the operating system, since Python does not count all memory."""
    code = (
        "import resource, struct, sys\n"
        "from fedbcgd.data import pickles\n"
        "now = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "resource.setrlimit(resource.RLIMIT_AS, (now + 2**27,) * 2)\n"
        "for data in eval(sys.stdin.read()):\n"
        "    try:\n"
        "        pickles.load(data, 'batch')\n"
        "    except ValueError as error:\n"
        "        assert type(error).__name__ == 'UserError' and 'MemoryError' not in str(error), error\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=repr(list(BOMBS.values())), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 2**17  # KiB beyond what was there before, most of it torch


@pytest.mark.parametrize("protocol", [2, 4])
def test_cut_short_anywhere(protocol):
    data = pickle.dumps({"data": pictures(1, 64), "labels": [3, 4], "names": [b"a", "b"]}, protocol)
    for length in range(len(data)):
        with pytest.raises(UserError, match="batch: expected a CIFAR batch"):
            pickles.load(data[:length], "batch")


@pytest.mark.parametrize(
    "array",
    [ROWS.astype(np.int64), ROWS.astype(np.float32), np.array([{}]), np.array(["a"]), np.zeros(3, "u1,u1")],
    ids=lambda array: str(array.dtype),
)
def test_arrays_of_something_else_than_bytes(array):
    with pytest.raises(UserError, match="array of another type than uint8"):
        pickles.load(pickle.dumps({"data": array}, 2), "batch")


@pytest.mark.parametrize("kind", ["folder", "zip", "tar.gz"])
def test_a_hostile_batch_is_refused_and_nothing_is_kept(tmp_path, monkeypatch, kind):
    own_cache(tmp_path, monkeypatch)
    files = cifar10_python([ROWS, ROWS], [[0, 1], [1, 0]], [b"a", b"b"])
    files["cifar-10-batches-py/test_batch"] = pickle.dumps(Call(os.system, f"touch {tmp_path}/marker"))
    message = refusal(tmp_path, pack(files, tmp_path / "cifar", kind))
    assert "cifar-10-batches-py/test_batch: expected arrays and plain values, got 'posix.system'" in message
    assert not (tmp_path / "marker").exists()
