"""Reading the pickles of CIFAR's python archives without unpickling them.

A pickle is a program: it can call any function by name, and a few bytes of it can use any amount of memory or time. So none
of it is executed: `pickletools` splits it into instructions, and the numbers and texts in these are all that CIFAR's files
hold. A text that is one of CIFAR's keys begins an entry, and the values up to the next key belong to it.
"""

import pickletools
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

import numpy as np

from fedbcgd.errors import UserError

MAX_INSTRUCTIONS = 2_000_000  # the longest published batch has a quarter of a million
ROW = 3072  # bytes of an image
LABELS = ("labels", "fine_labels")
NAMES = ("label_names", "fine_label_names")
KEYS = {"data", *LABELS, *NAMES, "coarse_labels", "coarse_label_names", "filenames", "batch_label"}
KEYS |= {"num_cases_per_batch", "num_vis"}

_INTEGERS = {"BININT", "BININT1", "BININT2", "LONG1", "INT"}  # INT may have a flag, too


def load(data: bytes, where: str) -> dict[str, Any]:
    """Read one pickle.

    Args:
        data: the content of its file.
        where: its name, for messages.

    Returns:
        The images under `data`, uint8 (n, 3072); lists of integers under the keys of `LABELS`, and of texts under those of
        `NAMES`, as far as the pickle has them.

    Raises:
        UserError: it is damaged, or has something else than a CIFAR batch.
    """
    try:
        entries: dict[str, list[Any]] = {}
        items: list[Any] = []
        for value in _values(data):
            if value in KEYS:
                items = entries[value] = []
            else:
                items.append(value)
        numbers = {key: list(takewhile(_is_integer, entries[key])) for key in LABELS if key in entries}
        names = {key: [v for v in entries[key] if isinstance(v, str)] for key in NAMES if key in entries}
        return numbers | names | ({"data": _images(entries["data"])} if "data" in entries else {})
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    except Exception as error:  # damaged bytes can raise anything
        raise UserError(
            f"{where}: expected a CIFAR batch, got another file or a damaged one: {str(error) or type(error).__name__}"
        ) from None


def _values(data: bytes) -> Iterator[Any]:
    """Yield all integers, flags and texts, in order; bytes as text of Latin-1. Pickletools checks that none is cut short."""
    for number, (instruction, value, _) in enumerate(pickletools.genops(data)):
        name = instruction.name
        if number >= MAX_INSTRUCTIONS:
            raise ValueError(f"more than {MAX_INSTRUCTIONS:,} instructions")
        if name in ("NEWTRUE", "NEWFALSE"):
            yield name == "NEWTRUE"
        elif name in _INTEGERS:
            yield value
        elif isinstance(value, bytes):
            yield value.decode("latin1")
        elif isinstance(value, str) and name != "GLOBAL" and value != "latin1":  # how bytes are written for Python 2
            yield value


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _images(items: list[Any]) -> np.ndarray:
    """Return the array that numpy pickled as these items: among them its type, then whether it is transposed, its bytes."""
    content = max((item for item in items if isinstance(item, str)), key=len, default="")
    flags = [item for item in items[: items.index(content)] if isinstance(item, bool)] if content else []
    if "u1" not in items or not flags or len(content) % ROW:
        raise UserError(f"expected images of {ROW} bytes as an array of uint8 under 'data', got none")
    array = np.frombuffer(content.encode("latin1"), np.uint8)
    return array.reshape(ROW, -1).T if flags[-1] else array.reshape(-1, ROW)
