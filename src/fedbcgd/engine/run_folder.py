"""The folder of a run: its files, the rows that are added to them, and a lock for one process at a time."""

import itertools
import logging
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedbcgd.engine.loop import Outcome
from fedbcgd.engine.signals import uninterrupted
from fedbcgd.errors import UserError
from fedbcgd.files import (
    Damaged,
    add_checksum,
    as_json,
    open_regular,
    parse_json_object,
    read_regular,
    same_file,
    sync_folder,
    write_whole,
)

log = logging.getLogger("fedbcgd")

MAX_READ_BYTES = 1 << 26  # of a configuration, a summary or metrics
MAX_CHECKED_BYTES = 1 << 32  # of metrics or traffic, when `fedbcgd check` reads them
MAX_WALKED = 100_000  # folders that are searched for runs


class RunFolder:
    """The files of a run.

    Attributes:
        federation: the file that a federation on Flower writes instead of config.toml.
        label_counts: the file that says how many examples of which label each client has.
    """

    def __init__(self, path: Path):
        self.path = path
        self.config = path / "config.toml"
        self.federation = path / "federation.json"
        self.metrics = path / "metrics.jsonl"
        self.traffic = path / "traffic.jsonl"
        self.summary = path / "summary.json"
        self.label_counts = path / "label_counts.json"
        self.model = path / "model.safetensors"
        self.checkpoint = path / "checkpoint"

    def summary_values(self) -> dict[str, Any]:
        """Return the summary of a finished run.

        Raises:
            Damaged: its content is not what was written.
        """
        try:
            return parse_json_object(read_regular(self.summary, MAX_READ_BYTES))[0]
        except ValueError as error:
            raise Damaged(f"{self.summary} is damaged: {error}") from None

    def outcome(self) -> Outcome:
        """Return the outcome of a finished run."""
        return Outcome.from_summary(self.summary_values(), self.rows())

    def rows(self) -> list[dict[str, float]]:
        """Return the rows of metrics so far.

        Raises:
            UserError: this is not the folder of a run.
            Damaged: a row is not what was written.
        """
        try:
            rows, lines, _ = read_rows(read_regular(self.metrics, MAX_READ_BYTES))
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(f"{self.path}: expected the folder of a run, got one without {self.metrics.name}") from None
        except OSError as error:
            raise UserError(f"{self.metrics} cannot be read: {error.strerror}") from None
        if len(rows) < lines:
            raise Damaged(f"{self.metrics} is damaged: expected {lines} rows as written, got {len(rows)}")
        if not all(name.isprintable() and _is_number(v) for row in rows for name, v in row.items()):
            raise Damaged(f"{self.metrics} is damaged: expected numbers, got another value")
        return rows


