"""The pickles of CIFAR's python archives, read without running anything they say.

A pickle is a program: it may name any function to be called, and a few bytes of it may ask for any amount of memory. So
it is not unpickled, but taken apart by `pickletools`. Of its instructions those are followed that lists, dictionaries,
text and numbers are put together with; and of names the four are known that numpy arrays are pickled with, each of which
stands for something inert of ours.
"""

import pickletools
from typing import Any

import numpy as np

from fedbcgd.errors import UserError

STEPS = 2_000_000  # instructions; the longest published batch has a quarter of a million
ENTRIES = 32  # of the dictionary; the published ones have five


class _Dtype:
    def __init__(self, name: Any, *_: Any):
        self.name = name.decode("ascii") if isinstance(name, bytes) else name

    def __setstate__(self, state: Any) -> None:
        pass  # byte order and the like, which bytes do not have


class _Array:
    """Takes a pickled array's shape, type and bytes; numpy sees them only once they fit together."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def array(self) -> np.ndarray:
        _, shape, dtype, fortran, data = self.state
        if not isinstance(dtype, _Dtype) or dtype.name != "u1" or not isinstance(data, bytes):
            raise ValueError("an array of something else than bytes")
        return np.frombuffer(data, np.uint8).reshape(shape, order="F" if fortran else "C")


def _reconstruct(*_: Any) -> _Array:
    return _Array()


def _encode(text: str, encoding: str) -> bytes:  # how Python 3 writes bytes for Python 2
    if encoding != "latin1":
        raise ValueError("text in another encoding than Latin-1")
    return text.encode("latin1")


class _Marker:
    """Stands for the class numpy.ndarray, which is only ever passed on."""

    __slots__ = ()


_KNOWN: dict[str, Any] = {
    "numpy.core.multiarray _reconstruct": _reconstruct,
    "numpy._core.multiarray _reconstruct": _reconstruct,
    "numpy ndarray": _Marker,
    "numpy dtype": _Dtype,
    "_codecs encode": _encode,
}


def load(data: bytes, where: str) -> dict[str, Any]:
    """A dictionary of bytes, text, numbers, lists of these, and uint8 arrays."""
    try:
        found = _follow(data)
        if not isinstance(found, dict) or len(found) > ENTRIES:
            raise ValueError("something else than a dictionary of a few entries")
        return {_text(key): _plain(value) for key, value in found.items()}
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    except Exception as error:  # whatever damaged bytes lead to
        raise UserError(f"{where} is no CIFAR batch, or is damaged: {str(error) or type(error).__name__}") from None


def _follow(data: bytes) -> Any:
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    room = len(data)

    def since_mark() -> list[Any]:
        start = marks.pop()
        items = stack[start:]
        del stack[start:]
        return items

    for step, (instruction, value, _) in enumerate(pickletools.genops(data)):
        if step >= STEPS:
            raise ValueError(f"more than {STEPS:,} instructions")
        match instruction.name:
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "INT" | "NONE":
                stack.append(value)
            case "BINUNICODE" | "SHORT_BINUNICODE" | "BINBYTES" | "SHORT_BINBYTES" | "BINBYTES8":
                stack.append(value)
            case "BINSTRING" | "SHORT_BINSTRING":  # bytes of Python 2, which pickletools shows as text
                stack.append(str(value).encode("latin1"))
            case "NEWTRUE" | "NEWFALSE":
                stack.append(instruction.name == "NEWTRUE")
            case "BINPUT" | "LONG_BINPUT":
                memo[int(value or 0)] = stack[-1]
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[int(value or 0)])
            case "MARK":
                marks.append(len(stack))
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_LIST" | "EMPTY_TUPLE":
                stack.append([])
            # A tuple becomes a list. Nothing here needs tuples, and they may be keys: one nested in itself, twice in each
            # of forty levels, takes forever to hash.
            case "TUPLE":
                stack.append(since_mark())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                marks.append(len(stack) - int(instruction.name[-1]))
                stack.append(since_mark())
            case "APPEND" | "APPENDS":
                items = [stack.pop()] if instruction.name == "APPEND" else since_mark()
                _of(list, stack[-1]).extend(items)
            case "SETITEM" | "SETITEMS":
                items = [stack.pop(-2), stack.pop()] if instruction.name == "SETITEM" else since_mark()
                _of(dict, stack[-1]).update(zip(items[::2], items[1::2], strict=True))
            case "GLOBAL":
                stack.append(_named(str(value)))
            case "STACK_GLOBAL":
                name = stack.pop()
                stack.append(_named(f"{_of(str, stack.pop())} {_of(str, name)}"))
            case "REDUCE":
                arguments = stack.pop()
                if len(arguments) > 3:
                    raise ValueError("a call with more arguments than numpy's have")
                made = stack.pop()(*arguments)
                if isinstance(made, bytes):  # a text encoded again and again would outgrow memory
                    room -= len(made)
                    if room < 0:
                        raise ValueError("more text than it holds")
                stack.append(made)
            case "BUILD":
                state = stack.pop()
                stack[-1].__setstate__(state)
            case "PROTO" | "FRAME" | "STOP":
                pass
            case other:
                raise UserError(f"it uses the pickle instruction {other}, which no data set needs: refused")
    return stack.pop()


def _named(name: str) -> Any:
    try:
        return _KNOWN[name]
    except KeyError:
        raise UserError(f"it wants to use {name[:80].replace(' ', '.')!r}, which no data set needs: refused") from None


def _of(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"a {type(value).__name__} where a {kind.__name__} belongs")
    return value


def _plain(value: Any) -> Any:
    """One level deep: a list within itself, ten times in each of ten levels, would be too much for numpy."""
    if isinstance(value, _Array):
        return value.array()
    for item in value if isinstance(value, list) else [value]:
        if not isinstance(item, (int, bytes, str, type(None))):
            raise ValueError("something else than numbers, text, lists of these, and arrays")
    return value


def _text(key: Any) -> str:
    return key.decode("utf-8") if isinstance(key, bytes) else str(key)
