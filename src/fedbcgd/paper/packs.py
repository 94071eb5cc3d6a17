"""Finished runs in one compressed file per item, `OUT/ITEM/runs.tar.xz`, from which `reproduce` can continue.

A pack holds the files that show a run is finished: configuration, metrics, summary, commit; no models or checkpoints.
Items share runs: a run is in the pack of the first item that needs it.
"""

import io
import json
import lzma
import shutil
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from fedbcgd.errors import UserError
from fedbcgd.files import Damaged, as_json, make_folder, read_regular, write_whole
from fedbcgd.paper.origin import COMMIT_FILE

NAME = "runs.tar.xz"
RUN_FILES = ("config.toml", "metrics.jsonl", "summary.json", COMMIT_FILE)
MAX_BYTES = 1 << 28  # of a pack, compressed or not

Runs = dict[str, dict[str, bytes]]  # folder name → file name → content


def read(path: Path) -> Runs:
    """Read the runs in a pack; members that are not regular files named in `RUN_FILES` are ignored.

    Raises:
        Damaged: the file is truncated or altered.
        UserError: the file is larger than `MAX_BYTES`.
    """
    runs: Runs = {}
    packed = read_regular(path, MAX_BYTES)
    try:
        decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MAX_BYTES)
        data = decoder.decompress(packed, max_length=MAX_BYTES + 1)
        if len(data) > MAX_BYTES or not decoder.eof:
            raise lzma.LZMAError(f"more than {MAX_BYTES:,} bytes, or truncated")
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
            for member in tar:
                folder, _, name = member.name.partition("/")
                if member.isreg() and name in RUN_FILES and folder not in ("", ".", ".."):
                    file = tar.extractfile(member)
                    assert file is not None  # it is a regular file
                    runs.setdefault(folder, {})[name] = file.read()
    except (lzma.LZMAError, tarfile.TarError, ValueError, EOFError) as error:
        raise Damaged(
            f"{path}: expected packed runs, got a damaged file ({error}); fetch it again, or delete it to run anew"
        ) from None
    return runs


def write(path: Path, runs: Mapping[str, Mapping[str, bytes]]) -> None:
    """Write a pack. The same runs give the same bytes, in whatever order and whenever they were computed."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for folder, files in sorted(runs.items()):
            for name, content in sorted(files.items()):
                member = tarfile.TarInfo(f"{folder}/{name}")  # owner and time are zero
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    packed = lzma.compress(raw.getvalue(), preset=9 | lzma.PRESET_EXTREME)
    write_whole(path, lambda temporary: _write_bytes(temporary, packed))


def add(out: Path, item: str, folders: Iterable[Path]) -> None:
    """Add finished runs to the pack of an item, except those in another item's pack.

    Args:
        out: the folder of all items.
        item: name of the item.
        folders: folders of finished runs.
    """
    path = out / item / NAME
    elsewhere = {name for other in _packs(out) if other != path for name in read(other)}
    before = read(path) if path.exists() else {}
    runs = before | {folder.name: _run_files(folder) for folder in folders if folder.name not in elsewhere}
    if runs != before:
        make_folder(path.parent)
        write(path, runs)


def restore(out: Path, names: Iterable[str]) -> None:
    """Unpack runs into `OUT/runs`; existing folders and runs that are in no pack are left alone.

    Args:
        out: the folder of all items.
        names: folder names of the runs.
    """
    missing = {name for name in names if not (out / "runs" / name).exists()}
    for path in _packs(out) if missing else ():
        if found := missing & _names(path, path.stat().st_mtime_ns):
            runs = read(path)
            for name in found:
                _unpack(make_folder(out / "runs") / name, runs[name])
            missing -= found


@cache
def _names(path: Path, changed: int) -> frozenset[str]:
    """Return the names of the runs in a pack that was last changed at this time."""
    return frozenset(read(path))


def _packs(out: Path) -> list[Path]:
    return sorted(out.glob(f"*/{NAME}"))


def _run_files(folder: Path) -> dict[str, bytes]:
    files = {name: (folder / name).read_bytes() for name in RUN_FILES if (folder / name).exists()}
    summary = json.loads(files["summary.json"])
    summary.pop("command", None)  # it names folders of the machine that ran it
    return files | {"summary.json": (as_json(summary, indent=1) + "\n").encode()}


def _unpack(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write the files of a run, all or none of them."""
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".unpacking-"))
    try:
        temporary.chmod(0o755)
        for name, content in files.items():
            _write_bytes(temporary / name, content)
        temporary.rename(folder)
    except OSError as error:
        raise UserError(f"{folder} could not be unpacked: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_bytes(path: Path, content: bytes) -> None:
    path.write_bytes(content)
