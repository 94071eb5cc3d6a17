"""Folders and archives, read in place: nothing is ever unpacked to disk, so nothing can escape from an archive."""

import bz2
import gzip
import lzma
import re
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any, Protocol

from fedbcgd.errors import UserError

GIB = 2**30
FILES = 1_000_000
ARCHIVE = 4 * GIB  # unpacked
IN_MEMORY = 1 * GIB  # unpacked, of a tar, which can only be read from front to back
HEADER = 2 * 2**20  # of one member of a tar
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class Files(Protocol):
    """Files by their name, with forward slashes."""

    where: str
    names: list[str]

    def read(self, name: str, limit: int) -> bytes:
        """The whole file; one larger than `limit` is refused."""


class Folder:
    def __init__(self, path: Path):
        self.where = str(path)
        self._path = path
        self.names = []
        for file in path.rglob("*"):
            if file.is_file():
                self.names.append(file.relative_to(path).as_posix())
            if len(self.names) > FILES:
                raise UserError(f"{path} holds more than {FILES:,} files")
        self.names.sort()

    def read(self, name: str, limit: int) -> bytes:
        file = self._path / name
        with _readable(file):
            _check_size(str(file), file.stat().st_size, limit)
            return file.read_bytes()


class Zip:
    def __init__(self, path: Path, limit: int = ARCHIVE):
        self.where = str(path)
        self._zip = zipfile.ZipFile(path)
        entries = [entry for entry in self._zip.infolist() if not entry.is_dir()]
        _check_names(self.where, [entry.filename for entry in entries])
        _check_total(self.where, sum(entry.file_size for entry in entries), limit)
        if any(entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for entry in entries):
            raise UserError(f"{path} uses a compression that is not read here; known are none and deflate")
        self._entries = {entry.filename: entry for entry in entries}
        self.names = sorted(self._entries)

    def read(self, name: str, limit: int) -> bytes:
        entry = self._entries[name]
        _check_total(f"{self.where}: {name}", entry.file_size, limit)
        with _readable(f"{self.where}: {name}"), self._zip.open(entry) as file:
            return file.read(entry.file_size)  # without a size all is unpacked, whatever it declares


class Tar:
    """Read whole into memory, front to back, after a look at what each member declares."""

    def __init__(self, path: Path):
        self.where = str(path)
        self._members: dict[str, bytes] = {}
        total = count = 0
        with _unpacked(path) as file:
            stream: Any = _Stream(file, self.where)
            with tarfile.open(fileobj=stream, mode="r|", tarinfo=_Header) as tar:
                while (member := tar.next()) is not None:
                    tar.members = []  # type: ignore[attr-defined]  # it would keep every header
                    count += 1
                    if count > FILES:
                        raise UserError(f"{path} holds more than {FILES:,} files: refused")
                    if member.isfile() and not member.issparse():
                        _check_names(self.where, [member.name])
                        total += member.size
                        _check_total(self.where, total, IN_MEMORY)
                        stream.allow(member.size)
                        data = tar.extractfile(member)
                        assert data is not None
                        self._members[member.name] = data.read()
                    elif not member.isdir():
                        raise UserError(f"{path} holds {member.name!r}, a link, a device or a sparse file: refused")
                    stream.allow(HEADER)
            while stream.read(tarfile.RECORDSIZE):
                pass  # a checksum comes last
        self.names = sorted(self._members)

    def read(self, name: str, limit: int) -> bytes:
        _check_size(f"{self.where}: {name}", len(self._members[name]), limit)
        return self._members[name]


class _Header(tarfile.TarInfo):
    @classmethod
    def frombuf(cls, buf: Any, encoding: Any, errors: Any) -> Any:
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if len(buf) == tarfile.BLOCKSIZE and not any(buf):
                raise  # the end of the archive, for which tarfile takes a damaged header, too
            raise tarfile.ReadError(str(error)) from None


class _Stream:
    """A tar's bytes, but no more of them at a time than is allowed: names and other headers can be bombs, too."""

    def __init__(self, file: IO[bytes], where: str):
        self._file, self._where = file, where
        self.allow(HEADER)

    def allow(self, size: int) -> None:
        self._left = size + 2 * tarfile.RECORDSIZE  # it is read in records

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise UserError(f"{self._where} holds more than {HEADER >> 20} MiB that belong to no file: refused")
        return data


def _unpacked(path: Path) -> IO[bytes]:
    with path.open("rb") as file:
        magic = file.read(6)
    if magic.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(path)  # type: ignore[return-value]
    if magic.startswith(b"BZh"):
        return bz2.BZ2File(path)
    return lzma.LZMAFile(path) if magic == b"\xfd7zXZ\0" else path.open("rb")


def opened(path: Path) -> Files:
    """What is at `path`: a folder, a zip or a tar."""
    with _readable(path):
        if path.is_dir():
            return Folder(path)
        if not path.is_file():
            raise UserError(f"{path} is no file or folder" if path.exists() else f"{path} does not exist")
        return Zip(path) if zipfile.is_zipfile(path) else Tar(path)


@contextmanager
def _readable(where: Path | str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{where} cannot be read: {error.strerror or error}") from None
    except Exception as error:  # whatever damaged bytes lead to
        what = str(error) or type(error).__name__
        raise UserError(
            f"{where} is damaged or no archive that can be read (zip, tar; beside folders and .npz files): {what}"
        ) from None


def _check_names(where: str, names: list[str]) -> None:
    if len(names) > FILES:
        raise UserError(f"{where} holds more than {FILES:,} files: refused")
    for name in names:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name:
            raise UserError(f"{where} holds {name!r}, a name that leads out of the archive: refused")
        if _CONTROL.search(name):  # messages quote names, on terminals
            raise UserError(f"{where} holds {name!r}, a name with control characters: refused")


def _check_total(where: str, size: int, limit: int) -> None:
    if size > limit:
        raise UserError(f"{where} would unpack to {size / 2**20:,.0f} MiB, more than {limit / 2**20:,.0f} MiB: refused")


def _check_size(where: str, size: int, limit: int) -> None:
    if size > limit:
        raise UserError(f"{where} is larger than {limit / 2**20:,.0f} MiB: refused")
