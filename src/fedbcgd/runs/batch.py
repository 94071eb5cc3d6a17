"""Several runs, one after the other: finished ones are kept, unfinished ones go on."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbcgd.backends.registry import keep_for
from fedbcgd.engine.loop import Outcome
from fedbcgd.engine.run_folder import RunFolder
from fedbcgd.errors import Diverged
from fedbcgd.runs import config as configuration
from fedbcgd.runs.config import Config
from fedbcgd.runs.execute import examine, execute
from fedbcgd.runs.folder import finished


@dataclass(frozen=True)
class Planned:
    label: str
    group: str  # runs of one group differ by their seed alone
    folder: str
    config: Config


def run_all(runs: Sequence[Planned], folder: Path, shown: Any, figures: bool = True) -> dict[str, Outcome]:
    """The outcome of each, by label. What is wrong with any of them is said before the first begins.

    figures: whether each run draws its own; of many runs nobody looks at them, and they cost more than short runs do.
    """
    outcomes: dict[str, Outcome] = {}
    for planned in runs:
        done = finished(RunFolder(folder / planned.folder), configuration.complete(planned.config))
        if done is not None:
            outcomes[planned.label] = done
    examined = set()
    for planned in runs:
        if planned.label not in outcomes and planned.group not in examined:
            examine(planned.config, folder / planned.folder)
            examined.add(planned.group)  # its other seeds differ in nothing that could fail
    with keep_for(planned.config.where for planned in runs if planned.label not in outcomes):
        for k, planned in enumerate(runs):
            if planned.label in outcomes:
                shown.skip(k, "finished before")
                continue
            shown.begin(k)
            place = folder / planned.folder
            try:
                outcomes[planned.label] = execute(
                    planned.config, place, resume=True, callbacks=[shown], figures=figures
                )
            except Diverged:
                outcomes[planned.label] = RunFolder(place).outcome()
                shown.skip(k, "diverged")
            except KeyboardInterrupt:
                raise KeyboardInterrupt(f"interrupted; the same command goes on from there ({folder})") from None
    return outcomes
