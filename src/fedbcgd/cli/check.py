"""`fedbcgd check`: which files of runs are whole."""

from pathlib import Path
from typing import Annotated

import typer

from fedbcgd.cli import app


@app.command()
def check(
    folders: Annotated[
        list[Path],
        typer.Argument(help="Folders of runs, or folders that hold several (compare, sweep).", show_default=False),
    ],
) -> None:
    """Say which files of a run are whole, damaged, missing or, as those of earlier versions, without a checksum.

    The exit code is 0 where nothing is damaged or missing, 1 where something is. `fedbcgd data check` does the same for
    data sets.
    """
    from fedbcgd.runs import check as checks

    bad = False
    for folder in checks.find(folders):
        print(folder)
        for found in checks.check(folder):
            bad |= found.bad
            note = f": {found.note}" if found.note else ""
            print(f"  {found.file:<31} {found.state}{note}")
    raise typer.Exit(int(bad))
