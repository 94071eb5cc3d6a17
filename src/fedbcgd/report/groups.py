"""Groups runs for the page: runs of a task can be compared, and runs of a group within it differ only in their seed."""

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from fedbcgd.display.styles import LineStyle, variant_styles
from fedbcgd.report.collect import RunData

# Options that change where and how a run is computed; its result is the same, up to rounding.
IGNORED_OPTIONS = {
    "run.seed",
    "run.workers",
    "run.backend",
    "run.address",
    "run.gpus",
    "run.batch_clients",
    "run.together",  # its earlier name
    "run.device",
    "run.tensorboard",
    "origin.program",
    "run.checkpoint_every",
}
# Options that change only when a run is evaluated and stopped: they are in the name of a group only if no others differ.
STOP_OPTIONS = {"run.evaluate_every", "run.rounds", "run.budget", "run.target", "run.metric", "run.goal"}
MAX_VALUE_LENGTH = 24  # characters of an option's value in a name
MAX_KEYS = 60  # of the options that differ, considered for a name
_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]+)?)")
_TASK = ("data.", "model.", "quadratics.", "origin.data")


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed."""

    task: int
    name: str
    style: LineStyle
    runs: tuple[int, ...]  # positions among the runs
    algorithm: str


@dataclass(frozen=True)
class Grouped:
    """The names of the tasks, and the groups of all tasks."""

    tasks: tuple[str, ...]
    groups: tuple[Group, ...]


def group(runs: Sequence[RunData]) -> Grouped:
    """Group runs, and name each group by its algorithm and the fewest options that distinguish it.

    Tasks are sorted: those measured on test data first, searches on held-out data last, and within these by the number of
    runs. Groups are sorted by name.
    """
    by_task: dict[str, list[int]] = {}
    for k, run in enumerate(runs):
        by_task.setdefault(_options_key(run, _TASK), []).append(k)
    tasks = sorted(by_task.values(), key=lambda m: (_is_search(runs[m[0]]), -_is_tested(runs, m), -len(m)))
    groups: list[Group] = []
    for t, members in enumerate(tasks):
        gathered = _group_by_options(runs, members)
        named = sorted(
            zip(_group_names([runs[g[0]] for g in gathered]), gathered, strict=True), key=lambda n: _natural_key(n[0])
        )
        names, gathered = [name for name, _ in named], [g for _, g in named]
        styles = variant_styles([runs[g[0]].algorithm for g in gathered])
        groups += [
            Group(t, name, style, tuple(g), runs[g[0]].algorithm)
            for name, style, g in zip(names, styles, gathered, strict=True)
        ]
    return Grouped(tuple(_task_names([runs[members[0]] for members in tasks])), tuple(groups))


def _is_search(run: RunData) -> bool:
    held = run.options.get("data.validation")
    return isinstance(held, (int, float)) and held > 0


def _natural_key(name: str) -> list[tuple[bool, float, str]]:
    """Return a sort key by which 2 comes before 10."""
    parts = enumerate(_NUMBER.split(name))  # every second part is a number
    return [(True, float(part), "") if k % 2 else (False, 0.0, part) for k, part in parts if part]


def _is_tested(runs: Sequence[RunData], members: Sequence[int]) -> bool:
    return any(key.startswith("test_") for k in members for key in (runs[k].rows[-1] if runs[k].rows else ()))


def _options_key(run: RunData, prefixes: tuple[str, ...] = ("",)) -> str:
    return repr(
        sorted((k, repr(v)) for k, v in run.options.items() if k.startswith(prefixes) and k not in IGNORED_OPTIONS)
    )


def _group_by_options(runs: Sequence[RunData], members: Sequence[int]) -> list[list[int]]:
    """Return groups of runs with equal options; a repeated seed starts another group."""
    by_key: dict[tuple[str, int], list[int]] = {}
    copies: Counter[tuple[str, int | None]] = Counter()
    for k in members:
        key = _options_key(runs[k])
        by_key.setdefault((key, copies[key, runs[k].seed]), []).append(k)
        copies[key, runs[k].seed] += 1
    return list(by_key.values())


def _group_names(firsts: Sequence[RunData]) -> list[str]:
    apart = _distinguish_each([run.algorithm for run in firsts], [run.options for run in firsts], STOP_OPTIONS)
    names = [", ".join([run.algorithm, *_option_texts(run, keys)]) for run, keys in zip(firsts, apart, strict=True)]
    for positions in _repeated(names):
        stop_options = [key for key in differences([firsts[k].options for k in positions]) if key in STOP_OPTIONS]
        for k in positions:
            names[k] = ", ".join([names[k], *_option_texts(firsts[k], stop_options)])
    for positions in _repeated(names):
        for turn, k in enumerate(positions):
            names[k] += f" ({turn + 1})"
    return names


def _distinguish_each(
    kinds: Sequence[str], options: Sequence[dict[str, Any]], ignored: Collection[str] = ()
) -> list[list[str]]:
    """Return for each configuration the keys that distinguish it from others of its kind."""
    alike: dict[str, list[dict[str, Any]]] = {}
    for kind, own in zip(kinds, options, strict=True):
        alike.setdefault(kind, []).append(own)
    by_kind = {kind: _distinguish(group, ignored) for kind, group in alike.items()}
    return [by_kind[kind] for kind in kinds]


def _distinguish(options: Sequence[dict[str, Any]], ignored: Collection[str] = ()) -> list[str]:
    """Return the fewest keys that distinguish these configurations as well as all keys do, preferably numeric ones."""
    keys = [key for key in differences(options) if key not in ignored][:MAX_KEYS]
    numeric = {key: all(isinstance(o.get(key), (int, float, type(None))) for o in options) for key in keys}
    distinct = _count_distinct(options, keys)
    for key in [*(k for k in keys if not numeric[k]), *(k for k in reversed(keys) if numeric[k])]:
        fewer = [k for k in keys if k != key]
        if _count_distinct(options, fewer) == distinct:
            keys = fewer
    return keys


def _count_distinct(options: Sequence[dict[str, Any]], keys: Sequence[str]) -> int:
    return len({tuple(repr(o.get(key)) for key in keys) for o in options})


def _repeated(names: Sequence[str]) -> list[list[int]]:
    """Return the positions of each name that occurs more than once."""
    positions: dict[str, list[int]] = {}
    for k, name in enumerate(names):
        positions.setdefault(name, []).append(k)
    return [repeated for repeated in positions.values() if len(repeated) > 1]


def _option_texts(run: RunData, keys: Sequence[str]) -> list[str]:
    """Return texts such as `momentum 0.5`; for a flag, its name if it is on, and nothing if it is off."""
    names = {key: key.rpartition(".")[2] for key in keys if run.options.get(key) is not False}
    return [
        name if run.options.get(key) is True else f"{name} {_value_text(run.options.get(key))}"
        for key, name in names.items()
    ]


def _task_names(firsts: Sequence[RunData]) -> list[str]:
    heads = []
    for run in firsts:
        o = run.options
        named = {"model.name", "data.name"} <= set(o)
        head = f"{o['model.name']} on {o['data.name']}" if named else "a model of your own"
        heads.append(f"search: {head}" if _is_search(run) else head)
    own = [{k: v for k, v in run.options.items() if k.startswith(_TASK)} for run in firsts]
    apart = _distinguish_each(heads, own)
    return [", ".join([head, *_option_texts(run, keys)]) for run, head, keys in zip(firsts, heads, apart, strict=True)]


def differences(options: Sequence[dict[str, Any]]) -> list[str]:
    """Return the keys in which these configurations differ, except `IGNORED_OPTIONS`."""
    count = Counter(
        (key, repr(v)) for o in options for key, v in o.items() if v is not None and key not in IGNORED_OPTIONS
    )
    return list(dict.fromkeys(key for (key, _), times in count.items() if times < len(options)))


def _value_text(value: Any) -> str:
    text = "unset" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= MAX_VALUE_LENGTH else text[: MAX_VALUE_LENGTH - 1].rstrip(" ,") + "…"
