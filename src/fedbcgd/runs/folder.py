"""The configuration in a run folder, and whether its run is finished."""

import tomllib
from collections.abc import Callable

from fedbcgd.engine.checkpoint import Checkpoints
from fedbcgd.engine.loop import Outcome
from fedbcgd.engine.run_folder import MAX_READ_BYTES, RunFolder
from fedbcgd.errors import UserError
from fedbcgd.files import Damaged, read_regular, verify_checksum
from fedbcgd.runs import config as config_module
from fedbcgd.runs.config import Config


def read_configuration(folder: RunFolder, say: Callable[[str], None] = lambda line: None) -> Config:
    """Read the configuration that a run was begun with: from config.toml or, if that is damaged, from a checkpoint.

    Args:
        folder: the run folder.
        say: called with a message if config.toml is damaged.

    Returns:
        The configuration.

    Raises:
        Damaged: config.toml is damaged, and no checkpoint has a copy.
        UserError: config.toml cannot be read, or a value in it is wrong.
    """
    text, problem = b"", "it has no checksum"  # the first versions wrote none, and no copy in the checkpoint either
    try:
        data = read_regular(folder.config, MAX_READ_BYTES)
        problem = "" if verify_checksum(data) else problem
        text = data
    except OSError as error:
        raise UserError(f"{folder.config} cannot be read: {error.strerror}") from None
    except Damaged as error:
        problem = str(error)
    checkpoint = Checkpoints(folder.checkpoint, None).load() if problem else None
    if checkpoint is not None and "config" in checkpoint[1]:
        say(
            f"{folder.config}: expected it as it was written, got a changed file ({problem}); the checkpoint's copy is used"
        )
        text = checkpoint[1]["config"].encode()
    elif problem and not text:
        raise Damaged(f"{folder.config} is damaged: {problem}; put an undamaged copy there")
    try:
        return config_module.check(tomllib.loads(text.decode()), str(folder.config), trust=False)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Damaged(f"{folder.config} is damaged: {error}; put an undamaged copy there") from None


def finished(folder: RunFolder, config: Config) -> Outcome | None:
    """Return the outcome of a run if it is finished in this folder.

    Args:
        folder: a folder that may have a run.
        config: the complete configuration of the run.

    Returns:
        The outcome; None if there is no run, or another, an unfinished or a damaged one.
    """
    if not folder.summary.exists() or not folder.config.exists() or not folder.metrics.exists():
        return None
    try:
        stored = read_configuration(folder)
        same = not config_module.differences(stored, config)
        limits = ("rounds", "budget", "target")
        if not same or any(getattr(stored.run, limit) != getattr(config.run, limit) for limit in limits):
            return None
        if _links_changed(folder, stored):
            return None
        return folder.outcome()
    except (ValueError, KeyError, TypeError, ArithmeticError, OSError):
        return None  # damaged: the run is resumed from its checkpoint


def _links_changed(folder: RunFolder, config: Config) -> bool:
    """Return whether the links differ from those of the run: a configuration has only the name of a CSV file."""
    digest = folder.summary_values().get("links")
    if config.network is None or digest is None:
        return False
    return digest != config.network.links(config.data.clients, config.run.seed).digest()
