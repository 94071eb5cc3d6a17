"""What goes wrong, said to a person."""

import errno
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any


class UserError(ValueError):
    """A mistake in what was asked for: the message says what was wrong, where, and what would be right."""


class Diverged(RuntimeError):
    """Every upload of several rounds in a row was refused: going on cannot help. From `simulate` it has a `result`."""

    result: Any = None


class NothingAccepted(RuntimeError):
    """No upload was accepted in several rounds in a row, on Flower: going on cannot help."""


class WorkerLost(RuntimeError):
    """One task ended several worker processes."""


def unknown(kind: str, given: str, allowed: Iterable[str]) -> UserError:
    """An unknown name, with the nearest valid one and the whole list."""
    names = sorted(allowed)
    near = get_close_matches(str(given), names, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return UserError(f"unknown {kind} {given!r}.{hint} Known: {', '.join(names) or 'none'}.")


_LIMITS = {
    errno.EMFILE: "too many open files: raise the limit (ulimit -n)",
    errno.ENFILE: "too many open files on this machine",
    errno.ENOMEM: "out of memory",
    errno.EAGAIN: "too many processes or threads: raise the limit (ulimit -u)",
    errno.ENOSPC: "no space left on the disk",
    errno.EDQUOT: "no space left on the disk: the quota is used up",
    errno.EFBIG: "a file became too large: raise the limit (ulimit -f)",
}
_MEMORY = (
    "allocate memory",
    "out of memory",
    "failed to map segment",
)  # in what PyTorch and the loader of libraries say


def shortage(error: BaseException) -> str:
    """What this machine or a limit has too little of, if that is what the error is about; empty otherwise."""
    if isinstance(error, OSError):
        said = _LIMITS.get(error.errno or 0, "")
        disk = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        return f"{said} ({error.filename})" if disk and error.filename else said
    if isinstance(error, MemoryError):
        return "out of memory"
    text = str(error).strip() or type(error).__name__
    if "can't start new thread" in text:
        return _LIMITS[errno.EAGAIN]
    # The interpreter itself loses errors where there is no memory to make them.
    if isinstance(error, SystemError) or (
        isinstance(error, (RuntimeError, ImportError)) and any(word in text.lower() for word in _MEMORY)
    ):
        return f"out of memory: {text.splitlines()[-1]}"
    return ""
