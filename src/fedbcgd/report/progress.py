"""Progress of long work: a live bar on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from fedbcgd.loop import RoundInfo

PLAIN_EVERY = 5.0  # seconds between plain lines


def wide_console() -> Console:
    """Standard output; where it is no terminal, and so has no width, wide enough for the tables."""
    console = Console()
    return console if console.is_terminal else Console(width=110)


class Watch:
    """Shows one or several runs, one after the other. `watch(info)` is a callback of a run."""

    def __init__(self, names: list[str], console: Console, live: bool):
        self.console = console
        self.live = live
        self._now = 0
        self._names = names
        self._accuracy = ""
        self._started = self._said = time.monotonic()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not live,
        )
        width = max(map(len, names))
        self._tasks: list[TaskID] = [
            self._progress.add_task(name.ljust(width), total=1.0, status="", start=False) for name in names
        ]

    def begin(self, index: int) -> None:
        """From now on, what is reported is run number `index`."""
        self._now = index
        self._accuracy = ""
        self._started = self._said = time.monotonic()
        self._progress.start_task(self._tasks[index])
        if not self.live:
            self.console.print(f"{self._names[index]}: started", markup=False, highlight=False)

    def __call__(self, info: "RoundInfo") -> None:
        if info.row:
            shown = next((k for k in ("test_accuracy", "test_loss", "train_loss") if k in info.row), None)
            self._accuracy = f"{shown.replace('test_', '').replace('_', ' ')} {info.row[shown]:.4f}  " if shown else ""
        ledger = info.ledger
        status = (
            f"round {info.server.round}  {self._accuracy}{ledger.upload_d:.2f} d  {ledger.upload_bytes / 1e6:.1f} MB up"
        )
        if self.live:
            self._progress.update(self._tasks[self._now], completed=info.progress, status=status)
            return
        now = time.monotonic()
        if now - self._said >= PLAIN_EVERY or info.progress >= 1:
            self._said = now
            spent = now - self._started
            left = f"{spent / info.progress - spent:.0f} s left" if info.progress else "time left unknown"
            line = f"{self._names[self._now]}: {status}  {info.progress:.0%}  {left}"
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def watch(names: list[str], console: Console | None = None) -> Iterator[Watch]:
    """A live display on a terminal, plain lines otherwise."""
    console = console or Console(stderr=True)
    shown = Watch(names, console, live=console.is_terminal)
    with shown._progress:
        yield shown


@contextmanager
def single(name: str, progress: bool | None) -> Iterator[Watch | None]:
    """The display of one run: asked for, or by default when the output is a terminal."""
    if progress or (progress is None and sys.stderr.isatty()):
        with watch([name]) as shown:
            shown.begin(0)
            yield shown
    else:
        yield None
