"""The command line. Heavy imports stay inside the commands, so that --help answers at once."""

import sys
from typing import Annotated, Any

import click
import typer
from typer.core import TyperGroup

from fedbcgd.outputs import output_was_lost, protect_streams
from fedbcgd.version import __version__


class Commands(TyperGroup):
    """A group of commands that reports a user's mistake as one message and exit code 2, without a traceback."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Print the help if there are no arguments."""
        if not args and self.no_args_is_help and not ctx.resilient_parsing:
            print(ctx.get_help())
            ctx.exit(2)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help as click does: the frames of typer need rich, which takes longer to import than all the rest."""
        click.Group.format_help(self, ctx, formatter)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands in alphabetical order, whichever module was imported first."""
        return sorted(super().list_commands(ctx))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands, each with the whole first paragraph of its description."""
        commands = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        rows = [
            (name, (c.help or "").split("\n\n")[0].replace("\n", " ")) for name, c in commands if c and not c.hidden
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def invoke(self, ctx: Any) -> Any:
        """Run a command; exit with 2 after a user's mistake, 1 after a failure, 130 or 129 after an interruption."""
        from fedbcgd.engine.signals import HungUp
        from fedbcgd.errors import Diverged, UserError, WorkerLost

        try:
            return super().invoke(ctx)
        except UserError as error:
            code, message = 2, str(error)
        except (Diverged, WorkerLost) as error:
            code, message = 1, str(error)
        except KeyboardInterrupt as interrupt:
            code, message = 129 if isinstance(interrupt, HungUp) else 130, str(interrupt) or "interrupted"
        from fedbcgd.core.reading import shorten

        lines = [shorten(line, 5000) for line in message.split("\n")[:200]]  # it may contain names from untrusted files
        print("fedbcgd:", "\n".join(lines), file=sys.stderr)
        sys.exit(code)


app = typer.Typer(
    name="fedbcgd",
    cls=Commands,
    help="Federated learning over slow uplinks: FedBCGD, FedBCGD+ and their baselines, compared by the bytes they upload.",
    no_args_is_help=True,
    suggest_commands=False,  # click does already
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # in "rich" a description would lose words such as "[algorithm]"
)


def _version(requested: bool) -> None:
    if requested:
        print(f"fedbcgd {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def register_commands() -> None:
    """Import the modules of the commands; each registers its own with `app`."""
    from fedbcgd.cli import (  # noqa: F401
        blocks,
        check,
        compare,
        data,
        demo,
        doctor,
        export,
        hours,
        options,
        paper,
        report,
        rollback,
        run,
    )


def main() -> None:
    """Run the command line; the exit code is 1 if output could not be written."""
    protect_streams()
    try:
        register_commands()
        app()
    except SystemExit as end:
        sys.stdout.flush()
        raise SystemExit(end.code or int(output_was_lost())) from None
    except Exception as error:
        from fedbcgd.errors import shortage

        if not (message := shortage(error)):
            raise
        print(f"fedbcgd: {message}", file=sys.stderr)
        raise SystemExit(1) from None
