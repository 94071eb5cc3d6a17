"""Figures, each written as PNG and SVG."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedbcgd.display.metrics import main_metric
from fedbcgd.display.styles import LineStyle, line_styles
from fedbcgd.engine.loop import Row
from fedbcgd.files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fedbcgd.data.store import DataSet

# For a paper: text of 8 points at the width of a page, and text that stays text in an SVG.
STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 8,
    "figure.titlesize": 9,
    "legend.fontsize": 7.5,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": False,
    "grid.color": "#b0b0b0",
    "grid.linewidth": 0.4,
    "grid.alpha": 0.5,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "legend.frameon": False,
    "legend.handlelength": 2.8,  # room for a dash
    "svg.fonttype": "none",
    "svg.hashsalt": "fedbcgd",  # the same figure gives the same file
}
PAGE = 7.0  # inches: the text width of a page, and of a figure
DPI = 220
AXES = {"upload_d": "upload (in d)", "round": "rounds", "gradient_evaluations": "gradient evaluations (minibatches)"}


def line(style: LineStyle) -> dict[str, Any]:
    """Return a style as arguments of matplotlib's `plot`, with markers far enough apart not to hide the line."""
    return {
        "color": style.colour,
        "linestyle": (0, style.dash) if style.dash else "-",
        "marker": style.marker,
        "markevery": 0.13,
        "markeredgewidth": 0,
    }


def save(figure: Figure, path: Path) -> None:
    """Write a figure as PNG and as SVG.

    Args:
        figure: the figure.
        path: a file name; its suffix is replaced by .png and .svg. A file with another suffix, such as .pdf, is written
            as well.
    """
    for suffix in dict.fromkeys((".png", ".svg", path.suffix or ".png")):
        metadata = {"Date": None} if suffix == ".svg" else None

        def write(temporary: Path, metadata: Any = metadata) -> None:
            with matplotlib.rc_context(STYLE):
                figure.savefig(temporary, dpi=DPI, metadata=metadata)

        write_whole(path.with_suffix(suffix), write)


def curves(runs: Mapping[str, Sequence[Row]], path: Path, title: str = "", metric: str | None = None) -> None:
    """Draw runs, one of each name, as `bands` does."""
    bands({name: [rows] for name, rows in runs.items()}, path, title, metric)


