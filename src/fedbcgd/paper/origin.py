"""Which source made a run: its commit is kept beside it."""

import subprocess
from functools import cache
from pathlib import Path
from typing import Any

from fedbcgd.files import make_folder, write_text
from fedbcgd.runs.batch import Planned

FILE = "commit.txt"


UNKNOWN = "unknown"


@cache
def commit(package: Path = Path(__file__).parents[1]) -> str:
    """Of the source that runs, where it is a git checkout of this project; `-changed` where files differ from the commit."""
    top = _git(package, "rev-parse", "--show-toplevel")
    if not top or (Path(top) / "src" / "fedbcgd").resolve() != package.resolve():
        return UNKNOWN  # installed, or a copy within another repository
    at = _git(package, "rev-parse", "--short", "HEAD")
    return (at + "-changed" if _git(package, "status", "--porcelain", "-uno", ".") else at) or UNKNOWN


def _git(folder: Path, *arguments: str) -> str:
    try:
        said = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return said.stdout.strip() if said.returncode == 0 else ""


def commit_of(folder: Path) -> str:
    """Of the source that made a run."""
    try:
        return (folder / FILE).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return UNKNOWN


class Recorded:
    """A display of runs that notes, as each begins, which source makes it."""

    def __init__(self, shown: Any, runs: list[Planned], folder: Path):
        self._shown, self._runs, self._folder = shown, runs, folder

    def begin(self, index: int) -> None:
        write_text(make_folder(self._folder / self._runs[index].folder) / FILE, commit() + "\n")
        self._shown.begin(index)

    def skip(self, index: int, why: str) -> None:
        self._shown.skip(index, why)

    def __call__(self, info: Any) -> None:
        self._shown(info)
