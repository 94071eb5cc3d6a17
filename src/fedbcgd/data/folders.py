"""Images as files: a folder per class, and Tiny ImageNet's folder."""

import io
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import PurePosixPath

import numpy as np
from PIL import Image

from fedbcgd.data.containers import Files
from fedbcgd.data.raw import Raw, Split, Step, make_room
from fedbcgd.errors import UserError

KINDS = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".ppm", ".pgm")
DECODERS = ("PNG", "JPEG", "BMP", "WEBP", "GIF", "PPM")
IMAGE = 256 * 2**20  # bytes of one file
AREA = 2**26  # pixels of one image
TRAIN = ("train", "training")
TEST = ("test", "testing", "val", "valid", "validation")  # in this order of preference


def decode(data: bytes, where: str, mode: str | None = None, size: int | None = None) -> np.ndarray:
    """One image as bytes (height, width, channels): grey as one channel, all else as RGB."""
    try:
        with warnings.catch_warnings(action="ignore"), Image.open(io.BytesIO(data), formats=DECODERS) as file:
            if file.width * file.height > AREA:
                raise UserError(f"{where} is {file.width}×{file.height} pixels, more than {AREA:,}: refused")
            if file.mode.startswith(("I", "F")):
                raise UserError(f"{where} has more than 8 bits a pixel: refused")  # they would be cut off, not scaled
            grey = file.mode in ("1", "L", "LA")
            image = file.convert(mode or ("L" if grey else "RGB"))
            if size is not None and image.size != (size, size):
                image = image.resize((size, size), Image.Resampling.BICUBIC)
            pixels = np.asarray(image)
    except UserError:
        raise
    except Exception as error:  # whatever damaged bytes lead to
        what = str(error).split(" <")[0]  # without the address of a buffer
        raise UserError(f"{where} is no image that can be read, or is damaged: {what}") from None
    return pixels[..., None] if pixels.ndim == 2 else pixels


def decode_all(files: Files, names: Sequence[str], size: int | None, step: Step, mode: str | None = None) -> np.ndarray:
    """All of them in one array; they must have one size. One of them in colour, and all are."""
    where = f"{files.where}: {names[0]}"
    first = decode(files.read(names[0], IMAGE), where, mode, size)
    out = make_room(len(names), first.shape, files.where)
    for k, name in enumerate(names):
        pixels = decode(files.read(name, IMAGE), f"{files.where}: {name}", mode, size)
        if pixels.shape[2] > first.shape[2]:
            return decode_all(files, names, size, step, "RGB")
        if pixels.shape[:2] != first.shape[:2]:
            (a, b), (c, d) = first.shape[:2], pixels.shape[:2]
            raise UserError(
                f"{files.where}: images differ in size: {names[0]} is {b}×{a}, {name} is {d}×{c}; --size N scales all "
                "to N×N"
            )
        out[k] = pixels  # grey among colours is spread over all three
        if k % 100 == 99 or k + 1 == len(names):
            step("decoding", k + 1, len(names))
    return out


def tiny_imagenet(files: Files, root: str, name: str, size: int | None, step: Step) -> Raw:
    """train/WNID/images/*.JPEG and val/images/*.JPEG with val_annotations.txt; the validation images are the test set."""

    def text(name: str) -> str:
        if root + name not in files.names:
            raise UserError(f"{files.where} has no file {root}{name}, which Tiny ImageNet's folder has")
        return files.read(root + name, 16 * 2**20).decode("utf-8", "replace")

    there = set(files.names)
    wnids = sorted(text("wnids.txt").split())
    number = {wnid: k for k, wnid in enumerate(wnids)}
    words = dict(line.split("\t", 1) for line in text("words.txt").splitlines() if "\t" in line)
    train: list[str] = []
    labels: list[int] = []
    for file in files.names:
        parts = file.removeprefix(root).split("/") if file.startswith(root) else []
        if len(parts) == 4 and parts[0] == "train" and parts[2] == "images" and _is_image(file):
            if parts[1] not in number:
                raise UserError(f"{files.where}: {file} is of class {parts[1]!r}, which wnids.txt does not list")
            train.append(file)
            labels.append(number[parts[1]])
    val: list[str] = []
    truth: list[int] = []
    for line in text("val/val_annotations.txt").splitlines():
        file, *rest = line.split("\t")
        if not rest or rest[0] not in number or f"{root}val/images/{file}" not in there:
            raise UserError(f"{files.where}: val_annotations.txt has a line for {file!r} that fits no image and class")
        val.append(f"{root}val/images/{file}")
        truth.append(number[rest[0]])
    if not train or not val:
        raise UserError(f"{files.where} has {len(train)} training and {len(val)} validation images")
    both = decode_all(files, [*train, *val], size, step, "RGB")
    n = len(train)
    classes = tuple(words.get(w, w).split(",")[0].strip() for w in wnids)
    return Raw(Split(both[:n], np.array(labels)), Split(both[n:], np.array(truth)), classes)


def root_of(names: Sequence[str]) -> str | None:
    """The folder that has train/CLASS/image (or CLASS/image) in it."""
    images = [name for name in names if _is_image(name)]
    trains = {"/".join(p[:k]) for p in map(_parts, images) for k, part in enumerate(p[:-2]) if part in TRAIN}
    if trains:
        at = min(sorted(trains), key=len)
        return at + "/" if at else ""
    classes = Counter("/".join(_parts(name)[:-2]) for name in images if len(_parts(name)) >= 2)
    if not classes:
        return None
    at = classes.most_common(1)[0][0]
    return at + "/" if at else ""


def image_folder(files: Files, root: str, name: str, size: int | None, step: Step) -> Raw:
    """train/CLASS/… and test/CLASS/…, or CLASS/… alone, which has no test set."""
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
        raise UserError(f"{files.where} has no images in train/CLASS/ or CLASS/")
    classes = sorted({label for label, _ in train})
    number = {label: k for k, label in enumerate(classes)}
    if strange := sorted({label for label, _ in test} - set(classes)):
        raise UserError(f"{files.where}: the test images have classes that training has not: {', '.join(strange[:8])}")
    pixels = decode_all(files, [file for _, file in (*train, *test)], size, step)
    labels = np.array([number[label] for label, _ in (*train, *test)])
    n = len(train)
    held = Split(pixels[n:], labels[n:]) if test else None
    return Raw(Split(pixels[:n], labels[:n]), held, tuple(classes))


def _parts(name: str) -> list[str]:
    return name.split("/")


def _is_image(name: str) -> bool:
    path = PurePosixPath(name)
    return path.suffix.lower() in KINDS and not path.name.startswith(".") and "__MACOSX" not in path.parts
