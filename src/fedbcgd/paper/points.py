"""Measurements that are kept, each in a file named by a digest of what was measured, so that none is made twice."""

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedbcgd.files import as_json, make_folder, read_regular, write_text

LARGEST = 1 << 24  # bytes of a measurement


class Points:
    """Of a folder; without one nothing is kept. `seconds` and `commits` are of all points that were asked for."""

    def __init__(self, folder: Path | None = None, commit: str = ""):
        self._folder = None if folder is None else make_folder(folder)
        self._commit = commit
        self.seconds = 0.0
        self.commits: set[str] = set()

    @property
    def hours(self) -> float:
        return round(self.seconds / 3600, 3)

    def once(self, settings: Mapping[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What was measured with these settings, now or before. A number that is infinite is written as null."""
        asked = json.loads(as_json(dict(settings)))
        path = None if self._folder is None else self._folder / f"{_digest(asked)}.json"
        known = _read(path, asked)
        if known is None:
            begun = time.monotonic()
            found = measure()
            known = {"settings": asked, "commit": self._commit, "seconds": time.monotonic() - begun, "found": found}
            if path is not None:
                write_text(path, as_json(known, indent=1) + "\n")
        self.seconds += known["seconds"]
        self.commits.add(known["commit"])
        return {k: math.inf if v is None else v for k, v in known["found"].items()}


def _digest(settings: Any) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def _read(path: Path | None, settings: Any) -> dict[str, Any] | None:
    """A file that is damaged is measured again."""
    try:
        known = json.loads(read_regular(path, LARGEST)) if path is not None else {}
    except (OSError, ValueError, RecursionError):
        return None
    whole = isinstance(known, dict) and isinstance(known.get("found"), dict) and known.get("settings") == settings
    return known if whole and isinstance(known.get("seconds"), (int, float)) and "commit" in known else None
