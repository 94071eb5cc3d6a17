"""`fedbcgd compare` and `fedbcgd sweep`: several runs of one configuration."""

from pathlib import Path
from typing import Annotated

import typer

from fedbcgd.cli import app
from fedbcgd.cli.common import ConfigFile, Out, Sets, start_workers_early
from fedbcgd.display.terminal import Json, Quiet, display, print_json, terminable


@app.command()
def compare(
    config: ConfigFile,
    algorithms: Annotated[
        str, typer.Option(help="Names, separated by commas: fedavg,fedavgm,fedbcgd", show_default=False)
    ],
    out: Out,
    budget: Annotated[
        float | None,
        typer.Option(
            help="Upload budget of each run: the mean upload of a client, in models (d); replaces the file's run.budget, "
            "rounds and target."
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each algorithm, with seeds from run.seed on.")] = 1,
    target: Annotated[
        float | None,
        typer.Option(
            help="Accuracy, or value of run.metric, for the table of rounds, upload and hours until it is reached. Default: "
            "the best that every run reached."
        ),
    ] = None,
    set_: Sets = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run several algorithms on the same data under the same upload budget, and compare them.

    Each algorithm takes the options of [algorithm] that it has, and those of [compare.NAME], which apply to it alone.
    Finished runs in the folder are kept and not run again; unfinished ones continue where they stopped. Writes compare.csv,
    compare.png and reach.csv: rounds, upload, and hours under each network profile until a metric is reached.
    """
    start_workers_early(config, set_)
    from fedbcgd.display.progress import printable, wide_console
    from fedbcgd.report import reach
    from fedbcgd.runs import compare as comparison
    from fedbcgd.runs import config as configuration
    from fedbcgd.runs.retiming import check_target

    settings = configuration.load(
        config, set_ or [], {} if budget is None else {"budget": budget, "rounds": None, "target": None}
    )
    if ":" not in settings.model.name + settings.data.name and settings.run.metric is None:
        check_target(target)  # later the metric is known, but then the runs are done
    names = [name.strip() for name in algorithms.split(",") if name.strip()]
    runs = comparison.plan(settings, names, seeds)
    with display([run.label for run in runs], quiet, as_json) as shown, terminable():
        outcomes = comparison.run(runs, out, shown)
    untimed: list[str] = []
    reached, tables = reach.write_comparison(outcomes, out, target, untimed.append)
    if as_json:
        for row in comparison.rows(outcomes):
            print_json(**row)
        for row in reached:
            print_json(reach=row)
    else:
        console = wide_console()
        for table in tables:
            console.print(table)
        for reason in untimed:
            console.print(printable(f"no hours under the network profiles: {reason}", 5000), soft_wrap=True)
        files = ", ".join(f"{out}/{name}" for name in ("compare.csv", "compare.png", *["reach.csv"][: len(reached)]))
        console.print(printable(f"{files}, and a folder for each run", 5000))


@app.command()
def sweep(
    config: ConfigFile,
    grid: Annotated[
        list[str],
        typer.Option(
            help="An option of the algorithm and its values: option=value,value,… May be repeated.", show_default=False
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder for the files of the runs.")] = Path("runs/sweep"),
    validation: Annotated[
        float, typer.Option(min=0.001, max=0.9, help="Share of the training set that is held out.")
    ] = 0.1,
    set_: Sets = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Try every combination of some hyper-parameters and choose the best on data held out of the training set.

    The test set is not used. Writes sweep.csv, and best.toml, a configuration for `fedbcgd run`. Finished runs are kept.
    """
    start_workers_early(config, set_)
    from fedbcgd.display.progress import printable, wide_console
    from fedbcgd.runs import config as configuration
    from fedbcgd.runs import sweep as search
    from fedbcgd.runs.batch import run_all

    settings = configuration.load(config, set_ or [])
    if not settings.data.validation:
        settings = configuration.load(config, [*(set_ or []), f"data.validation={validation!r}"])
    runs = search.plan(settings, grid)
    with display([run.label for run in runs], quiet, as_json) as shown, terminable():
        outcomes = run_all(runs, out, shown)
    best = search.write(runs, outcomes, out)
    if as_json:
        for row in search.rows(runs, outcomes):
            print_json(**row)
        print_json(best=best.label, config=f"{out}/best.toml")
    else:
        console = wide_console()
        console.print(search.table(runs, outcomes))
        console.print(printable(f"best on held-out data: {best.label}; {out}/best.toml runs it", 5000))
