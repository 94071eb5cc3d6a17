"""Finished runs in one compressed file per item, `OUT/ITEM/runs.tar.xz`, from which `reproduce` can go on.

A pack holds what is needed to know a run as finished: configuration, metrics, summary, commit; no models or checkpoints.
Items share runs: a run stands in the pack of the first item that has it.
"""

import io
import json
import lzma
import shutil
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from fedbcgd.errors import UserError
from fedbcgd.files import Damaged, as_json, make_folder, read_regular, write_whole
from fedbcgd.paper.origin import FILE

NAME = "runs.tar.xz"
KEPT = ("config.toml", "metrics.jsonl", "summary.json", FILE)
LARGEST = 1 << 28  # bytes of a pack, compressed or not

Runs = dict[str, dict[str, bytes]]  # the files of each run, by the name of its folder


def read(path: Path) -> Runs:
    """The runs in a pack; members other than regular files of these names are left out.

    Raises:
        Damaged: it was cut off or changed.
        UserError: it is larger than any pack.
    """
    runs: Runs = {}
    try:
        decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=LARGEST)
        data = decoder.decompress(read_regular(path, LARGEST), max_length=LARGEST + 1)
        if len(data) > LARGEST or not decoder.eof:
            raise lzma.LZMAError(f"more than {LARGEST:,} bytes, or cut off")
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
            for member in tar:
                folder, _, name = member.name.partition("/")
                if member.isreg() and name in KEPT and folder not in ("", ".", ".."):
                    file = tar.extractfile(member)
                    assert file is not None  # it is a regular file
                    runs.setdefault(folder, {})[name] = file.read()
    except (lzma.LZMAError, tarfile.TarError, ValueError, EOFError) as error:
        raise Damaged(
            f"{path}: expected packed runs, got a damaged file ({error}); fetch it again, or delete it to run anew"
        ) from None
    return runs


def write(path: Path, runs: Mapping[str, Mapping[str, bytes]]) -> None:
    """Pack runs. The same runs give the same bytes, whenever and in whatever order they were made."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for folder, files in sorted(runs.items()):
            for name, content in sorted(files.items()):
                member = tarfile.TarInfo(f"{folder}/{name}")  # owner and time are zero
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    packed = lzma.compress(raw.getvalue(), preset=9 | lzma.PRESET_EXTREME)
    write_whole(path, lambda temporary: _put(temporary, packed))


def add(out: Path, item: str, folders: Iterable[Path]) -> None:
    """Add finished runs to the pack of an item, but for those that other items have packed."""
    path = out / item / NAME
    elsewhere = {name for other in _packs(out) if other != path for name in read(other)}
    before = read(path) if path.exists() else {}
    runs = before | {folder.name: _files(folder) for folder in folders if folder.name not in elsewhere}
    if runs != before:
        make_folder(path.parent)
        write(path, runs)


def restore(out: Path, wanted: Iterable[str]) -> None:
    """Unpack into `OUT/runs` the wanted runs that are in a pack and not there."""
    missing = {name for name in wanted if not (out / "runs" / name).exists()}
    for path in _packs(out) if missing else ():
        for name, files in read(path).items():
            if name in missing:
                missing.remove(name)
                _unpack(make_folder(out / "runs") / name, files)


def _packs(out: Path) -> list[Path]:
    return sorted(out.glob(f"*/{NAME}"))


def _files(folder: Path) -> dict[str, bytes]:
    files = {name: (folder / name).read_bytes() for name in KEPT if (folder / name).exists()}
    summary = json.loads(files["summary.json"])
    summary.pop("command", None)  # it names folders of the machine that ran it
    return files | {"summary.json": (as_json(summary, indent=1) + "\n").encode()}


def _unpack(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write the files of a run, all or none of them."""
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".unpacking-"))
    try:
        temporary.chmod(0o755)
        for name, content in files.items():
            _put(temporary / name, content)
        temporary.rename(folder)
    except OSError as error:
        raise UserError(f"{folder} could not be unpacked: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _put(path: Path, content: bytes) -> None:
    path.write_bytes(content)
