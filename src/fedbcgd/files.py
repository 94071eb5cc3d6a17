"""Writing files atomically, opening regular files only, and checksums.

A file is written under a temporary name and renamed, so that a crash leaves the old or the new one. What is opened in a
run folder must be a regular file, never a link. Checksums (CRC-32) find damage, not forgery.
"""

import csv
import errno
import io
import json
import math
import os
import stat
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from fedbcgd.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


class Damaged(UserError):
    """The content of a file is not what was written."""


_FLAGS = {
    "rb": os.O_RDONLY,
    "r+b": os.O_RDWR,
    "a+b": os.O_RDWR | os.O_CREAT | os.O_APPEND,
    "wb": os.O_WRONLY | os.O_CREAT,
}
# Do not follow links, and do not block: opening a FIFO without a writer would wait for ever.
_SAFE_FLAGS = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_BINARY"))
_NOT_REGULAR = (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENODEV, errno.EOPNOTSUPP)


def open_regular(path: Path, mode: str = "rb") -> IO[bytes]:
    """Open a regular file, and nothing else.

    Args:
        path: the file. The path to its folder may contain links, but the file itself must not be one.
        mode: "rb", "r+b", "a+b" or "wb", as for `open`. A file with a hard link is not opened for writing, since that
            would change the other name's file too.

    Returns:
        The open file.

    Raises:
        UserError: it is a link, a folder, a FIFO, a socket or a device.
        OSError: it does not exist, or cannot be opened.
    """
    try:
        handle = os.open(path, _FLAGS[mode] | _SAFE_FLAGS, 0o644)
    except OSError as error:
        if error.errno in _NOT_REGULAR:
            raise _not_regular(path) from None
        raise
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise _not_regular(path)
        if mode != "rb" and status.st_nlink > 1:
            raise UserError(f"{path} has a second name (a hard link), and both would be written to: copy it instead")
        if mode == "wb":
            os.ftruncate(handle, 0)
        return os.fdopen(handle, mode)
    except BaseException:
        os.close(handle)
        raise


def read_regular(path: Path, limit: int) -> bytes:
    """Read a regular file.

    Args:
        path: the file.
        limit: the most bytes that are read.

    Returns:
        The whole content.

    Raises:
        UserError: it is larger than `limit`, or not a regular file.
        OSError: it does not exist, or cannot be read.
    """
    with open_regular(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise UserError(f"{path}: expected a file of at most {limit:,} bytes, got a larger one, which is not read")
    return data


def _not_regular(path: Path) -> UserError:
    return UserError(
        f"{path}: expected a regular file, got a link, a folder or a device, which is left alone; remove it"
    )


def refuse_link(folder: Path) -> None:
    """Check that a folder inside a run folder is not a link.

    Raises:
        UserError: it is one.
    """
    if folder.is_symlink():
        raise UserError(f"{folder}: expected a folder, got a link, which is not followed; remove it")


def same_file(handle: int, path: Path) -> bool:
    """Return whether `path` still names the open file, that is, was neither removed nor replaced."""
    try:
        at_path, opened = os.lstat(path), os.fstat(handle)
    except OSError:
        return False
    return (at_path.st_dev, at_path.st_ino) == (opened.st_dev, opened.st_ino)


def remove(path: Path) -> None:
    """Remove a file if it exists.

    Raises:
        UserError: it cannot be removed.
    """
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{path} could not be removed: {error.strerror}") from error


def write_whole(path: Path, write: Callable[[Path], None], backup: Path | None = None) -> None:
    """Write a file atomically: as a temporary file in the same folder, flushed to the disk and renamed.

    Args:
        path: the file.
        write: is called with the path of the temporary file, and fills it.
        backup: where the previous file is moved to; None: it is replaced.

    Raises:
        UserError: it cannot be written; the previous file is then still in place.
    """
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix)
        os.close(handle)
        temporary = Path(name)
        try:
            write(temporary)
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            temporary.chmod(0o644)
            if backup is not None and path.exists():
                path.replace(backup)
            temporary.replace(path)
            sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{path} could not be written: {error.strerror or error}") from error


def read_text(path: Path, expected: str, remedy: str = "") -> str:
    """Read a UTF-8 text file that a user has named.

    Args:
        path: the file.
        expected: what it should be, for messages.
        remedy: added to the message if there is no such file.

    Raises:
        UserError: it does not exist, cannot be read, or is no text.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path}: expected {expected}, got none{remedy}") from None
    except IsADirectoryError:
        raise UserError(f"{path}: expected {expected}, got a folder") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: expected UTF-8 text, got {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file atomically, see `write_whole`."""

    def write(temporary: Path) -> None:
        temporary.write_text(text, encoding="utf-8")

    write_whole(path, write)


def as_json(value: Any, indent: int | None = None) -> str:
    """Return a value as strict JSON, with null in place of NaN and infinities."""

    def finite(v: Any) -> Any:
        if isinstance(v, float) and not math.isfinite(v):
            return None
        if isinstance(v, dict):
            return {k: finite(item) for k, item in v.items()}
        return [finite(item) for item in v] if isinstance(v, (list, tuple)) else v

    return json.dumps(finite(value), indent=indent, allow_nan=False)


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as CSV, with a column for each key that any row has; cells of keys that a row lacks are empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def add_checksum(text: str) -> str:
    """Append a checksum to the text of a JSON object, as a key "crc", or of a TOML file, as a comment."""
    if text.startswith("{"):
        text = text.rstrip().removesuffix("}").rstrip()
        return f'{text}, "crc": {zlib.crc32(text.encode())}}}'
    return f"{text}# crc: {zlib.crc32(text.encode())}\n"


