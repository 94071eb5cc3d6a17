"""What the files of a run folder say, brought to the kinds that the page counts on.

Folders come from anywhere: of other versions, edited by hand, half copied, made to do harm. A fact of the wrong kind is
left out and told; the rest of its folder is shown. Every text is cut to a line of bounded length without control
characters, every number is one that a browser can show, every table and list has bounded depth and length.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from fedbcgd.core.reading import shorten

Wrong = Callable[[str], None]

LONGEST = 1000  # characters of a text
LONGEST_NAME = 100
MOST_ITEMS = 10_000  # of a list: sizes of blocks
MOST_ENTRIES = 200  # of a table: options, versions, columns of metrics
MOST_NOTES = 50
MOST_DEPTH = 8  # of tables in tables
LARGEST = 2**63  # a whole number


def text(value: Any, longest: int = LONGEST) -> Any:
    """A text as it may be shown, on a terminal or on the page; anything else as it is."""
    return shorten(value, longest) if isinstance(value, str) else value


def option(value: Any, depth: int = MOST_DEPTH) -> Any:
    """A value of a configuration as JSON knows it; what is neither of TOML nor of bounded size becomes a text."""
    if isinstance(value, (Mapping, list, tuple)) and not depth:
        return "…"
    if isinstance(value, Mapping):
        entries = list(value.items())[:MOST_ENTRIES]
        return {shorten(str(k), LONGEST_NAME): option(item, depth - 1) for k, item in entries}
    if isinstance(value, (list, tuple)):
        return [option(item, depth - 1) for item in value[:MOST_ENTRIES]]
    if isinstance(value, int) and abs(value) >= LARGEST:
        return f"a number of {value.bit_length()} bits"
    return value if value is None or isinstance(value, (bool, int, float)) else shorten(str(value), LONGEST)


_Text = Annotated[str, BeforeValidator(text)]
_Name = Annotated[str, BeforeValidator(lambda v: text(v, LONGEST_NAME))]
_Whole = Annotated[int, Field(ge=0, lt=LARGEST)]
_Number = _Whole | Annotated[int, Field(gt=-LARGEST, lt=0)] | Annotated[float, Field(allow_inf_nan=False)]
_Positive = _Whole | Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _kind(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind, config=ConfigDict(strict=True))


_NUMBER = (_kind(_Number), "a number")
_TEXT = (_kind(_Text), "text")
_NAME = (_kind(_Name), "text")
_NUMBERS = (_kind(Annotated[list[_Positive], Field(max_length=MOST_ITEMS)]), "a list of numbers")
_TEXTS = (_kind(Annotated[list[_Text], Field(max_length=MOST_NOTES)]), "a list of texts")
_TABLE = (_kind(Annotated[dict[str, Any], BeforeValidator(option)]), "a table")
_LEDGER = (_kind(dict[str, Any]), "a table")

SUMMARY = {
    "algorithm": _NAME,
    "stopped": _NAME,
    "seconds": _NUMBER,
    "rounds": _NUMBER,
    "finished": _NAME,
    "command": _TEXT,
    "versions": _TABLE,
    "machine": _TABLE,
    "divider": _TEXT,
    "notes": _TEXTS,
    "backend": _NAME,
    "seed": _NUMBER,
    "blocks": _NUMBERS,
    "shared": _NUMBER,
    "ledger": _LEDGER,
    "config": _TABLE,
    "options": _TABLE,
}
LEDGER = dict.fromkeys(("dim", "itemsize", "blocks", "upload_bytes", "upload_max_bytes", "refused", "lost"), _NUMBER)
LEDGER |= {"block_bytes": _NUMBERS}


def summary(loaded: Mapping[str, Any], wrong: Wrong) -> dict[str, Any]:
    """The facts of a summary that are of the right kind."""
    earlier = {"carrier": "backend"}  # as it was called
    kept = _checked({earlier.get(key, key): value for key, value in loaded.items()}, SUMMARY, "", wrong)
    if "ledger" in kept:
        kept["ledger"] = _checked(kept["ledger"], LEDGER, "ledger.", wrong)
    for table in ("versions", "machine"):
        if table in kept:
            kept[table] = {k: v if isinstance(v, (int, float)) else str(v) for k, v in kept[table].items()}
    return kept


def _checked(
    loaded: Mapping[str, Any], kinds: Mapping[str, tuple[TypeAdapter[Any], str]], prefix: str, wrong: Wrong
) -> dict[str, Any]:
    kept = {}
    for name, (kind, called) in kinds.items():
        value = loaded.get(name)  # null is how a number that is none was written
        if value is None:
            continue
        try:
            kept[name] = kind.validate_python(value)
        except ValidationError:
            wrong(f"{prefix}{name} is not {called}, or too large: it is left out")
    return kept


_ROW = _kind(Annotated[dict[_Name, float | _Number | None], Field(max_length=MOST_ENTRIES)])
_ROUND = _kind(Annotated[int, Field(ge=0, lt=2**53)] | Annotated[float, Field(ge=0, lt=2**53)])


def row(loaded: Mapping[str, Any]) -> dict[str, float]:
    """A row of metrics; null stands for what was not a number.

    Raises:
        ValueError: it is none.
    """
    read = _ROW.validate_python(loaded)
    _ROUND.validate_python(read.get("round"))
    return {name: float("nan") if value is None else value for name, value in read.items()}


_HOLDINGS = _kind(
    tuple[list[_Name], Annotated[list[Annotated[list[_Whole], Field(min_length=1)]], Field(min_length=1)]]
)


def holdings(loaded: Mapping[str, Any]) -> dict[str, Any]:
    """How many examples of each label each client has.

    Raises:
        ValueError: that is not what it says.
    """
    names, counts = _HOLDINGS.validate_python((loaded.get("classes"), loaded.get("counts")))
    if len({len(count) for count in counts}) != 1:
        raise ValueError("clients with more labels than others")
    labels = len(counts[0])
    return {"classes": names if len(names) == labels else [str(k) for k in range(labels)], "counts": counts}
