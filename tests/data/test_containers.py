"""Folders and archives: read in place, bounded, and refused where they are damaged or hostile."""

import gzip
import io
import os
import struct
import tarfile
import zipfile

import pytest

from fedbcgd.data import containers
from fedbcgd.data.containers import open_files
from fedbcgd.errors import UserError
from tests.data.archives import (
    CONTAINERS,
    memory_below,
    npz,
    own_cache,
    pack,
    pictures,
    plain,
    refusal,
    tar_bytes,
    zip_bytes,
)

FILES = {"set/b.txt": b"second", "set/deep/a.bin": bytes(range(256)) * 9, "empty": b""}
PICTURES = {f"{split}/cat/{k}.png": plain((k, 2, 3)) for split in ("train", "test") for k in range(2)}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    return own_cache(tmp_path, monkeypatch)


def member(name, kind=tarfile.REGTYPE, link=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


def header(name, size, kind):
    """Make a tar header that declares any size."""
    info = member(name, kind)
    info.size = size
    return info.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize("kind", CONTAINERS)
def test_the_same_files_however_they_are_packed(tmp_path, kind):
    files = open_files(pack(FILES, tmp_path / "set", kind))
    assert files.names == ["empty", "set/b.txt", "set/deep/a.bin"]
    assert {name: files.read(name, 10_000) for name in files.names} == FILES


@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_file_larger_than_wanted_is_refused(tmp_path, kind):
    files = open_files(pack(FILES, tmp_path / "set", kind))
    assert files.read("set/b.txt", 6) == b"second"
    with pytest.raises(UserError, match=r"b\.txt: expected at most 0 MiB, got 0 MiB"):
        files.read("set/b.txt", 5)


@pytest.mark.parametrize("kind", CONTAINERS)
def test_too_many_files_are_refused(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(containers, "MAX_FILES", 2)
    assert "expected at most 2 files, got more" in refusal(tmp_path, pack(PICTURES, tmp_path / "set", kind))


def test_folders_in_a_tar_count_too(tmp_path, monkeypatch):
    """A gigabyte of headers compresses to a megabyte."""
    monkeypatch.setattr(containers, "MAX_FILES", 100)
    blocks = b"".join(header(f"d{k}", 0, tarfile.DIRTYPE) for k in range(200))
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(blocks + bytes(1024)))
    assert "expected at most 100 files, got more" in refusal(tmp_path, tmp_path / "a.tar.gz")


@pytest.mark.parametrize("kind", ["zip", "tar", "tar.gz"])
@pytest.mark.parametrize(
    "name", ["../evil.png", "train/cat/../../../evil.png", "/tmp/evil.png", "..\\evil.png", "C:\\evil.png", ".."]
)
def test_names_that_lead_out_are_refused(tmp_path, kind, name):
    path = pack(PICTURES | {name: plain((9, 9, 9))}, tmp_path / "set", kind)
    message = refusal(tmp_path, path)
    assert repr(name) in message
    assert "leads out of it" in message


@pytest.mark.parametrize("kind", ["zip", "tar"])
@pytest.mark.parametrize("name", ["a\nfedbcgd: all is well.png", "\x1b[2J.png", "bell\x07/a.png", "c1\x9b31m.png"])
def test_names_that_a_terminal_would_follow_are_refused(tmp_path, kind, name):
    path = pack(PICTURES | {f"train/{name}": plain((9, 9, 9))}, tmp_path / "set", kind)
    assert "expected printable names" in refusal(tmp_path, path)


@pytest.mark.parametrize(
    ("kind", "link"),
    [
        (tarfile.SYMTYPE, "/etc/passwd"),
        (tarfile.SYMTYPE, "0.png"),
        (tarfile.LNKTYPE, "train/cat/0.png"),
        (tarfile.CHRTYPE, ""),
        (tarfile.BLKTYPE, ""),
        (tarfile.FIFOTYPE, ""),
    ],
)
def test_links_and_devices_in_a_tar_are_refused(tmp_path, kind, link):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        tar.addfile(member("train/cat/x.png", kind, link))
    message = refusal(tmp_path, path)
    assert "'train/cat/x.png', a link, a device or a sparse file" in message


def test_a_sparse_file_in_a_tar_is_refused(tmp_path):
    """A kilobyte that declares 900 MiB of zeros."""
    block = bytearray(header("train/cat/x.png", 0, tarfile.GNUTYPE_SPARSE))
    block[386:398] = block[398:410] = b"00000000000\0"
    block[483:495] = b"%011o\0" % (900 * 2**20)
    block[148:156] = b"%06o\0 " % (sum(block[:148]) + 8 * 32 + sum(block[156:]))
    (tmp_path / "a.tar").write_bytes(bytes(block) + bytes(1024))
    with memory_below(4):
        assert "sparse file" in refusal(tmp_path, tmp_path / "a.tar")


def test_a_link_in_a_zip_is_only_a_small_file(tmp_path):
    info = zipfile.ZipInfo("train/cat/link.png")
    info.external_attr = 0o120777 << 16
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(info, "/etc/passwd")
    assert "link.png: expected an image" in refusal(tmp_path, path)


def test_a_zip_that_declares_too_much_is_refused_unread(tmp_path):
    data = bytearray(zip_bytes(PICTURES))
    at = -1
    while (at := data.find(b"PK\x01\x02", at + 1)) >= 0:
        data[at + 24 : at + 28] = struct.pack("<I", 0xFFFFFFF0)
    (tmp_path / "a.zip").write_bytes(data)
    assert "expected at most 4,096 MiB, got 16,384 MiB" in refusal(tmp_path, tmp_path / "a.zip")


def test_a_zip_that_declares_too_little_gives_no_more(tmp_path):
    """zipfile itself would unpack all of it, and cut off what is too much."""
    data = bytearray(zip_bytes({"train/cat/0.png": bytes(64 * 2**20)}))
    for magic, at in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):
        start = data.find(magic) + at
        data[start : start + 4] = struct.pack("<I", 1000)
    (tmp_path / "a.zip").write_bytes(data)
    with memory_below(8):
        assert "damaged" in refusal(tmp_path, tmp_path / "a.zip")


