"""The folder of a run: its files, rows that are written line by line, and the lock that one process at a time holds."""

import itertools
import logging
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbcgd.engine.loop import Outcome
from fedbcgd.engine.signals import uninterrupted
from fedbcgd.errors import UserError
from fedbcgd.files import (
    Damaged,
    as_json,
    open_regular,
    read_regular,
    same_file,
    sealed,
    sync_folder,
    unsealed,
    write_whole,
)

log = logging.getLogger("fedbcgd")

LARGEST = 1 << 26  # bytes of a configuration or a summary
MOST_WALKED = 100_000  # folders that are looked into for runs
MOST = 1 << 32  # bytes of metrics or traffic


@dataclass(frozen=True)
class RunFolder:
    """Where everything of a run is."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def federation(self) -> Path:
        """What a federation on Flower has instead of a configuration."""
        return self.path / "federation.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def traffic(self) -> Path:
        return self.path / "traffic.jsonl"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def label_counts(self) -> Path:
        """How many examples of which label each client has."""
        return self.path / "holdings.json"

    @property
    def model(self) -> Path:
        return self.path / "model.safetensors"

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint"

    def summary_values(self) -> dict[str, Any]:
        try:
            return unsealed(read_regular(self.summary, LARGEST))[0]
        except ValueError as error:
            raise Damaged(f"{self.summary} is damaged: {error}") from None

    def outcome(self) -> Outcome:
        """What a finished run left."""
        return Outcome.from_summary(self.summary_values(), self.rows())

    def rows(self) -> list[dict[str, float]]:
        """The metrics, as far as the run has come."""
        try:
            rows, lines, _ = read_rows(read_regular(self.metrics, LARGEST))
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(f"{self.path} is no folder of a run: it has no {self.metrics.name}") from None
        except OSError as error:
            raise UserError(f"{self.metrics} cannot be read: {error.strerror}") from None
        if len(rows) < lines:
            raise Damaged(f"{self.metrics} is damaged: {lines - len(rows)} of its {lines} rows")
        if not all(name.isprintable() and _is_number(v) for row in rows for name, v in row.items()):
            raise Damaged(f"{self.metrics} is damaged: it holds what is no number")
        return rows


def _is_number(value: Any) -> bool:
    """Whether it is one that can be counted with: a whole number larger than any float cannot."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63)


def read_rows(data: bytes, checked: bool = False) -> tuple[list[dict[str, float]], int, bool]:
    """The rows of metrics or traffic that are whole, null read as what is not a number; how many lines there are; whether
    the rows have checksums.

    checked: whether each must have one; else it is enough if none has, as in earlier days.
    """
    rows, lines = [], data.splitlines()
    checked = checked or any(b', "crc": ' in line for line in lines)
    for line in lines:
        try:
            row, fits = unsealed(line)
        except ValueError:
            continue
        if isinstance(row.get("round"), int) and (fits or not checked):
            rows.append({name: math.nan if value is None else value for name, value in row.items()})
    return rows, len(lines), checked


