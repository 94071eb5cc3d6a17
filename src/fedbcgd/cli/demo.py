"""`fedbcgd demo`: three algorithms, one upload budget, real images."""

from pathlib import Path
from typing import Annotated

import typer

from fedbcgd.cli import app


@app.command()
def demo(
    budget: Annotated[
        float,
        typer.Option(
            min=1, max=10_000, help="Upload budget of each algorithm: the mean upload of a client, in models (d)."
        ),
    ] = 20,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Fixes every random draw.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the plots and the metrics.")] = Path("fedbcgd-demo"),
) -> None:
    """Train LeNet-5 on Fashion-MNIST with FedAvg, FedBCGD and FedPAQ under the same upload budget.

    100 clients with 100 images each, labels unevenly spread (Dirichlet 0.6); 10 clients train in each round. The images
    come with the package: nothing is downloaded. Takes a few minutes on two cores.
    """
    from fedbcgd.backends.workers.processes import start_early

    start_early()
    from fedbcgd.demo import conclude, introduce, run
    from fedbcgd.display.progress import wide_console
    from fedbcgd.files import make_folder

    console = wide_console()
    folder = make_folder(out)
    introduce(console, budget, seed)
    try:
        results = run(budget, seed, folder)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted; the measurements so far are in {folder}") from None
    conclude(console, results, budget, folder)