@pytest.mark.parametrize("compression", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_zip_whose_unpacking_cannot_be_bounded_is_refused(tmp_path, compression):
    (tmp_path / "a.zip").write_bytes(zip_bytes(PICTURES, compression))
    assert "expected no compression or deflate, got another" in refusal(tmp_path, tmp_path / "a.zip")


@pytest.mark.parametrize(("offset", "value", "words"), [(8, 1, "encrypted"), (10, 99, "compression")])
def test_a_zip_with_a_password_or_a_strange_compression_is_refused(tmp_path, offset, value, words):
    data = bytearray(zip_bytes(PICTURES))
    for magic, before in ((b"PK\x03\x04", 2), (b"PK\x01\x02", 0)):
        at = -1
        while (at := data.find(magic, at + 1)) >= 0:
            data[at + offset - before] = value
    (tmp_path / "a.zip").write_bytes(data)
    assert words in refusal(tmp_path, tmp_path / "a.zip")


def test_a_zip_with_names_in_no_encoding_is_refused(tmp_path):
    data = zip_bytes({"train/é/0.png": plain((1, 2, 3))})
    (tmp_path / "a.zip").write_bytes(data.replace("é".encode(), b"\xff\xfe"))
    assert "damaged" in refusal(tmp_path, tmp_path / "a.zip")


@pytest.mark.parametrize("packed", [False, True])
def test_a_tar_that_declares_too_much_is_refused_unread(tmp_path, packed):
    data = header("train/cat/0.png", 2 * 2**30, tarfile.REGTYPE) + bytes(2**20)
    (tmp_path / "a.tar").write_bytes(gzip.compress(data) if packed else data)
    with memory_below(4):
        message = refusal(tmp_path, tmp_path / "a.tar")
    assert "expected at most 1,024 MiB, got 2,048 MiB" in message


def test_the_members_of_a_tar_are_bounded_together(tmp_path, monkeypatch):
    monkeypatch.setattr(containers, "MAX_IN_MEMORY", 1000)
    (tmp_path / "a.tar").write_bytes(tar_bytes({"a": bytes(600), "b": bytes(600)}))
    with pytest.raises(UserError, match="expected at most 0 MiB"):
        open_files(tmp_path / "a.tar")
    monkeypatch.setattr(containers, "MAX_IN_MEMORY", 1200)
    assert open_files(tmp_path / "a.tar").names == ["a", "b"]


def test_a_negative_size_does_not_make_room_for_others(tmp_path, monkeypatch):
    monkeypatch.setattr(containers, "MAX_IN_MEMORY", 1000)
    data = header("a", -(2**40), tarfile.REGTYPE) + tar_bytes({"b": bytes(6000)})
    (tmp_path / "a.tar").write_bytes(data)
    with pytest.raises(UserError, match="damaged"):
        open_files(tmp_path / "a.tar")


@pytest.mark.parametrize(
    "kind",
    [tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE],
    ids=["long name", "long link", "pax", "global pax"],
)
def test_a_header_can_be_a_bomb(tmp_path, kind):
    """A name of 64 MiB in 64 KiB; tarfile would read it into memory before it returns any member."""
    size = 64 * 2**20
    out = io.BytesIO()
    with gzip.GzipFile(fileobj=out, mode="wb", compresslevel=1) as file:
        file.write(header("././@LongLink", size, kind))
        for _ in range(64):
            file.write(b"a" * 2**20)
        file.write(tar_bytes(PICTURES))
    (tmp_path / "a.tar.gz").write_bytes(out.getvalue())
    with memory_below(12):
        assert "expected headers of at most 2 MiB, got more" in refusal(tmp_path, tmp_path / "a.tar.gz")


def test_a_long_chain_of_headers_is_refused(tmp_path):
    block = header("././@LongLink", 1, tarfile.GNUTYPE_LONGNAME) + bytes(512)
    (tmp_path / "a.tar").write_bytes(block * 1500 + tar_bytes(PICTURES))
    assert "damaged" in refusal(tmp_path, tmp_path / "a.tar")


def test_what_follows_the_end_of_a_tar_is_bounded(tmp_path):
    data = gzip.compress(tar_bytes(PICTURES) + bytes(64 * 2**20), 1)
    (tmp_path / "a.tar.gz").write_bytes(data)
    with memory_below(8):
        assert "expected headers of at most 2 MiB, got more" in refusal(tmp_path, tmp_path / "a.tar.gz")


@pytest.mark.parametrize("kind", ["zip", "tar.gz", "tar.bz2", "tar.xz"])
def test_cut_short_anywhere_is_refused(tmp_path, kind):
    whole = pack({"train/cat/0.png": plain(3), "test/cat/0.png": plain(4)}, tmp_path / "a", kind)
    data = whole.read_bytes()
    for length in range(len(data)):
        whole.write_bytes(data[:length])
        with pytest.raises(UserError, match=r"damaged|cannot be read"):
            open_files(whole)


def test_a_tar_cut_short_anywhere_before_its_end_mark_is_refused(tmp_path):
    """tarfile itself would take a cut between two members for the end."""
    data = tar_bytes({"a": b"1" * 512, "b": b"2" * 100})
    path = tmp_path / "a.tar"
    for length in [*range(0, 2048 + 512, 64), 511, 513, 1023, 1025, 2047, 2049]:
        path.write_bytes(data[:length])
        with pytest.raises(UserError, match="damaged"):
            open_files(path)
    path.write_bytes(data[: 2048 + 512])
    assert open_files(path).names == ["a", "b"]


def test_a_damaged_header_in_the_middle_of_a_tar_is_refused(tmp_path):
    """tarfile itself would take it for the end, and silently lose half of the data set."""
    data = bytearray(tar_bytes(PICTURES))
    second = data.index(b"train/cat/1.png")
    data[second] ^= 1
    (tmp_path / "a.tar").write_bytes(data)
    assert "damaged" in refusal(tmp_path, tmp_path / "a.tar")


@pytest.mark.parametrize("kind", ["zip", "tar.gz", "tar.bz2", "tar.xz"])
def test_one_flipped_bit_in_the_middle_is_noticed(tmp_path, kind):
    files = {
        f"{split}/cat/{k}.ppm": b"P6 8 8 255\n" + pictures(1, 192, seed=k).tobytes()
        for split in ("train", "test")
        for k in range(3)
    }
    path = pack(files, tmp_path / "a", kind)
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 4
    path.write_bytes(data)
    assert refusal(tmp_path, path)


def test_what_is_no_archive_is_refused(tmp_path):
    for name, data in (("empty", b""), ("text", b"hello\n" * 200), ("zeros", bytes(600)), ("magic", b"\x1f\x8b\x08")):
        (tmp_path / name).write_bytes(data)
        assert refusal(tmp_path, tmp_path / name)


def test_what_is_not_there_or_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in ("none", "none.npz"):
        message = refusal(tmp_path, tmp_path / name)
        assert message == f"{tmp_path}/{name}: expected a file or a folder, got none: it does not exist"
    assert refusal(tmp_path, tmp_path / "pipe").endswith("got something else")
    assert "File name too long" in refusal(tmp_path, tmp_path / ("x" * 300))
    assert "File name too long" in refusal(tmp_path, tmp_path / ("x" * 300 + ".npz"))


def test_an_empty_folder_says_what_is_known(tmp_path):
    (tmp_path / "nothing").mkdir()
    assert "expected CIFAR" in refusal(tmp_path, tmp_path / "nothing")


def test_a_folder_that_looks_like_an_npz_file(tmp_path):
    path = pack({"x.txt": npz(x=1)}, tmp_path / "a.npz", "folder")
    assert "got none of these" in refusal(tmp_path, path)
