"""What goes wrong, said to a person."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any


class UserError(ValueError):
    """A mistake in what was asked for: the message says what was wrong, where, and what would be right."""


class Diverged(RuntimeError):
    """Every upload of several rounds in a row was refused: going on cannot help. From `simulate` it has a `result`."""

    result: Any = None


class WorkerLost(RuntimeError):
    """One task ended several worker processes."""


def unknown(kind: str, given: str, allowed: Iterable[str]) -> UserError:
    """An unknown name, with the nearest valid one and the whole list."""
    names = sorted(allowed)
    near = get_close_matches(str(given), names, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return UserError(f"unknown {kind} {given!r}.{hint} Known: {', '.join(names) or 'none'}.")
