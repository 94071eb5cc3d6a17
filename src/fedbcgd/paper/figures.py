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
    """Draw figure.png and figure.svg.

    Args:
        results: The results of an item's panels.
        folder: Where to put the files.
        title: Title of the figure.

    Returns:
        The names of the files; none if nothing was run.
    """
    rows = [(r, metric) for r in results if r.contenders for metric in (r.metric, *r.panel.drawn)]
    if not rows:
        return []
    with matplotlib.rc_context(plots.STYLE):
        figure = Figure(figsize=(plots.PAGE, HEIGHT * len(rows)), layout="constrained")
        grid = figure.subplots(len(rows), len(plots.AXES), squeeze=False, sharey="row")
        for line, (result, metric) in zip(grid, rows, strict=True):
            styles = contender_looks(result.panel.contenders)
            for panel, (axis, label) in zip(line, plots.AXES.items(), strict=True):
                _curves(panel, result, metric, axis, styles)
                panel.set_xlabel(label.replace(" (minibatches)", ""))
                panel.grid(True)
            if metric.endswith("loss"):
                _limit_axis(line[0])
            line[0].set_ylabel(metric.replace("_", " "))
            line[0].set_title(result.panel.title, loc="left")
            line[-1].legend(*line[0].get_legend_handles_labels(), loc="center left", bbox_to_anchor=(1.01, 0.5))
        figure.suptitle(title)
        plots.save(figure, folder / "figure.png")
    return ["figure.png", "figure.svg"]


def contender_looks(contenders: Sequence[Contender]) -> dict[str, Look]:
    """Return a look for each contender, by key.

    Of contenders with the same algorithm, the one with the fewest changed options has the algorithm's look, of equals the
    one that is tuned itself; the others have variants of it.
    """
    plainest: dict[str, Contender] = {}
    for contender in sorted(contenders, key=lambda c: (_count_changed_options(c), c.tuned_as is not None)):
        plainest.setdefault(contender.algorithm["name"], contender)
    ordered = sorted(contenders, key=lambda c: c is not plainest[c.algorithm["name"]])
    looks = families([contender.algorithm["name"] for contender in ordered])
    return {contender.key: look for contender, look in zip(ordered, looks, strict=True)}


def _count_changed_options(contender: Contender) -> int:
    default = make_algorithm(contender.algorithm["name"]).options()
    return sum(v != default.get(name) for name, v in contender.algorithm.items() if name not in ("blocks", "divider"))


def _limit_axis(panel: Axes) -> None:
    """End the axis of a loss at the 95 % quantile: a loss begins high and jumps, which would flatten the rest."""
    values = np.concatenate([np.asarray(line.get_ydata(), float) for line in panel.get_lines()] or [np.zeros(0)])
    values = values[np.isfinite(values)]
    if len(values):
        low, high = float(values.min()), float(np.quantile(values, 0.95))
        margin = 0.05 * (high - low)
        if margin > 0:
            panel.set_ylim(low - margin, high + margin)


def _curves(panel: Axes, result: PanelResult, metric: str, axis: str, styles: dict[str, Look]) -> None:
    for contender in result.contenders:
        look = styles[contender.key]
        if (
            axis == "upload_d" and contender.rounds_of is not None
        ):  # it uploads nothing: draw its final value as a level
            final = result.final(contender.key)[0] / result.unit
            if metric == result.metric and np.isfinite(final):
                style = {k: v for k, v in plots.line(look).items() if not k.startswith("mark")}
                panel.axhline(final, label=contender.title, **style)
            continue
        outcomes = list(result.outcomes[contender.key].values())
        runs = [o.rows for o in outcomes if o.rows and not o.diverged]
        diverged = sum(o.diverged for o in outcomes)
        label = contender.title
        if diverged:
            label += f" ({diverged} of {len(outcomes)} {DIVERGED})" if runs else f" ({DIVERGED})"
        if runs:
            plots.draw_band(panel, runs, axis, metric, label, look)
        else:
            panel.plot([], [], label=label, **plots.line(look))
