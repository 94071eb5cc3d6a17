"""Tables for the terminal."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Column, Table
from rich.text import Text, TextType

from fedbcgd.display.metrics import in_words, metric_of
from fedbcgd.display.progress import printable
from fedbcgd.engine.client_evaluation import SPREAD
from fedbcgd.engine.loop import Outcome


class SplitTable(Table):
    """A table that is shown as several, one below the other, if its columns do not fit side by side.

    Each begins with the first column, so that no number is broken into lines and no name of a column is cut. If the first
    column alone takes more than half of the width, it is wrapped instead.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        first, *others = self.columns
        unlimited = options.update_width(10**6)
        if _beside([first]).__rich_measure__(console, unlimited).maximum > options.max_width // 2:
            first.no_wrap = False
            yield from super().__rich_console__(console, options)
            return
        parts: list[list[Column]] = [[first]]
        for column in others:
            wider = [*parts[-1], column]
            if len(wider) > 2 and _beside(wider).__rich_measure__(console, unlimited).maximum > options.max_width:
                wider = [first, column]
                parts.append(wider)
            parts[-1] = wider
        if len(parts) == 1:
            yield from super().__rich_console__(console, options)
        else:
            yield from (_beside(columns, self.title if k == 0 else None) for k, columns in enumerate(parts))


def _beside(columns: Sequence[Column], title: TextType | None = None) -> Table:
    out = Table(title=title, title_justify="left")
    for column in columns:
        out.add_column(column.header, justify=column.justify, no_wrap=column.no_wrap)
    for row in zip(*(column.cells for column in columns), strict=True):
        out.add_row(*row)
    return out


def text_table(
    title: str | Text, head: Sequence[str | Text], rows: Iterable[Iterable[object]], texts: int = 1
) -> Table:
    """Return a table for the terminal; nothing in it is read as markup.

    Args:
        title: its title.
        head: the names of the columns.
        rows: the cells of each row.
        texts: how many columns are text; the others are numbers, on the right.
    """
    out = (SplitTable if texts == 1 else Table)(title=title or None, title_justify="left")
    for k, name in enumerate(head):
        out.add_column(name, justify="left" if k < texts else "right", no_wrap=k == 0)
    for row in rows:
        out.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    return out


def table(results: Mapping[str, Outcome], title: str = "") -> Table:
    """Return a table with a row for each run: the metric that it is about, and its costs."""
    metric = metric_of(results.values())
    named = () if metric is None else (in_words(metric),)
    head = ("algorithm", *named, "rounds", "upload, d", "upload, MB", "largest upload\nof a client, MB")
    rows = (
        (
            printable(name),
            *([] if metric is None else [f"{result.final[metric]:.4f}" if metric in result.final else "–"]),
            str(result.rounds),
            f"{result.ledger.upload_d:.2f}",
            f"{result.ledger.upload_bytes / 1e6:.1f}",
            f"{result.ledger.upload_max_bytes / 1e6:.3f}",
            str(result.ledger.gradient_evaluations),
            f"{result.seconds:.0f}",
        )
        for name, result in results.items()
    )
    return text_table(title, (*head, "gradient\nevaluations", "seconds"), rows)


def client_tables(results: Mapping[str, Sequence[Outcome]]) -> list[Table]:
    """Return a table of how metrics are spread over the clients, means over seeds; none if that was not measured."""
    rows = []
    for name, outcomes in results.items():
        finals = [outcome.final for outcome in outcomes if not outcome.diverged]
        for column in dict.fromkeys(c for final in finals for c in final if c.startswith("clients_")):
            metric = column.removesuffix("_worst_tenth")
            measured = [final for final in finals if all(f"{metric}_{part}" in final for part in SPREAD)]
            if metric != column and measured:
                values = (fmean(final[f"{metric}_{part}"] for final in measured) for part in SPREAD)
                rows.append((printable(name), in_words(metric.removeprefix("clients_")), *(f"{v:.4f}" for v in values)))
    head = ("algorithm", "metric", "mean", "standard\ndeviation", "worst tenth", "lowest quarter")
    return [text_table("on each client's own held-out examples", head, rows, texts=2)] if rows else []
