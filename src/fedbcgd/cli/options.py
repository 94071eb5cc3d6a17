"""`fedbcgd options`: the table of the options of algorithms."""

from typing import Annotated

import typer

from fedbcgd.cli import app


@app.command()
def options(
    algorithm: Annotated[str | None, typer.Argument(help="Only those of this algorithm.", show_default=False)] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print docs/options.md instead.")] = False,
) -> None:
    """List the options of algorithms: name, default, meaning, and which algorithms take them."""
    from rich.table import Table

    from fedbcgd.algorithms.options import options as rows
    from fedbcgd.algorithms.options import page
    from fedbcgd.display.progress import wide_console

    if markdown:
        print(page(), end="")
        return
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("option", no_wrap=True)
    table.add_column("default", max_width=12)
    table.add_column("meaning", ratio=1)
    if algorithm is None:
        table.add_column("algorithms", max_width=22)
    for row in rows(algorithm):
        table.add_row(row.name, row.default, row.meaning, *([row.takers] if algorithm is None else []))
    wide_console().print(table, markup=False, highlight=False)
