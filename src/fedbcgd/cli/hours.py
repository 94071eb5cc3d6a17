"""`fedbcgd hours`: how long a finished run would have taken on any network."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedbcgd.cli import app
from fedbcgd.display.terminal import Json, print_json

if TYPE_CHECKING:
    from rich.table import Table


@app.command()
def hours(
    folder: Annotated[
        Path, typer.Argument(help="The folder of a run, or one with several runs below.", show_default=False)
    ],
    network: Annotated[
        str | None,
        typer.Option(
            help="Profiles, with commas: 4g, broadband, datacentre, mix; own for the run's own network. Default: all.",
            show_default=False,
        ),
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="Measured links, as in docs/network.md.")] = None,
    target: Annotated[
        float | None,
        typer.Option(help="Value of the run's metric to be reached. Default: the best that every run reached."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show how many hours a run takes on each network, in all and to a target, and whether fast clients serve some blocks
    more often than others. The clients' speeds for the latter are those of the CSV, else of the run's own network, else of
    the first profile. For several runs, such as those of `fedbcgd compare`, only the hours are shown."""
    from fedbcgd.report import network as tables
    from fedbcgd.runs.retiming import bias

    runs = tables.runs_in(folder)
    if len(runs) > 1:
        rows = tables.measure_runs(folder, runs, network, csv, target)
        if as_json:
            for row in rows:
                print_json(**row)
        else:
            _print(tables.runs_table(rows), rows)
        return
    folder = runs[0]
    chosen = tables.select_networks(folder, network, csv)
    rows = tables.measure_hours(folder, chosen, target)
    name, network_ = next(iter(chosen.items()))
    biases = bias(folder, network_)
    if as_json:
        for row in rows:
            print_json(**row)
        print_json(network=name, bias=[block.row() for block in biases])
        return
    _print(tables.hours_table(rows), rows)
    _print(tables.bias_table(biases, name))


def _print(table: "Table", rows: Sequence[Mapping[str, Any]] = ()) -> None:
    """Print a table and, below it, why some of these rows have no hours."""
    from fedbcgd.display.progress import printable, wide_console

    console = wide_console()
    console.print(table)
    for reason in dict.fromkeys(row["why"] for row in rows if "why" in row):
        console.print(printable(f"– {reason}", 5000), soft_wrap=True)
