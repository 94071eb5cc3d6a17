"""A data set as it was read: pixels and labels of both splits, checked; and the digest of its content."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedbcgd.errors import UserError

Step = Callable[[str, int, int], None]  # progress: what, how far, of how many (0 where unknown)
PIXELS = 2 * 2**30  # bytes of a data set in memory
CLASSES = 100_000


@dataclass
class Split:
    pixels: np.ndarray  # uint8 (n, height, width, channels)
    labels: np.ndarray  # int64
    groups: np.ndarray | None = None  # who an example comes from, such as a writer

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: np.ndarray) -> "Split":
        return Split(self.pixels[rows], self.labels[rows], None if self.groups is None else self.groups[rows])

    @cached_property
    def digest(self) -> str:
        """Of the labelled images whatever their order, so that one data set in two formats has one digest."""
        flat = np.ascontiguousarray(self.pixels).reshape(len(self), -1)
        each = sorted(
            hashlib.blake2b(image.data, digest_size=16, salt=int(label).to_bytes(8, "little", signed=True)).digest()
            for image, label in zip(flat, self.labels, strict=True)
        )
        return hashlib.sha256(b"".join(each)).hexdigest()[:32]


@dataclass
class Raw:
    train: Split
    test: Split | None
    classes: tuple[str, ...] = ()  # names, where the source has them


def checked(raw: Raw, where: str) -> Raw:
    """The same, its classes filled in, or a refusal."""
    splits = {"train": raw.train} | ({"test": raw.test} if raw.test is not None else {})
    shapes = {name: split.pixels.shape[1:] for name, split in splits.items()}
    for name, split in splits.items():
        if split.pixels.dtype != np.uint8 or split.pixels.ndim != 4:
            raise UserError(
                f"{where}: {name} images are {split.pixels.dtype} of shape {split.pixels.shape}; wanted are bytes "
                "(uint8) of shape (n, height, width) or (n, height, width, channels)"
            )
        if len(split.pixels) != len(split.labels):
            raise UserError(f"{where}: {name} has {len(split.pixels):,} images but {len(split.labels):,} labels")
        if not len(split) or 0 in split.pixels.shape:
            raise UserError(f"{where}: {name} holds no images")
        if split.groups is not None and len(split.groups) != len(split):
            raise UserError(f"{where}: {name} has {len(split):,} images but {len(split.groups):,} groups")
        if split.labels.min() < 0:
            raise UserError(f"{where}: {name} has the label {split.labels.min()}; labels count from 0")
    if len(set(shapes.values())) > 1:
        raise UserError(f"{where}: train and test images differ in shape: {shapes['train']} and {shapes['test']}")
    count = 1 + max(int(split.labels.max()) for split in splits.values())
    if len(raw.classes) > CLASSES:
        raise UserError(f"{where}: {len(raw.classes):,} classes are too many")
    if raw.classes and count > len(raw.classes):
        raise UserError(f"{where}: a label is {count - 1}, but only {len(raw.classes)} classes have names")
    if count > CLASSES:
        raise UserError(f"{where}: a label is {count - 1}: labels count classes from 0")
    return Raw(raw.train, raw.test, tuple(map(_printable, raw.classes)) or tuple(str(c) for c in range(count)))


def _printable(name: str) -> str:
    """Names come from archives and go to terminals."""
    return "".join(c if c.isprintable() else "?" for c in name[:200])


def make_room(count: int, shape: tuple[int, int, int], where: str) -> np.ndarray:
    """An array for so many images, if they may be so many."""
    size = count * shape[0] * shape[1] * shape[2]
    if size > PIXELS:
        raise UserError(f"{where}: {count:,} images of {shape} are {size / 2**30:.1f} GiB, more than {PIXELS >> 30}")
    return np.empty((count, *shape), dtype=np.uint8)


def nothing(what: str, done: int, total: int) -> None:
    """No progress wanted."""
