"""The figure of an item: a row for each panel, accuracy or loss against upload, rounds and gradient evaluations."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedbcgd.algorithms.registry import make_algorithm
from fedbcgd.display import plots
from fedbcgd.display.looks import Look, families
from fedbcgd.engine.loop import DIVERGED
from fedbcgd.paper.results import PanelResult
from fedbcgd.paper.spec import Contender

HEIGHT = 2.3  # inches of a row


def draw(results: list[PanelResult], folder: Path, title: str) -> list[str]:
    """figure.png and figure.svg, if there is anything to draw; their names."""
    rows = [(r, metric) for r in results if r.contenders for metric in (r.metric, *r.panel.drawn)]
    if not rows:
        return []
    with matplotlib.rc_context(plots.STYLE):
        figure = Figure(figsize=(plots.PAGE, HEIGHT * len(rows)), layout="constrained")
        grid = figure.subplots(len(rows), len(plots.AXES), squeeze=False, sharey="row")
        for line, (result, metric) in zip(grid, rows, strict=True):
            styles = styles_of(result.panel.contenders)
            for panel, (axis, label) in zip(line, plots.AXES.items(), strict=True):
                _curves(panel, result, metric, axis, styles)
                panel.set_xlabel(label.replace(" (minibatches)", ""))
                panel.grid(True)
            if metric.endswith("loss"):
                _top(line[0])
            line[0].set_ylabel(metric.replace("_", " "))
            line[0].set_title(result.panel.title, loc="left")
            line[-1].legend(*line[0].get_legend_handles_labels(), loc="center left", bbox_to_anchor=(1.01, 0.5))
        figure.suptitle(title)
        plots.save(figure, folder / "figure.png")
    return ["figure.png", "figure.svg"]


def styles_of(contenders: Sequence[Contender]) -> dict[str, Look]:
    """An algorithm has its look; of several contenders with one the plainest has, the others are variants of it."""
    order = sorted(contenders, key=_odd)
    given = families([contender.algorithm["name"] for contender in order])
    return {contender.key: look for contender, look in zip(order, given, strict=True)}


def _odd(contender: Contender) -> int:
    """How many options are not the algorithm's own."""
    usual = make_algorithm(contender.algorithm["name"]).options()
    return sum(value != usual.get(name) for name, value in contender.algorithm.items() if name != "divider")


def _top(panel: Axes) -> None:
    """A loss begins high and jumps: its axis ends above nineteen points of twenty, so that what matters is not flat."""
    values = np.concatenate([np.asarray(line.get_ydata(), float) for line in panel.get_lines()] or [np.zeros(0)])
    values = values[np.isfinite(values)]
    if len(values):
        low, high = float(values.min()), float(np.quantile(values, 0.95))
        room = 0.05 * (high - low)
        if room > 0:
            panel.set_ylim(low - room, high + room)


def _curves(panel: Axes, result: PanelResult, metric: str, axis: str, styles: dict[str, Look]) -> None:
    for contender in result.contenders:
        style = plots.line(styles[contender.key])
        if axis == "upload_d" and contender.rounds_of is not None:  # it uploads nothing: where it ends is a level
            ended = result.final(contender.key)[0] / result.unit
            if metric == result.metric and np.isfinite(ended):
                panel.axhline(
                    ended, label=contender.title, **{k: v for k, v in style.items() if not k.startswith("mark")}
                )
            continue
        every = list(result.outcomes[contender.key].values())
        runs = [o.rows for o in every if o.rows and not o.diverged]
        lost = sum(o.diverged for o in every)
        told = f" ({lost} of {len(every)} {DIVERGED})" if lost and runs else f" ({DIVERGED})" if lost else ""
        if not runs:
            panel.plot([], [], label=contender.title + told, **style)
            continue
        shared = set.intersection(*({row["round"] for row in rows} for rows in runs))
        x = np.array([[row[axis] for row in rows if row["round"] in shared] for rows in runs]).mean(0)
        y = np.array([[row[metric] for row in rows if row["round"] in shared] for rows in runs])
        mean = y.mean(0)
        panel.plot(x, mean, label=contender.title + told, **style)
        if len(runs) > 1:
            spread = y.std(0, ddof=1)
            panel.fill_between(x, mean - spread, mean + spread, color=style["color"], alpha=0.15, linewidth=0)
