"""`fedbcgd.files`: it opens regular files only, and its checksums find damage."""

import json
import os

import pytest
import torch

from fedbcgd import UserError
from fedbcgd.files import (
    Damaged,
    add_checksum,
    bytes_checksum,
    open_regular,
    parse_json_object,
    read_regular,
    read_tensors,
    verify_checksum,
    write_tensors,
    write_text,
)

MODES = ["rb", "r+b", "a+b", "wb"]


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "secret"
    path.write_bytes(b"of somebody else")
    return path


@pytest.mark.parametrize("mode", MODES)
def test_links_are_not_followed(tmp_path, secret, mode):
    place = tmp_path / "place"
    place.symlink_to(secret)
    with pytest.raises(UserError, match=r"place: expected a regular file, got a link"):
        open_regular(place, mode)
    assert secret.read_bytes() == b"of somebody else"


@pytest.mark.parametrize("mode", ["a+b", "wb"])
def test_a_link_to_nothing_makes_no_file_elsewhere(tmp_path, mode):
    place = tmp_path / "place"
    place.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError):
        open_regular(place, mode)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_what_is_no_file_neither_opens_nor_blocks(tmp_path, mode, make):
    make(tmp_path / "place")
    with pytest.raises(UserError, match="expected a regular file"):
        open_regular(tmp_path / "place", mode)


@pytest.mark.parametrize("mode", MODES[1:])
def test_a_second_name_is_not_written_through(tmp_path, secret, mode):
    os.link(secret, tmp_path / "place")
    with pytest.raises(UserError, match="second name"):
        open_regular(tmp_path / "place", mode)
    assert secret.read_bytes() == b"of somebody else"
    assert read_regular(tmp_path / "place", 100) == b"of somebody else"


def test_the_modes_are_those_of_open(tmp_path):
    place = tmp_path / "place"
    for mode in ("rb", "r+b"):
        with pytest.raises(FileNotFoundError):
            open_regular(place, mode)
    for content in (b"one", b"onetwo"):
        with open_regular(place, "a+b") as file:
            file.write(content[-3:])
            file.seek(0)
            assert file.read() == content
    with open_regular(place, "r+b") as file:
        file.write(b"ONE")
    assert read_regular(place, 6) == b"ONEtwo"
    with open_regular(place, "wb") as file:
        file.write(b"x")
    assert place.read_bytes() == b"x"


def test_a_file_larger_than_the_limit_is_refused(tmp_path):
    place = tmp_path / "place"
    place.write_bytes(bytes(11))
    assert len(read_regular(place, 11)) == 11
    with pytest.raises(UserError, match="at most 10 bytes"):
        read_regular(place, 10)


def test_writing_replaces_a_link_and_not_what_it_points_to(tmp_path, secret):
    (tmp_path / "place").symlink_to(secret)
    write_text(tmp_path / "place", "new")
    assert secret.read_bytes() == b"of somebody else"
    assert (tmp_path / "place").read_text() == "new"
    assert not (tmp_path / "place").is_symlink()


@pytest.mark.parametrize("length", [0, 1, 511, 512, 513, 5000])
def test_a_checksum_finds_every_flipped_bit(length):
    data = torch.randint(256, (length,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    whole = bytes_checksum(data)
    assert bytes_checksum(torch.cat([torch.zeros(3, dtype=torch.uint8), data])[3:]) == whole  # at any offset in memory
    assert bytes_checksum(torch.cat([data, torch.zeros(1, dtype=torch.uint8)])) != whole
    for at in range(length):
        for bit in (0, 7):
            data[at] ^= 1 << bit
            assert bytes_checksum(data) != whole
            data[at] ^= 1 << bit
    if length == 5000:
        assert bytes_checksum(torch.cat([data[512:1024], data[:512], data[1024:]])) != whole  # swapped sectors


@pytest.mark.parametrize("text", ['{"round": 1, "loss": null}', '{\n "a": {"b": "crc"}\n}', "a = 1\n[b]\n"])
def test_damage_of_a_text_with_a_checksum_is_found(text):
    data = add_checksum(text).encode()
    assert verify_checksum(data)
    assert not verify_checksum(text.encode())
    for at in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[at] ^= 1 << bit
            try:
                checked = verify_checksum(bytes(damaged))
            except Damaged:
                continue
            assert not checked  # the damage is in the marker, so that no checksum is recognised


def test_a_text_with_a_checksum_is_valid_json():
    line = add_checksum('{"round": 1, "loss": null}')
    assert list(json.loads(line)) == ["round", "loss", "crc"]
    assert parse_json_object(line.encode()) == ({"round": 1, "loss": None}, True)
    assert parse_json_object(b'{"round": 1}') == ({"round": 1}, False)
    for damaged in (b"", b"[1]", b"{", b"[" * 100_000, b'{"a": 1, "crc": 5}'):
        with pytest.raises(ValueError):
            parse_json_object(damaged)


def test_the_same_tensors_and_metadata_give_the_same_file(tmp_path):
    """safetensors alone writes the metadata in an order that changes from call to call."""
    written = set()
    for k in range(12):
        write_tensors(tmp_path / f"{k}", {"w": torch.arange(3.0)}, {"a": "1", "ü": "\n\x07", "c": '{"d": 2}'})
        written.add((tmp_path / f"{k}").read_bytes())
    assert len(written) == 1
    tensors, metadata, checked = read_tensors(tmp_path / "0")
    assert checked
    assert torch.equal(tensors["w"], torch.arange(3.0))
    assert metadata == {"a": "1", "ü": "\n\x07", "c": '{"d": 2}'}
