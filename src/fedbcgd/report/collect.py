"""Read run folders for the page: everything that is intact, and a list of problems with the rest."""

import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedbcgd.core.reading import shorten
from fedbcgd.engine.run_folder import find_runs
from fedbcgd.errors import UserError
from fedbcgd.files import as_json, open_regular, parse_json_object, read_regular
from fedbcgd.report import validation
from fedbcgd.runs.config import flat, read_table
from fedbcgd.runs.secrets import mask_command, mask_config

FILES = ("config.toml", "federation.json", "metrics.jsonl", "summary.json", "label_counts.json", "holdings.json")
RUNNING_SECONDS = 120.0  # a run that wrote nothing for this long is "unfinished", no longer "running"
MAX_ROWS = 2000  # of a run on the page; if there are more, every k-th and the last are shown
MAX_BLOCKS = validation.MAX_ITEMS
MAX_LABEL_COUNTS = 300_000  # clients times labels; larger tables are left out
MAX_RUNS = 2000  # on a page
MAX_PAGE_BYTES = 64_000_000
MAX_PROBLEMS_PER_RUN = 20
MAX_PROBLEMS = 500
MAX_SUMMARY_BYTES = 1 << 21
MAX_LABEL_COUNTS_BYTES = 1 << 23
MAX_METRICS_BYTES = 1 << 28
MAX_LINES = 500_000  # of metrics.jsonl
MAX_LINE_BYTES = 1 << 16

ReportProblem = Callable[[str, str], None]  # called with the name of a file and what is wrong with it


@dataclass
class RunData:
    """What could be read of a run."""

    folder: str
    algorithm: str
    seed: int | None
    status: str  # finished, diverged, running, unfinished
    rows: list[dict[str, float]]
    options: dict[str, Any]  # the configuration with dotted keys: "algorithm.lr" → 0.1
    summary: dict[str, Any] = field(default_factory=dict)
    label_counts: dict[str, Any] | None = None  # names of the labels, and examples by client and label
    hours: dict[str, list[float]] = field(default_factory=dict)  # by network profile: hours at each row
    block_bytes: list[int] = field(default_factory=list)  # uploaded so far for each block, if there is no summary
    size: int = 0  # approximate bytes on the page


@dataclass(frozen=True)
class Problem:
    """A file or folder, and what is wrong with it."""

    where: str
    what: str


def problem(where: Path | str, what: str) -> Problem:
    """Return a problem with both texts made printable."""
    return Problem(shorten(str(where), validation.MAX_TEXT), shorten(what))


class Collector:
    """Reads run folders repeatedly; a folder is read again only if its files have changed.

    Args:
        folders: folders of runs, or folders that contain some.
    """

    def __init__(self, folders: Sequence[Path]):
        self.folders = folders
        self._cache: dict[Path, tuple[Any, RunData | None, list[Problem]]] = {}

    def collect(self) -> tuple[list[RunData], list[Problem]]:
        """Return all runs that can be shown and fit on a page, and all problems."""
        runs: list[RunData] = []
        problems: list[Problem] = []
        size = left_out = 0
        for folder in find_runs(self.folders):
            if len(runs) == MAX_RUNS or size > MAX_PAGE_BYTES:
                left_out += 1
                self._cache.pop(folder, None)
                continue
            stamp = _stamp(folder)
            if folder not in self._cache or self._cache[folder][0] != stamp:
                folder_problems: list[Problem] = []
                self._cache[folder] = (
                    stamp,
                    _read_safely(folder, folder_problems),
                    folder_problems[:MAX_PROBLEMS_PER_RUN],
                )
            _, run, own_problems = self._cache[folder]
            problems += own_problems
            if run is not None:
                if run.status in ("running", "unfinished"):
                    run.status = _unfinished(folder)
                runs.append(run)
                size += run.size
        if left_out:
            where = ", ".join(map(str, self.folders))
            why = f"the page holds {len(runs):,} runs and {size / 1e6:.0f} MB already"
            problems.insert(0, problem(where, f"{left_out:,} folders are left out: {why}; make pages of parts of it"))
        if len(problems) > MAX_PROBLEMS:
            more = problem("and", f"{len(problems) - MAX_PROBLEMS:,} more such messages")
            problems = [*problems[:MAX_PROBLEMS], more]
        return runs, problems


def _read_safely(folder: Path, problems: list[Problem]) -> RunData | None:
    """Read a folder; an unforeseen error becomes a problem, so that the other folders are still shown."""
    try:
        return read(folder, problems)
    except (Exception, RecursionError, MemoryError) as error:
        problems.append(problem(folder, f"cannot be shown: {type(error).__name__}: {error}"))
        return None


