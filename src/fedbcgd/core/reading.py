"""Strict parsing of clients' messages: known fields, integers in range, finite numbers, texts of bounded length.

Every message from outside the server's process is checked against one of the models here. A message that does not fit is
refused with a reason on one line; this module raises nothing but `Malformed`.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field, ValidationError

from fedbcgd.core.parts import Section, expectation

LONGEST_TEXT = 500  # characters of a client's text that are kept
LONGEST_NAME = 100  # characters of a metric's name
MOST_METRICS = 100  # of an evaluation
MOST_TRAIN_METRICS = 32
MAX_CLIENTS = 2**31
MOST_STEPS = 2**40  # local steps, gradient evaluations, examples: more than any client can do in a round


class Malformed(ValueError):
    """A client's message does not have the expected form; the text says which field and why."""


class Message(Section):
    """Base of clients' messages: like a section of a configuration, with no unknown fields, no NaN or infinity."""


def _printable(name: str) -> str:
    if not name.isprintable():
        raise ValueError("expected a printable name")
    return name


MetricName = Annotated[str, Field(min_length=1, max_length=LONGEST_NAME), AfterValidator(_printable)]


class UploadValues(Message):
    """The values of an upload beside its payload."""

    round: int = Field(ge=0, lt=2**62)
    client: int = Field(ge=0, lt=MAX_CLIENTS)
    block: int = Field(ge=0, lt=MAX_CLIENTS)
    examples: int = Field(ge=1, le=MOST_STEPS)
    steps: int = Field(ge=1, le=MOST_STEPS)
    gradient_evaluations: int = Field(ge=0, le=MOST_STEPS)
    train_loss: float | None = None
    metrics: dict[MetricName, float] = Field(default_factory=dict, max_length=MOST_TRAIN_METRICS)


# How a client trains: by the algorithm's local rule, by a user's function, or in an app of its own that takes and returns
# whole models.
Trains = Literal["rule", "function", "app"]
RULE: Trains = "rule"
FUNCTION: Trains = "function"
APP: Trains = "app"


class Hello(Message):
    """Which client a node says it is and, if the server asked for that, how much data it has."""

    client: int = Field(ge=0, lt=MAX_CLIENTS)
    of: int = Field(0, ge=0, le=MAX_CLIENTS)  # the number of clients, as far as the node knows; 0: unknown
    examples: int | None = Field(None, ge=1, le=MOST_STEPS)
    test_examples: int | None = Field(None, ge=1, le=MOST_STEPS)
    trains: Trains = RULE
    wire_format: int = Field(1, ge=0, lt=2**31)  # of its messages; earlier versions did not say it
    version: str = Field("", max_length=LONGEST_NAME)  # of its package


class Failure(Message):
    """Why a client could not do its task, as text of the client: pass it through `shorten` before use."""

    failed: str
    state_lost: bool = False


class Evaluation(Message):
    """The metrics of a model on a client's test data."""

    examples: int = Field(ge=1, le=MOST_STEPS)
    metrics: dict[MetricName, float] = Field(min_length=1, max_length=MOST_METRICS)


M = TypeVar("M", bound=Message)


def read(kind: type[M], values: Any) -> M:
    """Parse a client's message.

    Args:
        kind: the model that the values must fit.
        values: a mapping from field names to values, as they arrived.

    Returns:
        The message, every field checked.

    Raises:
        Malformed: the values do not fit; the text names the first field that does not.
    """
    try:
        if not isinstance(values, Mapping):
            raise Malformed(f"expected fields by name, got {type(values).__name__}")
        return kind.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = shorten(".".join(map(str, first["loc"])), 60)
        value = values.get(first["loc"][0]) if first["loc"] and first["type"] != "missing" else None
        got = f", got {shown(value)}" if value is not None else ""
        raise Malformed(f"{field}: {expectation(first)}{got}") from None
    except Malformed:
        raise
    except Exception as error:  # the mapping may be any object, and raise anything
        raise Malformed(f"expected readable fields, got {type(error).__name__} while reading them") from None


def shorten(text: Any, longest: int = LONGEST_TEXT) -> str:
    """Return a text on one printable line of bounded length."""
    if not isinstance(text, str):
        return shown(text, longest)
    cut = text[: longest + 1]
    line = "".join(c if c.isprintable() else " " for c in cut)
    return line if len(text) <= longest else f"{line[:longest]}… ({len(text):,} characters)"


def shown(value: Any, longest: int = 60) -> str:
    """Return a short text for any value, however large or strange it is."""
    if isinstance(value, str):
        return repr(shorten(value, longest))
    if value is None or isinstance(value, (bool, float)) or (isinstance(value, int) and abs(value) < 10**18):
        return str(value)
    return type(value).__name__
