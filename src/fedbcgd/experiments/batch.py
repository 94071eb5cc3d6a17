"""Several runs, one after the other: finished ones are kept, unfinished ones go on."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbcgd import config as configuration
from fedbcgd.config import Config
from fedbcgd.loop import Outcome
from fedbcgd.runner import Folder, execute


@dataclass(frozen=True)
class Planned:
    label: str
    group: str  # runs of one group differ by their seed alone
    folder: str
    config: Config


def run_all(runs: Sequence[Planned], folder: Path, shown: Any) -> dict[str, Outcome]:
    """The outcome of each, by label."""
    outcomes = {}
    for k, planned in enumerate(runs):
        place = folder / planned.folder
        done = Folder(place).finished(configuration.complete(planned.config))
        if done is not None:
            shown.skip(k, "finished before")
        else:
            shown.begin(k)
            done = execute(planned.config, place, resume=True, callbacks=[shown])
        outcomes[planned.label] = done
    return outcomes