def read(folder: Path, problems: list[Problem]) -> RunData | None:
    """Read a run folder.

    Args:
        folder: the folder.
        problems: a list to which problems are appended.

    Returns:
        What could be read; None if not even the algorithm is known.
    """

    def report(name: str, what: str) -> None:
        problems.append(problem(folder / name, what))

    def load(name: str, limit: int = MAX_SUMMARY_BYTES) -> dict[str, Any]:
        path = folder / name
        try:
            return read_table(path) if path.suffix == ".toml" else parse_json_object(read_regular(path, limit))[0]
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            report(name, f"cannot be read: {_reason(error, path)}")
            return {}

    summary = validation.summary(load("summary.json"), lambda what: report("summary.json", what))
    if "command" in summary:
        summary["command"] = " ".join(mask_command(re.split(" (?=--)", summary["command"])))
    config = validation.bounded(load("config.toml") or load("federation.json"))
    rows = _rows(folder / "metrics.jsonl", report)
    written = flat(mask_config(config or summary.get("config") or {"algorithm": summary.get("options", {})}))
    options = dict(list(written.items())[: validation.MAX_ENTRIES])
    algorithm = summary.get("algorithm") or options.get("algorithm.name")
    if not algorithm:
        report("", "no file names the algorithm: the run is left out")
        return None
    options.setdefault("algorithm.name", algorithm)
    options.setdefault("run.precision", str(summary.get("precision", "fp32")))  # which runs of earlier versions had
    seed = options.get("run.seed", summary.get("seed"))
    finished = "diverged" if summary.get("stopped") == "diverged" else "finished"
    counts_file = "label_counts.json"
    if not os.path.lexists(folder / counts_file):
        counts_file = "holdings.json"  # its name in earlier versions
    run = RunData(
        folder=validation.text(str(folder)),
        algorithm=validation.text(str(algorithm), validation.MAX_NAME),
        seed=seed if isinstance(seed, int) and not isinstance(seed, bool) else None,
        status=finished if summary else _unfinished(folder),
        rows=rows,
        options=options,
        summary=summary,
        label_counts=_label_counts(load(counts_file, MAX_LABEL_COUNTS_BYTES), lambda what: report(counts_file, what)),
        hours=_hours(folder, rows),
        block_bytes=[] if summary else _block_bytes(folder / "traffic.jsonl"),
    )
    run.size = len(as_json(vars(run)))
    return run


def _reason(error: Exception, path: Path) -> str:
    """Return what went wrong, without the name of the file, which is shown with it."""
    text = error.strerror if isinstance(error, OSError) else None
    return (text or str(error)).removeprefix(str(path)).lstrip(": ").removeprefix("is damaged: ")


def _hours(folder: Path, rows: list[dict[str, float]]) -> dict[str, list[float]]:
    """Return the hours at each row under each network profile; nothing without a record of the traffic."""
    if not rows or not (folder / "traffic.jsonl").exists():
        return {}
    from fedbcgd.network.profiles import PROFILES
    from fedbcgd.runs.retiming import hours_under

    try:
        return hours_under(folder, dict.fromkeys(PROFILES), [row["round"] for row in rows])
    except (UserError, OSError):
        return {}  # it is being written, or damaged; the page is complete without it


def _block_bytes(path: Path) -> list[int]:
    """Return the bytes uploaded for each block in the recorded rounds, counted as the ledger does."""
    from fedbcgd.engine import traffic

    sent: dict[int, int] = {}
    try:
        for round in traffic.read(path):
            for block, size in zip(round.blocks, round.upload, strict=True):
                if 0 <= block < MAX_BLOCKS:  # refused uploads may name others
                    sent[block] = sent.get(block, 0) + size
    except UserError:
        return []
    return [sent.get(block, 0) for block in range(max(sent, default=-1) + 1)]


def _stamp(folder: Path) -> tuple[Any, ...]:
    """Return the time and size of each file, which show whether one has changed."""

    def of(path: Path) -> tuple[int, int] | None:
        try:
            stat = path.lstat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size

    return tuple(of(folder / name) for name in FILES)


def _unfinished(folder: Path) -> str:
    newest = max((s[0] for s in _stamp(folder) if s is not None), default=0) / 1e9
    return "running" if time.time() - newest < RUNNING_SECONDS else "unfinished"


def _rows(path: Path, report: ReportProblem) -> list[dict[str, float]]:
    """Return up to about `MAX_ROWS` rows of metrics: all, or every k-th and the last."""
    rows: list[dict[str, float]] = []
    last: dict[str, float] | None = None
    damaged = lines = intact = 0
    step = 1
    try:
        with open_regular(path) as file:
            while (line := file.readline(MAX_LINE_BYTES)).endswith(b"\n") or len(line) == MAX_LINE_BYTES:
                # A last line without its end is still being written.
                if lines == MAX_LINES or file.tell() > MAX_METRICS_BYTES:
                    report(
                        path.name,
                        f"has more than {MAX_LINES:,} lines or {MAX_METRICS_BYTES:,} bytes: the rest is left out",
                    )
                    break
                lines += 1
                try:
                    last = validation.row(parse_json_object(line)[0])
                except ValueError:
                    damaged += 1
                    continue
                if intact % step == 0:
                    rows.append(last)
                intact += 1
                if len(rows) > MAX_ROWS:
                    rows, step = rows[::2], 2 * step
    except FileNotFoundError:
        return []
    except (OSError, UserError) as error:
        report(path.name, f"cannot be read: {_reason(error, path)}")
        return []
    if damaged:
        report(path.name, f"{damaged} of {lines} lines are damaged and left out")
    return rows if last is None or rows[-1] is last else [*rows, last]


def _label_counts(loaded: dict[str, Any], report: Callable[[str], None]) -> dict[str, Any] | None:
    if not loaded:
        return None
    try:
        table = validation.label_counts(loaded)
        return table if len(table["counts"]) * len(table["classes"]) <= MAX_LABEL_COUNTS else None
    except ValueError:
        report("is not what a run writes: it is left out")
        return None
