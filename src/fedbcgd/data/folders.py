"""Readers of image files: a folder for each class, and the folder of Tiny ImageNet."""

import io
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import PurePosixPath

import numpy as np
from PIL import Image

from fedbcgd.data.containers import Files
from fedbcgd.data.raw import Raw, ReportProgress, Split, allocate_pixels
from fedbcgd.errors import UserError

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".ppm", ".pgm")
DECODERS = ("PNG", "JPEG", "BMP", "WEBP", "GIF", "PPM")
MAX_FILE_BYTES = 256 * 2**20  # of one image
MAX_PIXELS = 2**26  # of one image
TRAIN = ("train", "training")
TEST = ("test", "testing", "val", "valid", "validation")  # in this order of preference


def decode(data: bytes, where: str, mode: str | None = None, size: int | None = None) -> np.ndarray:
    """Decode one image.

    Args:
        data: the content of its file.
        where: its name, for messages.
        mode: a mode of Pillow, such as "RGB"; by default "L" for grey images and "RGB" for all others.
        size: side, in pixels, to which the image is scaled.

    Returns:
        Its pixels, uint8 (height, width, channels).

    Raises:
        UserError: it is not an image, too large, or has more than 8 bits per channel.
    """
    try:
        with warnings.catch_warnings(action="ignore"), Image.open(io.BytesIO(data), formats=DECODERS) as file:
            if file.width * file.height > MAX_PIXELS:
                raise UserError(f"{where}: expected at most {MAX_PIXELS:,} pixels, got {file.width}×{file.height}")
            if file.mode.startswith(("I", "F")):  # Pillow would clip the values instead of scaling them
                raise UserError(f"{where}: expected 8 bits a channel, got more; convert the image")
            grey = file.mode in ("1", "L", "LA")
            image = file.convert(mode or ("L" if grey else "RGB"))
            if size is not None and image.size != (size, size):
                image = image.resize((size, size), Image.Resampling.BICUBIC)
            pixels = np.asarray(image)
    except UserError:
        raise
    except Exception as error:  # damaged bytes can raise anything
        reason = str(error).split(" <")[0]  # without the address of a buffer
        raise UserError(f"{where}: expected an image, got a file that is none or is damaged: {reason}") from None
    return pixels[..., None] if pixels.ndim == 2 else pixels


def decode_all(
    files: Files, names: Sequence[str], size: int | None, progress: ReportProgress, mode: str | None = None
) -> np.ndarray:
    """Decode several images of one size into one array. If one of them has colours, all get three channels.

    Args:
        files: contain the images.
        names: the names of the images.
        size: side, in pixels, to which all are scaled.
        progress: called from time to time, see `raw.ReportProgress`.
        mode: see `decode`.

    Returns:
        Pixels, uint8 (n, height, width, channels).

    Raises:
        UserError: an image cannot be read, or sizes differ.
    """

    def read(name: str) -> np.ndarray:
        return decode(files.read(name, MAX_FILE_BYTES), f"{files.where}: {name}", mode, size)

    first = read(names[0])
    out = allocate_pixels(len(names), first.shape, files.where)
    for k, name in enumerate(names):
        pixels = read(name)
        if pixels.shape[2] > first.shape[2]:
            return decode_all(files, names, size, progress, "RGB")
        if pixels.shape[:2] != first.shape[:2]:
            (a, b), (c, d) = first.shape[:2], pixels.shape[:2]
            raise UserError(
                f"{files.where}: expected images of one size, got {names[0]} with {b}×{a} and {name} with {d}×{c}; "
                "--size N scales all to N×N"
            )
        out[k] = pixels  # a grey image is repeated over three channels
        if k % 100 == 99 or k + 1 == len(names):
            progress("decoding", k + 1, len(names))
    return out


