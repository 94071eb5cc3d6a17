"""The configuration of a run that is in a folder, and whether that run is finished."""

import tomllib
from collections.abc import Callable

from fedbcgd.engine.checkpoint import Checkpoints
from fedbcgd.engine.loop import Outcome
from fedbcgd.engine.run_folder import LARGEST, RunFolder
from fedbcgd.errors import UserError
from fedbcgd.files import Damaged, read_regular, verify_checksum
from fedbcgd.runs import config as config_module
from fedbcgd.runs.config import Config


def read_configuration(folder: RunFolder, say: Callable[[str], None] = lambda line: None) -> Config:
    """What the run was begun with: as config.toml has it, or, where that is damaged, which is said, a checkpoint.

    Raises:
        Damaged: config.toml is, and no checkpoint has a copy.
    """
    text, wrong = b"", "it has no checksum"  # as those of earlier days
    try:
        found = read_regular(folder.config, LARGEST)
        wrong = "" if verify_checksum(found) else wrong
        text = found
    except OSError as error:
        raise UserError(f"{folder.config} cannot be read: {error.strerror}") from None
    except Damaged as error:
        wrong = str(error)
    kept = Checkpoints(folder.checkpoint, None).load() if wrong else None
    if kept is not None and "config" in kept[1]:
        say(f"{folder.config} is damaged ({wrong}): the copy in the checkpoint is taken")
        text = kept[1]["config"].encode()
    elif wrong and not text:
        raise Damaged(f"{folder.config} is damaged: {wrong}; put a copy of it there")
    try:
        return config_module.check(tomllib.loads(text.decode()), str(folder.config))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Damaged(f"{folder.config} is damaged: {error}; put a copy of it there") from None


def finished(folder: RunFolder, config: Config) -> Outcome | None:
    """The outcome, if this very run is finished here."""
    if not folder.summary.exists() or not folder.config.exists() or not folder.metrics.exists():
        return None
    try:
        there = read_configuration(folder)
        same = not config_module.differences(there, config)
        goals = ("rounds", "budget", "target")
        if not same or any(getattr(there.run, goal) != getattr(config.run, goal) for goal in goals):
            return None
        if _other_links(folder, config):
            return None
        return folder.outcome()
    except (ValueError, KeyError, TypeError, ArithmeticError, OSError):
        return None  # damaged: it is made again from the checkpoint


def _other_links(folder: RunFolder, config: Config) -> bool:
    """Whether the clients' links are others than when it was made: of a CSV the configuration has the name alone."""
    made = folder.summary_values().get("links")
    if config.network is None or made is None:
        return False
    return made != config.network.links(config.data.clients, config.run.seed).digest()
