"""`fedbcgd rollback`: take a run back to an earlier checkpoint."""

from pathlib import Path
from typing import Annotated

import typer

from fedbcgd.cli import app


@app.command()
def rollback(
    folder: Annotated[Path, typer.Argument(help="The folder of a run, simulated or on Flower.", show_default=False)],
    round: Annotated[
        int | None,
        typer.Argument(
            help="Number of finished rounds at the checkpoint to return to. Without it the checkpoints are listed."
        ),
    ] = None,
) -> None:
    """Take a run back to an earlier checkpoint; without ROUND, list the checkpoints.

    The last two checkpoints are kept. The newer one is renamed, and the run continues from the older one when it is started
    again. While a process uses the folder, nothing is changed.
    """
    from fedbcgd.runs.rollback import checkpoints, roll_back

    if round is None:
        for kept in checkpoints(folder):
            print(f"round {kept.round}: {kept.path}" if kept.round is not None else f"damaged: {kept.problem}")
        return
    aside = roll_back(folder, round)
    print(f"{folder} will continue after round {round}" if aside else f"{folder} is at round {round} already")
    for path in aside:
        print(f"renamed: {path}")
