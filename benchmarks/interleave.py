"""Measure several ways in turn, so that a slow minute of the machine affects all of them."""

import statistics
import time
from collections.abc import Callable

MORE = 3  # at most this many times the requested turns


def interleaved(ways: dict[str, Callable[[], None]], repeats: int, enough: float = 0.0) -> dict[str, list[float]]:
    """Time each way in `repeats` turns, after one turn that does not count.

    Args:
        ways: What to time.
        repeats: The number of turns.
        enough: If all turns take fewer seconds than this, there are more turns.

    Returns:
        The seconds of each turn.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    began = time.perf_counter()
    for turn in range(MORE * repeats + 1):
        if turn > repeats and time.perf_counter() - began > enough:
            break
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def ratios(seconds: dict[str, list[float]], base: str) -> dict[str, float]:
    """Return how many times as fast as `base` each way is: the median over the turns."""
    return {
        name: statistics.median(b / s for b, s in zip(seconds[base], times, strict=True))
        for name, times in seconds.items()
    }