def _is_number(value: Any) -> bool:
    """Return whether the value is a float, or an integer that fits into 64 bits."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63)


def read_rows(data: bytes, checked: bool = False) -> tuple[list[dict[str, float]], int, bool]:
    """Read the undamaged rows of metrics or traffic; null is read as NaN.

    Args:
        data: the bytes of the file.
        checked: whether each row must have a checksum; else none may have one, as in earlier versions.

    Returns:
        The rows, the number of lines, and whether the rows have checksums.
    """
    rows, lines = [], data.splitlines()
    checked = checked or any(b', "crc": ' in line for line in lines)
    for line in lines:
        try:
            row, fits = parse_json_object(line)
        except ValueError:
            continue
        if isinstance(row.get("round"), int) and (fits or not checked):
            rows.append({name: math.nan if value is None else value for name, value in row.items()})
    return rows, len(lines), checked


class JsonlFile:
    """metrics.jsonl or traffic.jsonl: cut back to its rows at a checkpoint when it is opened, and appended to.

    Rows that are lost or damaged are left out with a warning: the model does not depend on them.

    Args:
        path: the file.
        size: its bytes at the checkpoint; the rest is cut off.
        count: its rows at the checkpoint; None if the checkpoint is of an earlier version, which had no count.
        last: the round of the checkpoint.
    """

    def __init__(self, path: Path, size: int, count: int | None = None, last: int | None = None):
        self._path = path
        try:
            self._file = open_regular(path, "a+b")
            self._file.seek(0)
            data = self._file.read() if size else b""
            self.rows, lines, _ = read_rows(data[:size], count is not None)
            whole = len(data) >= size and len(self.rows) == lines and count in (lines, None)
            if not whole:  # undamaged rows may be anywhere in the file
                rows = [row for row in read_rows(data)[0] if last is None or row["round"] <= last]
                self.rows = rows[:count]
                lost = "some" if count is None else f"{count - len(self.rows)} of {count}"
                log.warning("%s is damaged: %s rows are lost, and the run continues without them", path, lost)
            self.written = len(self.rows)
            if whole and count is not None:
                self._file.truncate(size)
                sync_folder(path.parent)  # the file may be new
            else:
                self._replace("".join(map(_line, self.rows)).encode())
        except OSError as error:
            raise UserError(f"{path} could not be opened: {error.strerror}") from error

    @classmethod
    def resumed(cls, path: Path, before: dict[str, Any] | None) -> "JsonlFile":
        """Open the file as it was at the checkpoint `before`; empty if there is no checkpoint."""
        if before is None:
            return cls(path, 0, 0)
        return cls(path, before.get(path.stem, 0), before.get(f"{path.stem}_rows"), before["round"])

    def append(self, row: dict[str, float]) -> None:
        """Add a row."""
        try:
            with uninterrupted():
                self._file.write(_line(row).encode())
                self._file.flush()
                self.written += 1
        except OSError as error:
            raise UserError(f"{self._path} could not be written: {error.strerror}") from error

    def kept(self) -> dict[str, int]:
        """Return the size and the number of rows, for a checkpoint; first restore a file that was removed or replaced."""
        if not same_file(self._file.fileno(), self._path):
            log.warning("%s was removed or replaced during the run: it is written again", self._path)
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
        """Make what was written durable; return its bytes."""
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
    return add_checksum(as_json(row)) + "\n"


class Busy(UserError):
    """Another process uses the folder."""


@contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    """Hold the lock of a folder within the block; it is released however the process ends.

    Raises:
        Busy: another process holds it.
        UserError: the folder cannot be written to.
    """
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
            raise Busy(
                f"{path}: expected a folder that no other process uses, got one that is locked; wait until that process "
                "ends, or choose another folder"
            )
        yield


def remove_temporary_files(folder: RunFolder) -> None:
    """Remove temporary files that a killed process left behind."""
    for place in (folder.path, folder.checkpoint):
        for stem, suffix in (
            ("server", ".safetensors"),
            ("model", ".safetensors"),
            ("config", ".toml"),
            ("summary", ".json"),
            ("metrics", ".jsonl"),
            ("traffic", ".jsonl"),
            ("clients", ".bin"),
            ("label_counts", ".json"),
            ("federation", ".json"),
            *((figure, kind) for figure in ("curve", "label_counts") for kind in (".png", ".svg")),
        ):
            for path in place.glob(f".{stem}-*{suffix}"):
                path.unlink(missing_ok=True)


def find_runs(places: Sequence[Path]) -> list[Path]:
    """Return the run folders in these places, each once, sorted by path within each place.

    A folder that several paths lead to is returned with the first of them.

    Raises:
        UserError: one of the places is not a folder.
    """
    runs: dict[Path, Path] = {}
    for place in places:
        if not place.is_dir():
            raise UserError(f"{place}: expected the folder of a run, or one that holds several, got no folder")
        inside = []
        for root, names, files in itertools.islice(os.walk(place), MAX_WALKED):  # links are not followed
            entries = {*names, *files}
            names[:] = [n for n in names if not n.startswith(".") and n not in ("checkpoint", "tensorboard")]
            if entries & {"metrics.jsonl", "summary.json"} or {"config.toml", ".lock"} <= entries:
                inside.append(Path(root))
        for folder in sorted(inside):
            runs.setdefault(folder.resolve(), folder)
    return list(runs.values())
