"""Measure several ways in turn, so that a slow minute of the machine hits them all."""

import statistics
import time
from collections.abc import Callable

MORE = 3  # times as many turns as asked for, at the most


def interleaved(ways: dict[str, Callable[[], None]], repeats: int, enough: float = 0.0) -> dict[str, list[float]]:
    """Seconds of each way in each of `repeats` turns, after one turn that does not count; in more turns, where they take
    less than `enough` seconds in all."""
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
    """How many times as fast as `base`: the median over the turns."""
    return {
        name: statistics.median(b / s for b, s in zip(seconds[base], times, strict=True))
        for name, times in seconds.items()
    }
