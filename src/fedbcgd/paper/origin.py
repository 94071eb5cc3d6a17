"""Which commit of the source computed a run: it is written into the run's folder."""

import subprocess
from functools import cache
from pathlib import Path

COMMIT_FILE = "commit.txt"
UNKNOWN = "unknown"


@cache
def current_commit(package: Path = Path(__file__).parents[1]) -> str:
    """Return the short commit hash of the running source, followed by `-changed` if files differ from it.

    Args:
        package: folder of the package `fedbcgd`.

    Returns:
        `unknown` if the package is not in a git checkout of this project.
    """
    top = _git(package, "rev-parse", "--show-toplevel")
    if not top or (Path(top) / "src" / "fedbcgd").resolve() != package.resolve():
        return UNKNOWN  # installed, or a copy within another repository
    commit = _git(package, "rev-parse", "--short", "HEAD")
    changed = _git(package, "status", "--porcelain", "-uno", ".")
    return (commit + "-changed" if changed else commit) or UNKNOWN


def _git(folder: Path, *arguments: str) -> str:
    """Return git's output, or nothing if it fails."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def commit_of_run(folder: Path) -> str:
    """Return the commit that computed the run in a folder, or `unknown`."""
    try:
        return (folder / COMMIT_FILE).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return UNKNOWN
