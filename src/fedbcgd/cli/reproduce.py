"""`fedbcgd reproduce`: a table or figure of the paper from one command."""

from pathlib import Path
from typing import Annotated

import typer

from fedbcgd.cli import app
from fedbcgd.cli.common import Json, Quiet, display, terminable
from fedbcgd.files import as_json as to_json


@app.command()
def reproduce(
    item: Annotated[str, typer.Argument(help="table1 … figure8, or all; --list shows them.", show_default=False)] = "",
    scale: Annotated[str, typer.Option(help="paper, cpu or smoke.")] = "cpu",
    out: Annotated[
        Path | None, typer.Option(help="Folder for everything; runs/reproduce-SCALE if not given.", show_default=False)
    ] = None,
    only: Annotated[str, typer.Option(help="Only panels whose name has this in it: cifar10-lenet5.")] = "",
    seeds: Annotated[int | None, typer.Option(min=1, help="So many seeds instead of the scale's.")] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(help="Another data set in the place of one: emnist-byclass=mine. May be repeated."),
    ] = None,
    workers: Annotated[int | None, typer.Option(min=0, help="Processes; one per core if not given.")] = None,
    device: Annotated[str, typer.Option(help="Where clients compute: cpu, cuda, mps.")] = "cpu",
    show: Annotated[bool, typer.Option("--show", help="Run nothing: write the tables from what is finished.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="The items, and what each costs at this scale.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run a table or figure of the paper and say which of its claims hold.

    paper: the paper's setting to the letter, for people with GPUs. cpu: a faithful miniature for two cores. smoke: a trial
    of the machinery in under a minute. Finished runs are kept and not run again; items share the runs they have in common.
    """
    from fedbcgd.display.progress import wide_console
    from fedbcgd.paper import command

    console = wide_console(stderr=as_json)
    command.check_scale(scale)
    if list_ or not item:
        command.show_list(console, scale)
        return
    asked = command.asked(scale, out, only, seeds, data or [], workers, device)
    wanted = command.names(item, scale, only)
    command.check(wanted, asked, run=not show)
    with terminable():
        for name in wanted:
            verdicts = command.reproduce(
                name, asked, lambda labels: display(labels, quiet, as_json), console, run=not show
            )
            if as_json:
                print(to_json({"item": name, "claims": verdicts}), flush=True)
