"""Folders and archives, read in place: nothing is ever unpacked to disk, so nothing can escape from an archive."""

import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from lzma import LZMAError
from pathlib import Path, PurePosixPath
from typing import Protocol

from fedbcgd.errors import UserError

GIB = 2**30
FILES = 1_000_000
ARCHIVE = 4 * GIB  # unpacked
IN_MEMORY = 1 * GIB  # unpacked, of a tar, which can only be read from front to back


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
        try:
            with (self._path / name).open("rb") as file:
                return _bounded(file.read(limit + 1), limit, f"{self.where}/{name}")
        except OSError as error:
            raise UserError(f"{self.where}/{name} cannot be read: {error.strerror}") from None


class Zip:
    def __init__(self, path: Path):
        self.where = str(path)
        self._zip = zipfile.ZipFile(path)
        entries = [entry for entry in self._zip.infolist() if not entry.is_dir()]
        _check_names(self.where, [entry.filename for entry in entries])
        _check_total(self.where, sum(entry.file_size for entry in entries), ARCHIVE)
        self._entries = {entry.filename: entry for entry in entries}
        self.names = sorted(self._entries)

    def read(self, name: str, limit: int) -> bytes:
        entry = self._entries[name]
        _check_total(f"{self.where}: {name}", entry.file_size, limit)
        with self._zip.open(entry) as file:  # gives no more than it declares, and checks the CRC
            return file.read()


class Tar:
    """Read whole into memory, front to back, after a look at what each member declares."""

    def __init__(self, path: Path):
        self.where = str(path)
        self._members: dict[str, bytes] = {}
        total = 0
        with tarfile.open(path, "r|*") as tar:
            for member in tar:
                if member.isdir():
                    continue
                if not member.isfile():
                    raise UserError(f"{path} holds {member.name!r}, a link or a device: refused")
                _check_names(self.where, [member.name])
                total += member.size
                _check_total(self.where, total, IN_MEMORY)
                if len(self._members) >= FILES:
                    raise UserError(f"{path} holds more than {FILES:,} files: refused")
                data = tar.extractfile(member)
                assert data is not None
                self._members[member.name] = data.read()
        self.names = sorted(self._members)

    def read(self, name: str, limit: int) -> bytes:
        return _bounded(self._members[name], limit, f"{self.where}: {name}")


@contextmanager
def opened(path: Path) -> Iterator[Files]:
    """What is at `path`: a folder, a zip or a tar. A damaged archive, also one found out late, is a user's error."""
    if not path.exists():
        raise UserError(f"{path} does not exist")
    try:
        if path.is_dir():
            yield Folder(path)
        elif zipfile.is_zipfile(path):
            yield Zip(path)
        else:
            yield Tar(path)
    except (
        tarfile.TarError,
        zipfile.BadZipFile,
        zlib.error,
        LZMAError,
        EOFError,
        NotImplementedError,
        RuntimeError,  # what zipfile raises for a password
    ) as error:
        raise UserError(f"{path} is damaged or no archive that can be read (zip, tar): {error}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None


def _check_names(where: str, names: list[str]) -> None:
    if len(names) > FILES:
        raise UserError(f"{where} holds more than {FILES:,} files: refused")
    for name in names:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name:
            raise UserError(f"{where} holds {name!r}, a name that leads out of the archive: refused")


def _check_total(where: str, size: int, limit: int) -> None:
    if size > limit:
        raise UserError(f"{where} would unpack to {size / 2**20:,.0f} MiB, more than {limit / 2**20:,.0f} MiB: refused")


def _bounded(data: bytes, limit: int, where: str) -> bytes:
    if len(data) > limit:
        raise UserError(f"{where} is larger than {limit / 2**20:,.0f} MiB: refused")
    return data
