"""A user's own algorithms and callbacks, which a configuration names as `module:attribute` or `file.py:attribute`."""

import inspect
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from fedbcgd.algorithms.registry import algorithm_names, make_algorithm, option_names
from fedbcgd.core.algorithm import Algorithm
from fedbcgd.display import callbacks as ready
from fedbcgd.engine.loop import Callback
from fedbcgd.errors import UserError, unknown
from fedbcgd.models.make import call_factory, load_attribute

READY: dict[str, Any] = {"csv": ready.ClientCsv, "wandb": ready.WandB, "mlflow": ready.MLflow}


def make_own_algorithm(name: str, options: Mapping[str, Any]) -> Algorithm:
    """Make an algorithm of a user's own.

    Args:
        name: names an Algorithm; a function of options that returns one, or the name of a registered one; a function without
            parameters that registers one; or an algorithm that the module registers when it is imported.
        options: those of the configuration.

    Raises:
        UserError: it is none of these, or an option is wrong.
    """
    value = _resolved(name)
    if callable(value):
        value, options = call_factory(value, name, "algorithm", {}, dict(options)), {}
    if isinstance(value, str):
        return make_algorithm(value, **options)
    if not isinstance(value, Algorithm):
        raise UserError(f"name: expected {name} to be or to return an Algorithm or a name, got {type(value).__name__}")
    if options:
        raise UserError(f"{next(iter(options))}: expected no options with {name}, which is an Algorithm with its own")
    return value


def own_option_names(name: str, choice: Mapping[str, Any]) -> set[str]:
    """Return the options that an algorithm of a user's own takes; `choice` is as for `option_names`."""
    value = _resolved(name)
    if isinstance(value, str):
        return option_names(value, choice)
    return set(inspect.signature(value).parameters) if callable(value) else set()


@cache
def _resolved(name: str) -> Any:
    """Return what a name stands for; the name of a registered algorithm, if a function without parameters registered it."""
    attribute = name.rpartition(":")[2]
    try:
        value = load_attribute(name, "name")
    except UserError:
        if attribute in algorithm_names():  # registered when the module was imported
            return attribute
        raise
    if not callable(value) or inspect.signature(value).parameters:
        return value
    before = set(algorithm_names())
    result = call_factory(value, name, "name", {}, {})
    if result is not None:
        return result
    new = [registered for registered in algorithm_names() if registered not in before]
    if len(new) != 1:
        raise UserError(
            f"name: expected {name} to return an Algorithm or a name, or to register one algorithm, got "
            f"{', '.join(new) or 'neither'}"
        )
    return new[0]


def make_callbacks(names: Sequence[str]) -> list[Callback]:
    """Make the callbacks that `[run] callbacks` names.

    Raises:
        UserError: there is no such callback, or it cannot be made.
    """
    out: list[Callback] = []
    for name in names:
        if name not in READY and ":" not in name:
            raise unknown("run.callbacks", name, [*READY, "module:attribute", "file.py:attribute"])
        value = READY[name] if name in READY else load_attribute(name, "run.callbacks")
        is_factory = inspect.isclass(value) or (inspect.isfunction(value) and not inspect.signature(value).parameters)
        value = call_factory(value, name, "run.callbacks", {}, {}) if is_factory else value
        if not callable(value):
            raise UserError(f"run.callbacks: expected {name} to be a function of a RoundInfo, got {value!r}")
        out.append(value)
    return out
