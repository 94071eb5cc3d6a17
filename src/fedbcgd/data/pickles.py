"""The pickles of CIFAR's python archives, read without running anything they say.

A pickle is a program: it may name any function to be called, and a few bytes of it may ask for any amount of memory or
time. So `pickle.Unpickler` gets something inert of ours for the few names that arrays are pickled with, and no other
name; and `_check` looks through the instructions before it runs, for what it does not guard against itself.
"""

import io
import pickle
import pickletools
from collections.abc import Callable
from typing import Any

import numpy as np

from fedbcgd.errors import UserError

STEPS = 2_000_000  # instructions; the longest published batch has a quarter of a million
ENTRIES = 32  # of the dictionary; the published ones have five

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
    """A dictionary of bytes, text, numbers, lists of these, and uint8 arrays."""
    try:
        _check(data)
        found = _Unpickler(data).load()
        if not isinstance(found, dict) or len(found) > ENTRIES:
            raise ValueError("something else than a dictionary of a few entries")
        return {_text(key): _plain(value) for key, value in found.items()}
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    except Exception as error:  # whatever damaged bytes lead to
        raise UserError(f"{where} is no CIFAR batch, or is damaged: {str(error) or type(error).__name__}") from None


def _check(data: bytes) -> None:
    """Refuse what would take memory or time out of proportion; pickletools checks that no length exceeds the data.

    Tuples may be keys, which are hashed: one that holds another twice, in each of forty levels, takes for ever, and a
    million nested ones overflow the stack. So no tuple is used twice, and few are anything but arguments or state.
    """
    puts, loose = 0, 0
    on_top = False  # whether a tuple is
    kept: set[int] = set()  # places in the memo with a tuple
    for step, (instruction, value, _) in enumerate(pickletools.genops(data)):
        name = instruction.name
        if step >= STEPS:
            raise ValueError(f"more than {STEPS:,} instructions")
        if name not in _ALLOWED:
            raise UserError(f"it uses the pickle instruction {name}, which no data set needs: refused")
        if name in _PUTS:
            place = puts if name == "MEMOIZE" else int(value or 0)
            if place > step:  # memory is taken for all places before it
                raise ValueError("a place far off in the memo")
            (kept.add if on_top else kept.discard)(place)
            puts += 1
            continue
        if name in _GETS and int(value or 0) in kept:
            raise ValueError("a tuple in two places")
        loose += (name in _TUPLES) - (on_top and name in ("REDUCE", "BUILD"))
        if loose > 2 * ENTRIES:
            raise ValueError("more tuples than arrays have")
        on_top = name in _TUPLES


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes):
        super().__init__(io.BytesIO(data), encoding="bytes")
        self._room = len(data)

    def find_class(self, module: str, name: str) -> Any:
        match module, name:
            case ("numpy.core.multiarray" | "numpy._core.multiarray", "_reconstruct"):
                return _Name(_Array)
            case ("numpy", "ndarray"):  # only ever an argument of _reconstruct
                return _Name(_Array)
            case ("numpy", "dtype"):
                return _Name(_Dtype)
            case ("_codecs", "encode"):
                return _Name(self._encode)
        wanted = f"{module}.{name}"[:80]
        raise UserError(f"it wants to use {wanted!r}, which no data set needs: refused")

    def _encode(self, text: str, encoding: str) -> bytes:
        """How Python 3 writes bytes for Python 2. One text encoded again and again would outgrow memory."""
        self._room -= len(text)
        if self._room < 0:
            raise ValueError("more text than it holds")
        if encoding != "latin1":
            raise ValueError("text in another encoding than Latin-1")
        return text.encode("latin1")


class _Name:
    """What a name stands for: it can be called, and nothing can be set on it."""

    def __init__(self, make: Callable[..., Any]):
        self._make = make

    def __call__(self, *arguments: Any) -> Any:
        if len(arguments) > 3:
            raise ValueError("a call with more arguments than numpy's have")
        return self._make(*arguments)

    def __setstate__(self, _: Any) -> None:
        raise ValueError("state for a function")


class _Dtype:
    def __init__(self, name: Any, *_: Any):
        self.name = name.decode("ascii") if isinstance(name, bytes) else name

    def __setstate__(self, state: Any) -> None:
        pass  # byte order and the like, which bytes do not have


class _Array:
    """Takes a pickled array's shape, type and bytes; numpy sees them only once they fit together."""

    def __init__(self, *_: Any):
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def array(self) -> np.ndarray:
        _, shape, dtype, fortran, data = self.state
        if not isinstance(dtype, _Dtype) or dtype.name != "u1" or not isinstance(data, bytes):
            raise ValueError("an array of something else than bytes")
        return np.frombuffer(data, np.uint8).reshape(shape, order="F" if fortran else "C")


def _plain(value: Any) -> Any:
    """One level deep: a list within itself, ten times in each of ten levels, would be too much for numpy."""
    if isinstance(value, _Array):
        return value.array()
    for item in value if isinstance(value, list) else [value]:
        if not isinstance(item, (int, bytes, str, type(None))):
            raise ValueError("something else than numbers, text, lists of these, and arrays")
    return value


def _text(key: Any) -> str:
    if not isinstance(key, (bytes, str)):
        raise ValueError("a key that is no text")
    return key.decode("utf-8") if isinstance(key, bytes) else key
