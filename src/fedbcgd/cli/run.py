"""`fedbcgd run` and `fedbcgd init`."""

from pathlib import Path
from typing import Annotated

import typer

from fedbcgd.cli import app
from fedbcgd.cli.common import ConfigFile, Out, Sets, start_workers_early
from fedbcgd.display.terminal import Json, Quiet, display, print_json, terminable


@app.command()
def run(
    config: ConfigFile,
    out: Out,
    set_: Sets = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Continue the run in the folder; the result is bit for bit that of an uninterrupted run."
        ),
    ] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run a configuration file, with all results in a folder.

    The folder gets config.toml (complete: it reproduces the run), metrics.jsonl, summary.json, model.safetensors, curve.png
    and checkpoint/. After Ctrl-C, a crash or a power cut, --resume continues; the model is that of an uninterrupted run.
    With --resume, run.rounds, budget and target may be extended, and workers, backend, address, gpus, checkpoint_every and
    tensorboard may change.
    """
    start_workers_early(config, set_)
    from fedbcgd.display.progress import wide_console
    from fedbcgd.display.tables import client_tables, table
    from fedbcgd.engine.run_folder import RunFolder
    from fedbcgd.errors import UserError
    from fedbcgd.report.network import format_hours
    from fedbcgd.runs import config as configuration
    from fedbcgd.runs.execute import execute

    settings = configuration.load(config, set_ or [])
    folder = RunFolder(out)
    if resume and not folder.config.exists() and not folder.checkpoint.exists():
        raise UserError(
            f"--resume: expected the folder of a run, got {out}, which has none; leave --resume out to begin one"
        )
    name = settings.algorithm["name"]
    with display([name], quiet, as_json) as shown, terminable():
        shown.begin(0)
        outcome = execute(settings, out, resume=resume, callbacks=[shown], say=shown.say)
    if as_json:
        print_json(run=name, out=str(out), stopped=outcome.stopped, rounds=outcome.rounds, final=outcome.final)
        return
    console = wide_console()
    for one in (table({name: outcome}), *client_tables({name: [outcome]})):
        console.print(one)
    hours = outcome.final.get("hours")
    after = f" after {format_hours(hours)} on the clock of its network" if hours is not None else ""
    console.print(f"stopped by {outcome.stopped}{after}; everything is in {out}", highlight=False, markup=False)


@app.command()
def init(
    path: Annotated[Path, typer.Argument(help="The file to write.")] = Path("run.toml"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Write a commented configuration file to start from."""
    from fedbcgd.errors import UserError
    from fedbcgd.files import write_text
    from fedbcgd.runs.config import template

    if path.exists() and not force:
        raise UserError(f"{path}: expected a new file, got one that exists; --force overwrites it")
    write_text(path, template())
    print(f"{path} written; run it with: fedbcgd run {path} --out runs/first")
