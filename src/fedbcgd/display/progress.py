"""Shows the progress of runs: a live bar on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from fedbcgd.core.reading import shorten
from fedbcgd.display.metrics import in_words, main_metric

if TYPE_CHECKING:
    from fedbcgd.engine.loop import Loop, RoundInfo

PLAIN_EVERY = 5.0  # seconds between plain lines
WIDTH = 110  # columns of output that is no terminal; on narrower terminals a bar says less
MAX_BARS = 6  # if there are more runs, only the current one has a bar


def wide_console(stderr: bool = False) -> Console:
    """Return a console on standard output or error; if that is no terminal, it is 110 columns wide."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(width=WIDTH, stderr=stderr)


def printable(text: object, longest: int = 500) -> Text:
    """Return a text from an untrusted source as one printable line, without control characters and markup."""
    return Text(shorten(str(text), longest))


class ProgressDisplay:
    """Shows one or several runs, one after the other. The object itself is a callback of a run.

    Args:
        names: the name of each run.
        console: where to print.
        live: whether to draw bars; otherwise lines are printed.
    """

    plain_every = PLAIN_EVERY

    def __init__(self, names: list[str], console: Console, live: bool):
        self.console = console
        self.live = live
        self._names = names
        self._now = 0
        self._metric = ""
        self._start_progress: float | None = None
        self._first_started = self._started = self._printed = time.monotonic()
        self._skipped = 0
        self._progress = Progress(
            TextColumn("{task.description}", table_column=Column()),  # the only one that is wrapped
            BarColumn(bar_width=10),
            TextColumn("{task.fields[status]}"),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=console,
            disable=not live,
        )
        several = len(names) > 1
        self._total_task: TaskID | None = (
            self._progress.add_task("all", total=len(names), status="") if several else None
        )
        self._task: TaskID | None = None

    def begin(self, index: int) -> None:
        """Report run number `index` from now on."""
        self._now = index
        self._metric = ""
        self._start_progress = None  # unknown until the first round: a resumed run does not begin at zero
        self._started = self._printed = time.monotonic()
        if self._task is not None and len(self._names) > MAX_BARS:
            self._progress.remove_task(self._task)  # the bars of all runs would not fit on a screen
        self._task = self._progress.add_task(self._names[index], total=1.0, status="")

    def start(self, loop: "Loop") -> None:
        """Say that the run has begun, after all checks."""
        if not self.live:
            self.say(f"{self._names[self._now]}: started{self._which()}")

    def skip(self, index: int, why: str) -> None:
        """Report that run number `index` is not run, and why."""
        self._skipped += 1
        self._now = index
        if self.live and self._total_task is not None:
            self._progress.update(self._total_task, completed=index + 1, status=f"{index + 1} of {len(self._names)}")
        self.say(f"{self._names[index]}: {why}{self._which()}")

    def __call__(self, info: "RoundInfo") -> None:
        if info.row:
            self._metric = _metric_text(info.row, info.metric)
        if self._start_progress is None:
            self._start_progress, self._started = info.progress, time.monotonic()
        ledger = info.ledger
        metric, megabytes = self._metric, f"  {ledger.upload_bytes / 1e6:.1f} MB"
        if self.live and self.console.width < WIDTH:
            metric, megabytes = metric.removeprefix("validation "), ""
        status = f"round {info.server.round}  {metric}{ledger.upload_d:.2f} d{megabytes}"
        if self.live:
            if self._task is not None:
                self._progress.update(self._task, completed=info.progress, status=status)
            if self._total_task is not None:
                which = f"{self._now + 1} of {len(self._names)}"
                self._progress.update(self._total_task, completed=self._now + info.progress, status=which)
            return
        now = time.monotonic()
        if now - self._printed >= self.plain_every or info.reason:
            self._printed = now
            self.say(f"{self._names[self._now]}: {status}  {info.progress:.0%}  {self._left(now, info.progress)}")

    def _left(self, now: float, progress: float) -> str:
        gained = progress - (self._start_progress or 0.0)
        if not gained and progress < 1:
            return "time left unknown"
        left = (now - self._started) / gained * (1 - progress) if gained else 0.0
        if len(self._names) == 1:
            return f"{left:.0f} s left"
        done = self._now - self._skipped + progress  # skipped runs took no time
        after = (now - self._first_started) / done * (len(self._names) - self._now - 1)
        return f"{left:.0f} s left, {left + after:.0f} s for all"

    def _which(self) -> str:
        return f" ({self._now + 1} of {len(self._names)})" if len(self._names) > 1 else ""

    def say(self, line: str) -> None:
        """Print a line."""
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)


def _metric_text(row: dict[str, float], stated: str | None) -> str:
    name = main_metric(row, stated)
    return "" if name is None else f"{in_words(name)} {row[name]:.4f}  "


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")


@contextmanager
def progress_display(names: list[str], console: Console | None = None) -> Iterator[ProgressDisplay]:
    """Show runs on a console, by default standard error: live on a terminal or in a notebook, else as plain lines."""
    if console is None and in_notebook():
        from fedbcgd.display.notebook import NotebookDisplay

        yield NotebookDisplay(names)
        return
    console = console or Console(stderr=True)
    shown = ProgressDisplay(names, console, live=console.is_terminal)
    with shown._progress:
        yield shown


@contextmanager
def single_run_display(name: str, progress: bool | None) -> Iterator[ProgressDisplay | None]:
    """Show one run.

    Args:
        name: its name.
        progress: whether to show it; None: if standard error is a terminal, or in a notebook.
    """
    if progress or (progress is None and (sys.stderr.isatty() or in_notebook())):
        with progress_display([name]) as shown:
            shown.begin(0)
            yield shown
    else:
        yield None
