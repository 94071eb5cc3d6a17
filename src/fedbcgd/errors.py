"""Errors whose message is meant for the user, and the messages for exhausted resources."""

import errno
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any


class UserError(ValueError):
    """A mistake in the user's input. The message says what is wrong, where, and what would be right."""


class Diverged(RuntimeError):
    """The server refused at least two thirds of the uploads in several successive rounds, so training cannot recover.

    Attributes:
        result: what `simulate` had computed until then; None if another caller raised the error.
    """

    result: Any = None


class NothingAccepted(RuntimeError):
    """No upload was accepted in several successive rounds, on Flower, so that continuing cannot help."""


class WorkerLost(RuntimeError):
    """Several worker processes were lost with the same task, or could not be started."""


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """Return a hint with the most similar allowed name, with a space before it; empty if none is similar."""
    similar = get_close_matches(str(name), list(allowed), n=1, cutoff=0.5)
    return f" Did you mean {similar[0]!r}?" if similar else ""


def unknown(kind: str, name: str, allowed: Iterable[str]) -> UserError:
    """Make the error for a name that does not exist.

    Args:
        kind: what the name stands for, such as "algorithm"; or the field that has it.
        name: the name that the user wrote.
        allowed: all names that exist.

    Returns:
        An error that suggests the most similar name and lists all.
    """
    names = sorted(allowed)
    return UserError(f"{kind}: expected one of {', '.join(names) or 'none'}, got {name!r}.{did_you_mean(name, names)}")


_MESSAGES = {
    errno.EMFILE: "too many open files: raise the limit (ulimit -n)",
    errno.ENFILE: "too many open files on this machine",
    errno.ENOMEM: "out of memory",
    errno.EAGAIN: "too many processes or threads: raise the limit (ulimit -u)",
    errno.ENOSPC: "no space left on the disk",
    errno.EDQUOT: "no space left on the disk: the quota is used up",
    errno.EFBIG: "a file became too large: raise the limit (ulimit -f)",
}
# In messages of PyTorch and of the dynamic loader.
_OUT_OF_MEMORY = ("allocate memory", "out of memory", "failed to map segment")


def shortage(error: BaseException) -> str:
    """Say which resource of this machine ran out.

    Args:
        error: any error.

    Returns:
        A sentence for the user; empty if the error is about something else.
    """
    if isinstance(error, OSError):
        message = _MESSAGES.get(error.errno or 0, "")
        on_disk = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        return f"{message} ({error.filename})" if on_disk and error.filename else message
    if isinstance(error, MemoryError):
        return "out of memory"
    text = str(error).strip() or type(error).__name__
    if "can't start new thread" in text:
        return _MESSAGES[errno.EAGAIN]
    # Without memory to create the right exception the interpreter raises SystemError.
    if isinstance(error, SystemError) or (
        isinstance(error, (RuntimeError, ImportError)) and any(part in text.lower() for part in _OUT_OF_MEMORY)
    ):
        return f"out of memory: {text.splitlines()[-1]}"
    return ""
