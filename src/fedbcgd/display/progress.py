"""Progress of long work: a live bar on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from fedbcgd.core.reading import shorten

if TYPE_CHECKING:
    from fedbcgd.engine.loop import RoundInfo

PLAIN_EVERY = 5.0  # seconds between plain lines
LISTED = 6  # up to so many runs keep their bars


def wide_console(stderr: bool = False) -> Console:
    """Standard output; where it is no terminal, and so has no width, wide enough for the tables."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(width=110, stderr=stderr)


def printable(text: object, longest: int = 500) -> Text:
    """A name or message from anywhere as it may be printed: no control characters, no markup, on one line."""
    return Text(shorten(str(text), longest))


class ProgressDisplay:
    """Shows one or several runs, one after the other. `watch(info)` is a callback of a run."""

    def __init__(self, names: list[str], console: Console, live: bool):
        self.console = console
        self.live = live
        self._names = names
        self._now = 0
        self._metric = ""
        self._base: float | None = None
        self._first = self._started = self._said = time.monotonic()
        self._skipped = 0
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=10),
            TextColumn("{task.fields[status]}"),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=console,
            disable=not live,
        )
        several = len(names) > 1
        self._all: TaskID | None = self._progress.add_task("all", total=len(names), status="") if several else None
        self._task: TaskID | None = None

    def begin(self, index: int) -> None:
        """From now on, what is reported is run number `index`."""
        self._now = index
        self._metric = ""
        self._base = None  # a resumed run does not begin at zero
        self._started = self._said = time.monotonic()
        if self._task is not None and len(self._names) > LISTED:
            self._progress.remove_task(self._task)  # so many would not fit on a screen
        self._task = self._progress.add_task(self._names[index], total=1.0, status="")
        if not self.live:
            self.say(f"{self._names[index]}: started{self._which()}")

    def skip(self, index: int, why: str) -> None:
        """Run number `index` need not run."""
        self._skipped += 1
        self._now = index
        if self.live and self._all is not None:
            self._progress.update(self._all, completed=index + 1, status=f"{index + 1} of {len(self._names)}")
        self.say(f"{self._names[index]}: {why}{self._which()}")

    def __call__(self, info: "RoundInfo") -> None:
        if info.row:
            self._metric = _metric(info.row)
        if self._base is None:
            self._base, self._started = info.progress, time.monotonic()
        ledger = info.ledger
        status = f"round {info.server.round}  {self._metric}{ledger.upload_d:.2f} d  {ledger.upload_bytes / 1e6:.1f} MB"
        if self.live:
            if self._task is not None:
                self._progress.update(self._task, completed=info.progress, status=status)
            if self._all is not None:
                which = f"{self._now + 1} of {len(self._names)}"
                self._progress.update(self._all, completed=self._now + info.progress, status=which)
            return
        now = time.monotonic()
        if now - self._said >= PLAIN_EVERY or info.reason:
            self._said = now
            self.say(f"{self._names[self._now]}: {status}  {info.progress:.0%}  {self._left(now, info.progress)}")

    def _left(self, now: float, progress: float) -> str:
        gained = progress - (self._base or 0.0)
        if not gained and progress < 1:
            return "time left unknown"
        left = (now - self._started) / gained * (1 - progress) if gained else 0.0
        if len(self._names) == 1:
            return f"{left:.0f} s left"
        done = self._now - self._skipped + progress  # what was skipped took no time
        after = (now - self._first) / done * (len(self._names) - self._now - 1)
        return f"{left:.0f} s left, {left + after:.0f} s for all"

    def _which(self) -> str:
        return f" ({self._now + 1} of {len(self._names)})" if len(self._names) > 1 else ""

    def say(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)


def _metric(row: dict[str, float]) -> str:
    for name in ("test_accuracy", "validation_accuracy", "test_loss", "train_loss"):
        if name in row:
            return f"{name.removeprefix('test_').replace('_', ' ')} {row[name]:.4f}  "
    return ""


@contextmanager
def watch(names: list[str], console: Console | None = None) -> Iterator[ProgressDisplay]:
    """A live display on a terminal, plain lines otherwise."""
    console = console or Console(stderr=True)
    shown = ProgressDisplay(names, console, live=console.is_terminal)
    with shown._progress:
        yield shown


@contextmanager
def single(name: str, progress: bool | None) -> Iterator[ProgressDisplay | None]:
    """The display of one run: asked for, or by default when the output is a terminal."""
    if progress or (progress is None and sys.stderr.isatty()):
        with watch([name]) as shown:
            shown.begin(0)
            yield shown
    else:
        yield None
