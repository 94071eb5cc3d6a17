"""`fedbcgd hours`: how long a finished run would have taken on any network."""

from pathlib import Path
from typing import Annotated

import typer

from fedbcgd.cli import app
from fedbcgd.display.terminal import print_json


@app.command()
def hours(
    folder: Annotated[Path, typer.Argument(help="The folder of a run.", show_default=False)],
    network: Annotated[
        str | None,
        typer.Option(
            help="Names, separated by commas: the profiles 4g, broadband, datacentre and mix, or own, the run's own "
            "network. Default: all.",
            show_default=False,
        ),
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="A CSV file of measured links, see docs/network.md.")] = None,
    target: Annotated[
        float | None, typer.Option(help="Accuracy to reach. Default: the best that the run reached.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable: a line of JSON for each network.")] = False,
) -> None:
    """Show how many hours a run takes on each network, in total and until a target accuracy.

    Also show whether fast clients serve some blocks more often than others. The clients' speeds for that are those of the
    CSV file, else of the run's own network, else of the first profile.
    """
    from fedbcgd.display.progress import printable, wide_console
    from fedbcgd.report.network import bias_table, first_bias, hours_table, measure_hours, select_networks

    chosen = select_networks(folder, network, csv)
    rows = measure_hours(folder, chosen, target)
    name, biases = first_bias(folder, chosen)
    if as_json:
        for row in rows:
            print_json(**row)
        print_json(network=name, bias=[block.row() for block in biases])
        return
    console = wide_console()
    console.print(hours_table(rows))
    for reason in dict.fromkeys(row["why"] for row in rows if "why" in row):
        console.print(printable(f"– {reason}", 5000), soft_wrap=True)
    console.print(bias_table(biases, name))
