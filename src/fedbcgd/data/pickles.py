"""Reading the pickles of CIFAR's python archives without executing any code in them.

A pickle is a program: it can call any function by name, and a few bytes of it can use any amount of memory or time. So
`find_class` of our `pickle.Unpickler` returns harmless stand-ins for the few names that numpy arrays are pickled with,
and refuses all others; and `_check_instructions` looks for what the unpickler itself does not guard against.
"""

import io
import pickle
import pickletools
from collections.abc import Callable
from typing import Any

import numpy as np

from fedbcgd.errors import UserError

MAX_INSTRUCTIONS = 2_000_000  # the longest published batch has a quarter of a million
MAX_ENTRIES = 32  # of the dictionary; the published ones have five

_TUPLES = {"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"}
_PUTS = {"BINPUT", "LONG_BINPUT", "MEMOIZE"}
_GETS = {"BINGET", "LONG_BINGET"}
_ALLOWED = _TUPLES | _PUTS | _GETS
_ALLOWED |= {"BININT", "BININT1", "BININT2", "LONG1", "INT", "NONE", "NEWTRUE", "NEWFALSE"}
_ALLOWED |= {
    "BINUNICODE",
    "SHORT_BINUNICODE",
    "BINBYTES",
    "SHORT_BINBYTES",
    "BINBYTES8",
    "BINSTRING",
    "SHORT_BINSTRING",
}
_ALLOWED |= {"MARK", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "APPEND", "APPENDS", "SETITEM", "SETITEMS"}
_ALLOWED |= {"GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD", "PROTO", "FRAME", "STOP"}


def load(data: bytes, where: str) -> dict[str, Any]:
    """Read one pickle.

    Args:
        data: the content of its file.
        where: its name, for messages.

    Returns:
        A dictionary of bytes, text, numbers, lists of these, and uint8 arrays.

    Raises:
        UserError: it is damaged, or needs more than a CIFAR batch does.
    """
    try:
        _check_instructions(data)
        content = _Unpickler(data).load()
        if not isinstance(content, dict) or len(content) > MAX_ENTRIES:
            raise ValueError(f"expected a dictionary of at most {MAX_ENTRIES} entries")
        return {_text(key): _plain(value) for key, value in content.items()}
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    except Exception as error:  # damaged bytes can raise anything
        raise UserError(
            f"{where}: expected a CIFAR batch, got another file or a damaged one: {str(error) or type(error).__name__}"
        ) from None


def _check_instructions(data: bytes) -> None:
    """Refuse a pickle that would use too much memory or time; pickletools checks that no length exceeds the data.

    Tuples can be keys, which are hashed. If each of forty tuples contains the one before it twice, hashing takes for ever;
    if a million are nested, it overflows the stack. So no tuple may be used twice, and only a few may be something else
    than the arguments of a call or the state of an object.
    """
    memo_size, other_tuples = 0, 0
    tuple_on_top = False  # of the stack
    tuples_in_memo: set[int] = set()  # their indices
    for number, (instruction, value, _) in enumerate(pickletools.genops(data)):
        name = instruction.name
        if number >= MAX_INSTRUCTIONS:
            raise ValueError(f"more than {MAX_INSTRUCTIONS:,} instructions")
        if name not in _ALLOWED:
            raise UserError(
                f"expected arrays and plain values, got the pickle instruction {name}, which no data set needs"
            )
        if name in _PUTS:
            index = memo_size if name == "MEMOIZE" else int(value or 0)
            if index > number:  # the unpickler would allocate memory for all indices before it
                raise ValueError("an index beyond the memo")
            (tuples_in_memo.add if tuple_on_top else tuples_in_memo.discard)(index)
            memo_size += 1
            continue
        if name in _GETS and int(value or 0) in tuples_in_memo:
            raise ValueError("a tuple is used twice")
        other_tuples += (name in _TUPLES) - (tuple_on_top and name in ("REDUCE", "BUILD"))
        if other_tuples > 2 * MAX_ENTRIES:
            raise ValueError("more tuples than arrays need")
        tuple_on_top = name in _TUPLES


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes):
        super().__init__(io.BytesIO(data), encoding="bytes")
        self._encodable = len(data)  # characters that may still be encoded

    def find_class(self, module: str, name: str) -> Any:
        match module, name:
            case ("numpy.core.multiarray" | "numpy._core.multiarray", "_reconstruct"):
                return _Function(_Array)
            case ("numpy", "ndarray"):  # only ever an argument of _reconstruct
                return _Function(_Array)
            case ("numpy", "dtype"):
                return _Function(_Dtype)
            case ("_codecs", "encode"):
                return _Function(self._encode)
        full_name = f"{module}.{name}"[:80]
        raise UserError(f"expected arrays and plain values, got {full_name!r}, which no data set needs")

    def _encode(self, text: str, encoding: str) -> bytes:
        """Encode text, as Python 3 pickles bytes for Python 2; the total is limited, since one text may be used often."""
        self._encodable -= len(text)
        if self._encodable < 0:
            raise ValueError("more text is encoded than the file contains")
        if encoding != "latin1":
            raise ValueError("text in another encoding than Latin-1")
        return text.encode("latin1")


class _Function:
    """Stands for a function that a pickle names: it can be called, and no state can be set on it."""

    def __init__(self, function: Callable[..., Any]):
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        if len(arguments) > 3:
            raise ValueError("a call with more arguments than numpy's functions have")
        return self._function(*arguments)

    def __setstate__(self, _: Any) -> None:
        raise ValueError("state for a function")


class _Dtype:
    """Stands for numpy.dtype."""

    def __init__(self, name: Any, *_: Any):
        self.name = name.decode("ascii") if isinstance(name, bytes) else name

    def __setstate__(self, state: Any) -> None:
        pass  # byte order and alignment, which do not matter for uint8


class _Array:
    """Stands for numpy.ndarray: takes shape, type and bytes of a pickled array, which `array` checks."""

    def __init__(self, *_: Any):
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def array(self) -> np.ndarray:
        _, shape, dtype, fortran, data = self.state
        if not isinstance(dtype, _Dtype) or dtype.name != "u1" or not isinstance(data, bytes):
            raise ValueError("an array of another type than uint8")
        return np.frombuffer(data, np.uint8).reshape(shape, order="F" if fortran else "C")


def _plain(value: Any) -> Any:
    """Convert a value; lists may not be nested, since a list may contain itself."""
    if isinstance(value, _Array):
        return value.array()
    for item in value if isinstance(value, list) else [value]:
        if not isinstance(item, (int, bytes, str, type(None))):
            raise ValueError("expected numbers, text, lists of these, and arrays")
    return value


def _text(key: Any) -> str:
    if not isinstance(key, (bytes, str)):
        raise ValueError("expected keys that are text")
    return key.decode("utf-8") if isinstance(key, bytes) else key
