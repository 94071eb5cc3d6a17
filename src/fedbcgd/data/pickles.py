"""The pickles of CIFAR's python archives, read without running anything they say.

A pickle may name any function to be called. Here four names are known, the ones numpy arrays are pickled with, and each
stands for something inert of ours; any other name is refused.
"""

import io
import pickle
from typing import Any

import numpy as np

from fedbcgd.errors import UserError


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
        raise ValueError(f"text in {encoding}")
    return text.encode("latin1")


class _Marker:
    """Stands for the class numpy.ndarray, which is only ever passed on."""

    __slots__ = ()


_KNOWN: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): _Marker,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _encode,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _KNOWN[module, name]
        except KeyError:
            raise UserError(f"it wants to use {module}.{name}, which no data set needs: refused") from None


def load(data: bytes, where: str) -> dict[str, Any]:
    """A dictionary of bytes, numbers, lists and uint8 arrays."""
    try:
        found = _Unpickler(io.BytesIO(data), encoding="bytes").load()
        if not isinstance(found, dict):
            raise ValueError("something else than a dictionary")
        return {_text(key): value.array() if isinstance(value, _Array) else value for key, value in found.items()}
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    except Exception as error:  # whatever damaged bytes lead to
        raise UserError(f"{where} is no CIFAR batch, or is damaged: {error}") from None


def _text(key: Any) -> str:
    return key.decode("utf-8") if isinstance(key, bytes) else str(key)
