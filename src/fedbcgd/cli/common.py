"""What commands share: options, and how progress and results are shown."""

import signal
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedbcgd.engine.signals import ENDING, HungUp
from fedbcgd.files import as_json

if TYPE_CHECKING:
    from fedbcgd.display.progress import ProgressDisplay
    from fedbcgd.engine.loop import RoundInfo

ConfigFile = Annotated[Path, typer.Argument(help="A TOML file; `fedbcgd init` writes one.", show_default=False)]
Out = Annotated[Path, typer.Option("--out", help="Folder for everything the run leaves.", show_default=False)]
Sets = Annotated[
    list[str] | None, typer.Option("--set", help="Change a value of the file: section.key=value. May be repeated.")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress, only the outcome.")]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable: a line of JSON for each evaluation and outcome.")]


class JsonLines:
    """Progress as lines of JSON on standard output."""

    def __init__(self, names: list[str]):
        self._names = names
        self._now = 0

    def begin(self, index: int) -> None:
        self._now = index

    def skip(self, index: int, why: str) -> None:
        print(as_json({"run": self._names[index], "skipped": why}), flush=True)

    def say(self, line: str) -> None:
        pass  # it is in summary.json

    def __call__(self, info: "RoundInfo") -> None:
        for row in info.rows:
            print(as_json({"run": self._names[self._now], **row}), flush=True)


class Silent:
    def begin(self, index: int) -> None:
        pass

    def say(self, line: str) -> None:
        pass

    def skip(self, index: int, why: str) -> None:
        pass

    def __call__(self, info: "RoundInfo") -> None:
        pass


@contextmanager
def display(names: list[str], quiet: bool, as_json: bool) -> Iterator["ProgressDisplay | JsonLines | Silent"]:
    """Progress of these runs, as asked for."""
    if as_json:
        yield JsonLines(names)
    elif quiet:
        yield Silent()
    else:
        from fedbcgd.display.progress import watch

        with watch(names) as shown:
            yield shown


@contextmanager
def terminable() -> Iterator[None]:
    """`kill PID` and a closed terminal end a run as Ctrl-C does: with a checkpoint."""
    hung_up = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal hung_up
        hung_up = hung_up or number != signal.SIGTERM
        raise KeyboardInterrupt

    # Whoever ignores a signal (nohup) wants the run to go on.
    before = {number: signal.getsignal(number) for number in ENDING if number != signal.SIGINT}
    taken = [number for number, handler in before.items() if handler != signal.SIG_IGN]
    for number in taken:
        signal.signal(number, stop)
    try:
        yield
    except KeyboardInterrupt as stopped:
        if hung_up:
            raise HungUp(str(stopped)) from None
        raise
    finally:
        for number in taken:
            signal.signal(number, before[number])


def expect_workers(config: Path, sets: list[str] | None) -> None:
    """Have worker processes prepared while this one imports what it needs, if the file looks like a run that has some.
    Whatever is wrong with it is said later."""
    from fedbcgd.backends.placement import Placement
    from fedbcgd.errors import UserError

    try:
        run = tomllib.loads(config.read_text(encoding="utf-8")).get("run", {})
    except (OSError, ValueError):
        return
    if not isinstance(run, dict):
        return
    given = {key.strip(): value.strip(" '\"") for key, _, value in (text.partition("=") for text in sets or [])}
    chosen = {key: given.get(f"run.{key}", str(run.get(key, ""))) for key in ("workers", "backend", "device")}
    workers = 0 if chosen["workers"] == "0" else None
    with suppress(UserError):
        Placement(chosen["backend"] or "workers", workers, device=chosen["device"] or "cpu").entry.start_early()


def say_json(**values: Any) -> None:
    print(as_json(values), flush=True)
