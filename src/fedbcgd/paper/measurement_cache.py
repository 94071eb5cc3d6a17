"""Measurements on disk, each in a file named by a digest of its settings, so that none is repeated."""

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from fedbcgd.files import as_json, make_folder, read_regular, write_text

MAX_BYTES = 1 << 24  # of a file


class Measurement(BaseModel):
    """The content of a file."""

    model_config = ConfigDict(strict=True)

    settings: dict[str, Any]
    commit: str
    seconds: float
    found: dict[str, Any]


class MeasurementCache:
    """Measurements in a folder, or none at all without a folder.

    Attributes:
        seconds: the time that all requested measurements took, cached ones included.
        commits: the commits of the source that made them.
    """

    def __init__(self, folder: Path | None = None, commit: str = ""):
        self._folder = None if folder is None else make_folder(folder)
        self._commit = commit
        self.seconds = 0.0
        self.commits: set[str] = set()

    @property
    def hours(self) -> float:
        """`seconds` in hours, rounded."""
        return round(self.seconds / 3600, 3)

    def get(self, settings: Mapping[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the measurement with these settings; measure if there is none, or if its file is damaged.

        Args:
            settings: everything the measurement depends on, as JSON values.
            measure: makes the measurement. Infinite numbers are written as null.
        """
        plain: dict[str, Any] = json.loads(as_json(dict(settings)))
        path = None if self._folder is None else self._folder / f"{_digest(plain)}.json"
        known = None if path is None else _read(path)
        if known is None or known.settings != plain:
            start = time.monotonic()
            found = measure()
            seconds = time.monotonic() - start
            known = Measurement(settings=plain, commit=self._commit, seconds=seconds, found=found)
            if path is not None:
                write_text(path, as_json(known.model_dump(), indent=1) + "\n")
        self.seconds += known.seconds
        self.commits.add(known.commit)
        return {name: math.inf if value is None else value for name, value in known.found.items()}


def _digest(settings: Any) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def _read(path: Path) -> Measurement | None:
    """Read a file; None if there is none or it is damaged."""
    try:
        return Measurement.model_validate_json(read_regular(path, MAX_BYTES))
    except (OSError, ValueError):
        return None
