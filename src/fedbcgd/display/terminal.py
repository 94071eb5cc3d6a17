"""Shows runs on the terminal: progress and results as text or as JSON; and handles signals that end a run."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedbcgd.engine.signals import ENDING, HungUp
from fedbcgd.files import as_json

if TYPE_CHECKING:
    from fedbcgd.display.progress import ProgressDisplay
    from fedbcgd.engine.loop import RoundInfo

Quiet = Annotated[bool, typer.Option("--quiet", help="No progress, only the outcome.")]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable: a line of JSON for each evaluation and outcome.")]


class JsonLines:
    """Shows progress as lines of JSON on standard output."""

    def __init__(self, names: list[str]):
        self._names = names
        self._now = 0

    def begin(self, index: int) -> None:
        """Report run number `index` from now on."""
        self._now = index

    def skip(self, index: int, why: str) -> None:
        """Report that run number `index` is not run, and why."""
        print(as_json({"run": self._names[index], "skipped": why}), flush=True)

    def say(self, line: str) -> None:
        """Do nothing: notes are in summary.json."""

    def __call__(self, info: "RoundInfo") -> None:
        for row in info.rows:
            print(as_json({"run": self._names[self._now], **row}), flush=True)


class Silent:
    """A display that shows nothing."""

    def begin(self, index: int) -> None:
        """Do nothing."""

    def say(self, line: str) -> None:
        """Do nothing."""

    def skip(self, index: int, why: str) -> None:
        """Do nothing."""

    def __call__(self, info: "RoundInfo") -> None:
        pass


@contextmanager
def display(names: list[str], quiet: bool, as_json: bool) -> Iterator["ProgressDisplay | JsonLines | Silent"]:
    """Show the progress of runs.

    Args:
        names: the name of each run.
        quiet: show nothing.
        as_json: print lines of JSON on standard output.

    Yields:
        A callback of runs, with `begin(index)` and `skip(index, why)`.
    """
    if as_json:
        yield JsonLines(names)
    elif quiet:
        yield Silent()
    else:
        from fedbcgd.display.progress import progress_display

        with progress_display(names) as shown:
            yield shown


@contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM and a closed terminal end a run as Ctrl-C does: with a checkpoint.

    Raises:
        KeyboardInterrupt: the run was ended by SIGTERM or Ctrl-C.
        HungUp: the terminal was closed.
    """
    hung_up = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal hung_up
        hung_up = hung_up or number != signal.SIGTERM
        raise KeyboardInterrupt

    # A signal that is ignored (nohup) stays ignored, so that the run continues.
    before = {number: signal.getsignal(number) for number in ENDING if number != signal.SIGINT}
    handled = [number for number, handler in before.items() if handler != signal.SIG_IGN]
    for number in handled:
        signal.signal(number, stop)
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if hung_up:
            raise HungUp(str(interrupt)) from None
        raise
    finally:
        for number in handled:
            signal.signal(number, before[number])


def print_json(**values: Any) -> None:
    """Print a JSON object on a line of standard output."""
    print(as_json(values), flush=True)
