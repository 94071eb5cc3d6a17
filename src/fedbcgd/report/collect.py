"""Run folders, read for the page: as far as they are whole, and what is wrong with the others."""

import json
import math
import os
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedbcgd.config import flat
from fedbcgd.errors import UserError
from fedbcgd.report import facts

FILES = ("config.toml", "metrics.jsonl", "summary.json", "holdings.json")
FRESH = 120.0  # seconds after which a run that writes nothing is no longer called running
MOST_ROWS = 2000  # of one run on the page; of more, every so many and the last
MOST_BLOCKS = 1_000_000  # a record of traffic that numbers its blocks higher is damaged


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


@dataclass(frozen=True)
class Problem:
    where: str
    what: str


def folders(places: Sequence[Path]) -> list[Path]:
    """The run folders in these places, each once, in the order of their names.

    One that is reached by several paths, as one relative and one absolute or through a link, bears the first of them.
    """
    found: dict[Path, Path] = {}
    for place in places:
        if not place.is_dir():
            raise UserError(f"{place} is no folder: wanted is the folder of a run, or one that holds several")
        inside = []
        for root, names, files in os.walk(place):
            names[:] = [n for n in names if not n.startswith(".") and n not in ("checkpoint", "tensorboard")]
            if "metrics.jsonl" in files or "summary.json" in files or {"config.toml", ".lock"} <= set(files):
                inside.append(Path(root))
        for folder in sorted(inside):
            found.setdefault(folder.resolve(), folder)
    return list(found.values())


class Collector:
    """Reads run folders again and again; a folder whose files have not changed is not read twice."""

    def __init__(self, places: Sequence[Path]):
        self.places = places
        self._known: dict[Path, tuple[Any, Found | None, list[Problem]]] = {}

    def collect(self) -> tuple[list[Found], list[Problem]]:
        runs, problems = [], []
        for folder in folders(self.places):
            stamp = _stamp(folder)
            if folder not in self._known or self._known[folder][0] != stamp:
                wrong: list[Problem] = []
                self._known[folder] = (stamp, _guarded(folder, wrong), wrong)
            _, run, wrong = self._known[folder]
            problems += wrong
            if run is not None:
                if run.status in ("running", "unfinished"):
                    run.status = _unfinished(folder)
                runs.append(run)
        return runs, problems


def _guarded(folder: Path, problems: list[Problem]) -> Found | None:
    """What no reader foresaw in one folder must not take the others with it."""
    try:
        return read(folder, problems)
    except Exception as error:
        problems.append(Problem(str(folder), f"cannot be shown: {type(error).__name__}: {error}"))
        return None


def read(folder: Path, problems: list[Problem]) -> Found | None:
    """What a folder holds; None where that is not enough to show. What is wrong is added to `problems`."""

    def wrong(name: str, what: str) -> None:
        problems.append(Problem(str(folder / name), what))

    def load(name: str) -> dict[str, Any]:
        path = folder / name
        if not path.exists():
            return {}
        try:
            text = path.read_text(encoding="utf-8")
            made = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
            if not isinstance(made, dict):
                raise ValueError("it holds no table")
            return made
        except (OSError, ValueError, RecursionError) as error:
            wrong(name, f"cannot be read: {error}")
            return {}

    summary = facts.summary(load("summary.json"), lambda what: wrong("summary.json", what))
    config = load("config.toml")
    rows = _rows(folder / "metrics.jsonl", wrong)
    written = flat(config or summary.get("config") or {"algorithm": summary.get("options", {})})
    options = {key: facts.option(value) for key, value in written.items()}
    named = summary.get("algorithm") or options.get("algorithm.name")
    if not named:
        wrong("", "says nowhere which algorithm ran: it is left out")
        return None
    options.setdefault("algorithm.name", named)
    seed = options.get("run.seed", summary.get("seed"))
    status = _status(summary) if summary else _unfinished(folder)
    holdings = _holdings(load("holdings.json"), wrong)
    known_seed = seed if isinstance(seed, int) and not isinstance(seed, bool) else None
    hours = _hours(folder, rows)
    sent = [] if summary else _block_bytes(folder / "traffic.jsonl")
    return Found(str(folder), str(named), known_seed, status, rows, options, summary, holdings, hours, sent)


