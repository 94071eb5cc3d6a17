"""`fedbcgd rollback`: let a run go on from an earlier checkpoint."""

from pathlib import Path
from typing import Annotated

import typer

from fedbcgd.cli import app


@app.command()
def rollback(
    folder: Annotated[Path, typer.Argument(help="The folder of a run, simulated or on Flower.", show_default=False)],
    round: Annotated[
        int | None, typer.Argument(help="Rounds that were done then. Without it: say which there are.")
    ] = None,
) -> None:
    """Take a run back to the checkpoint before its last one; without ROUND, list the checkpoints.

    The last two are kept. What is newer is set aside under another name, and the run goes on from the older one when it is
    started again. Refused while a process is at work in the folder.
    """
    from fedbcgd.runs.rollback import checkpoints, roll_back

    if round is None:
        for kept in checkpoints(folder):
            print(f"round {kept.round}: {kept.path}" if kept.round is not None else f"damaged: {kept.problem}")
        return
    aside = roll_back(folder, round)
    print(f"{folder} goes on after round {round}" if aside else f"{folder} is at round {round} already")
    for path in aside:
        print(f"set aside: {path}")
