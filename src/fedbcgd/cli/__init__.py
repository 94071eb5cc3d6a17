"""The command line. Heavy imports stay inside the commands, so that --help answers at once."""

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from fedbcgd.version import __version__


class Commands(TyperGroup):
    """A user's mistake is one message and exit code 2, never a traceback."""

    def invoke(self, ctx: Any) -> Any:
        from fedbcgd.errors import Diverged, UserError, WorkerLost

        try:
            return super().invoke(ctx)
        except UserError as error:
            code, message = 2, str(error)
        except (Diverged, WorkerLost) as error:
            code, message = 1, str(error)
        except KeyboardInterrupt as stopped:
            code, message = 130, str(stopped) or "interrupted"
        print(f"fedbcgd: {message}", file=sys.stderr)
        sys.exit(code)


app = typer.Typer(
    name="fedbcgd",
    cls=Commands,
    help="Federated learning over slow uplinks: FedBCGD, FedBCGD+ and their baselines under one upload ledger.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _version(asked: bool) -> None:
    if asked:
        print(f"fedbcgd {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


def main() -> None:
    # Each registers its commands.
    from fedbcgd.cli import blocks, compare, data, demo, doctor, network, report, reproduce, run, theory  # noqa: F401

    app()
