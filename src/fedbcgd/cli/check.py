"""`fedbcgd check`: find damaged files of runs."""

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
    """Say of each file of a run whether it is whole, damaged, missing or unverified.

    Files that an earlier version wrote without a checksum are unverified. The exit code is 1 if a file is damaged or
    missing, else 0. `fedbcgd data check` does the same for data sets.
    """
    from fedbcgd.runs import check as checks

    bad = False
    for folder in checks.find(folders):
        print(folder)
        for result in checks.check(folder):
            bad |= result.bad
            note = f": {result.note}" if result.note else ""
            print(f"  {result.file:<31} {result.state}{note}")
    raise typer.Exit(int(bad))
