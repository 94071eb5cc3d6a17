"""Ctrl-C, `kill` and a closed terminal at safe moments only."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# What ends a run with a checkpoint. Windows has no terminal that hangs up.
ENDING = [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]


class HungUp(KeyboardInterrupt):
    """The terminal was closed (SIGHUP)."""


@contextmanager
def uninterrupted() -> Iterator[None]:
    """What happens within happens whole: a signal that arrives meanwhile is handled right after."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    arrived: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        arrived.append(number)

    before = {int(number): signal.getsignal(number) for number in ENDING}
    caught = [number for number, handler in before.items() if callable(handler)]
    for number in caught:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number in caught:
            signal.signal(number, before[number])
    for number in arrived[:1]:
        handler = before[number]
        assert callable(handler)
        handler(number, None)
