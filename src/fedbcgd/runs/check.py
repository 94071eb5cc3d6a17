"""Which files of a run folder are whole: what `fedbcgd check` says."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedbcgd.engine import checkpoint
from fedbcgd.engine.run_folder import LARGEST, MOST, RunFolder, find_runs, read_rows
from fedbcgd.errors import UserError
from fedbcgd.files import checksum_of, open_regular, read_regular, read_tensors, unsealed, vouched

WHOLE, DAMAGED, MISSING, UNVERIFIED = "whole", "damaged", "missing", "unverified"


@dataclass(frozen=True)
class Finding:
    file: str
    state: str  # one of those above
    note: str = ""

    @property
    def bad(self) -> bool:
        return self.state in (DAMAGED, MISSING)


def check(path: Path) -> list[Finding]:
    """A finding for each file of a run that is there or should be. Figures are not among them: they can be drawn again."""
    return _Check(RunFolder(path)).findings


class _Check:
    def __init__(self, folder: RunFolder):
        self.findings: list[Finding] = []
        self._folder = folder
        self._sealed = False  # a checksum was found
        summary = self._try(folder.summary, self._object)
        saved = self._checkpoints()
        flower = "clients_in_all" in saved or "flower" in [(summary or {}).get(key) for key in ("backend", "carrier")]
        begun = bool(saved or summary)
        self._try(folder.config, lambda path: vouched(read_regular(path, LARGEST)), begun and not flower)
        self._try(folder.federation, self._object)
        self._try(folder.label_counts, self._object)
        for file, needed in (
            (folder.metrics, bool(saved.get("metrics"))),
            (folder.traffic, bool(saved.get("traffic"))),
        ):
            self._try(file, lambda path: self._rows(path, saved), needed)
        finished = bool(summary) and summary.get("stopped") != "diverged"
        self._try(folder.model, lambda path: read_tensors(path)[2], finished)
        if self._sealed:
            # All files of a run have checksums or none has: of a single one, what it was kept in is damaged.
            self.findings = [
                Finding(f.file, DAMAGED, "its checksum is missing") if f.state == UNVERIFIED else f
                for f in self.findings
            ]

    def _try(self, path: Path, look: Callable[[Path], Any], needed: bool = False) -> Any:
        """Look at a file and note what was found. `look` gives whether it has a checksum (None: it is empty and needs none),
        alone or behind what it read."""
        name = str(path.relative_to(self._folder.path))
        try:
            found = look(path)
        except (FileNotFoundError, NotADirectoryError):
            if needed:
                self.findings.append(Finding(name, MISSING))
            return None
        except (OSError, ValueError) as error:
            said = error.strerror if isinstance(error, OSError) else str(error)
            self.findings.append(Finding(name, DAMAGED, str(said).removeprefix(f"{path} is damaged: ")))
            return None
        read, checked = found if isinstance(found, tuple) else (None, found)
        self._sealed |= bool(checked)
        self.findings.append(Finding(name, UNVERIFIED if checked is False else WHOLE))
        return read

    @staticmethod
    def _object(path: Path) -> tuple[dict[str, Any], bool]:
        return unsealed(read_regular(path, LARGEST))

    def _checkpoints(self) -> dict[str, Any]:
        """Both of them with their client state; the values of the newer one that can be read."""
        places = checkpoint.Checkpoints(self._folder.checkpoint, None)
        there = [path for path in (places.path, places.previous) if os.path.lexists(path)]
        newest: dict[str, Any] = {}
        tables: list[dict[str, Any]] = []

        def look(path: Path) -> tuple[dict[str, Any], bool]:
            values = checkpoint.read(path)[1]
            return values, "format" in values

        for path in (places.path, places.previous):
            values = self._try(path, look, needed=path == places.path and bool(there))
            if values is not None:
                newest = newest or values
                tables.append(values)
        slots = {entry[0]: entry[2:] for values in tables for entry in values["clients"].values()}
        if slots:
            self._try(places.clients, lambda path: _slots(path, newest.get("slot_bytes", 0), slots), needed=True)
        return newest

    @staticmethod
    def _rows(path: Path, saved: dict[str, Any]) -> bool | None:
        rows, lines, checked = read_rows(read_regular(path, MOST))
        if len(rows) < lines:
            raise ValueError(f"{lines - len(rows)} of {lines} rows")
        said = saved.get(f"{path.stem}_rows", 0)
        if lines < said:
            raise ValueError(f"{said - lines} of the {said} rows that the checkpoint speaks of are not there")
        return checked if lines else None


def _slots(path: Path, size: int, slots: dict[int, list[int]]) -> bool:
    wrong = 0
    with open_regular(path) as file:
        for slot, said in slots.items():
            if size and said:
                file.seek(slot * size)
                data = bytearray(file.read(size))
                wrong += len(data) < size or checksum_of(torch.frombuffer(data, dtype=torch.uint8)) != said[0]
    if wrong:
        raise ValueError(f"{wrong} of the {len(slots)} states of clients that checkpoints speak of")
    return bool(size)


def find(places: list[Path]) -> list[Path]:
    """The run folders in these places."""
    found = find_runs(places)
    alone = [place for place in places if (place / "checkpoint").is_dir() and place not in found]
    for place in places:
        if not any(folder == place or place in folder.parents for folder in [*found, *alone]):
            raise UserError(f"{place}: no run is in there; wanted is the folder of a run, or one that holds several")
    return [*found, *alone]
