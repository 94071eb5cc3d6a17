"""Image files: decoding, a folder for each class, Tiny ImageNet's folder."""

import io
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
from PIL import Image

from fedbcgd.data import folders
from fedbcgd.data.formats import read
from fedbcgd.errors import UserError
from tests.data.archives import (
    CONTAINERS,
    image,
    image_folder,
    memory_below,
    own_cache,
    pack,
    plain,
    refusal,
    tiny_imagenet,
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    return own_cache(tmp_path, monkeypatch)


def saved(mode, kind="PNG", **options):
    out = io.BytesIO()
    Image.new(mode, (3, 2)).save(out, kind, **options)
    return out.getvalue()


def test_decoding_keeps_every_pixel_in_its_place():
    pixels = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
    np.testing.assert_array_equal(folders.decode(image(pixels), "x"), pixels)
    np.testing.assert_array_equal(folders.decode(image(pixels, "BMP"), "x"), pixels)
    np.testing.assert_array_equal(folders.decode(image(pixels[..., 0], "PPM"), "x"), pixels[..., :1])


@pytest.mark.parametrize(
    ("mode", "kind", "channels"),
    [
        ("1", "PNG", 1),
        ("L", "PNG", 1),
        ("LA", "PNG", 1),
        ("L", "JPEG", 1),
        ("P", "PNG", 3),
        ("P", "GIF", 3),
        ("RGBA", "PNG", 3),
        ("RGB", "WEBP", 3),
        ("CMYK", "JPEG", 3),
    ],
)
def test_grey_is_one_channel_and_all_else_three(mode, kind, channels):
    assert folders.decode(saved(mode, kind), "x").shape == (2, 3, channels)
    assert folders.decode(saved(mode, kind), "x", "RGB").shape == (2, 3, 3)


@pytest.mark.parametrize("data", [saved("I;16"), b"P5 1 1 65535\n\xff\xff", b"Pf 1 1 -1.0\n" + bytes(4)])
def test_more_than_eight_bits_are_refused(data):
    """Pillow would clip values above 255, so that all is white."""
    with pytest.raises(UserError, match="expected 8 bits a channel, got more"):
        folders.decode(data, "x")


@pytest.mark.parametrize("kind", ["TIFF", "ICO", "PCX"])
def test_kinds_that_are_not_listed_are_refused_whatever_their_name(tmp_path, kind):
    """Each of Pillow's decoders can be attacked, and some start other programs."""
    files = {"train/a/0.png": saved("RGB", kind), "test/a/0.png": plain((1, 2, 3))}
    message = refusal(tmp_path, pack(files, tmp_path / "set", "folder"))
    assert message.endswith(
        "train/a/0.png: expected an image, got a file that is none or is damaged: cannot identify image file"
    )


def png(width, height, *chunks, body=b""):
    """Make a PNG file that declares any size."""
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    parts = [(b"IHDR", head), *chunks, (b"IDAT", body), (b"IEND", b"")]
    framed = (struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in parts)
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)


