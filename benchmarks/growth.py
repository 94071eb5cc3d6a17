"""How the overhead of a round grows with the cohort, the number of clients, d and N.

Clients do almost no work (machinery.py), so this measures planning, broadcast, upload, sums and the server's step. Plot:
growth.png.
"""

import statistics
import time
from pathlib import Path

from machinery import Federation, one_round
from matplotlib.figure import Figure
from rich.console import Console

from fedbcgd.display.plots import save

USUAL = {"cohort": 10, "clients": 100, "d": 100_000, "N": 5}
AXES = {
    "cohort": (5, 10, 20, 50, 100, 200),
    "clients": (100, 1_000, 10_000, 100_000),
    "d": (10_000, 100_000, 1_000_000, 10_000_000),
    "N": (1, 2, 5, 10, 20, 50),
}


def a_round(cohort: int, clients: int, d: int, N: int) -> float:
    """Return the median seconds of a round."""
    times = []
    with Federation(cohort, clients, d, N) as loop:
        for k in range(12):
            start = time.perf_counter()
            one_round(loop)
            if k > 1:
                times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(console: Console, repeats: int = 1) -> list[dict]:
    console.print("growth of a round's cost, 10 rounds each", highlight=False)
    figure = Figure(figsize=(12, 3), layout="constrained")
    panels = figure.subplots(1, len(AXES))
    rows = []
    for panel, (name, values) in zip(panels, AXES.items(), strict=True):
        costs = [a_round(**(USUAL | {name: value} | _enough(name, value))) for value in values]
        rows += [{"grows": name, "value": v, "ms a round": 1e3 * c} for v, c in zip(values, costs, strict=True)]
        panel.loglog(values, [1e3 * c for c in costs], "o-", color="#0072B2")
        slope = costs[-1] / values[-1] * 1e3
        panel.loglog(values, [slope * v for v in values], ":", color="#999999", label="in proportion")
        panel.set_ylim(min(costs) * 300, max(costs) * 3000)
        panel.set_xlabel(name)
        panel.grid(alpha=0.25)
    panels[0].set_ylabel("ms a round")
    panels[0].legend(frameon=False)
    save(figure, Path(__file__).with_name("growth.png"))
    return rows


def _enough(name: str, value: int) -> dict[str, int]:
    """Return at least as many clients as the cohort, and a cohort that serves each block."""
    if name == "cohort":
        return {"clients": max(100, value)}
    return {"cohort": 50} if name == "N" else {}
