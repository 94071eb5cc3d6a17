"""`fedbcgd hours`: what time a finished run would have taken, on any network."""

from pathlib import Path
from typing import Annotated

import typer

from fedbcgd.cli import app
from fedbcgd.cli.common import Json, say_json


@app.command()
def hours(
    folder: Annotated[Path, typer.Argument(help="The folder of a run.", show_default=False)],
    network: Annotated[
        str, typer.Option(help="Profiles, with commas: 4g, broadband, datacentre, mix; own for the run's own network.")
    ] = "4g,broadband,datacentre,mix",
    csv: Annotated[Path | None, typer.Option(help="Your measurements, as in docs/network.md.")] = None,
    target: Annotated[float | None, typer.Option(help="An accuracy. Default: the best that the run reached.")] = None,
    as_json: Json = False,
) -> None:
    """Hours of a run on the clock of a network, whole and to a target; and whether its blocks lean to fast clients."""
    from fedbcgd.network.show import bias_table, hours_table, measure
    from fedbcgd.report.progress import wide_console

    names = [name.strip() for name in network.split(",") if name.strip()]
    found = measure(folder, names, csv, target)
    if as_json:
        for row in found:
            say_json(**row)
        return
    console = wide_console()
    console.print(hours_table(found))
    for name in names[:1]:
        console.print(bias_table(folder, None if name == "own" else name))
