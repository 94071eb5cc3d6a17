"""Standard streams that never raise: output that nobody reads any more (`| head -1`) is dropped, and the run goes on."""

import errno
import io
import os
import sys
from typing import Any

_failed: list[int] = []  # descriptors whose writes failed although somebody still reads them


class _Unfailing(io.FileIO):
    """A file whose first failed write redirects it to the null device."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            _discard(self.fileno(), error)
            return memoryview(data).nbytes


def _discard(fd: int, error: OSError) -> None:
    """Redirect a descriptor to the null device after a failed write."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, fd)
    os.close(null)
    if error.errno not in (errno.EPIPE, errno.EIO):  # those two mean that the reader is gone
        _failed.append(fd)
        if fd == 1:
            print(f"fedbcgd: standard output cannot be written: {error.strerror}; going on without it", file=sys.stderr)


def output_was_lost() -> bool:
    """Return whether output was dropped that somebody could still have read."""
    return bool(_failed)


def protect_streams() -> None:
    """Replace standard output and standard error of this process by streams that never raise.

    Closed descriptors are opened on the null device, so that no other file takes their numbers.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
    sys.stdout = _protected(sys.stdout, 1)
    sys.stderr = _protected(sys.stderr, 2)


def _protected(stream: Any, fd: int) -> io.TextIOWrapper:
    raw = _Unfailing(fd, "wb", closefd=False)
    write_through = bool(getattr(stream, "write_through", False))  # python -u
    return io.TextIOWrapper(
        raw if write_through else io.BufferedWriter(raw),
        encoding=getattr(stream, "encoding", None) or "utf-8",
        errors=getattr(stream, "errors", None) or "backslashreplace",
        line_buffering=bool(getattr(stream, "line_buffering", fd == 2)),
        write_through=write_through,
    )
