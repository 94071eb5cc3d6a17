"""Files are written whole or not at all; what is read or written in a run folder is a regular file, never a link."""

import errno
import json
import math
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from fedbcgd.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


_HOW = {
    "rb": os.O_RDONLY,
    "r+b": os.O_RDWR,
    "a+b": os.O_RDWR | os.O_CREAT | os.O_APPEND,
    "wb": os.O_WRONLY | os.O_CREAT,
}
# Neither a link is followed nor is anything waited for: a FIFO without a writer would block for ever.
_SAFELY = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_BINARY"))
_NOT_REGULAR = (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENODEV, errno.EOPNOTSUPP)


def open_regular(path: Path, mode: str = "rb") -> IO[bytes]:
    """Open a regular file; whatever else bears this name is left alone.

    Args:
        path: of the file. The folder it is in may be reached by a link, the file itself may not.
        mode: "rb", "r+b", "a+b" or "wb", as for `open`. To be written to, a file may have no second name: that would
            change the file of the other name too.

    Raises:
        UserError: it is a link, a folder, a FIFO, a socket or a device.
        OSError: it is not there, or cannot be opened.
    """
    try:
        handle = os.open(path, _HOW[mode] | _SAFELY, 0o644)
    except OSError as error:
        if error.errno in _NOT_REGULAR:
            raise _not_regular(path) from None
        raise
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise _not_regular(path)
        if mode != "rb" and found.st_nlink > 1:
            raise UserError(f"{path} has a second name (a hard link), and both would be written to: copy it instead")
        if mode == "wb":
            os.ftruncate(handle, 0)
        return os.fdopen(handle, mode)
    except BaseException:
        os.close(handle)
        raise


def read_regular(path: Path, limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes.

    Raises:
        UserError: it is larger, or no regular file.
        OSError: it is not there, or cannot be read.
    """
    with open_regular(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise UserError(f"{path} is larger than {limit:,} bytes, more than is expected here: it is not read")
    return data


def _not_regular(path: Path) -> UserError:
    return UserError(f"{path}: expected a regular file, got a link, a folder or a device, which is left alone; remove it")


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary file beside `path`, make it durable, and put it in place in one step."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix)
        os.close(handle)
        temporary = Path(name)
        try:
            write(temporary)
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            temporary.chmod(0o644)
            temporary.replace(path)
            _sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{path} could not be written: {error.strerror or error}") from error


def write_text(path: Path, text: str) -> None:
    def write(temporary: Path) -> None:
        temporary.write_text(text, encoding="utf-8")

    write_whole(path, write)


def as_json(value: Any, indent: int | None = None) -> str:
    """Strict JSON: what is not a number is null."""

    def plain(v: Any) -> Any:
        if isinstance(v, float) and not math.isfinite(v):
            return None
        if isinstance(v, dict):
            return {k: plain(item) for k, item in v.items()}
        return [plain(item) for item in v] if isinstance(v, (list, tuple)) else v

    return json.dumps(plain(value), indent=indent, allow_nan=False)


def write_tensors(path: Path, tensors: "dict[str, Tensor]", metadata: dict[str, str] | None = None) -> None:
    """A safetensors file."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    def write(temporary: Path) -> None:
        try:
            save_file(tensors, temporary, metadata)
        except SafetensorError as error:  # it wraps what the disk said
            raise OSError(str(error).removeprefix("Error while serializing: ")) from error

    write_whole(path, write)


def make_folder(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path} could not be made: {error.strerror or error}") from error
    if not os.access(path, os.W_OK):
        raise UserError(f"{path} cannot be written to: choose another folder")
    return path


def _sync_folder(folder: Path) -> None:
    if os.name != "posix":
        return  # Windows knows no fsync of a folder
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
