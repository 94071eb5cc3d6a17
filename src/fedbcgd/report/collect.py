"""Run folders, read for the page: as far as they are whole, and what is wrong with the others."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedbcgd.core.reading import shorten
from fedbcgd.engine.run_folder import find_runs
from fedbcgd.errors import UserError
from fedbcgd.files import as_json, open_regular, read_regular, unsealed
from fedbcgd.report import facts
from fedbcgd.runs.config import flat, read_table
from fedbcgd.runs.secrets import mask_command, mask_config

FILES = ("config.toml", "federation.json", "metrics.jsonl", "summary.json", "holdings.json")
FRESH = 120.0  # seconds after which a run that writes nothing is no longer called running
MOST_ROWS = 2000  # of one run on the page; of more, every so many and the last
MOST_BLOCKS = facts.MOST_ITEMS
MOST_CELLS = 300_000  # of a map of labels; a larger one is left out
MOST_FOLDERS = 2000  # runs on a page
MOST_BYTES = 64_000_000  # of a page
MOST_PROBLEMS = 20  # of one folder that are told
MOST_TOLD = 500  # of all folders
MOST_JSON = 1 << 21  # bytes of a summary
MOST_HOLDINGS = 1 << 23  # bytes of the labels of all clients
MOST_METRICS = 1 << 28  # bytes of metrics
MOST_LINES = 500_000  # of them
MOST_LINE = 1 << 16  # bytes of one line


@dataclass
class Found:
    """One run, as far as it could be read."""

    place: str
    algorithm: str
    seed: int | None
    status: str  # finished, diverged, running, unfinished
    rows: list[dict[str, float]]
    options: dict[str, Any]  # the configuration, flat: "algorithm.lr" → 0.1
    summary: dict[str, Any] = field(default_factory=dict)
    holdings: dict[str, Any] | None = None
    # By profile: hours at each row, had it been its network.
    hours: dict[str, list[float]] = field(default_factory=dict)
    block_bytes: list[int] = field(default_factory=list)  # uploaded so far, where no summary says it yet
    size: int = 0  # bytes that it takes on the page, about


@dataclass(frozen=True)
class Problem:
    where: str
    what: str


def problem(where: Path | str, what: str) -> Problem:
    """Both texts as they may be shown."""
    return Problem(shorten(str(where), facts.LONGEST), shorten(what))


class Collector:
    """Reads run folders again and again; a folder whose files have not changed is not read twice."""

    def __init__(self, places: Sequence[Path]):
        self.places = places
        self._known: dict[Path, tuple[Any, Found | None, list[Problem]]] = {}

    def collect(self) -> tuple[list[Found], list[Problem]]:
        """All runs that can be shown, as far as they fit on a page, and what is wrong with the others."""
        runs: list[Found] = []
        problems: list[Problem] = []
        size = left_out = 0
        for folder in find_runs(self.places):
            if len(runs) == MOST_FOLDERS or size > MOST_BYTES:
                left_out += 1
                self._known.pop(folder, None)
                continue
            stamp = _stamp(folder)
            if folder not in self._known or self._known[folder][0] != stamp:
                wrong: list[Problem] = []
                self._known[folder] = (stamp, _guarded(folder, wrong), wrong[:MOST_PROBLEMS])
            _, run, wrong = self._known[folder]
            problems += wrong
            if run is not None:
                if run.status in ("running", "unfinished"):
                    run.status = _unfinished(folder)
                runs.append(run)
                size += run.size
        if left_out:
            places = ", ".join(map(str, self.places))
            why = f"the page holds {len(runs):,} runs and {size / 1e6:.0f} MB already"
            problems.insert(0, problem(places, f"{left_out:,} folders are left out: {why}; make pages of parts of it"))
        if len(problems) > MOST_TOLD:
            more = problem("and", f"{len(problems) - MOST_TOLD:,} more of such messages")
            problems = [*problems[:MOST_TOLD], more]
        return runs, problems


def _guarded(folder: Path, problems: list[Problem]) -> Found | None:
    """What no reader foresaw in one folder must not take the others with it."""
    try:
        return read(folder, problems)
    except (Exception, RecursionError, MemoryError) as error:
        problems.append(problem(folder, f"cannot be shown: {type(error).__name__}: {error}"))
        return None


def read(folder: Path, problems: list[Problem]) -> Found | None:
    """What a folder holds; None where that is not enough to show. What is wrong is added to `problems`."""

    def wrong(name: str, what: str) -> None:
        problems.append(problem(folder / name, what))

    def load(name: str, limit: int = MOST_JSON) -> dict[str, Any]:
        path = folder / name
        try:
            return read_table(path) if path.suffix == ".toml" else unsealed(read_regular(path, limit))[0]
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            wrong(name, f"cannot be read: {_reason(error, path)}")
            return {}

    summary = facts.summary(load("summary.json"), lambda what: wrong("summary.json", what))
    if "command" in summary:
        summary["command"] = " ".join(mask_command(re.split(" (?=--)", summary["command"])))
    config = facts.option(load("config.toml") or load("federation.json"))
    rows = _rows(folder / "metrics.jsonl", wrong)
    written = flat(mask_config(config or summary.get("config") or {"algorithm": summary.get("options", {})}))
    options = dict(list(written.items())[: facts.MOST_ENTRIES])
    named = summary.get("algorithm") or options.get("algorithm.name")
    if not named:
        wrong("", "says nowhere which algorithm ran: it is left out")
        return None
    options.setdefault("algorithm.name", named)
    seed = options.get("run.seed", summary.get("seed"))
    known_seed = seed if isinstance(seed, int) and not isinstance(seed, bool) else None
    status = _status(summary) if summary else _unfinished(folder)
    holdings = _holdings(load("holdings.json", MOST_HOLDINGS), wrong)
    hours = _hours(folder, rows)
    sent = [] if summary else _block_bytes(folder / "traffic.jsonl")
    place = facts.text(str(folder))
    found = Found(place, facts.text(str(named), facts.LONGEST_NAME), known_seed, status, rows, options, summary)
    found.holdings, found.hours, found.block_bytes = holdings, hours, sent
    found.size = len(as_json(vars(found)))
    return found


def _reason(error: Exception, path: Path) -> str:
    """Without the name of the file, which is told beside it."""
    told = error.strerror if isinstance(error, OSError) else None
    return (told or str(error)).removeprefix(str(path)).lstrip(": ").removeprefix("is damaged: ")


def _hours(folder: Path, rows: list[dict[str, float]]) -> dict[str, list[float]]:
    """Under each profile; nothing where the folder does not say what was sent."""
    if not rows or not (folder / "traffic.jsonl").exists():
        return {}
    from fedbcgd.network.profiles import PROFILES
    from fedbcgd.runs.retiming import hours_under

    try:
        return hours_under(folder, dict.fromkeys(PROFILES), [row["round"] for row in rows])
    except (UserError, OSError):
        return {}  # it is being written, or damaged, which is told of the files that matter more


def _block_bytes(path: Path) -> list[int]:
    """As the ledger counts them, in the rounds that are written."""
    from fedbcgd.engine import traffic

    sent: dict[int, int] = {}
    try:
        for round in traffic.read(path):
            for block, size in zip(round.blocks, round.upload, strict=True):
                if 0 <= block < MOST_BLOCKS:  # others are in refused uploads
                    sent[block] = sent.get(block, 0) + size
    except UserError:
        return []
    return [sent.get(block, 0) for block in range(max(sent, default=-1) + 1)]


def _stamp(folder: Path) -> tuple[Any, ...]:
    def of(path: Path) -> tuple[int, int] | None:
        try:
            stat = path.lstat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size

    return tuple(of(folder / name) for name in FILES)


def _status(summary: Mapping[str, Any]) -> str:
    return "diverged" if summary.get("stopped") == "diverged" else "finished"


def _unfinished(folder: Path) -> str:
    newest = max((s[0] for s in _stamp(folder) if s is not None), default=0) / 1e9
    return "running" if time.time() - newest < FRESH else "unfinished"


def _rows(path: Path, wrong: Callable[[str, str], None]) -> list[dict[str, float]]:
    """As many rows as are shown: every so many, and the last."""
    rows: list[dict[str, float]] = []
    last: dict[str, float] | None = None
    damaged = lines = whole = 0
    step = 1
    try:
        with open_regular(path) as file:
            while (line := file.readline(MOST_LINE)).endswith(b"\n") or len(line) == MOST_LINE:
                # What stands after the last line's end is still being written.
                if lines == MOST_LINES or file.tell() > MOST_METRICS:
                    wrong(
                        path.name, f"has more than {MOST_LINES:,} lines or {MOST_METRICS:,} bytes: the rest is left out"
                    )
                    break
                lines += 1
                try:
                    last = facts.row(unsealed(line)[0])
                except ValueError:
                    damaged += 1
                    continue
                if whole % step == 0:
                    rows.append(last)
                whole += 1
                if len(rows) > MOST_ROWS:
                    rows, step = rows[::2], 2 * step
    except FileNotFoundError:
        return []
    except (OSError, UserError) as error:
        wrong(path.name, f"cannot be read: {_reason(error, path)}")
        return []
    if damaged:
        wrong(path.name, f"{damaged} of {lines} lines are damaged and left out")
    return rows if last is None or rows[-1] is last else [*rows, last]


def _holdings(loaded: dict[str, Any], wrong: Callable[[str, str], None]) -> dict[str, Any] | None:
    if not loaded:
        return None
    try:
        made = facts.holdings(loaded)
        return made if len(made["counts"]) * len(made["classes"]) <= MOST_CELLS else None
    except ValueError:
        wrong("holdings.json", "is not what a run writes: it is left out")
        return None