def tiny_imagenet(files: Files, root: str, name: str, size: int | None, progress: ReportProgress) -> Raw:
    """Read train/WNID/images/*.JPEG, and val/images/*.JPEG with val_annotations.txt as the test set."""

    def text(name: str) -> str:
        if root + name not in files.names:
            raise UserError(f"{files.where}: expected Tiny ImageNet's folder, got one without {root}{name}")
        return files.read(root + name, 16 * 2**20).decode("utf-8", "replace")

    wnids = sorted(text("wnids.txt").split())
    description = dict(line.split("\t", 1) for line in text("words.txt").splitlines() if "\t" in line)
    train = []
    for file in files.names:
        parts = file.removeprefix(root).split("/") if file.startswith(root) else []
        if len(parts) == 4 and parts[0] == "train" and parts[2] == "images" and _is_image(file):
            train.append((parts[1], file))
    test = []
    for line in text("val/val_annotations.txt").splitlines():
        file, *rest = line.split("\t")
        if not rest:
            raise UserError(f"{files.where}: val_annotations.txt: expected an image and its class, got {file!r}")
        test.append((rest[0], f"{root}val/images/{file}"))
    if not train or not test:
        raise UserError(f"{files.where}: expected training and validation images, got {len(train)} and {len(test)}")
    raw = _read_classes(files, train, test, wnids, size, progress, "RGB")
    return Raw(raw.train, raw.test, tuple(description.get(wnid, wnid).split(",")[0].strip() for wnid in wnids))


def _read_classes(
    files: Files,
    train: Sequence[tuple[str, str]],
    test: Sequence[tuple[str, str]],
    classes: Sequence[str],
    size: int | None,
    progress: ReportProgress,
    mode: str | None = None,
) -> Raw:
    """Read images, each given as its class and the name of its file; without test images there is no test set."""
    label_of = {name: k for k, name in enumerate(classes)}
    all_names = set(files.names)
    for label, file in (*train, *test):
        if label not in label_of:
            known = ", ".join(classes)[:200] or "(none)"
            raise UserError(f"{files.where}: expected images of the classes {known}, got {label!r} for {file!r}")
        if file not in all_names:
            raise UserError(f"{files.where}: expected {file!r}, of which the class is given, got none")
    pixels = decode_all(files, [file for _, file in (*train, *test)], size, progress, mode)
    labels = np.array([label_of[label] for label, _ in (*train, *test)])
    n = len(train)
    return Raw(Split(pixels[:n], labels[:n]), Split(pixels[n:], labels[n:]) if test else None, tuple(classes))


def root_of(names: Sequence[str]) -> str | None:
    """Find the folder that contains train/CLASS/image or CLASS/image; return its name with a slash, or None."""
    paths = [name.split("/") for name in names if _is_image(name)]
    with_train = {"/".join(path[:k]) for path in paths for k, part in enumerate(path[:-2]) if part in TRAIN}
    with_classes = Counter("/".join(path[:-2]) for path in paths if len(path) >= 2)
    if with_train:
        root = min(sorted(with_train), key=len)
    elif with_classes:
        root = with_classes.most_common(1)[0][0]
    else:
        return None
    return root + "/" if root else ""


def image_folder(files: Files, root: str, name: str, size: int | None, progress: ReportProgress) -> Raw:
    """Read train/CLASS/… and test/CLASS/…, or CLASS/… alone, which has no test set."""
    by_split: dict[str, list[tuple[str, str]]] = {}
    for file in files.names:
        if not file.startswith(root) or not _is_image(file):
            continue
        parts = file.removeprefix(root).split("/")
        if len(parts) >= 3 and parts[0] in (*TRAIN, *TEST):
            by_split.setdefault(parts[0], []).append((parts[1], file))
        elif len(parts) == 2:
            by_split.setdefault("", []).append((parts[0], file))
    train = next((by_split[s] for s in (*TRAIN, "") if s in by_split), [])
    test = next((by_split[s] for s in TEST if s in by_split), [])
    if not train:
        raise UserError(f"{files.where}: expected images in train/CLASS/ or CLASS/, got none")
    return _read_classes(files, train, test, sorted({label for label, _ in train}), size, progress)


def _is_image(name: str) -> bool:
    path = PurePosixPath(name)
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and "__MACOSX" not in path.parts
