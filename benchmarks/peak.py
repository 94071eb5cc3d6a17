"""Peak speed of the cores: matrix products and copies, with all threads and with one."""

import time

import torch
from rich.console import Console

from fedbcgd.backends.workers.processes import cores
from fedbcgd.engine.threads import threads


def measure(console: Console, repeats: int = 7) -> list[dict]:
    console.print("peak", highlight=False)
    a, b, c = torch.randn(2048, 2048), torch.randn(2048, 2048), torch.empty(2048, 2048)
    v, w = torch.randn(20_000_000), torch.empty(20_000_000)
    rows = []
    for count in dict.fromkeys((1, cores())):
        with threads(count):
            multiply = _best(lambda: torch.mm(a, b, out=c), repeats)
            copy = _best(lambda: w.copy_(v), repeats)
        rows.append({"threads": count, "sgemm, GFLOP/s": 2 * 2048**3 / multiply / 1e9, "copy, GB/s": 8e7 / copy / 1e9})
    return rows


def _best(what, repeats: int) -> float:
    what()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        what()
        times.append(time.perf_counter() - start)
    return min(times)
