"""Table 1 as a table and as figures, with measured values beside it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from fedbcgd.display import plots
from fedbcgd.display.styles import line_styles
from fedbcgd.paper import theory
from fedbcgd.paper.theory import CASES, Setting


def order_table(s: Setting, case: str) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the names of the columns, and the cells of a row for each algorithm: its order in a case."""
    head = (case, "rounds", "terms of the rounds", "floats a round, d", "floats, d", "from")
    return head, [
        (
            o.name,
            f"{o.rounds:.4g}",
            " + ".join(f"{term:.3g}" for term in o.terms),
            f"{o.floats_per_round:.3g}",
            f"{o.floats:.4g}",
            o.source,
        )
        for o in theory.orders(s, case)
    ]


def measured_table(rows: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the names of the columns, and the cells of each row of `quadratics.compare`."""
    head = ("algorithm", "N", "measured, d", "theorem, d", "measured, to N = 1", "theorem, to N = 1")
    return head, [
        (
            row["algorithm"],
            str(row["blocks"]),
            f"{row['measured_d']:.4g}",
            f"{row['theorem_d']:.4g}",
            f"{row['measured_ratio']:.3f}",
            f"{row['theorem_ratio']:.3f}",
        )
        for row in rows
    ]


def sweep(s: Setting) -> list[dict[str, Any]]:
    """Return rounds and floats over N and over G, for every algorithm and case."""
    highest = max(2, min(s.cohort, 64))
    axes: dict[str, list[Any]] = {
        "blocks": sorted({round(n) for n in np.geomspace(1, highest, 25)}),
        "G": [float(g) for g in np.geomspace(0.1, 10, 25) * (s.G or 1.0)],
    }
    return [
        {"axis": axis, "value": value, "case": case, "algorithm": o.name, "rounds": o.rounds, "floats_d": o.floats}
        for axis, values in axes.items()
        for value in values
        for case in CASES
        for o in theory.orders(replace(s, **{axis: value}), case)
    ]


def figure(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the rows of `sweep`: floats over N and over G, with a row of panels for each case."""
    styles = _styles()
    with matplotlib.rc_context(plots.STYLE):
        drawn = Figure(figsize=(plots.PAGE, 4.6), layout="constrained")
        panels = drawn.subplots(len(CASES), 2, sharey="row")
        for line, case in zip(panels, CASES, strict=True):
            for panel, axis in zip(line, ("blocks", "G"), strict=True):
                for name in dict.fromkeys(row["algorithm"] for row in rows if row["case"] == case):
                    own = [r for r in rows if (r["axis"], r["case"], r["algorithm"]) == (axis, case, name)]
                    x, y = [r["value"] for r in own], [r["floats_d"] for r in own]
                    panel.loglog(x, y, label=name, **plots.line(styles[name]))
                panel.yaxis.set_minor_formatter(NullFormatter())
                panel.grid(True)
            _count_blocks(line[0])
            line[1].set_xlabel("heterogeneity G")
            line[0].set_ylabel(f"{case}\nfloats to ε (in d), constants 1")
            line[1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        plots.save(drawn, path)


def measured_figure(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw measured floats over N and, as thin lines, the theorem's order scaled to the measured value at N = 1."""
    names = list(dict.fromkeys(row["algorithm"] for row in rows))
    styles = line_styles(names)
    highest = max(row["blocks"] for row in rows)
    with matplotlib.rc_context(plots.STYLE):
        drawn = Figure(figsize=(plots.PAGE * 0.62, 2.9), layout="constrained")
        panel = drawn.subplots()
        for name in names:
            own = [row for row in rows if row["algorithm"] == name and row["measured_d"] < float("inf")]
            if not own:
                continue
            x = np.array([row["blocks"] for row in own], dtype=float)
            y = np.array([row["measured_d"] for row in own])
            if len(own) == 1:  # it has no blocks: the same for every N
                x, y = np.array([1.0, highest]), np.array([y[0], y[0]])
            panel.loglog(x, y, label=name, **{**plots.line(styles[name]), "markevery": 1})
            if len(own) > 1:
                panel.errorbar(x, y, [row["measured_sd"] for row in own], fmt="none", color=styles[name].colour)
                shape = y[0] * np.array([row["theorem_ratio"] for row in own])
                panel.plot(x, shape, color=styles[name].colour, linewidth=0.8, linestyle=(0, (1, 1.5)))
        panel.plot([], [], color="#222222", linewidth=0.8, linestyle=(0, (1, 1.5)), label="theorem's shape")
        _count_blocks(panel)
        panel.set_ylabel("floats to ε (in d), measured")
        panel.grid(True)
        panel.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        plots.save(drawn, path)


def _count_blocks(panel: Axes) -> None:
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter("{x:g}")
    panel.set_xlabel("blocks N")


def _styles() -> dict[str, Any]:
    """Return a style for each algorithm of the table, by the table's name."""
    algorithms = {row.name: row.algorithm or row.name for row in theory.TABLE}
    by_algorithm = line_styles(algorithms.values())
    return {name: by_algorithm[algorithm] for name, algorithm in algorithms.items()}
