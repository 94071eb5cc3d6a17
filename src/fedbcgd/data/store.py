"""The user's data sets: one file each, mapped into memory, in the cache folder (FEDBCGD_DATA overrides)."""

import contextlib
import json
import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from platformdirs import user_cache_path
from torch import Tensor

from fedbcgd.data.catalog import KNOWN
from fedbcgd.data.embedded import CLASSES as EMBEDDED_CLASSES
from fedbcgd.data.embedded import fashion_mnist
from fedbcgd.data.formats import read
from fedbcgd.data.images import Images
from fedbcgd.data.names import EMBEDDED, QUADRATICS
from fedbcgd.data.raw import Raw, Split, Step, nothing
from fedbcgd.errors import UserError
from fedbcgd.files import Damaged, make_folder, read_tensors, write_tensors
from fedbcgd.rng import stream

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
VERSION = "2"
BEFORE = "1"  # without a checksum, but with the digest of the images


@dataclass(frozen=True)
class DataSet:
    name: str
    train: Images
    test: Images
    classes: tuple[str, ...]
    digest: str  # of its content
    groups: np.ndarray | None = None  # of the training examples
    about: str = ""  # where it comes from

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.train.shape


def folder() -> Path:
    """Where data sets are kept."""
    if chosen := os.environ.get("FEDBCGD_DATA"):
        return Path(os.path.expanduser(chosen))  # leaves alone what it does not know
    return user_cache_path("fedbcgd", appauthor=False, opinion=False)


def place(name: str) -> Path:
    if not NAME.fullmatch(name):
        raise UserError(f"{name!r} is no name for a data set: small letters, digits, '.', '_' and '-' are wanted")
    return folder() / f"{name}.safetensors"


def kept() -> list[str]:
    """The names of the data sets in the folder."""
    files = folder().glob("*.safetensors") if folder().is_dir() else ()
    return sorted(path.stem for path in files if NAME.fullmatch(path.stem))


def sweep() -> None:
    """Remove what a kill in the middle of fetching or writing left behind, a day later: another process may be at work."""
    for path in [*folder().glob(".get-*"), *folder().glob(".*.safetensors")]:
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > 86_400:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def add(
    name: str, path: Path, size: int | None = None, test_share: float | None = None, step: Step = nothing
) -> DataSet:
    """Read what is at `path`, check it, and keep it under `name`."""
    place(name)
    if name in (EMBEDDED, QUADRATICS):
        raise UserError(f"{name!r} has a meaning of its own in configurations; take another name")
    return keep(name, read(path, name, size, step), str(path), test_share, step)


def keep(name: str, raw: Raw, where: str, test_share: float | None = None, step: Step = nothing) -> DataSet:
    step("checking", 0, 0)
    if raw.test is None or test_share is not None:
        raw = _with_test(raw, where, test_share)
    assert raw.test is not None
    known = KNOWN.get(name)
    if known is not None:
        known.check(name, raw, where)
    digests = [split.digest for split in (raw.train, raw.test)]
    mean, std = _moments(raw.train.pixels)
    classes = known.names if known is not None and known.names else raw.classes
    tensors = {
        "x_train": _tensor(raw.train.pixels),
        "y_train": _tensor(raw.train.labels),
        "x_test": _tensor(raw.test.pixels),
        "y_test": _tensor(raw.test.labels),
        "mean": torch.from_numpy(mean),
        "std": torch.from_numpy(std),
    }
    if raw.train.groups is not None:
        tensors["groups"] = torch.from_numpy(np.unique(raw.train.groups, return_inverse=True)[1].astype(np.int64))
    about = {
        "version": VERSION,
        "classes": json.dumps(classes),
        "digest": json.dumps(digests),
        "about": Path(where).name.encode("utf-8", "replace").decode("utf-8"),  # a file's name may be any bytes
    }
    step("writing", 0, 0)
    make_folder(folder())
    write_tensors(place(name), tensors, about)
    return load(name)


