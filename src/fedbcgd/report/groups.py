"""Runs put together for the page: tasks that can be compared, groups that differ by their seed alone, names and looks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedbcgd.report.collect import Found
from fedbcgd.report.looks import Look, families

# Where something is done, and how, changes nothing in what is computed but for rounding.
ASIDE = {
    "run.seed",
    "run.workers",
    "run.carrier",
    "run.address",
    "run.gpus",
    "run.together",
    "run.device",
    "run.tensorboard",
    "run.checkpoint_every",
}
_TASK = ("data.", "model.", "quadratics.")


@dataclass(frozen=True)
class Group:
    task: int
    name: str
    look: Look
    runs: tuple[int, ...]  # positions among the runs
    algorithm: str


@dataclass(frozen=True)
class Grouped:
    tasks: tuple[str, ...]
    groups: tuple[Group, ...]


def group(runs: Sequence[Found]) -> Grouped:
    """Group the runs, and name each group by its algorithm and, where several have it, by what sets it apart."""
    tasks: dict[str, list[int]] = {}
    for k, run in enumerate(runs):
        tasks.setdefault(_key(run, _TASK), []).append(k)
    groups: list[Group] = []
    for t, members in enumerate(tasks.values()):
        gathered = _gather(runs, members)
        names = _names([runs[g[0]] for g in gathered])
        given = families([runs[g[0]].algorithm for g in gathered])
        groups += [
            Group(t, name, look, tuple(g), runs[g[0]].algorithm)
            for name, look, g in zip(names, given, gathered, strict=True)
        ]
    return Grouped(tuple(_tasks([runs[members[0]] for members in tasks.values()])), tuple(groups))


def _key(run: Found, prefixes: tuple[str, ...] = ("",)) -> str:
    return repr(sorted((k, repr(v)) for k, v in run.options.items() if k.startswith(prefixes) and k not in ASIDE))


def _gather(runs: Sequence[Found], members: Sequence[int]) -> list[list[int]]:
    """Runs of one configuration; a seed that comes twice begins a group of its own."""
    by_key: dict[tuple[str, int], list[int]] = {}
    for k in members:
        copy = 0
        while any(runs[other].seed == runs[k].seed for other in by_key.get((_key(runs[k]), copy), [])):
            copy += 1
        by_key.setdefault((_key(runs[k]), copy), []).append(k)
    return list(by_key.values())


def _names(firsts: Sequence[Found]) -> list[str]:
    names = []
    for run in firsts:
        alike = [other for other in firsts if other.algorithm == run.algorithm]
        apart = differences([other.options for other in alike])
        said = [f"{key.rpartition('.')[2]} {_text(run.options.get(key))}" for key in apart]
        names.append(", ".join([run.algorithm, *said]))
    for name in {n for n in names if names.count(n) > 1}:
        for turn, k in enumerate([k for k, other in enumerate(names) if other == name]):
            names[k] = f"{name} ({turn + 1})"
    return names


def _tasks(firsts: Sequence[Found]) -> list[str]:
    apart = differences([run.options for run in firsts])
    names = []
    for run in firsts:
        o = run.options
        head = (
            f"{o['model.name']} on {o['data.name']}" if {"model.name", "data.name"} <= set(o) else "a model of your own"
        )
        more = [
            f"{key.rpartition('.')[2]} {_text(o[key])}"
            for key in apart
            if key in o and key.startswith(_TASK) and key not in ("model.name", "data.name")
        ]
        names.append(", ".join([head, *more]))
    return names


def differences(options: Sequence[dict[str, Any]]) -> list[str]:
    """The keys in which these configurations differ, but for those that change nothing."""
    keys = dict.fromkeys(key for o in options for key in o if key not in ASIDE)
    return [key for key in keys if len({repr(o.get(key)) for o in options}) > 1]


def _text(value: Any) -> str:
    return "unset" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
