"""Folders and archives, read in place: nothing is unpacked to the disk, so an archive cannot write files anywhere."""

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
MAX_FILES = 1_000_000
MAX_UNPACKED = 4 * GIB  # bytes of a zip, unpacked
MAX_IN_MEMORY = 1 * GIB  # bytes of a tar, unpacked: it can only be read from front to back, so it is kept in memory
MAX_HEADER = 2 * 2**20  # bytes of the header of one member of a tar
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class Files(Protocol):
    """Files by their names.

    Attributes:
        where: the path of the folder or archive, for messages.
        names: the names of the files: sorted, relative, with forward slashes.
    """

    where: str
    names: list[str]

    def read(self, name: str, limit: int) -> bytes:
        """Read a whole file.

        Raises:
            UserError: it is larger than `limit` bytes, or cannot be read.
        """


class Folder:
    """The files in a folder and its subfolders."""

    def __init__(self, path: Path):
        self.where = str(path)
        self._path = path
        self.names = []
        for file in path.rglob("*"):
            if file.is_file():
                self.names.append(file.relative_to(path).as_posix())
            if len(self.names) > MAX_FILES:
                raise UserError(f"{path}: expected at most {MAX_FILES:,} files, got more")
        self.names.sort()

    def read(self, name: str, limit: int) -> bytes:
        file = self._path / name
        with _readable(file):
            _check_size(str(file), file.stat().st_size, limit)
            return file.read_bytes()


class Zip:
    """The files in a zip archive.

    Args:
        path: the archive.
        limit: the most bytes that all files together may have, unpacked.
    """

    def __init__(self, path: Path, limit: int = MAX_UNPACKED):
        self.where = str(path)
        self._zip = zipfile.ZipFile(path)
        entries = [entry for entry in self._zip.infolist() if not entry.is_dir()]
        _check_names(self.where, [entry.filename for entry in entries])
        _check_size(self.where, sum(entry.file_size for entry in entries), limit)
        if any(entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for entry in entries):
            raise UserError(f"{path}: expected no compression or deflate, got another; pack it again")
        self._entries = {entry.filename: entry for entry in entries}
        self.names = sorted(self._entries)

    def read(self, name: str, limit: int) -> bytes:
        entry = self._entries[name]
        _check_size(f"{self.where}: {name}", entry.file_size, limit)
        with _readable(f"{self.where}: {name}"), self._zip.open(entry) as file:
            return file.read(entry.file_size)  # no more than the archive declares


class Tar:
    """The files in a tar archive, all read into memory; the size of each is checked before it is read."""

    def __init__(self, path: Path):
        self.where = str(path)
        self._members: dict[str, bytes] = {}
        total = count = 0
        with _decompressed(path) as file:
            stream: Any = _BoundedStream(file, self.where)
            with tarfile.open(fileobj=stream, mode="r|", tarinfo=_StrictHeader) as tar:
                while (member := tar.next()) is not None:
                    tar.members = []  # type: ignore[attr-defined]  # tarfile would keep all headers in memory
                    count += 1
                    if count > MAX_FILES:
                        raise UserError(f"{path}: expected at most {MAX_FILES:,} files, got more")
                    if member.isfile() and not member.issparse():
                        _check_names(self.where, [member.name])
                        total += member.size
                        _check_size(self.where, total, MAX_IN_MEMORY)
                        stream.allow(member.size)
                        data = tar.extractfile(member)
                        assert data is not None
                        self._members[member.name] = data.read()
                    elif not member.isdir():
                        raise UserError(
                            f"{path}: expected files and folders, got {member.name!r}, a link, a device or a sparse "
                            "file; pack it without"
                        )
                    stream.allow(MAX_HEADER)
            while stream.read(tarfile.RECORDSIZE):
                pass  # to the end, where the compression has its checksum
        self.names = sorted(self._members)

    def read(self, name: str, limit: int) -> bytes:
        _check_size(f"{self.where}: {name}", len(self._members[name]), limit)
        return self._members[name]


class _StrictHeader(tarfile.TarInfo):
    """A header that raises an error if it is damaged; tarfile takes damage for the end of the archive."""

    @classmethod
    def frombuf(cls, buf: Any, encoding: Any, errors: Any) -> Any:
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if len(buf) == tarfile.BLOCKSIZE and not any(buf):
                raise  # a block of zeros is the end of the archive
            raise tarfile.ReadError(str(error)) from None


class _BoundedStream:
    """The bytes of a tar, limited in number between two calls of `allow`, since headers can be decompression bombs."""

    def __init__(self, file: IO[bytes], where: str):
        self._file, self._where = file, where
        self.allow(MAX_HEADER)

    def allow(self, size: int) -> None:
        self._left = size + 2 * tarfile.RECORDSIZE  # tarfile reads whole records

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise UserError(f"{self._where}: expected headers of at most {MAX_HEADER >> 20} MiB, got more")
        return data


def _decompressed(path: Path) -> IO[bytes]:
    """Open a file, decompressed if it is gzip, bzip2 or xz."""
    with path.open("rb") as file:
        magic = file.read(6)
    if magic.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(path)  # type: ignore[return-value]
    if magic.startswith(b"BZh"):
        return bz2.BZ2File(path)
    return lzma.LZMAFile(path) if magic == b"\xfd7zXZ\0" else path.open("rb")


def open_files(path: Path) -> Files:
    """Open a folder, a zip or a tar.

    Args:
        path: the folder or archive.

    Returns:
        Its files.

    Raises:
        UserError: it does not exist, cannot be read, is damaged, or has more or larger files than the limits above.
    """
    with _readable(path):
        if path.is_dir():
            return Folder(path)
        if not path.is_file():
            raise UserError(
                f"{path}: expected a file or a folder, got "
                f"{'something else' if path.exists() else 'none: it does not exist'}"
            )
        return Zip(path) if zipfile.is_zipfile(path) else Tar(path)


@contextmanager
def _readable(where: Path | str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{where} cannot be read: {error.strerror or error}") from None
    except Exception as error:  # damaged bytes can raise anything
        reason = str(error) or type(error).__name__
        raise UserError(
            f"{where}: expected a folder, a zip, a tar or an .npz file, got something else or a damaged file: {reason}"
        ) from None


def _check_names(where: str, names: list[str]) -> None:
    if len(names) > MAX_FILES:
        raise UserError(f"{where}: expected at most {MAX_FILES:,} files, got more")
    for name in names:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name:
            raise UserError(f"{where}: expected names inside the archive, got {name!r}, which leads out of it")
        if _CONTROL.search(name):  # messages with names are printed on terminals
            raise UserError(f"{where}: expected printable names, got {name!r}")


def _check_size(where: str, size: int, limit: int) -> None:
    if size > limit:
        raise UserError(f"{where}: expected at most {limit / 2**20:,.0f} MiB, got {size / 2**20:,.0f} MiB")
