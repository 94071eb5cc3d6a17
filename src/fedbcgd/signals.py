"""Ctrl-C and `kill` at safe moments only."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def uninterrupted() -> Iterator[None]:
    """What happens within happens whole: a signal that arrives meanwhile is handled right after."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    arrived: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        arrived.append(number)

    before = {int(number): signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
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
