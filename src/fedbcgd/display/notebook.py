"""What a Jupyter notebook shows: progress that is updated in place, and a run as a table with curves."""

import io
from collections.abc import Mapping
from dataclasses import replace
from html import escape
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from rich.console import Console

from fedbcgd.display.metrics import main_metric
from fedbcgd.display.plots import AXES, STYLE, draw_band
from fedbcgd.display.progress import ProgressDisplay, in_notebook
from fedbcgd.display.styles import LineStyle, line_style
from fedbcgd.engine.loop import Loop, Outcome, RoundInfo
from fedbcgd.errors import unknown

EVERY = 0.2  # seconds between updates
_TEXT = "#010203"  # stands for the colour of the notebook's own text, which is light on a dark page
_BLACK = "#222222"  # a colour of styles that cannot be seen on a dark page


class NotebookDisplay(ProgressDisplay):
    """Shows runs as a bar and a line below the cell; needs no widgets."""

    plain_every = EVERY

    def __init__(self, names: list[str]):
        super().__init__(names, Console(file=io.StringIO()), live=False)
        self._handle: Any = None
        self._done = 0.0
        self._in_place = False

    def begin(self, index: int) -> None:
        """Report run number `index` from now on, in a new line."""
        self._handle, self._done = None, 0.0
        super().begin(index)

    def start(self, loop: Loop) -> None:
        """Say that the run has begun."""
        self._draw_in_place(lambda: super(NotebookDisplay, self).start(loop))

    def __call__(self, info: RoundInfo) -> None:
        self._done = info.progress
        self._draw_in_place(lambda: super(NotebookDisplay, self).__call__(info))

    def _draw_in_place(self, report: Any) -> None:
        self._in_place = True
        try:
            report()
        finally:
            self._in_place = False

    def say(self, line: str) -> None:
        """Show a line: beside the bar if it is about progress, otherwise without a bar."""
        from IPython.display import display

        if not self._in_place:
            print(line)
            return
        bar = f'<progress value="{self._done:.4f}" max="1" style="vertical-align: middle"></progress>'
        data = {"text/html": f"{bar} <code>{escape(line)}</code>", "text/plain": line}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


def curve(outcome: Outcome, metric: str | None = None, against: str = "upload_d", axes: Any = None) -> Figure:
    """Draw a metric of a run.

    Args:
        outcome: the outcome of the run.
        metric: a column of its rows; default: the main metric.
        against: the column on the x axis.
        axes: matplotlib's Axes to draw into; default: a new figure.

    Returns:
        The figure.

    Raises:
        UserError: there is no such column.
    """
    columns = list(dict.fromkeys(name for row in outcome.rows for name in row))
    metric = metric or main_metric(columns, outcome.metric) or "train_loss"
    for name in (metric, against):
        if name not in columns:
            raise unknown("column", name, columns)
    rows = [row for row in outcome.rows if metric in row and against in row]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.0, 2.5), layout="constrained") if axes is None else axes.figure
        panel = figure.subplots() if axes is None else axes
        position = len(panel.lines)
        drawn = _for_any_page(line_style(outcome.algorithm, position))
        draw_band(panel, [rows], against, metric, outcome.algorithm, drawn)
        panel.set_xlabel(AXES.get(against, against.replace("_", " ")))
        panel.set_ylabel(metric.replace("_", " "))
        panel.grid(True)
        if panel.lines:
            panel.legend()
    _show_figures()
    return figure


def _for_any_page(drawn: LineStyle) -> LineStyle:
    """Return a style that can be seen on white and on dark pages: with the colour for white or the colour for dark."""
    if drawn.colour == _BLACK:
        return drawn  # becomes the colour of the text
    return replace(drawn, colour=max(drawn.colour, drawn.dark, key=_least_contrast))


def _least_contrast(colour: str) -> float:
    """Return the contrast with white or with nearly black, whichever is less."""
    parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in matplotlib.colors.to_rgb(colour)]
    luminance = 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]
    return min(1.05 / (luminance + 0.05), (luminance + 0.05) / (0.0056 + 0.05))


def _show_figures() -> None:
    """Have the notebook draw figures that were made without pyplot."""
    if in_notebook():
        from IPython.core.getipython import get_ipython
        from IPython.core.pylabtools import select_figure_formats

        select_figure_formats(get_ipython(), {"png"})


def html(outcome: Outcome) -> str:
    """Return a run as HTML: a table of its costs and last metrics, and curves of the main metric and a loss.

    Text and axes have the colour of the page's own text, so both can be read on light and dark pages.
    """
    ledger = outcome.ledger
    facts = {
        "algorithm": outcome.algorithm,
        "stopped by": outcome.stopped,
        "rounds": str(outcome.rounds),
        "upload, d": f"{ledger.upload_d:.2f}",
        "upload, MB": f"{ledger.upload_bytes / 1e6:.1f}",
        "seconds": f"{outcome.seconds:.1f}",
    }
    metrics = {name: value for name, value in outcome.final.items() if _is_metric(name)}
    facts |= {name.replace("_", " "): f"{value:.4g}" for name, value in metrics.items()}
    columns = dict.fromkeys(name for row in outcome.rows for name in row)
    losses = [name for name in ("test_loss", "validation_loss", "train_loss") if name in columns]
    drawn = dict.fromkeys(name for name in (main_metric(columns, outcome.metric), *losses[:1]) if name is not None)
    curves = "".join(_svg(outcome, metric) for metric in drawn)
    return f'<div style="color: inherit">{_table(facts)}{curves}</div>'


def _is_metric(name: str) -> bool:
    return name.startswith(("test_", "validation_", "train_", "clients_")) or name == "hours"


def _table(facts: Mapping[str, str]) -> str:
    cell = 'style="text-align: left; color: inherit; background: none; padding: 1px 10px 1px 0"'
    rows = "".join(
        f"<tr><th {cell} scope='row'>{escape(name)}</th><td {cell}>{escape(value)}</td></tr>"
        for name, value in facts.items()
    )
    return f'<table style="display: inline-table; vertical-align: top; color: inherit">{rows}</table>'


def _svg(outcome: Outcome, metric: str) -> str:
    figure = curve(outcome, metric)
    panel = figure.axes[0]
    figure.patch.set_alpha(0)
    panel.patch.set_alpha(0)
    for line in panel.lines:
        if line.get_color() == _BLACK:
            line.set_color(_TEXT)
    legend = panel.get_legend()
    if legend is not None:
        legend.remove()  # the table names the algorithm
    panel.tick_params(colors=_TEXT)
    for text in (panel.xaxis.label, panel.yaxis.label):
        text.set_color(_TEXT)
    for spine in panel.spines.values():
        spine.set_color(_TEXT)
    stream = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(stream, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg = stream.getvalue()
    label = f'role="img" aria-label="{escape(panel.get_ylabel())} of {escape(outcome.algorithm)}"'
    return svg[svg.index("<svg") :].replace("<svg", f"<svg {label}", 1).replace(_TEXT, "currentColor")