class JsonlFile:
    """metrics.jsonl: a row per evaluation, cut back to the checkpoint when a run goes on. traffic.jsonl likewise.

    Rows that are lost or damaged are left out, which is said: the model does not depend on them.

    Args:
        path: of the file.
        size: bytes that the checkpoint knows of; what follows is cut off.
        count: rows that it knows of; None where it does not say, as in earlier days.
        last: its round.
    """

    def __init__(self, path: Path, size: int, count: int | None = None, last: int | None = None):
        self._path = path
        try:
            self._file = open_regular(path, "a+b")
            self._file.seek(0)
            data = self._file.read() if size else b""
            self.rows, lines, _ = read_rows(data[:size], count is not None)
            whole = len(data) >= size and len(self.rows) == lines and count in (lines, None)
            if not whole:  # lines may have moved: what is left of them stands anywhere
                found = [row for row in read_rows(data)[0] if last is None or row["round"] <= last]
                self.rows = found[:count]
                lost = "some" if count is None else f"{count - len(self.rows)} of {count}"
                log.warning("%s is damaged: %s rows are lost, and the run goes on without them", path, lost)
            self.written = len(self.rows)
            if whole and count is not None:
                self._file.truncate(size)
                sync_folder(path.parent)  # it may be new
            else:
                self._replace("".join(map(_line, self.rows)).encode())
        except OSError as error:
            raise UserError(f"{path} could not be opened: {error.strerror}") from error

    @classmethod
    def resumed(cls, path: Path, before: dict[str, Any] | None) -> "JsonlFile":
        """As the checkpoint `before` knows it; empty without one."""
        if before is None:
            return cls(path, 0, 0)
        return cls(path, before.get(path.stem, 0), before.get(f"{path.stem}_rows"), before["round"])

    def append(self, row: dict[str, float]) -> None:
        try:
            with uninterrupted():
                self._file.write(_line(row).encode())
                self._file.flush()
                self.written += 1
        except OSError as error:
            raise UserError(f"{self._path} could not be written: {error.strerror}") from error

    def kept(self) -> dict[str, int]:
        """What a checkpoint has to know. A file that was removed or replaced in the middle of the run is put back first."""
        if not same_file(self._file.fileno(), self._path):
            log.warning("%s was removed or replaced in the middle of the run: it is written anew", self._path)
            self._file.seek(0)
            self._replace(self._file.read())
        return {self._path.stem: self.size, f"{self._path.stem}_rows": self.written}

    def _replace(self, data: bytes) -> None:
        def write(temporary: Path) -> None:
            temporary.write_bytes(data)

        self._file.close()
        write_whole(self._path, write)
        self._file = open_regular(self._path, "a+b")

    def sync(self) -> int:
        """Make what was written durable; its length."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise UserError(f"{self._path} could not be written: {error.strerror}") from error
        return self.size

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return os.fstat(self._file.fileno()).st_size

    def __enter__(self) -> "JsonlFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _line(row: dict[str, float]) -> str:
    return sealed(as_json(row)) + "\n"


@contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    """One process at a time works in a folder; the lock goes with the process, however it ends."""
    from filelock import lock_descriptor

    try:
        file = open_regular(path / ".lock", "a+b")
    except OSError as error:
        raise UserError(f"{path} cannot be written to: {error.strerror}; choose another folder") from None
    with file:
        try:
            locked = lock_descriptor(file.fileno(), blocking=False)
        except OSError as error:
            raise UserError(f"{path} cannot be locked: {error.strerror}; choose a folder on another disk") from None
        if not locked:
            raise UserError(f"another process is at work in {path}")
        yield


def sweep_up(folder: RunFolder) -> None:
    """Temporary files that a kill in the middle of writing left behind."""
    for place in (folder.path, folder.checkpoint):
        for stem, suffix in (
            ("server", ".safetensors"),
            ("model", ".safetensors"),
            ("config", ".toml"),
            ("summary", ".json"),
            ("metrics", ".jsonl"),
            ("traffic", ".jsonl"),
            ("clients", ".bin"),
            ("holdings", ".json"),
            ("federation", ".json"),
            *((figure, kind) for figure in ("curve", "holdings") for kind in (".png", ".svg")),
        ):
            for path in place.glob(f".{stem}-*{suffix}"):
                path.unlink(missing_ok=True)


def find_runs(places: Sequence[Path]) -> list[Path]:
    """The run folders in these places, each once, in the order of their names.

    One that is reached by several paths, as one relative and one absolute or through a link, bears the first of them.
    """
    found: dict[Path, Path] = {}
    for place in places:
        if not place.is_dir():
            raise UserError(f"{place} is no folder: wanted is the folder of a run, or one that holds several")
        inside = []
        for root, names, files in itertools.islice(os.walk(place), MOST_WALKED):  # which follows no links
            inner = {*names, *files}
            names[:] = [n for n in names if not n.startswith(".") and n not in ("checkpoint", "tensorboard")]
            if inner & {"metrics.jsonl", "summary.json"} or {"config.toml", ".lock"} <= inner:
                inside.append(Path(root))
        for folder in sorted(inside):
            found.setdefault(folder.resolve(), folder)
    return list(found.values())