def _hours(folder: Path, rows: list[dict[str, float]]) -> dict[str, list[float]]:
    """Under each profile; nothing where the folder does not say what was sent."""
    if not rows or not (folder / "traffic.jsonl").exists():
        return {}
    from fedbcgd.network import afterwards
    from fedbcgd.network.profiles import PROFILES
    from fedbcgd.runner import Folder

    try:
        rounds = [row["round"] for row in Folder(folder).rows()]
        known = {profile: dict(zip(rounds, afterwards.hours(folder, profile), strict=True)) for profile in PROFILES}
        return {profile: [at[row["round"]] for row in rows] for profile, at in known.items()}
    except (UserError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, OSError):
        return {}  # it is being written, or damaged, which is told of the files that matter more


def _block_bytes(path: Path) -> list[int]:
    """As the ledger counts them, in the rounds that are written."""
    sent: dict[int, int] = {}
    try:
        for line in path.read_bytes().split(b"\n")[:-1]:  # the last one may be in the middle of being written
            row = json.loads(line)
            for block, size in zip(row["blocks"], row["upload"], strict=True):
                if not 0 <= block < MOST_BLOCKS or size < 0:
                    raise ValueError("no block of a model")
                sent[int(block)] = sent.get(int(block), 0) + int(size)
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return []
    return [sent.get(block, 0) for block in range(max(sent, default=-1) + 1)]


def _stamp(folder: Path) -> tuple[Any, ...]:
    def of(path: Path) -> tuple[int, int] | None:
        try:
            stat = path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size

    return tuple(of(folder / name) for name in FILES)


def _status(summary: Mapping[str, Any]) -> str:
    return "diverged" if summary.get("stopped") == "diverged" else "finished"


def _unfinished(folder: Path) -> str:
    newest = max((s[0] for s in _stamp(folder) if s is not None), default=0) / 1e9
    return "running" if time.time() - newest < FRESH else "unfinished"


def _rows(path: Path, wrong: Any) -> list[dict[str, float]]:
    if not path.exists():
        return []
    rows: list[dict[str, float]] = []
    damaged = 0
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        wrong(path.name, f"cannot be read: {error.strerror}")
        return []
    for line in lines[:-1]:  # what stands after the last line's end is still being written
        try:
            row = {str(k): _number(v) for k, v in json.loads(line).items()}
            if not math.isfinite(row["round"]):
                raise ValueError("a row without its round")
            rows.append(row)
        except (ValueError, AttributeError, KeyError, OverflowError, RecursionError):
            damaged += 1
    if damaged:
        wrong(path.name, f"{damaged} of {len(lines) - 1} lines are damaged and left out")
    if len(rows) > MOST_ROWS:
        step = -(-len(rows) // MOST_ROWS)
        rows = rows[::step] + ([] if (len(rows) - 1) % step == 0 else [rows[-1]])
    return rows


def _number(value: Any) -> float:
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(value)
    math.isfinite(value)  # a whole number larger than any float is damage
    return value


def _holdings(loaded: dict[str, Any], wrong: Any) -> dict[str, Any] | None:
    if not loaded:
        return None
    classes, counts = loaded.get("classes"), loaded.get("counts")
    if (
        not isinstance(counts, list)
        or not isinstance(classes, list)
        or not counts
        or not all(isinstance(c, list) and all(isinstance(n, int) and n >= 0 for n in c) for c in counts)
        or len({len(c) for c in counts}) != 1
        or not counts[0]
    ):
        wrong("holdings.json", "is not what a run writes: it is left out")
        return None
    names = [str(c) for c in classes]
    return {
        "classes": names if len(names) == len(counts[0]) else [str(k) for k in range(len(counts[0]))],
        "counts": counts,
    }
