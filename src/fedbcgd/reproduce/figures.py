"""The figure of an item: a panel beside the other, accuracy or loss against upload, and against gradient evaluations."""

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedbcgd.files import write_whole
from fedbcgd.report import plots
from fedbcgd.reproduce.results import DIVERGED, PanelResult

AXES = {"upload_d": "upload (in d)", "gradient_evaluations": "gradient evaluations (minibatches)"}


def draw(results: list[PanelResult], folder: Path, title: str) -> list[str]:
    """figure.png and figure.svg, if there is anything to draw; the names."""
    seen = [result for result in results if result.contenders]
    if not seen:
        return []
    rows: list[tuple[PanelResult, str]] = []
    for result in seen:
        rows.append((result, result.metric))
        if not result.higher:
            rows.append((result, "train_loss"))
    with matplotlib.rc_context(plots.STYLE):
        figure = Figure(figsize=(11, 3.6 * len(rows)), layout="constrained")
        grid = figure.subplots(len(rows), len(AXES), squeeze=False)
        for line, (result, metric) in zip(grid, rows, strict=True):
            for panel, (axis, label) in zip(line, AXES.items(), strict=True):
                _curves(panel, result, metric, axis)
                panel.set_xlabel(label)
            line[0].set_ylabel(metric.replace("_", " "))
            line[0].set_title(result.panel.title, loc="left")
            handles, names = line[0].get_legend_handles_labels()
            line[-1].legend(handles, names, frameon=False, loc="center left", bbox_to_anchor=(1.01, 0.5))
        figure.suptitle(title)
        names = ["figure.png", "figure.svg"]
        for name in names:
            write_whole(folder / name, lambda temporary: figure.savefig(temporary, dpi=150))
    return names


def _curves(panel: Axes, result: PanelResult, metric: str, axis: str) -> None:
    for k, contender in enumerate(result.contenders):
        if axis == "upload_d" and contender.rounds_of is not None:
            ended = result.final(contender.key)[0] / result.unit
            if metric == result.metric and np.isfinite(ended):
                panel.axhline(ended, label=contender.title, linewidth=1.2, **_look(contender.key, k))
            continue
        runs = [o.rows for o in result.outcomes[contender.key].values() if o.rows and o.stopped != DIVERGED]
        if not runs:
            continue
        shared = set.intersection(*({row["round"] for row in rows} for rows in runs))
        x = np.array([[row[axis] for row in rows if row["round"] in shared] for rows in runs]).mean(0)
        y = np.array([[row[metric] for row in rows if row["round"] in shared] for rows in runs])
        look = _look(contender.key, k)
        panel.plot(x, y.mean(0), label=contender.title, linewidth=1.6, **look)
        if len(runs) > 1:
            spread = y.std(0, ddof=1)
            panel.fill_between(x, y.mean(0) - spread, y.mean(0) + spread, color=look["color"], alpha=0.15, linewidth=0)
    panel.grid(alpha=0.25)


_DERIVED = {"scaffold-derived": ("#0072B2", "-."), "feddc-derived": ("#0072B2", ":"), "topk-5": ("#56B4E9", "--")}
_SERIES = ["#000000", "#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#CC79A7"]


def _look(key: str, place: int) -> dict[str, Any]:
    """An algorithm's own look; the members of a series (numbers of blocks, momenta) are told apart by colour."""
    if key in plots.LOOKS:
        return dict(plots.look(key, place))
    colour, style = _DERIVED.get(key, (_SERIES[place % len(_SERIES)], ("-", "--", "-.")[place % 3]))
    return {"color": colour, "linestyle": style}
