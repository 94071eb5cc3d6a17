"""Standard streams that cannot end a run: what can no longer be written (`| head -1`, a closed terminal) is dropped."""

import errno
import io
import os
import sys
from typing import Any

_lost: list[int] = []  # streams that could not be written, though somebody still reads them


class _Raw(io.FileIO):
    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            drop(self.fileno(), error)
            return memoryview(data).nbytes


def drop(fd: int, error: OSError) -> None:
    """From now on this stream goes nowhere."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, fd)
    os.close(nowhere)
    if error.errno not in (errno.EPIPE, errno.EIO):  # with those nobody reads any more
        _lost.append(fd)
        if fd == 1:
            print(f"fedbcgd: standard output cannot be written: {error.strerror}; going on without it", file=sys.stderr)


def any_lost() -> bool:
    """Whether something that was to be read is missing."""
    return bool(_lost)


def make_lasting() -> None:
    """Replace the standard streams of this process. Closed ones go nowhere, so that no file is opened in their place."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest that is free: this one
    sys.stdout = _lasting(sys.stdout, 1)
    sys.stderr = _lasting(sys.stderr, 2)


def _lasting(stream: Any, fd: int) -> io.TextIOWrapper:
    raw = _Raw(fd, "wb", closefd=False)
    through = bool(getattr(stream, "write_through", False))  # python -u
    return io.TextIOWrapper(
        raw if through else io.BufferedWriter(raw),
        encoding=getattr(stream, "encoding", None) or "utf-8",
        errors=getattr(stream, "errors", None) or "backslashreplace",
        line_buffering=bool(getattr(stream, "line_buffering", fd == 2)),
        write_through=through,
    )
