"""Validation of the values in a run folder, so that the page can rely on their types.

Folders come from anywhere: written by other versions, edited by hand, half copied, or malicious. A value of the wrong type
is left out and reported; the rest of its folder is shown. Every text becomes a line of bounded length without control
characters, every number is one that a browser can show, every table and list has bounded depth and length.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from fedbcgd.core.reading import shorten

ReportProblem = Callable[[str], None]  # called with what is wrong

MAX_TEXT = 1000  # characters of a text
MAX_NAME = 100
MAX_ITEMS = 10_000  # of a list: sizes of blocks
MAX_ENTRIES = 200  # of a table: options, versions, columns of metrics
MAX_NOTES = 50
MAX_DEPTH = 8  # of tables in tables
MAX_INTEGER = 2**63


def text(value: Any, longest: int = MAX_TEXT) -> Any:
    """Return a text as one printable line of bounded length; anything else unchanged."""
    return shorten(value, longest) if isinstance(value, str) else value


def bounded(value: Any, depth: int = MAX_DEPTH) -> Any:
    """Return a value of a configuration with bounded size; if JSON cannot hold it, or it is too large, as text."""
    if isinstance(value, (Mapping, list, tuple)) and not depth:
        return "…"
    if isinstance(value, Mapping):
        entries = list(value.items())[:MAX_ENTRIES]
        return {shorten(str(k), MAX_NAME): bounded(item, depth - 1) for k, item in entries}
    if isinstance(value, (list, tuple)):
        return [bounded(item, depth - 1) for item in value[:MAX_ENTRIES]]
    if isinstance(value, int) and abs(value) >= MAX_INTEGER:
        return f"a number of {value.bit_length()} bits"
    return value if value is None or isinstance(value, (bool, int, float)) else shorten(str(value), MAX_TEXT)


_Text = Annotated[str, BeforeValidator(text)]
_Name = Annotated[str, BeforeValidator(lambda v: text(v, MAX_NAME))]
_Count = Annotated[int, Field(ge=0, lt=MAX_INTEGER)]
_Number = _Count | Annotated[int, Field(gt=-MAX_INTEGER, lt=0)] | Annotated[float, Field(allow_inf_nan=False)]
_Positive = _Count | Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _strict(annotation: Any) -> TypeAdapter[Any]:
    return TypeAdapter(annotation, config=ConfigDict(strict=True))


# A validator, and what it expects in words.
_NUMBER = (_strict(_Number), "a number")
_TEXT = (_strict(_Text), "text")
_NAME = (_strict(_Name), "text")
_NUMBERS = (_strict(Annotated[list[_Positive], Field(max_length=MAX_ITEMS)]), "a list of numbers")
_TEXTS = (_strict(Annotated[list[_Text], Field(max_length=MAX_NOTES)]), "a list of texts")
_TABLE = (_strict(Annotated[dict[str, Any], BeforeValidator(bounded)]), "a table")
_LEDGER = (_strict(dict[str, Any]), "a table")

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
    "metric": _NAME,
    "goal": (_strict(Literal["min", "max"]), '"min" or "max"'),
    "precision": _NAME,
    "seed": _NUMBER,
    "blocks": _NUMBERS,
    "shared": _NUMBER,
    "ledger": _LEDGER,
    "config": _TABLE,
    "options": _TABLE,
}
LEDGER = dict.fromkeys(("dim", "itemsize", "blocks", "upload_bytes", "upload_max_bytes", "refused", "lost"), _NUMBER)
LEDGER |= {"block_bytes": _NUMBERS}


def summary(loaded: Mapping[str, Any], report: ReportProblem) -> dict[str, Any]:
    """Return the values of a summary that have the right type.

    Args:
        loaded: the content of summary.json.
        report: called with a text about each value that is left out.
    """
    renamed = {"carrier": "backend"}  # keys of earlier versions
    valid = _validate({renamed.get(key, key): value for key, value in loaded.items()}, SUMMARY, "", report)
    if "ledger" in valid:
        valid["ledger"] = _validate(valid["ledger"], LEDGER, "ledger.", report)
    for table in ("versions", "machine"):
        if table in valid:
            valid[table] = {k: v if isinstance(v, (int, float)) else str(v) for k, v in valid[table].items()}
    return valid


def _validate(
    loaded: Mapping[str, Any],
    validators: Mapping[str, tuple[TypeAdapter[Any], str]],
    prefix: str,
    report: ReportProblem,
) -> dict[str, Any]:
    valid = {}
    for name, (validator, expected) in validators.items():
        value = loaded.get(name)  # NaN and infinity were written as null
        if value is None:
            continue
        try:
            valid[name] = validator.validate_python(value)
        except ValidationError:
            report(f"{prefix}{name} is not {expected}, or too large: it is left out")
    return valid


_ROW = _strict(Annotated[dict[_Name, float | _Number | None], Field(max_length=MAX_ENTRIES)])
_ROUND = _strict(Annotated[int, Field(ge=0, lt=2**53)] | Annotated[float, Field(ge=0, lt=2**53)])


def row(loaded: Mapping[str, Any]) -> dict[str, float]:
    """Return a row of metrics, with NaN for null.

    Raises:
        ValueError: it is not a row of metrics.
    """
    valid = _ROW.validate_python(loaded)
    _ROUND.validate_python(valid.get("round"))
    return {name: float("nan") if value is None else value for name, value in valid.items()}


_LABEL_COUNTS = _strict(
    tuple[list[_Name], Annotated[list[Annotated[list[_Count], Field(min_length=1)]], Field(min_length=1)]]
)


def label_counts(loaded: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of label_counts.json: the names of the labels, and how many examples of each a client has.

    Raises:
        ValueError: it has another form.
    """
    names, counts = _LABEL_COUNTS.validate_python((loaded.get("classes"), loaded.get("counts")))
    if len({len(count) for count in counts}) != 1:
        raise ValueError("counts: expected equally many labels for each client, got different numbers")
    labels = len(counts[0])
    return {"classes": names if len(names) == labels else [str(k) for k in range(labels)], "counts": counts}
