"""`fedbcgd hours`: what time a finished run would have taken, on any network."""

from pathlib import Path
from typing import Annotated

import typer

from fedbcgd.cli import app
from fedbcgd.display.terminal import Json, say_json


@app.command()
def hours(
    folder: Annotated[Path, typer.Argument(help="The folder of a run.", show_default=False)],
    network: Annotated[
        str | None,
        typer.Option(
            help="Profiles, with commas: 4g, broadband, datacentre, mix; own for the run's own network. Default: all.",
            show_default=False,
        ),
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="Your measurements, as in docs/network.md.")] = None,
    target: Annotated[float | None, typer.Option(help="An accuracy. Default: the best that the run reached.")] = None,
    as_json: Json = False,
) -> None:
    """Hours of a run on the clock of a network, whole and to a target; and whether its blocks lean to fast clients, by the
    links of the CSV, of the run's own network or of the first profile, whichever of these comes first."""
    from fedbcgd.display.progress import printable, wide_console
    from fedbcgd.report.network import bias_table, first_bias, hours_table, measure, networks

    chosen = networks(folder, network, csv)
    found = measure(folder, chosen, target)
    name, leans = first_bias(folder, chosen)
    if as_json:
        for row in found:
            say_json(**row)
        say_json(network=name, bias=[lean.row() for lean in leans])
        return
    console = wide_console()
    console.print(hours_table(found))
    for why in dict.fromkeys(row["why"] for row in found if "why" in row):
        console.print(printable(f"– {why}", 5000), soft_wrap=True)
    console.print(bias_table(leans, name))