def load(name: str) -> DataSet:
    """A data set by its name, mapped into memory. Its checksum is checked, which reads the file once: a CIFAR takes 25 ms
    where the system still has it in memory."""
    if name == EMBEDDED:
        train, test = fashion_mnist()
        return DataSet(name, train, test, EMBEDDED_CLASSES, EMBEDDED, about="in the package")
    path = place(name)
    if not path.exists():
        raise missing(name)
    tensors, about = _open(path)
    try:
        mean, std = tensors["mean"].float(), tensors["std"].float()
        train, test = (
            Images(tensors[f"x_{s}"].permute(0, 3, 1, 2), tensors[f"y_{s}"], mean, std) for s in ("train", "test")
        )
        groups = tensors["groups"].numpy() if "groups" in tensors else None
        classes, digest = tuple(json.loads(about["classes"])), ":".join(json.loads(about["digest"]))
        if about["version"] == BEFORE:
            _check_digest(tensors, digest)
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise _damaged(path, error) from None
    return DataSet(name, train, test, classes, digest, groups, about.get("about", ""))


def _damaged(path: Path, error: Exception) -> UserError:
    return UserError(f"{path} is damaged: {error}; delete it and add the data set again")


def missing(name: str) -> UserError:
    if name in KNOWN:
        return UserError(
            f"{KNOWN[name].title} is not here yet: `fedbcgd data get {name}` fetches it, or `fedbcgd data add {name} PATH` "
            f"takes what you have: {KNOWN[name].by_hand}"
        )
    from fedbcgd.errors import unknown

    return unknown("data set", name, {*KNOWN, *kept(), EMBEDDED})


def _open(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        tensors, about, checked = read_tensors(path)
    except Damaged as error:
        raise UserError(f"{error}; delete it and add the data set again") from None
    except OSError as error:
        raise _damaged(path, error) from None
    if about.get("version") not in (VERSION, BEFORE):
        raise UserError(f"{path} was not written by this version of fedbcgd; delete it and add the data set again")
    if about["version"] == VERSION and not checked:
        raise _damaged(path, ValueError("it has no checksum"))
    return tensors, about


def _check_digest(tensors: dict[str, Tensor], digest: str) -> None:
    """Of a file without a checksum: whether images, labels, means and deviations are those that were kept."""
    found = {s: Split(tensors[f"x_{s}"].numpy(), tensors[f"y_{s}"].numpy()) for s in ("train", "test")}
    if digest != f"{found['train'].digest}:{found['test'].digest}":
        raise ValueError("its images or labels are not those that were kept")
    for name, values in zip(("mean", "std"), _moments(found["train"].pixels), strict=True):
        if not np.array_equal(tensors[name].numpy(), values):
            raise ValueError(f"{name} is not that of its images")


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))


def _with_test(raw: Raw, where: str, share: float | None) -> Raw:
    if share is None:
        raise UserError(f"{where} has no test images; --test-share 0.1 holds out a tenth of what there is")
    if raw.test is not None:
        raise UserError(f"--test-share: {where} has test images of its own ({len(raw.test):,})")
    order = stream(0, "test share").permutation(len(raw.train))
    held = round(len(raw.train) * share) if 0 < share < 1 else 0
    if not 0 < held < len(raw.train):
        raise UserError(f"--test-share: {share:g} of {len(raw.train)} images leaves one side empty")
    return Raw(raw.train.take(np.sort(order[held:])), raw.train.take(np.sort(order[:held])), raw.classes)


def _moments(pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of each channel, of values from 0 to 1, exactly: by counting bytes."""
    levels = np.arange(256) / 255
    means, stds = [], []
    for channel in range(pixels.shape[3]):
        plane = pixels[..., channel]
        parts = (plane[k : k + 4096] for k in range(0, len(plane), 4096))  # counting takes eight bytes for each
        share = sum(np.bincount(part.ravel(), minlength=256) for part in parts) / plane.size
        mean = float(share @ levels)
        means.append(mean)
        stds.append(float(np.sqrt(share @ (levels - mean) ** 2)) or 1.0)  # one colour throughout: nothing to scale
    return np.array(means), np.array(stds)
