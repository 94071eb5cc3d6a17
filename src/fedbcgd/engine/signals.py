"""Handle Ctrl-C, `kill` and a closed terminal at safe moments only."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# Signals that end a run with a checkpoint. Windows has no SIGHUP.
ENDING = [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]


class HungUp(KeyboardInterrupt):
    """The terminal was closed (SIGHUP)."""


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay signals that arrive within the block until its end."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals go to the main thread
        return
    arrived: list[int] = []

    def delay(number: int, frame: FrameType | None) -> None:
        arrived.append(number)

    before = {int(number): signal.getsignal(number) for number in ENDING}
    caught = [number for number, handler in before.items() if callable(handler)]
    for number in caught:
        signal.signal(number, delay)
    try:
        yield
    finally:
        for number in caught:
            signal.signal(number, before[number])
    for number in arrived[:1]:
        handler = before[number]
        assert callable(handler)
        handler(number, None)
