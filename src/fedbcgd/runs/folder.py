"""The configuration in a run folder, and whether its run is finished."""

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
    """Read the configuration that a run was begun with: from config.toml or, if that is damaged, from a checkpoint.

    Args:
        folder: of the run.
        say: is called with a message if config.toml is damaged.

    Returns:
        The configuration.

    Raises:
        Damaged: config.toml is damaged, and no checkpoint has a copy.
        UserError: config.toml cannot be read, or a value in it is wrong.
    """
    text, problem = b"", "it has no checksum"  # files of the first versions have none
    try:
        data = read_regular(folder.config, LARGEST)
        problem = "" if verify_checksum(data) else problem
        text = data
    except OSError as error:
        raise UserError(f"{folder.config} cannot be read: {error.strerror}") from None
    except Damaged as error:
        problem = str(error)
    checkpoint = Checkpoints(folder.checkpoint, None).load() if problem else None
    if checkpoint is not None and "config" in checkpoint[1]:
        say(f"{folder.config} is damaged ({problem}): the copy in the checkpoint is used")
        text = checkpoint[1]["config"].encode()
    elif problem and not text:
        raise Damaged(f"{folder.config} is damaged: {problem}; put a copy of it there")
    try:
        return config_module.check(tomllib.loads(text.decode()), str(folder.config))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Damaged(f"{folder.config} is damaged: {error}; put a copy of it there") from None


def finished(folder: RunFolder, config: Config) -> Outcome | None:
    """Return the outcome of a run if it is finished in this folder.

    Args:
        folder: that may have a run.
        config: of the run, complete.

    Returns:
        The outcome; None if there is no run, another one, an unfinished or a damaged one.
    """
    if not folder.summary.exists() or not folder.config.exists() or not folder.metrics.exists():
        return None
    try:
        stored = read_configuration(folder)
        same = not config_module.differences(stored, config)
        goals = ("rounds", "budget", "target")
        if not same or any(getattr(stored.run, goal) != getattr(config.run, goal) for goal in goals):
            return None
        if _links_changed(folder, config):
            return None
        return folder.outcome()
    except (ValueError, KeyError, TypeError, ArithmeticError, OSError):
        return None  # damaged: the run is repeated from its checkpoint


def _links_changed(folder: RunFolder, config: Config) -> bool:
    """Return whether the links differ from those of the run: a configuration has only the name of a CSV file."""
    digest = folder.summary_values().get("links")
    if config.network is None or digest is None:
        return False
    return digest != config.network.links(config.data.clients, config.run.seed).digest()
