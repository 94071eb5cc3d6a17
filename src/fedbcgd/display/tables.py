"""A table of finished runs for the terminal."""

from collections.abc import Mapping

from rich.table import Table

from fedbcgd.display.metrics import in_words, metric_of
from fedbcgd.display.progress import printable
from fedbcgd.engine.loop import Outcome


def table(results: Mapping[str, Outcome], title: str = "") -> Table:
    """Return a table with a row for each run: the metric that it is about, and its costs."""
    metric = metric_of(results.values())
    out = Table(title=title or None, title_justify="left")
    out.add_column("algorithm", no_wrap=True)
    for column in (
        *([] if metric is None else [in_words(metric)]),
        "rounds",
        "upload, d",
        "upload, MB",
        "largest upload\nof a client, MB",
        "gradient\nevaluations",
        "seconds",
    ):
        out.add_column(column, justify="right")
    for name, result in results.items():
        ledger = result.ledger
        out.add_row(
            printable(name),
            *([] if metric is None else [f"{result.final[metric]:.4f}" if metric in result.final else "–"]),
            str(result.rounds),
            f"{ledger.upload_d:.2f}",
            f"{ledger.upload_bytes / 1e6:.1f}",
            f"{ledger.upload_max_bytes / 1e6:.3f}",
            str(ledger.gradient_evaluations),
            f"{result.seconds:.0f}",
        )
    return out


def upload_to_reach(result: Outcome, metric: str, value: float) -> float | None:
    """Return the upload in d at the first evaluation whose metric is at least `value`, or None."""
    return next((row["upload_d"] for row in result.rows if row.get(metric, -1.0) >= value), None)
