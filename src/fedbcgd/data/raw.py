"""A data set as read from files: pixels and labels of both splits, their validation, and the digest of the content."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedbcgd.errors import UserError

# A function that is called with what is being done, how much of it is done, and how much there is in all (0: unknown).
ReportProgress = Callable[[str, int, int], None]
MAX_PIXEL_BYTES = 2 * 2**30  # of a data set in memory
MAX_CLASSES = 100_000


@dataclass
class Split:
    """The examples of train or test.

    Attributes:
        pixels: uint8 (n, height, width, channels).
        labels: int64 (n).
        groups: for each example a number or name of whom it comes from, such as its writer.
    """

    pixels: np.ndarray
    labels: np.ndarray
    groups: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: np.ndarray) -> "Split":
        """Return the examples at these rows."""
        return Split(self.pixels[rows], self.labels[rows], None if self.groups is None else self.groups[rows])

    @cached_property
    def digest(self) -> str:
        """The digest of the labelled images in any order, so that one data set in two formats has one digest."""
        flat = np.ascontiguousarray(self.pixels).reshape(len(self), -1)
        digests = sorted(
            hashlib.blake2b(image.data, digest_size=16, salt=int(label).to_bytes(8, "little", signed=True)).digest()
            for image, label in zip(flat, self.labels, strict=True)
        )
        return hashlib.sha256(b"".join(digests)).hexdigest()[:32]


@dataclass
class Raw:
    """A data set as read.

    Attributes:
        train: training examples.
        test: test examples, if the source has some.
        classes: the names of the classes, if the source has them.
    """

    train: Split
    test: Split | None
    classes: tuple[str, ...] = ()


def validate(raw: Raw, where: str) -> Raw:
    """Check the arrays of a data set.

    Args:
        raw: the data set as read.
        where: its source, for messages.

    Returns:
        The same data set with names for all classes.

    Raises:
        UserError: types, shapes, lengths or labels are wrong.
    """
    splits = {"train": raw.train} | ({"test": raw.test} if raw.test is not None else {})
    shapes = {name: split.pixels.shape[1:] for name, split in splits.items()}
    for name, split in splits.items():
        if split.pixels.dtype != np.uint8 or split.pixels.ndim != 4:
            raise UserError(
                f"{where}: expected {name} images as uint8 of shape (n, height, width) or (n, height, width, "
                f"channels), got {split.pixels.dtype} of shape {split.pixels.shape}"
            )
        if len(split.pixels) != len(split.labels):
            raise UserError(
                f"{where}: {name}: expected {len(split.pixels):,} labels, as many as images, got {len(split.labels):,}"
            )
        if not len(split) or 0 in split.pixels.shape:
            raise UserError(f"{where}: {name}: expected images, got none")
        if split.groups is not None and len(split.groups) != len(split):
            raise UserError(
                f"{where}: {name}: expected {len(split):,} groups, as many as images, got {len(split.groups):,}"
            )
        if split.labels.min() < 0:
            raise UserError(f"{where}: {name}: expected labels from 0, got {split.labels.min()}")
    if len(set(shapes.values())) > 1:
        raise UserError(
            f"{where}: expected test images of shape {shapes['train']}, as in training, got {shapes['test']}"
        )
    count = 1 + max(int(split.labels.max()) for split in splits.values())
    if len(raw.classes) > MAX_CLASSES:
        raise UserError(f"{where}: expected at most {MAX_CLASSES:,} classes, got {len(raw.classes):,}")
    if raw.classes and count > len(raw.classes):
        raise UserError(
            f"{where}: expected labels below {len(raw.classes)}, the number of class names, got {count - 1}"
        )
    if count > MAX_CLASSES:
        raise UserError(f"{where}: expected labels from 0 to at most {MAX_CLASSES - 1:,}, got {count - 1}")
    return Raw(raw.train, raw.test, tuple(map(_printable, raw.classes)) or tuple(str(c) for c in range(count)))


def _printable(name: str) -> str:
    """Replace control characters: names come from archives and are printed on terminals."""
    return "".join(c if c.isprintable() else "?" for c in name[:200])


def allocate_pixels(count: int, shape: tuple[int, int, int], where: str) -> np.ndarray:
    """Allocate an array for images.

    Args:
        count: how many images.
        shape: height, width and channels of each.
        where: their source, for messages.

    Returns:
        An uninitialised uint8 array (count, height, width, channels).

    Raises:
        UserError: it would be larger than `MAX_PIXEL_BYTES`.
    """
    size = count * shape[0] * shape[1] * shape[2]
    if size > MAX_PIXEL_BYTES:
        raise UserError(
            f"{where}: expected at most {MAX_PIXEL_BYTES >> 30} GiB of images, got {count:,} of {shape}, which are "
            f"{size / 2**30:.1f} GiB"
        )
    return np.empty((count, *shape), dtype=np.uint8)


def no_progress(what: str, done: int, total: int) -> None:
    """Ignore progress."""
