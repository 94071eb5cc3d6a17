"""What a summary and a configuration say, brought to the kinds that the page counts on.

Folders come from anywhere: of other versions, edited by hand, half copied. A fact of the wrong kind is left out and told;
the rest of its folder is shown.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

Wrong = Callable[[str], None]


def _is_number(v: Any) -> bool:
    if isinstance(v, bool) or not isinstance(v, (int, float)):
        return False
    try:
        return math.isfinite(v)
    except OverflowError:  # a whole number larger than any float
        return False


def _is_text(v: Any) -> bool:
    return isinstance(v, str)


def _are_numbers(v: Any) -> bool:
    return isinstance(v, list) and all(_is_number(item) and item >= 0 for item in v)


def _are_texts(v: Any) -> bool:
    return isinstance(v, list) and all(_is_text(item) for item in v)


def _is_table(v: Any) -> bool:
    return isinstance(v, dict)


_NUMBER = (_is_number, "a number")
_TEXT = (_is_text, "text")
_NUMBERS = (_are_numbers, "a list of numbers")
_TEXTS = (_are_texts, "a list of texts")
_TABLE = (_is_table, "a table")

SUMMARY = {
    "algorithm": _TEXT,
    "stopped": _TEXT,
    "seconds": _NUMBER,
    "rounds": _NUMBER,
    "finished": _TEXT,
    "command": _TEXT,
    "versions": _TABLE,
    "machine": _TABLE,
    "divider": _TEXT,
    "notes": _TEXTS,
    "carrier": _TEXT,
    "seed": _NUMBER,
    "blocks": _NUMBERS,
    "shared": _NUMBER,
    "ledger": _TABLE,
    "config": _TABLE,
    "options": _TABLE,
}
LEDGER = dict.fromkeys(("dim", "itemsize", "blocks", "upload_bytes", "upload_max_bytes", "refused", "lost"), _NUMBER)
LEDGER |= {"block_bytes": _NUMBERS}


def summary(loaded: Mapping[str, Any], wrong: Wrong) -> dict[str, Any]:
    """The facts of a summary that are of the right kind."""
    kept = _checked(loaded, SUMMARY, "", wrong)
    if "ledger" in kept:
        kept["ledger"] = _checked(kept["ledger"], LEDGER, "ledger.", wrong)
    for table in ("versions", "machine"):
        if table in kept:
            kept[table] = {str(k): v if _is_number(v) else str(v) for k, v in kept[table].items()}
    return kept


def _checked(
    loaded: Mapping[str, Any], kinds: Mapping[str, tuple[Callable[[Any], bool], str]], prefix: str, wrong: Wrong
) -> dict[str, Any]:
    kept = {}
    for name, (right, kind) in kinds.items():
        value = loaded.get(name)  # null is how a number that is none was written
        if value is None:
            continue
        if right(value):
            kept[name] = value
        else:
            wrong(f"{prefix}{name} is not {kind}: it is left out")
    return kept


def option(value: Any) -> Any:
    """The value of an option as JSON knows it: a date or a time, and whatever else there may be, becomes text."""
    if isinstance(value, (list, tuple)):
        return [option(item) for item in value]
    if isinstance(value, Mapping):
        return {str(k): option(item) for k, item in value.items()}
    return value if value is None or isinstance(value, (bool, str, int, float)) else str(value)
