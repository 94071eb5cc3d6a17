"""Files are written whole or not at all."""

import json
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbcgd.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


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
