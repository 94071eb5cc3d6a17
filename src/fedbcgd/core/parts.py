"""A part of an algorithm: a frozen, checked set of hyper-parameters, and the table of names it is found under.
A section of a configuration is its stricter sister."""

import re
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from fedbcgd.errors import UserError, unknown


class Section(BaseModel):
    """A section of a configuration: frozen, and strict about types and names."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)


class Part(BaseModel):
    """Base of uplinks, local rules, server rules and codecs. Fields are the hyper-parameters; nothing else is kept."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def options(cls) -> list[str]:
        return list(cls.model_fields)

    @classmethod
    def registered_name(cls) -> str:
        """The name that this class was registered under; its own where it was not."""
        return cls.__dict__.get("_registered_name", cls.__name__)


P = TypeVar("P", bound=Part)


class Registry(Generic[P]):
    """Names for the parts of one kind."""

    def __init__(self, kind: str):
        self.kind = kind
        self._parts: dict[str, type[P]] = {}

    def add(self, name: str, part: type[P]) -> None:
        self._parts[name] = part
        part._registered_name = name  # type: ignore[attr-defined]

    def get(self, name: str) -> type[P]:
        if name not in self._parts:
            raise unknown(self.kind, name, self._parts)
        return self._parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)


def build(part: type[P], options: dict[str, Any]) -> P:
    """The part with these options; a wrong one is named with what was given and what is allowed."""
    try:
        return part(**options)
    except ValidationError as error:
        by_field: dict[str, list[Any]] = {}
        for e in error.errors():
            by_field.setdefault(str(e["loc"][0]) if e["loc"] else "", []).append(e)
        raise UserError("; ".join(_explain(part, field, errors) for field, errors in by_field.items())) from None


def _explain(part: type[Part], field: str, errors: list[Any]) -> str:
    message = errors[0]["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    if field in part.model_fields and len(errors) > 1:  # one complaint for each form that would do: say them in one
        message = f"wanted is: {part.model_fields[field].description}"
    return f"{field}: {message} (given: {errors[0]['input']!r})" if field else message


def explain_error(error: Any, section: type[BaseModel]) -> str:
    """Say one of pydantic's errors to a person. `section` is what the wrong key was given to."""
    path = [str(step) for step in error["loc"]]
    field = ".".join(path)
    if error["type"] == "extra_forbidden":
        names = list(section.model_fields)
        near = get_close_matches(path[-1], names, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        return f"{field}: unknown key.{hint} Known here: {', '.join(names)}"
    if error["type"] == "literal_error":
        expected = error["ctx"]["expected"]
        near = get_close_matches(str(error["input"]), re.findall(r"'([^']+)'", expected), n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        return f"{field}: given {error['input']!r}.{hint} Allowed: {expected}"
    if error["type"] == "value_error":  # of a section as a whole: it names its field itself
        return f"{field}.{error['msg'].removeprefix('Value error, ')}"
    message = error["msg"]
    return f"{field}: given {error['input']!r}; {message[:1].lower()}{message[1:]}"