BOMBS = {
    "a hundred million pixels": (
        png(10_000, 10_000, body=zlib.compress(bytes(10**6))),
        "pixels, got 10000×10000",
    ),
    "a billion": (png(30_000, 30_000, body=zlib.compress(bytes(10**6))), "decompression bomb"),
    "far too many": (png(2**31 - 1, 2**31 - 1, body=b"x"), "damaged"),
    "a comment": (
        png(2, 2, (b"zTXt", b"k\0\0" + zlib.compress(bytes(2**26))), body=zlib.compress(bytes(6))),
        "too large",
    ),
    "a profile": (png(2, 2, (b"iCCP", b"k\0\0" + zlib.compress(bytes(2**26))), body=b""), "damaged"),
    "no pixels": (png(0, 0), "damaged"),
    "cut short": (plain((1, 2, 3), 64, 64)[:-40], "damaged"),
    "an empty file": (b"", "damaged"),
    "a gif": (b"GIF89a\xff\xff\xff\xff\0\0\0,\0\0\0\0\xff\xff\xff\xff\0\2\0;", "65535×65535|bomb|damaged"),
    "a bmp": (b"BM" + bytes(12) + struct.pack("<IiiHH", 40, 2**31 - 1, 1, 1, 24) + bytes(24), "pixels|bomb|damaged"),
    "a ppm": (b"P6 99999999 99999999 255\n", "pixels|bomb|damaged"),
    "a ppm of digits": (b"P3 1 1 255\n" + b"9" * 10**6, "damaged"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_and_damaged_images_are_refused(tmp_path, name, recwarn):
    data, words = BOMBS[name]
    path = pack({"train/a/0.png": data, "test/a/0.png": plain((1, 2, 3))}, tmp_path / "set", "zip")
    with memory_below(8):
        message = refusal(tmp_path, path)
    assert any(word in message for word in words.split("|")), message
    assert "train/a/0.png" in message
    assert not recwarn.list  # they would be lines of their own


def test_a_bomb_takes_no_memory_of_the_process(tmp_path):
    """Pillow's own memory is not counted by Python."""
    (tmp_path / "bomb.png").write_bytes(BOMBS["a hundred million pixels"][0])
    code = (
        "import resource, sys, pathlib\n"
        "from fedbcgd.data import folders\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try:\n"
        "    folders.decode(pathlib.Path(sys.argv[1]).read_bytes(), 'x')\n"
        "except ValueError as error:\n"
        "    print(type(error).__name__, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "bomb.png")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    name, grown = done.stdout.split()
    assert name == "UserError"
    assert int(grown) < 30 * 1024  # KiB; decoded it is a hundred thousand
    assert not done.stderr


@pytest.mark.parametrize("kind", CONTAINERS)
def test_an_image_folder(tmp_path, kind):
    raw = read(pack(image_folder(), tmp_path / "set", kind))
    assert raw.classes == ("cat", "dog")
    assert raw.train.labels.tolist() == [0, 1, 1]
    assert raw.train.pixels[:, 0, 0].tolist() == [[10, 20, 30], [40, 50, 60], [70, 80, 90]]
    assert raw.train.pixels.shape == (3, 2, 2, 3)
    assert raw.test.labels.tolist() == [1]
    assert raw.test.pixels[0, 1, 1].tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("names", "classes", "test"),
    [
        (["./train/a/0.png", "./test/a/0.png"], ("a",), True),
        (["x/training/a/0.png", "x/testing/a/0.png"], ("a",), True),
        (["train/a/0.png", "train/b/deep/er/0.png", "val/b/0.png"], ("a", "b"), True),
        (["train/a/0.PNG", "train/a/.hidden.png", "train/__MACOSX/0.png", "train/notes.txt"], ("a",), False),
        (["car/0.png", "train/0.png"], ("car", "train"), False),  # a railway train
        (["train/train/0.png", "train/car/0.png", "test/car/0.png"], ("car", "train"), True),
        (["train/a/0.png", "old/train/b/0.png", "old/test/b/0.png"], ("a",), False),  # the outer one
        (["flowers/rose/0.png", "flowers/tulip/0.png"], ("rose", "tulip"), False),
    ],
)
def test_where_classes_are_found(tmp_path, names, classes, test):
    raw = read(pack(dict.fromkeys(names, plain((1, 2, 3))), tmp_path / "set", "tar"))
    assert raw.classes == classes
    assert (raw.test is not None) == test


def test_test_images_are_preferred_to_validation_images(tmp_path):
    files = {f"{split}/a/0.png": plain((k, 0, 0)) for k, split in enumerate(["train", "val", "test"])}
    assert read(pack(files, tmp_path / "set", "folder")).test.pixels[0, 0, 0, 0] == 2


@pytest.mark.parametrize("grey_first", [True, False])
def test_grey_images_among_colours(tmp_path, grey_first):
    """One grey image, even the first, does not turn the others grey."""
    files = {"train/a/0.png": plain(100), "train/a/1.png": plain((1, 2, 3)), "test/a/0.png": plain(200)}
    if not grey_first:
        files["train/a/0.png"], files["train/a/1.png"] = files["train/a/1.png"], files["train/a/0.png"]
    raw = read(pack(files, tmp_path / "set", "folder"))
    seen = raw.train.pixels[:, 0, 0].tolist()
    assert seen == ([[100] * 3, [1, 2, 3]] if grey_first else [[1, 2, 3], [100] * 3])
    assert raw.test.pixels[0, 0, 0].tolist() == [200] * 3


def test_grey_images_alone_have_one_channel(tmp_path):
    files = {"train/a/0.png": plain(100), "test/a/0.png": plain(200)}
    assert read(pack(files, tmp_path / "set", "folder")).train.pixels.tolist() == [[[[100]] * 2] * 2]


def test_sizes_that_differ_are_refused_and_can_be_scaled(tmp_path):
    files = {"train/a/0.png": plain((9, 9, 9), 2, 4), "test/a/0.png": plain((9, 9, 9), 5, 3)}
    path = pack(files, tmp_path / "set", "folder")
    message = refusal(tmp_path, path)
    assert "got train/a/0.png with 2×4 and test/a/0.png with 5×3; --size N scales all to N×N" in message
    raw = read(path, size=3)
    assert raw.train.pixels.shape == raw.test.pixels.shape == (1, 3, 3, 3)
    assert (raw.test.pixels == 9).all()


def test_a_class_only_in_test_is_refused(tmp_path):
    files = {"train/a/0.png": plain(1), "test/b/0.png": plain(1)}
    assert "expected images of the classes a, got 'b' for 'test/b/0.png'" in refusal(
        tmp_path, pack(files, tmp_path / "set", "folder")
    )


def test_no_test_images_need_a_share(tmp_path):
    path = pack({"a/0.png": plain(1), "b/0.png": plain(2)}, tmp_path / "set", "folder")
    assert "--test-share 0.1 holds out a tenth" in refusal(tmp_path, path)


def test_images_that_are_too_many_together_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("fedbcgd.data.raw.MAX_PIXEL_BYTES", 100)
    path = pack(image_folder(), tmp_path / "set", "folder")
    assert read(path).train.pixels.nbytes == 36
    monkeypatch.setattr("fedbcgd.data.raw.MAX_PIXEL_BYTES", 47)  # four images of 2 × 2 × 3
    assert "got 4 of (2, 2, 3), which are" in refusal(tmp_path, path)


def test_two_folders_alike_are_told_apart_in_the_same_way_each_time(tmp_path):
    """By name, not by the hash of a string, which differs from process to process."""
    files = {f"{k}/train/{k}/0.png": plain(1) for k in "bacd"}
    assert read(pack(files, tmp_path / "set", "zip")).classes == ("a",)


@pytest.mark.parametrize("kind", CONTAINERS)
def test_tiny_imagenet(tmp_path, kind):
    raw = read(pack(tiny_imagenet(), tmp_path / "tiny", kind))
    assert raw.classes == ("goldfish", "bullfrog")  # in the order of the wnids, by their first word
    assert raw.train.labels.tolist() == [0, 1, 1]
    assert raw.train.pixels[:, 5, 6].tolist() == [[0] * 3, [255] * 3, [255] * 3]
    assert raw.test.labels.tolist() == [1, 0]  # in the order of val_annotations.txt
    assert raw.test.pixels[:, 5, 6].tolist() == [[255] * 3, [0] * 3]


@pytest.mark.parametrize(
    ("file", "data", "words"),
    [
        ("words.txt", None, "got one without tiny-imagenet-200/words.txt"),
        ("val/val_annotations.txt", None, "got one without tiny-imagenet-200/val/val_annotations.txt"),
        ("wnids.txt", b"n01\n", "expected images of the classes n01, got 'n02'"),
        ("wnids.txt", b"", "expected images of the classes (none), got"),
        ("val/val_annotations.txt", b"", "expected training and validation images, got 3 and 0"),
        (
            "val/val_annotations.txt",
            b"val_9.JPEG\tn01\t0\n",
            "val/images/val_9.JPEG', of which the class is given, got none",
        ),
        ("val/val_annotations.txt", b"val_0.JPEG\tn77\t0\n", "got 'n77' for"),
        ("val/val_annotations.txt", b"val_0.JPEG\n", "expected an image and its class, got 'val_0.JPEG'"),
        (
            "val/val_annotations.txt",
            b"../../train/n01/images/n01_0.JPEG\tn01\n",
            "of which the class is given, got none",
        ),
        ("val/images/val_0.JPEG", plain((0, 0, 0), 63, 64, "JPEG"), "expected images of one size"),
        ("val/images/val_0.JPEG", b"\xff\xd8\xff", "val_0.JPEG: expected an image"),
    ],
)
def test_tiny_imagenet_with_something_wrong(tmp_path, file, data, words):
    files = tiny_imagenet() | {f"tiny-imagenet-200/{file}": data}
    path = pack({name: data for name, data in files.items() if data is not None}, tmp_path / "tiny", "zip")
    assert words in refusal(tmp_path, path)
