"""The figure of an item: a row for each panel, accuracy or loss against upload and against gradient evaluations."""

from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedbcgd.report import plots
from fedbcgd.report.looks import Look, looks
from fedbcgd.reproduce.results import PanelResult

AXES = ("upload_d", "gradient_evaluations")
HEIGHT = 2.4  # inches of a row


def draw(results: list[PanelResult], folder: Path, title: str) -> list[str]:
    """figure.png and figure.svg, if there is anything to draw; their names."""
    rows = [(r, metric) for r in results if r.contenders for metric in (r.metric, "train_loss")[: 1 + (not r.higher)]]
    if not rows:
        return []
    with matplotlib.rc_context(plots.STYLE):
        figure = Figure(figsize=(plots.PAGE, HEIGHT * len(rows)), layout="constrained")
        grid = figure.subplots(len(rows), len(AXES), squeeze=False, sharey="row")
        for line, (result, metric) in zip(grid, rows, strict=True):
            styles = looks(contender.key for contender in result.contenders)
            for panel, axis in zip(line, AXES, strict=True):
                _curves(panel, result, metric, axis, styles)
                panel.set_xlabel(plots.AXES[axis])
                panel.grid(True)
            if metric.endswith("loss"):
                _top(line[0])
            line[0].set_ylabel(metric.replace("_", " "))
            line[0].set_title(result.panel.title, loc="left")
            line[-1].legend(*line[0].get_legend_handles_labels(), loc="center left", bbox_to_anchor=(1.01, 0.5))
        figure.suptitle(title)
        plots.save(figure, folder / "figure.png")
    return ["figure.png", "figure.svg"]


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
        look = styles[contender.key]
        if axis == "upload_d" and contender.rounds_of is not None:  # it uploads nothing: where it ends is a level
            ended = result.final(contender.key)[0] / result.unit
            if metric == result.metric and np.isfinite(ended):
                style = {k: v for k, v in plots.line(look).items() if not k.startswith("mark")}
                panel.axhline(ended, label=contender.title, **style)
            continue
        runs = [o.rows for o in result.outcomes[contender.key].values() if o.rows and not o.diverged]
        if not runs:
            continue
        shared = set.intersection(*({row["round"] for row in rows} for rows in runs))
        x = np.array([[row[axis] for row in rows if row["round"] in shared] for rows in runs]).mean(0)
        y = np.array([[row[metric] for row in rows if row["round"] in shared] for rows in runs])
        mean = y.mean(0)
        panel.plot(x, mean, label=contender.title, **plots.line(look))
        if len(runs) > 1:
            spread = y.std(0, ddof=1)
            panel.fill_between(x, mean - spread, mean + spread, color=look.colour, alpha=0.15, linewidth=0)
