"""One table of all options of algorithms: name, default, meaning, and which algorithms take it.

The meaning of an option is the description of its field: in its part, or in `core.algorithm.Algorithm` if it concerns all
parts.
"""

import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from fedbcgd.algorithms.registry import KINDS, algorithm_names, make_algorithm, parts_of, registries
from fedbcgd.core.algorithm import Algorithm
from fedbcgd.core.local_rule import LocalRule

UNSET = "none"
MOST_NAMED = 3  # if more algorithms take an option, the table names the parts that have it instead


@dataclass(frozen=True)
class Option:
    """An option.

    Attributes:
        name: as a keyword of `simulate`, or a key of `[algorithm]`.
        default: its value if it is not given; in the table of one algorithm, the default of that algorithm.
        meaning: a sentence without a full stop.
        parts: the parts that have it; empty for options of an algorithm as a whole.
        algorithms: the named algorithms that take it.
        everyone: whether all of them take it.
    """

    name: str
    default: str
    meaning: str
    parts: tuple[str, ...]
    algorithms: tuple[str, ...]
    everyone: bool

    @property
    def takers(self) -> str:
        """The algorithms that take it, as text; if they are many, or none by default, the parts that have it."""
        if self.everyone:
            return "all"
        return ", ".join(self.algorithms if 0 < len(self.algorithms) <= MOST_NAMED else self.parts)


def options(algorithm: str | None = None) -> list[Option]:
    """Return all options, or those of one algorithm.

    Args:
        algorithm: a registered name.

    Raises:
        UserError: there is no such algorithm.
    """
    names = list(algorithm_names())
    own = None if algorithm is None else make_algorithm(algorithm).options()
    whole = [field.name for field in fields(Algorithm) if field.name != "name"]
    listed = [Option(n, _default_of(n, own), meaning_of(n), (), tuple(names), True) for n in whole]
    rows: dict[tuple[str, str, str], list[str]] = {}
    for kind, part, name, default, meaning in _fields():
        rows.setdefault((name, default, meaning), []).append(f"{kind}={part}")
    for (name, default, meaning), parts in rows.items():
        takers = tuple(n for n in names if any(f"{k}={p}" in parts for k, p in parts_of(n).items()))
        if own is None or algorithm in takers:
            shown = default if own is None else _text(own[name])
            listed.append(Option(name, shown, meaning, tuple(parts), takers, len(takers) == len(names)))
    return listed


def meaning_of(name: str) -> str:
    """Return the meaning of an option of an algorithm as a whole.

    For a kind of part, such as "uplink", that includes the names of its parts and their options.
    """
    meaning: str = get_type_hints(Algorithm, include_extras=True)[name].__metadata__[0]
    if name not in KINDS:
        return meaning
    registry = registries()[name]
    choices = []
    for part in registry:
        own = [key for key in registry.get(part).options() if name != "local" or key not in LocalRule.model_fields]
        choices.append(f"{part} ({', '.join(own)})" if own else part)
    return f"{meaning}: {', '.join(choices)}"


def _default_of(name: str, own: Mapping[str, Any] | None) -> str:
    if name in KINDS:
        return "by the algorithm" if own is None else own[name]
    return _text(getattr(Algorithm, name))


def _fields() -> Iterator[tuple[str, str, str, str, str]]:
    """Yield kind, part, name, default and meaning of every option of every part."""
    for kind, registry in registries().items():
        for part in registry:
            for name, info in registry.get(part).model_fields.items():
                yield kind, part, name, _text(info.default), info.description or ""


def _text(value: Any) -> str:
    if value is None:
        return UNSET
    return str(value).lower() if isinstance(value, bool) else str(value)


def as_text(indent: str) -> str:
    """Return all options for a docstring."""
    wrapper = textwrap.TextWrapper(
        110, initial_indent=indent, subsequent_indent=indent + "    ", break_on_hyphens=False, break_long_words=False
    )
    rows = [f"{o.name} ({o.default}): {o.meaning}" + ("" if o.everyone else f" [{o.takers}]") for o in options()]
    return "\n".join(map(wrapper.fill, rows))


def page() -> str:
    """Return docs/options.md."""
    return PAGE + _as_markdown(options())


def _as_markdown(rows: Iterable[Option]) -> str:
    lines = ["| option | default | meaning | algorithms |", "|---|---|---|---|"]
    for o in rows:
        takers = o.takers if o.everyone else ", ".join(f"`{name}`" for name in o.algorithms or o.parts)
        default = o.default if o.default in (UNSET, "by the algorithm") else f"`{o.default}`"
        lines.append(f"| `{o.name}` | {default} | {o.meaning.replace('|', chr(92) + '|')} | {takers} |")
    return "\n".join(lines) + "\n"


PAGE = """# Options of algorithms

Written by `fedbcgd options --markdown`; the meanings stand at the fields of the parts. They are keywords of
`fedbcgd.simulate` and `make_algorithm`, and keys of `[algorithm]` in a configuration. `fedbcgd options ALGORITHM`
shows those of one algorithm with its own defaults. What concerns a run, such as `rounds`, `cohort` and `workers`, is in
`help(fedbcgd.simulate)` and in the file that `fedbcgd init` writes.

d, the unit of `budget`, is the number of trained parameters. Weight decay 1e-3, rate decay 0.998 and 5 local epochs are the
paper's defaults.

"""
