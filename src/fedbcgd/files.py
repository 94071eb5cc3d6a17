"""Files are written whole or not at all, with a checksum inside; what is opened in a run folder is a regular file, never a
link.

Checksums find damage, not forgery: CRC-32, of tensors over sums of their words, which is as fast as memory is read.
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
    """A file is not what was written."""


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
    return UserError(
        f"{path}: expected a regular file, got a link, a folder or a device, which is left alone; remove it"
    )


def refuse_link(folder: Path) -> None:
    """A folder inside a run folder is no link to elsewhere."""
    if folder.is_symlink():
        raise UserError(f"{folder}: expected a folder, got a link, which is not followed; remove it")


def same_file(handle: int, path: Path) -> bool:
    """Whether `path` still names the open file, or was removed or replaced."""
    try:
        found, opened = os.lstat(path), os.fstat(handle)
    except OSError:
        return False
    return (found.st_dev, found.st_ino) == (opened.st_dev, opened.st_ino)


def remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{path} could not be removed: {error.strerror}") from error


def write_whole(path: Path, write: Callable[[Path], None], before: Path | None = None) -> None:
    """Let `write` fill a temporary file beside `path`, make it durable, and put it in place in one step.

    before: where to keep what was in its place.
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
            if before is not None and path.exists():
                path.replace(before)
            temporary.replace(path)
            sync_folder(path.parent)
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


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table of rows whose keys may differ."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def sealed(text: str) -> str:
    """The text of a JSON object or a TOML file with a checksum of itself at its end: a key "crc", or a comment."""
    if text.startswith("{"):
        text = text.rstrip().removesuffix("}").rstrip()
        return f'{text}, "crc": {zlib.crc32(text.encode())}}}'
    return f"{text}# crc: {zlib.crc32(text.encode())}\n"


def vouched(data: bytes) -> bool:
    """Whether a checksum that `sealed` put there vouches for this; False where there is none, as in files of earlier days.

    Raises:
        Damaged: it does not fit.
    """
    before, after = (b', "crc": ', b"}") if data.startswith(b"{") else (b"# crc: ", b"\n")
    text, found, end = data.rpartition(before)
    if found and end.rstrip(b"\n").removesuffix(after) != b"%d" % zlib.crc32(text):
        raise Damaged("its checksum does not fit")
    return bool(found)


def unsealed(data: bytes) -> tuple[dict[str, Any], bool]:
    """The JSON object in a line or file, without its checksum; and whether it had one.

    Raises:
        ValueError: it is damaged.
    """
    checked = vouched(data)
    try:
        made = json.loads(data)
    except RecursionError:
        made = None
    if not isinstance(made, dict):
        raise Damaged("it holds no JSON object")
    made.pop("crc", None)
    return made, checked


CHECKSUM = "checksum"  # among the metadata of a safetensors file
_SECTOR = 512  # bytes


def checksum(tensors: "Mapping[str, Tensor]", metadata: Mapping[str, str]) -> str:
    """Of all that a safetensors file says."""
    import torch

    said = {key: value for key, value in metadata.items() if key != CHECKSUM}
    crc = zlib.crc32(json.dumps(said, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        crc = zlib.crc32(f"{name} {tensor.dtype} {list(tensor.shape)}".encode(), crc)
        crc = checksum_of(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8), crc)
    return f"{crc:08x}"


def checksum_of(data: "Tensor", crc: int = 0) -> int:
    """Of a tensor of bytes: the CRC of the sums of the words in each sector, eight times as fast as that of the bytes.

    It finds any single change, and sectors that changed places.
    """
    import torch

    if data.storage_offset() % 8:  # words are read from multiples of their size only
        data = data.clone()
    whole = len(data) // _SECTOR * _SECTOR
    if whole:
        sums = data[:whole].view(torch.int64).view(-1, _SECTOR // 8).sum(1)
        crc = zlib.crc32(sums.numpy().data, crc)
    return zlib.crc32(data[whole:].numpy().data, crc)


def write_tensors(
    path: Path, tensors: "dict[str, Tensor]", metadata: dict[str, str] | None = None, before: Path | None = None
) -> None:
    """A safetensors file with a checksum. before: where to keep what was in its place."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    metadata = (metadata or {}) | {CHECKSUM: checksum(tensors, metadata or {})}

    def write(temporary: Path) -> None:
        try:
            save_file(tensors, temporary, metadata)
        except SafetensorError as error:  # it wraps what the disk said
            raise OSError(str(error).removeprefix("Error while serializing: ")) from error

    write_whole(path, write, before)


def read_tensors(path: Path) -> "tuple[dict[str, Tensor], dict[str, str], bool]":
    """The tensors of a safetensors file, mapped; its metadata; whether a checksum vouches for both.

    Raises:
        Damaged: it does not fit, or is no safetensors file.
        OSError: it is not there, or cannot be read.
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
    said = metadata.pop(CHECKSUM, None)
    if said is not None and said != checksum(tensors, metadata):
        raise Damaged(f"{path} is damaged: its checksum does not fit")
    return tensors, metadata, said is not None


def make_folder(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path} could not be made: {error.strerror or error}") from error
    if not os.access(path, os.W_OK):
        raise UserError(f"{path} cannot be written to: choose another folder")
    return path


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    if os.name != "posix":
        return  # Windows knows no fsync of a folder
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