def verify_checksum(data: bytes) -> bool:
    """Compare a text with the checksum that `add_checksum` appended to it.

    Returns:
        Whether it has a checksum; files of the first versions have none.

    Raises:
        Damaged: the checksum does not match.
    """
    prefix, suffix = (b', "crc": ', b"}") if data.startswith(b"{") else (b"# crc: ", b"\n")
    text, separator, end = data.rpartition(prefix)
    if separator and end.rstrip(b"\n").removesuffix(suffix) != b"%d" % zlib.crc32(text):
        raise Damaged("its checksum does not match")
    return bool(separator)


def parse_json_object(data: bytes) -> tuple[dict[str, Any], bool]:
    """Parse the JSON object in a line or file, and verify its checksum if it has one.

    Returns:
        The object without its checksum, and whether it had one.

    Raises:
        ValueError: it is damaged.
    """
    has_checksum = verify_checksum(data)
    try:
        value = json.loads(data)
    except RecursionError:
        value = None
    if not isinstance(value, dict):
        raise Damaged("it holds no JSON object")
    value.pop("crc", None)
    return value, has_checksum


CHECKSUM = "checksum"  # key in the metadata of a safetensors file
_SECTOR = 512  # bytes


def tensors_checksum(tensors: "Mapping[str, Tensor]", metadata: Mapping[str, str]) -> str:
    """Compute the checksum of everything in a safetensors file: metadata, names, types, shapes and values."""
    import torch

    others = {key: value for key, value in metadata.items() if key != CHECKSUM}
    crc = zlib.crc32(json.dumps(others, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        crc = zlib.crc32(f"{name} {tensor.dtype} {list(tensor.shape)}".encode(), crc)
        crc = bytes_checksum(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8), crc)
    return f"{crc:08x}"


def bytes_checksum(data: "Tensor", crc: int = 0) -> int:
    """Compute the checksum of a uint8 tensor: the CRC of the sums of 64-bit words over sectors of 512 bytes.

    It is eight times as fast as the CRC of the bytes, and detects any single changed word and swapped sectors.

    Args:
        data: a flat tensor on the CPU.
        crc: the checksum of the bytes before it.
    """
    import torch

    if data.storage_offset() % 8:  # a view as int64 needs an aligned start
        data = data.clone()
    whole = len(data) // _SECTOR * _SECTOR
    if whole:
        sums = data[:whole].view(torch.int64).view(-1, _SECTOR // 8).sum(1)
        crc = zlib.crc32(sums.numpy().data, crc)
    return zlib.crc32(data[whole:].numpy().data, crc)


def write_tensors(
    path: Path, tensors: "dict[str, Tensor]", metadata: dict[str, str] | None = None, backup: Path | None = None
) -> None:
    """Write a safetensors file with a checksum, atomically.

    Args:
        path: the file.
        tensors: the tensors by name.
        metadata: texts by name that are stored with the tensors.
        backup: where the previous file is moved to; None: it is replaced.

    Raises:
        UserError: it cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    metadata = (metadata or {}) | {CHECKSUM: tensors_checksum(tensors, metadata or {})}

    def write(temporary: Path) -> None:
        try:
            save_file(tensors, temporary, metadata)
            _sort_metadata(temporary)
        except SafetensorError as error:  # wraps the operating system's error
            raise OSError(str(error).removeprefix("Error while serializing: ")) from error

    write_whole(path, write, backup)


def _sort_metadata(path: Path) -> None:
    """Sort the metadata of a safetensors file by name: the library writes it in another order each time."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        if len(text) <= size:
            file.seek(8)
            file.write(text.ljust(size))


def read_tensors(path: Path) -> "tuple[dict[str, Tensor], dict[str, str], bool]":
    """Read a safetensors file, and verify its checksum if it has one.

    Returns:
        The tensors, mapped into memory; the metadata; and whether the file has a checksum.

    Raises:
        Damaged: the checksum does not match, or it is not a safetensors file.
        OSError: it does not exist, or cannot be read.
    """
    from safetensors import safe_open

    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except OSError:
        raise
    except Exception as error:  # a damaged header fails in many ways
        raise Damaged(f"{path} is damaged: {error}") from None
    expected = metadata.pop(CHECKSUM, None)
    if expected is not None and expected != tensors_checksum(tensors, metadata):
        raise Damaged(f"{path} is damaged: its checksum does not match")
    return tensors, metadata, expected is not None


def make_folder(path: Path) -> Path:
    """Create a folder and its parents, if they do not exist.

    Returns:
        The same path.

    Raises:
        UserError: it cannot be created, or cannot be written to.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path} could not be created: {error.strerror or error}") from error
    if not os.access(path, os.W_OK):
        raise UserError(f"{path} cannot be written to: choose another folder")
    return path


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk, so that a rename survives a power failure."""
    if os.name != "posix":
        return  # Windows cannot fsync a folder
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
