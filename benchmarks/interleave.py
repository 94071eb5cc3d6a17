"""Measure several ways in turn, so that a slow minute of the machine hits them all."""

import statistics
import time
from collections.abc import Callable


def interleaved(ways: dict[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each way in each of `repeats` turns, after one turn that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def ratios(seconds: dict[str, list[float]], base: str) -> dict[str, float]:
    """How many times as fast as `base`: the median over the turns."""
    return {
        name: statistics.median(b / s for b, s in zip(seconds[base], times, strict=True))
        for name, times in seconds.items()
    }
