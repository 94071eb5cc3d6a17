"""Runs put together for the page: tasks that can be compared, groups that differ by their seed alone, names and looks."""

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from fedbcgd.display.looks import Look, families
from fedbcgd.report.collect import Found

# Where something is done, and how, changes nothing in what is computed but for rounding.
ASIDE = {
    "run.seed",
    "run.workers",
    "run.backend",
    "run.address",
    "run.gpus",
    "run.together",
    "run.device",
    "run.tensorboard",
    "run.checkpoint_every",
}
# What only says when to look and when to stop: it names a group where nothing else tells it from another.
QUIET = {"run.evaluate_every", "run.rounds", "run.budget", "run.target"}
MOST_TEXT = 24  # characters of a value in a name
MOST_KEYS = 60  # in which configurations differ, that are looked at for a name
_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]+)?)")
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
    """Group the runs, and name each group by its algorithm and, where several have it, by as little as tells them apart.

    Tasks whose runs were measured on test data come first, and a search for options on held-out data, which is seldom what
    a reader is after, comes last; of those alike, the one with most runs. Groups stand in the order of their names.
    """
    by_task: dict[str, list[int]] = {}
    for k, run in enumerate(runs):
        by_task.setdefault(_key(run, _TASK), []).append(k)
    tasks = sorted(by_task.values(), key=lambda m: (_search(runs[m[0]]), -_tested(runs, m), -len(m)))
    groups: list[Group] = []
    for t, members in enumerate(tasks):
        gathered = _gather(runs, members)
        named = sorted(zip(_names([runs[g[0]] for g in gathered]), gathered, strict=True), key=lambda n: _natural(n[0]))
        names, gathered = [name for name, _ in named], [g for _, g in named]
        given = families([runs[g[0]].algorithm for g in gathered])
        groups += [
            Group(t, name, look, tuple(g), runs[g[0]].algorithm)
            for name, look, g in zip(names, given, gathered, strict=True)
        ]
    return Grouped(tuple(_tasks([runs[members[0]] for members in tasks])), tuple(groups))


def _search(run: Found) -> bool:
    held = run.options.get("data.validation")
    return isinstance(held, (int, float)) and held > 0


def _natural(name: str) -> list[tuple[bool, float, str]]:
    """A key by which 2 stands before 10."""
    parts = enumerate(_NUMBER.split(name))  # numbers stand at every second place
    return [(True, float(part), "") if k % 2 else (False, 0.0, part) for k, part in parts if part]


def _tested(runs: Sequence[Found], members: Sequence[int]) -> bool:
    return any(key.startswith("test_") for k in members for key in (runs[k].rows[-1] if runs[k].rows else ()))


def _key(run: Found, prefixes: tuple[str, ...] = ("",)) -> str:
    return repr(sorted((k, repr(v)) for k, v in run.options.items() if k.startswith(prefixes) and k not in ASIDE))


def _gather(runs: Sequence[Found], members: Sequence[int]) -> list[list[int]]:
    """Runs of one configuration; a seed that comes twice begins a group of its own."""
    by_key: dict[tuple[str, int], list[int]] = {}
    copies: Counter[tuple[str, int | None]] = Counter()
    for k in members:
        key = _key(runs[k])
        by_key.setdefault((key, copies[key, runs[k].seed]), []).append(k)
        copies[key, runs[k].seed] += 1
    return list(by_key.values())


def _names(firsts: Sequence[Found]) -> list[str]:
    apart = _enough_each([run.algorithm for run in firsts], [run.options for run in firsts], QUIET)
    names = [", ".join([run.algorithm, *_said(run, keys)]) for run, keys in zip(firsts, apart, strict=True)]
    for places in _twice(names):
        quiet = [key for key in differences([firsts[k].options for k in places]) if key in QUIET]
        for k in places:
            names[k] = ", ".join([names[k], *_said(firsts[k], quiet)])
    for places in _twice(names):
        for turn, k in enumerate(places):
            names[k] += f" ({turn + 1})"
    return names


def _enough_each(kinds: Sequence[str], options: Sequence[dict[str, Any]], but: Collection[str] = ()) -> list[list[str]]:
    """For each configuration the keys that tell it apart from those of its kind."""
    alike: dict[str, list[dict[str, Any]]] = {}
    for kind, own in zip(kinds, options, strict=True):
        alike.setdefault(kind, []).append(own)
    enough = {kind: _enough(group, but) for kind, group in alike.items()}
    return [enough[kind] for kind in kinds]


def _enough(options: Sequence[dict[str, Any]], but: Collection[str] = ()) -> list[str]:
    """Keys that tell these configurations apart as far as all of them do, and none to spare; numbers rather than others."""
    keys = [key for key in differences(options) if key not in but][:MOST_KEYS]
    plain = {key: all(isinstance(o.get(key), (int, float, type(None))) for o in options) for key in keys}
    kinds = _kinds(options, keys)
    for key in [*(k for k in keys if not plain[k]), *(k for k in reversed(keys) if plain[k])]:
        fewer = [k for k in keys if k != key]
        if _kinds(options, fewer) == kinds:
            keys = fewer
    return keys


def _kinds(options: Sequence[dict[str, Any]], keys: Sequence[str]) -> int:
    return len({tuple(repr(o.get(key)) for key in keys) for o in options})


def _twice(names: Sequence[str]) -> list[list[int]]:
    """The places of each name that comes more than once."""
    places: dict[str, list[int]] = {}
    for k, name in enumerate(names):
        places.setdefault(name, []).append(k)
    return [found for found in places.values() if len(found) > 1]


def _said(run: Found, keys: Sequence[str]) -> list[str]:
    """`momentum 0.5`; what is on is named, what is off is not."""
    words = {key: key.rpartition(".")[2] for key in keys if run.options.get(key) is not False}
    return [
        word if run.options.get(key) is True else f"{word} {_text(run.options.get(key))}" for key, word in words.items()
    ]


def _tasks(firsts: Sequence[Found]) -> list[str]:
    heads = []
    for run in firsts:
        o = run.options
        named = {"model.name", "data.name"} <= set(o)
        head = f"{o['model.name']} on {o['data.name']}" if named else "a model of your own"
        heads.append(f"search: {head}" if _search(run) else head)
    own = [{k: v for k, v in run.options.items() if k.startswith(_TASK)} for run in firsts]
    apart = _enough_each(heads, own)
    return [", ".join([head, *_said(run, keys)]) for run, head, keys in zip(firsts, heads, apart, strict=True)]


def differences(options: Sequence[dict[str, Any]]) -> list[str]:
    """The keys in which these configurations differ, but for those that change nothing."""
    count = Counter((key, repr(v)) for o in options for key, v in o.items() if v is not None and key not in ASIDE)
    return list(dict.fromkeys(key for (key, _), times in count.items() if times < len(options)))


def _text(value: Any) -> str:
    text = "unset" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= MOST_TEXT else text[: MOST_TEXT - 1].rstrip(" ,") + "…"