def smoothed(values: np.ndarray, count: int) -> np.ndarray:
    """Replace each value along the last axis by the mean of the `count` values around it, or of fewer near the ends."""
    last = values.shape[-1] - 1
    reach = [min(count // 2, k, last - k) for k in range(last + 1)]
    return np.stack([values[..., k - r : k + r + 1].mean(-1) for k, r in enumerate(reach)], -1)


def draw_band(
    panel: "Axes",
    runs: Sequence[Sequence[Row]],
    axis: str,
    metric: str,
    label: str,
    style: LineStyle,
    clip: bool = False,
    smooth: int = 1,
    crowded: bool = False,
) -> None:
    """Draw the mean of runs at the rounds that all of them have and, if there are several, ± one standard deviation.

    Args:
        panel: where to draw.
        runs: the rows of each run.
        axis: the column on the x axis.
        metric: the column on the y axis.
        label: the name in the legend.
        style: colour, dash and marker.
        clip: whether the band ends at 0 and 1.
        smooth: how many evaluations are averaged for each point of a run. The unsmoothed mean of the runs is drawn faintly
            behind, unless the panel is crowded.
        crowded: whether many lines share the panel; bands are then fainter.
    """
    shared = set.intersection(*({row["round"] for row in rows if metric in row} for rows in runs))
    x = np.array([[row[axis] for row in rows if row["round"] in shared] for rows in runs]).mean(0)
    y = np.array([[row[metric] for row in rows if row["round"] in shared] for rows in runs])
    if not np.isfinite(y).any():  # nothing was accepted; matplotlib cannot place markers on no points
        return
    if smooth > 1:
        if not crowded:
            panel.plot(x, y.mean(0), color=style.colour, linewidth=0.5, alpha=0.25)
        y = smoothed(y, smooth)
    mean = y.mean(0)
    panel.plot(x, mean, label=label, **line(style))
    if len(runs) > 1:
        spread = y.std(0, ddof=1)
        low, high = mean - spread, mean + spread
        if clip:
            low, high = np.clip(low, 0, 1), np.clip(high, 0, 1)
        panel.fill_between(x, low, high, color=style.colour, alpha=0.05 if crowded else 0.15, linewidth=0)


def bands(
    groups: Mapping[str, Sequence[Sequence[Row]]], path: Path, title: str = "", metric: str | None = None
) -> None:
    """Draw mean and band over the seeds of each group, against upload, rounds and gradient evaluations.

    Args:
        groups: the rows of each run, by the name of the group.
        path: a file name, as for `save`.
        title: title of the figure.
        metric: the metric that the runs name as theirs, such as mae; None: the accuracy, else a loss.
    """
    metric = main_metric(next(iter(groups.values()))[0][-1], metric)
    assert metric is not None
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(PAGE, 2.6), layout="constrained")
        panels = figure.subplots(1, len(AXES), sharey=True)
        styles = line_styles(groups)
        for panel, (axis, label) in zip(panels, AXES.items(), strict=True):
            for name, runs in groups.items():
                draw_band(panel, runs, axis, metric, name, styles[name], clip=metric.endswith("accuracy"))
            panel.set_xlabel(label)
            panel.grid(True)
        panels[0].set_ylabel(metric.replace("_", " "))
        if len(groups) <= 5:
            if panels[0].lines:
                panels[0].legend()
        else:
            columns = max(1, min(6, int(PAGE / (0.55 + 0.075 * max(map(len, groups))))))  # what fits the page
            figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=columns)
            figure.set_size_inches(PAGE, 2.6 + 0.18 * -(-len(groups) // columns))
        if title:
            figure.suptitle(title)
        save(figure, path)


def label_counts(counts: np.ndarray, path: Path, labels: Sequence[str] | None = None, title: str = "") -> None:
    """Draw how many examples of each label each client has: a column per client, a row per label.

    Args:
        counts: examples by client and label.
        path: a file name, as for `save`.
        labels: names of the labels.
        title: title of the figure.
    """
    clients, classes = counts.shape
    height = min(7.0, 1.2 + classes * 0.14)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(min(PAGE, 2.4 + clients * 0.06), height), layout="constrained")
        panel = figure.subplots()
        image = panel.imshow(counts.T, aspect="auto", cmap="Blues", interpolation="nearest")
        panel.set_xlabel("client")
        panel.set_ylabel("label")
        names = labels if labels is not None and len(labels) == classes else [str(c) for c in range(classes)]
        every = max(1, round(classes / (height * 7)))  # as many names as can be read
        panel.set_yticks(range(0, classes, every), names[::every], fontsize=6 if classes > 20 else 8)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.colorbar(image, ax=panel, label="examples")
        if title:
            panel.set_title(title, loc="left")
        save(figure, path)


def gallery(data: "DataSet", path: Path, rows: int = 20, columns: int = 12) -> None:
    """Draw the first training images of each class.

    Args:
        data: the data set.
        path: a file name, as for `save`.
        rows: how many classes to draw at most.
        columns: how many images of each.
    """
    labels = data.train.labels.numpy()
    chosen = np.unique(np.linspace(0, len(data.classes) - 1, min(rows, len(data.classes))).astype(int))
    figure = Figure(figsize=(2 + columns * 0.55, 0.6 + len(chosen) * 0.55), layout="constrained")
    panels = figure.subplots(len(chosen), columns, squeeze=False)
    for line, label in zip(panels, chosen, strict=True):
        indices = np.flatnonzero(labels == label)[:columns]
        for k, panel in enumerate(line):
            panel.set_axis_off()
            if k < len(indices):
                pixels = data.train.images[indices[k]].permute(1, 2, 0).numpy()
                panel.imshow(pixels, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
        line[0].text(-0.15, 0.5, data.classes[label], ha="right", va="center", transform=line[0].transAxes, fontsize=8)
    figure.suptitle(f"{data.name}: {len(data.train):,} train, {len(data.test):,} test, {len(data.classes)} classes")
    save(figure, path)
