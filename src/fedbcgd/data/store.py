"""The store of data sets: a file for each in the cache folder (or in FEDBCGD_DATA), mapped into memory when loaded."""

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
from fedbcgd.data.raw import Raw, ReportProgress, no_progress
from fedbcgd.errors import UserError, unknown
from fedbcgd.files import Damaged, make_folder, read_tensors, write_tensors
from fedbcgd.rng import stream

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
VERSION = "2"


@dataclass(frozen=True)
class DataSet:
    """A data set that can be trained on.

    Attributes:
        name: its name in configurations.
        train: training images.
        test: test images.
        classes: the names of the classes.
        digest: identifies the content.
        groups: for each training example the number of its group, such as its writer; None: there are no groups.
        about: where the data set comes from.
    """

    name: str
    train: Images
    test: Images
    classes: tuple[str, ...]
    digest: str
    groups: np.ndarray | None = None
    about: str = ""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        return self.train.shape


def folder() -> Path:
    """Return the folder of the store."""
    if chosen := os.environ.get("FEDBCGD_DATA"):
        return Path(os.path.expanduser(chosen))  # Path.expanduser would raise an error for an unknown user
    return user_cache_path("fedbcgd", appauthor=False, opinion=False)


def path_of(name: str) -> Path:
    """Return the path of a data set's file, whether it exists or not.

    Raises:
        UserError: the name is not valid.
    """
    if not NAME.fullmatch(name):
        raise UserError(
            f"expected a name of small letters, digits, '.', '_' and '-' (at most 64) for a data set, got {name!r}"
        )
    return folder() / f"{name}.safetensors"


def stored_names() -> list[str]:
    """Return the names of all data sets in the store."""
    files = folder().glob("*.safetensors") if folder().is_dir() else ()
    return sorted(path.stem for path in files if NAME.fullmatch(path.stem))


def remove_leftovers() -> None:
    """Remove temporary files of killed processes, except those younger than a day, which may be in use."""
    for path in [*folder().glob(".get-*"), *folder().glob(".*.safetensors")]:
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > 86_400:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def add(
    name: str,
    path: Path,
    size: int | None = None,
    test_share: float | None = None,
    progress: ReportProgress = no_progress,
) -> DataSet:
    """Read a data set from files, and store it.

    Args:
        name: its name in configurations.
        path: a folder, an archive or an .npz file.
        size: side, in pixels, to which image files are scaled.
        test_share: the share of the images that becomes the test set, if there is none.
        progress: called from time to time, see `raw.ReportProgress`.

    Returns:
        The data set.

    Raises:
        UserError: the name is not valid, or the files are not as expected.
    """
    path_of(name)
    if name in (EMBEDDED, QUADRATICS):
        raise UserError(f"name: expected one that is not reserved in configurations, got {name!r}; choose another")
    return save(name, read(path, name, size, progress), str(path), test_share, progress)


def save(
    name: str, raw: Raw, where: str, test_share: float | None = None, progress: ReportProgress = no_progress
) -> DataSet:
    """Store a data set. If the name is in `KNOWN`, it must be the data set that is published under this name.

    Args:
        name: its name in configurations.
        raw: the data set.
        where: its source, for messages.
        test_share: see `add`.
        progress: called from time to time, see `raw.ReportProgress`.

    Returns:
        The data set.

    Raises:
        UserError: the name is that of another data set, there are no test images, or the file cannot be written.
    """
    progress("checking", 0, 0)
    if raw.test is None or test_share is not None:
        raw = _hold_out_test(raw, where, test_share)
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
    progress("writing", 0, 0)
    make_folder(folder())
    write_tensors(path_of(name), tensors, about)
    return load(name)


def load(name: str) -> DataSet:
    """Load a data set, mapped into memory.

    The checksum is verified, which reads the file once: 25 ms for CIFAR-10 from the system's cache.

    Args:
        name: its name in configurations.

    Returns:
        The data set.

    Raises:
        UserError: it is not in the store, or it is damaged.
    """
    if name == EMBEDDED:
        train, test = fashion_mnist()
        return DataSet(name, train, test, EMBEDDED_CLASSES, EMBEDDED, about="in the package")
    path = path_of(name)
    if not path.exists():
        raise _missing(name)
    tensors, about = _open(path)
    try:
        mean, std = tensors["mean"].float(), tensors["std"].float()
        train, test = (
            Images(tensors[f"x_{s}"].permute(0, 3, 1, 2), tensors[f"y_{s}"], mean, std) for s in ("train", "test")
        )
        groups = tensors["groups"].numpy() if "groups" in tensors else None
        classes, digest = tuple(json.loads(about["classes"])), ":".join(json.loads(about["digest"]))
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise _damaged(path, error) from None
    return DataSet(name, train, test, classes, digest, groups, about.get("about", ""))


def _damaged(path: Path, error: Exception) -> UserError:
    return UserError(f"{path} is damaged: {error}; delete it and add the data set again")


def _missing(name: str) -> UserError:
    if name in KNOWN:
        return UserError(
            f"{KNOWN[name].title} is not on this machine yet: `fedbcgd data get {name}` fetches it, or `fedbcgd data add "
            f"{name} PATH` reads it from disk: {KNOWN[name].by_hand}"
        )
    return unknown("data set", name, {*KNOWN, *stored_names(), EMBEDDED})


def _open(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        tensors, about, has_checksum = read_tensors(path)
    except Damaged as error:
        raise UserError(f"{error}; delete it and add the data set again") from None
    except OSError as error:
        raise _damaged(path, error) from None
    if about.get("version") != VERSION:
        raise UserError(
            f"{path}: expected a data set of version {VERSION}, got version {about.get('version')}; delete it and add the "
            "data set again"
        )
    if not has_checksum:
        raise _damaged(path, ValueError("it has no checksum"))
    return tensors, about


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))


def _hold_out_test(raw: Raw, where: str, share: float | None) -> Raw:
    """Make a share of the training images the test set."""
    if share is None:
        raise UserError(f"{where}: expected test images, got none; --test-share 0.1 holds out a tenth of what there is")
    if raw.test is not None:
        raise UserError(
            f"--test-share: expected none, since {where} has {len(raw.test):,} test images, got {share:g}; leave it out"
        )
    order = stream(0, "test share").permutation(len(raw.train))
    count = round(len(raw.train) * share) if 0 < share < 1 else 0
    if not 0 < count < len(raw.train):
        raise UserError(
            f"--test-share: expected a share that leaves images in train and test, got {share:g} of {len(raw.train)}"
        )
    return Raw(raw.train.take(np.sort(order[count:])), raw.train.take(np.sort(order[:count])), raw.classes)


def _moments(pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the exact mean and standard deviation of each channel, of values from 0 to 1; computed from counts of bytes."""
    levels = np.arange(256) / 255
    means, stds = [], []
    for channel in range(pixels.shape[3]):
        plane = pixels[..., channel]
        parts = (plane[k : k + 4096] for k in range(0, len(plane), 4096))  # bincount needs eight bytes for each value
        share = sum(np.bincount(part.ravel(), minlength=256) for part in parts) / plane.size
        mean = float(share @ levels)
        means.append(mean)
        stds.append(float(np.sqrt(share @ (levels - mean) ** 2)) or 1.0)  # a constant channel is not scaled
    return np.array(means), np.array(stds)
