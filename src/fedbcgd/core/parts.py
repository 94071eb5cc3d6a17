"""Base classes of the parts of an algorithm and of configuration sections, their registry, and the wording of their errors.

A section of a configuration is such a set of options too, but strict: no conversion of types. All messages about a wrong
option, such as lr, are worded here, from pydantic's text.
"""

import re
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from fedbcgd.errors import UserError, did_you_mean, unknown


class Section(BaseModel):
    """A section of a configuration: frozen, and strict about types and names."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)


class Part(BaseModel):
    """Base of uplinks, local rules, server rules and codecs. Its fields are the hyper-parameters; it has no other state."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def options(cls) -> list[str]:
        """Return the names of the hyper-parameters."""
        return list(cls.model_fields)

    @classmethod
    def registered_name(cls) -> str:
        """Return the name under which this class is registered; the class's name if it is not registered."""
        return cls.__dict__.get("_registered_name", cls.__name__)


P = TypeVar("P", bound=Part)


class Registry(Generic[P]):
    """The parts of one kind, by name. Iterating gives the names."""

    def __init__(self, kind: str):
        self.kind = kind
        self._parts: dict[str, type[P]] = {}

    def add(self, name: str, part: type[P]) -> None:
        """Register a part under a name.

        Raises:
            UserError: the name is taken.
        """
        if name in self._parts:
            raise UserError(f"{self.kind}: expected a name that is not registered yet, got {name!r}")
        self._parts[name] = part
        part._registered_name = name  # type: ignore[attr-defined]

    def get(self, name: str) -> type[P]:
        """Return the part of this name.

        Raises:
            UserError: there is none; the message has the nearest name.
        """
        if name not in self._parts:
            raise unknown(self.kind, name, self._parts)
        return self._parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)


def build(part: type[P], options: dict[str, Any]) -> P:
    """Make a part with these options.

    Raises:
        UserError: an option is wrong; the message names it, what was expected and what it is.
    """
    try:
        return part(**options)
    except ValidationError as error:
        by_field: dict[str, list[Any]] = {}
        for e in error.errors():
            by_field.setdefault(str(e["loc"][0]) if e["loc"] else "", []).append(e)
        raise UserError("; ".join(_explain(part, field, errors) for field, errors in by_field.items())) from None


def _explain(part: type[Part], field: str, errors: list[Any]) -> str:
    if not field:  # a check of the part as a whole, whose message names its field
        return errors[0]["msg"].removeprefix("Value error, ")
    message = expectation(errors[0])
    if field in part.model_fields and len(errors) > 1:  # an error for each allowed type: name all types at once
        extra = part.model_fields[field].json_schema_extra
        expected = extra.get("expected") if isinstance(extra, dict) else None
        each = dict.fromkeys(expectation(error).removeprefix("expected ") for error in errors)
        message = f"expected {expected or ' or '.join(each)}"
    return f"{field}: {message}, got {errors[0]['input']!r}"


def expectation(error: Any) -> str:
    """Return the message of one of pydantic's errors, as "expected …" if it says what the input should be."""
    message = error["msg"].removeprefix("Value error, ")
    if not message.startswith("Input should be "):
        return message[:1].lower() + message[1:]
    expected = message.removeprefix("Input should be ").replace("a valid integer", "an integer").replace("valid ", "")
    if expected.startswith(("greater", "less")):
        expected = f"a number {expected}"
    if error["type"] != "literal_error":
        expected = expected.partition(", ")[0]  # what follows describes the input
    return f"expected {expected}"


def explain_error(error: Any, section: type[BaseModel]) -> str:
    """Return one of pydantic's errors as a message to a user.

    Args:
        error: one of `ValidationError.errors()`.
        section: the section that has the wrong key or value.
    """
    path = [str(step) for step in error["loc"]]
    field = ".".join(path)
    if error["type"] == "extra_forbidden":
        names = list(section.model_fields)
        return f"{field}: expected one of {', '.join(names)}, got {path[-1]!r}.{did_you_mean(path[-1], names)}"
    if error["type"] == "literal_error":
        expected = error["ctx"]["expected"]
        hint = did_you_mean(error["input"], re.findall(r"'([^']+)'", expected))
        return f"{field}: expected {expected}, got {error['input']!r}.{hint}"
    if error["type"] == "value_error":  # a check of the section as a whole, whose message names its field
        return f"{field}.{error['msg'].removeprefix('Value error, ')}"
    return f"{field}: {expectation(error)}, got {error['input']!r}"
