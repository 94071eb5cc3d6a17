"""Several runs, one after the other: finished ones are not repeated, unfinished ones are resumed."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fedbcgd.backends.registry import keep_for
from fedbcgd.engine.loop import Outcome
from fedbcgd.engine.run_folder import RunFolder
from fedbcgd.errors import Diverged
from fedbcgd.files import make_folder
from fedbcgd.runs import config as configuration
from fedbcgd.runs.config import Config
from fedbcgd.runs.execute import Prepare, examine, execute
from fedbcgd.runs.folder import finished
from fedbcgd.runs.prepare import prepare


@dataclass(frozen=True)
class PlannedRun:
    """A run that is to be done.

    Attributes:
        label: its name in tables.
        group: runs of one group differ in their seed only.
        folder: relative to the folder of the batch.
        config: its configuration.
        prepare: makes the objects of the run from it.
    """

    label: str
    group: str
    folder: str
    config: Config
    prepare: Prepare = field(default=prepare, repr=False, compare=False)


def run_all(runs: Sequence[PlannedRun], folder: Path, shown: Any, figures: bool = True) -> dict[str, Outcome]:
    """Do several runs. All are checked before the folder is made and the first begins.

    Args:
        runs: what to do.
        folder: contains the folders of the runs.
        shown: displays the progress; a callback that also has the methods `begin` and `skip` (display/terminal.py).
        figures: whether each run draws its figures, which takes longer than a short run.

    Returns:
        The outcome of each run by its label.

    Raises:
        UserError: a run cannot be done.
        KeyboardInterrupt: the user stopped it; the same call continues.
    """
    outcomes: dict[str, Outcome] = {}
    for planned in runs:
        done = finished(RunFolder(folder / planned.folder), configuration.complete(planned.config))
        if done is not None:
            outcomes[planned.label] = done
    examined = set()
    for planned in runs:
        if planned.label not in outcomes and planned.group not in examined:
            examine(planned.config, folder / planned.folder, planned.prepare)
            examined.add(planned.group)  # its other runs differ in their seed only
    make_folder(folder)
    with keep_for(planned.config.placement for planned in runs if planned.label not in outcomes):
        for k, planned in enumerate(runs):
            if planned.label in outcomes:
                shown.skip(k, "finished before")
                continue
            shown.begin(k)
            path = folder / planned.folder
            go_on = partial(execute, resume=True, callbacks=[shown], figures=figures, prepare=planned.prepare)
            try:
                outcomes[planned.label] = go_on(planned.config, path)
            except Diverged:
                outcomes[planned.label] = RunFolder(path).outcome()
                shown.skip(k, "diverged")
            except KeyboardInterrupt:
                raise KeyboardInterrupt(f"interrupted; the same command continues from there ({folder})") from None
    return outcomes
