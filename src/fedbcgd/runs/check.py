"""Finding damaged files in run folders, for `fedbcgd check`."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedbcgd.engine import checkpoint
from fedbcgd.engine.run_folder import MAX_CHECKED_BYTES, MAX_READ_BYTES, RunFolder, find_runs, read_rows
from fedbcgd.errors import UserError
from fedbcgd.files import bytes_checksum, open_regular, parse_json_object, read_regular, read_tensors, verify_checksum

WHOLE, DAMAGED, MISSING, UNVERIFIED = "whole", "damaged", "missing", "unverified"  # states of a file


@dataclass(frozen=True)
class Finding:
    """The state of one file.

    Attributes:
        file: its path relative to the run folder.
        state: WHOLE, DAMAGED, MISSING, or UNVERIFIED if it has no checksum.
        note: more about a damaged file, such as "3 of 5 rows are damaged".
    """

    file: str
    state: str
    note: str = ""

    @property
    def bad(self) -> bool:
        """Whether the file is damaged or missing."""
        return self.state in (DAMAGED, MISSING)


def check(path: Path) -> list[Finding]:
    """Check the files of a run.

    Args:
        path: the run folder.

    Returns:
        A finding for each file that exists or should exist. Figures are left out, since they can be drawn again.
    """
    return _Check(RunFolder(path)).findings


class _Check:
    def __init__(self, folder: RunFolder):
        self.findings: list[Finding] = []
        self._folder = folder
        self._any_checksum = False
        summary = self._try(folder.summary, self._object)
        saved = self._checkpoints()
        flower = "clients_in_all" in saved or "flower" in [(summary or {}).get(key) for key in ("backend", "carrier")]
        was_begun = bool(saved or summary)
        self._try(
            folder.config, lambda path: verify_checksum(read_regular(path, MAX_READ_BYTES)), was_begun and not flower
        )
        self._try(folder.federation, self._object)
        earlier = folder.path / "holdings.json"  # the name of label_counts.json in earlier versions
        self._try(folder.label_counts if folder.label_counts.exists() else earlier, self._object)
        for file in (folder.metrics, folder.traffic):
            self._try(file, lambda path: self._rows(path, saved), required=bool(saved.get(file.stem)))
        finished = bool(summary) and summary.get("stopped") != "diverged"
        self._try(folder.model, lambda path: read_tensors(path)[2], finished)
        if self._any_checksum:
            # Either all files of a run have checksums or none has, so a missing one among others counts as damage.
            self.findings = [
                Finding(f.file, DAMAGED, "its checksum is missing") if f.state == UNVERIFIED else f
                for f in self.findings
            ]

    def _try(self, path: Path, read: Callable[[Path], Any], required: bool = False) -> Any:
        """Read a file, append a finding, and return the content.

        Args:
            path: the file.
            read: returns whether the file has a checksum (None if it is empty and needs none), or a tuple of its
                content and that.
            required: whether the file should exist.
        """
        name = str(path.relative_to(self._folder.path))
        try:
            result = read(path)
        except (FileNotFoundError, NotADirectoryError):
            if required:
                self.findings.append(Finding(name, MISSING))
            return None
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            self.findings.append(Finding(name, DAMAGED, str(reason).removeprefix(f"{path} is damaged: ")))
            return None
        content, has_checksum = result if isinstance(result, tuple) else (None, result)
        self._any_checksum |= bool(has_checksum)
        self.findings.append(Finding(name, UNVERIFIED if has_checksum is False else WHOLE))
        return content

    @staticmethod
    def _object(path: Path) -> tuple[dict[str, Any], bool]:
        return parse_json_object(read_regular(path, MAX_READ_BYTES))

    def _checkpoints(self) -> dict[str, Any]:
        """Check both checkpoints and the client state; return the values of the newest that can be read."""
        checkpoints = checkpoint.Checkpoints(self._folder.checkpoint, None)
        paths = (checkpoints.path, checkpoints.previous)
        any_exists = any(os.path.lexists(path) for path in paths)
        readable: list[dict[str, Any]] = []

        def read(path: Path) -> tuple[dict[str, Any], bool]:
            values = checkpoint.read(path)[1]
            return values, "format" in values

        for path in paths:
            values = self._try(path, read, required=path == checkpoints.path and any_exists)
            if values is not None:
                readable.append(values)
        newest = readable[0] if readable else {}
        slots = {entry[0]: entry[2:] for values in readable for entry in values["clients"].values()}
        if slots:
            size = newest.get("slot_bytes", 0)
            self._try(checkpoints.clients, lambda path: _check_slots(path, size, slots), required=True)
        return newest

    @staticmethod
    def _rows(path: Path, saved: dict[str, Any]) -> bool | None:
        rows, lines, has_checksums = read_rows(read_regular(path, MAX_CHECKED_BYTES))
        if len(rows) < lines:
            raise ValueError(f"{lines - len(rows)} of {lines} rows are damaged")
        expected = saved.get(f"{path.stem}_rows", 0)
        if lines < expected:
            raise ValueError(f"{expected - lines} of the {expected} rows that the checkpoint counts are missing")
        return has_checksums if lines else None


def _check_slots(path: Path, size: int, slots: dict[int, list[int]]) -> bool:
    """Compare each slot of client state with its checksum."""
    damaged = 0
    with open_regular(path) as file:
        for slot, checksum in slots.items():
            if size and checksum:
                file.seek(slot * size)
                data = bytearray(file.read(size))
                damaged += len(data) < size or bytes_checksum(torch.frombuffer(data, dtype=torch.uint8)) != checksum[0]
    if damaged:
        raise ValueError(f"{damaged} of the {len(slots)} client states that checkpoints name are damaged")
    return bool(size)


def find(places: list[Path]) -> list[Path]:
    """Find run folders.

    Args:
        places: folders of runs, or folders that contain some.

    Returns:
        The run folders.

    Raises:
        UserError: there is none in one of the places.
    """
    runs = find_runs(places)
    only_checkpoint = [place for place in places if (place / "checkpoint").is_dir() and place not in runs]
    runs += only_checkpoint
    for place in places:
        if not any(folder == place or place in folder.parents for folder in runs):
            raise UserError(
                f"{place}: expected the folder of a run, or one that contains several, got one without runs"
            )
    return runs
