"""The figure of an item: a row for each panel, accuracy or loss against upload, rounds and gradient evaluations."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedbcgd.algorithms.registry import make_algorithm
from fedbcgd.display import plots
from fedbcgd.display.styles import LineStyle, variant_styles
from fedbcgd.engine.loop import DIVERGED
from fedbcgd.paper.results import PanelResult
from fedbcgd.paper.spec import Contender

HEIGHT = 2.5  # inches of a row
SMOOTH = 5  # how many evaluations are averaged for each point


def draw(results: list[PanelResult], folder: Path, title: str) -> list[str]:
    """Draw figure.png and figure.svg.

    Args:
        results: the results of an item's panels.
        folder: where to put the files.
        title: title of the figure.

    Returns:
        The names of the files; none if nothing was run.
    """
    rows = [(r, metric) for r in results if r.contenders for metric in (r.metric, *r.panel.drawn)]
    if not rows:
        return []
    alike = all(_spend_alike(result) for result, _ in rows)
    axes = list(plots.AXES.items())[: 1 if alike else None]
    shape = (-(-len(rows) // 2), min(2, len(rows))) if alike else (len(rows), len(axes))
    with matplotlib.rc_context(plots.STYLE):
        figure = Figure(figsize=(plots.PAGE, HEIGHT * shape[0]), layout="constrained")
        grid = figure.subplots(*shape, squeeze=False, sharey=False if alike else "row").reshape(-1, len(axes))
        for spare in grid[len(rows) :].flat:
            spare.set_axis_off()
        for line, (result, metric) in zip(grid, rows, strict=False):
            styles = contender_styles(result.panel.contenders)
            for panel, (axis, label) in zip(line, axes, strict=True):
                _curves(panel, result, metric, axis, styles)
                panel.set_xlabel(label.replace(" (minibatches)", ""))
                panel.grid(True)
                if _lengths_differ(panel):
                    panel.set_xscale("log")
            if metric.endswith("loss"):
                _limit_axis(line[0])
            line[0].set_ylabel(metric.replace("_", " "))
            line[0].set_title(result.panel.title, loc="left")
        _add_legends(figure, grid[: len(rows)])
        faint = "" if all(_is_crowded(result) for result, _ in rows) else "; faint: each evaluation"
        figure.suptitle(f"{title}\nlines: mean of {SMOOTH} evaluations{faint}")
        plots.save(figure, folder / "figure.png")
    return ["figure.png", "figure.svg"]


def _add_legends(figure: Figure, grid: np.ndarray) -> None:
    """Add one legend below all panels if their lines are the same, else one beside each row."""
    legends = [line[0].get_legend_handles_labels() for line in grid]
    if all(labels == legends[0][1] for _, labels in legends):
        longest = max(map(len, legends[0][1]), default=1)
        columns = max(1, min(6, len(legends[0][1]), int(plots.PAGE / (0.6 + 0.075 * longest))))
        figure.legend(*legends[0], loc="outside lower center", ncols=columns)
        height = figure.get_size_inches()[1] + 0.2 * -(-len(legends[0][1]) // columns)
        figure.set_size_inches(plots.PAGE, height)
        return
    for line, legend in zip(grid, legends, strict=True):
        line[-1].legend(*legend, loc="center left", bbox_to_anchor=(1.01, 0.5))


def _is_crowded(result: PanelResult) -> bool:
    return len(result.contenders) > 6


def _spend_alike(result: PanelResult) -> bool:
    """Return whether a round costs the same for each of several contenders, so that all axes would show one picture."""
    costs = set()
    for outcomes in result.outcomes.values():
        for row in (o.rows[-1] for o in outcomes.values() if o.rows):
            costs.add(tuple(float(f"{row[axis] / row['round']:.3g}") for axis in plots.AXES))
    return len(result.contenders) > 1 and len(costs) == 1


def _lengths_differ(panel: Axes) -> bool:
    """Return whether the longest line is more than three times as long as the shortest, which would be squeezed."""
    ends = [np.asarray(line.get_xdata(), float) for line in panel.get_lines()]
    last = [x[-1] for x in ends if len(x) > 2]  # a horizontal line has two points
    return bool(last) and bool(max(last) > 3 * min(last))


def contender_styles(contenders: Sequence[Contender]) -> dict[str, LineStyle]:
    """Return a style for each contender, by key.

    Of contenders with the same algorithm, the one with the fewest changed options has the algorithm's style, and the others
    have variants of it. If several have equally few, one that has a search of its own comes first.
    """
    plainest: dict[str, Contender] = {}
    for contender in sorted(contenders, key=lambda c: (_count_changed_options(c), c.tuned_as is not None)):
        plainest.setdefault(contender.algorithm["name"], contender)
    ordered = sorted(contenders, key=lambda c: c is not plainest[c.algorithm["name"]])
    styles = variant_styles([contender.algorithm["name"] for contender in ordered])
    return {contender.key: style for contender, style in zip(ordered, styles, strict=True)}


def _count_changed_options(contender: Contender) -> int:
    default = make_algorithm(contender.algorithm["name"]).options()
    return sum(v != default.get(name) for name, v in contender.algorithm.items() if name not in ("blocks", "divider"))


def _limit_axis(panel: Axes) -> None:
    """Fit the axis of a loss to the later four fifths of the lines: a loss begins high, which would flatten the rest."""
    lines = [np.asarray(line.get_ydata(), float) for line in panel.get_lines() if str(line.get_label())[0] != "_"]
    values = np.concatenate([y[len(y) // 5 :] for y in lines] or [np.zeros(0)])
    values = values[np.isfinite(values)]
    if len(values):
        low, high = float(values.min()), float(values.max())
        margin = 0.08 * (high - low)
        if margin > 0:
            panel.set_ylim(low - margin, high + margin)


def _curves(panel: Axes, result: PanelResult, metric: str, axis: str, styles: dict[str, LineStyle]) -> None:
    for contender in result.contenders:
        style = styles[contender.key]
        if axis == "upload_d" and contender.rounds_of is not None:
            # It uploads nothing: draw its final value as a horizontal line.
            final = result.final(contender.key)[0] / result.unit
            if metric == result.metric and np.isfinite(final):
                unmarked = {k: v for k, v in plots.line(style).items() if not k.startswith("mark")}
                panel.axhline(final, label=contender.title, **unmarked)
            continue
        outcomes = list(result.outcomes[contender.key].values())
        runs = [o.rows for o in outcomes if o.rows and not o.diverged]
        diverged = sum(o.diverged for o in outcomes)
        label = contender.title
        if diverged:
            label += f" ({diverged} of {len(outcomes)} {DIVERGED})" if runs else f" ({DIVERGED})"
        if runs:
            plots.draw_band(panel, runs, axis, metric, label, style, smooth=SMOOTH, crowded=_is_crowded(result))
        else:
            panel.plot([], [], label=label, **plots.line(style))
