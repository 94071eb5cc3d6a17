"""Mutated archives: each is either read or refused with a message."""

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedbcgd.data.formats import read
from fedbcgd.data.raw import Raw
from fedbcgd.errors import UserError
from tests.data.archives import every_format, npz, pictures, tar_bytes, zip_bytes

FORMATS = every_format()
NPZ = npz(x_train=pictures(3, 4, 5), y_train=[0, 1, 2], x_test=pictures(1, 4, 5), y_test=[1], classes=["a", "b", "c"])
EXAMPLES = int(os.environ.get("FEDBCGD_FUZZ", "60"))  # a thousand times as many when somebody has the time
often = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))

# Where (a share of the length), how many bytes are replaced, and by what.
edits = st.lists(
    st.tuples(
        st.floats(0, 1),
        st.integers(0, 8),
        st.one_of(st.binary(max_size=8), st.sampled_from([b"\xff" * 4, bytes(4), b"\x7f\xff\xff\xff", b"\n", b"../"])),
    ),
    min_size=1,
    max_size=4,
)
cuts = st.one_of(st.just(1.0), st.floats(0, 1))


def changed(data: bytes, edits: list[tuple[float, int, bytes]], cut: float) -> bytes:
    """Draw positions, at the front, where headers are, more often than at the back."""
    for share, length, new in edits:
        at = int(len(data) * share**3)
        data = data[:at] + new + data[at + length :]
    return data[: int(len(data) * cut)]


def check_read_or_refused(data: bytes, suffix: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"mine{suffix}"
        path.write_bytes(data)
        try:
            assert isinstance(read(path, "mine"), Raw)
        except UserError as error:
            assert str(error)
        assert os.listdir(folder) == [path.name]


@pytest.mark.parametrize("name", FORMATS)
@often
@given(which=st.integers(0, 99), edits=edits, cut=cuts)
def test_a_file_within_is_changed(name, which, edits, cut):
    files = dict(FORMATS[name])
    inner = sorted(files)[which % len(files)]
    files[inner] = changed(files[inner], edits, cut)
    check_read_or_refused(tar_bytes(files), ".tar")


@pytest.mark.parametrize("pack", [tar_bytes, zip_bytes], ids=["tar", "zip"])
@often
@given(name=st.sampled_from(sorted(FORMATS)), edits=edits, cut=cuts)
def test_an_archive_is_changed(pack, name, edits, cut):
    check_read_or_refused(changed(pack(FORMATS[name]), edits, cut), ".any")


@often
@given(edits=edits, cut=cuts)
def test_the_directory_of_a_zip_is_changed(edits, cut):
    data = zip_bytes(FORMATS["image folder"])
    at = data.index(b"PK\x01\x02")
    check_read_or_refused(data[:at] + changed(data[at:], edits, cut), ".zip")


@often
@given(edits=edits, cut=cuts)
def test_an_npz_file_is_changed(edits, cut):
    check_read_or_refused(changed(NPZ, edits, cut), ".npz")


@often
@given(edits=edits, cut=cuts)
def test_an_array_within_an_npz_file_is_changed(edits, cut):
    body = NPZ[NPZ.index(b"\x93NUMPY") :]
    array = body[: body.index(b"PK")]
    check_read_or_refused(zip_bytes({"x_train.npy": changed(array, edits, cut), "y_train.npy": array}), ".npz")


@often
@given(data=st.binary(max_size=300), suffix=st.sampled_from([".npz", ".zip", ".tar.gz"]))
def test_noise(data, suffix):
    check_read_or_refused(data, suffix)
