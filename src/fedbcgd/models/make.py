"""Building a model from its name: one of the package, a user's factory, or a transformers configuration."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedbcgd.core.objective import Loss, Metrics
from fedbcgd.errors import UserError, unknown, with_line
from fedbcgd.models import MODELS

HF = "hf:"


@dataclass
class BuiltModel:
    """A model, with its loss and metrics if it has its own.

    Attributes:
        module: the network.
        loss: its own loss; None: the cross entropy.
        metrics: its own metrics; None: those of classification.
        notes: messages for the user, such as which pretrained weights were not used.
    """

    module: nn.Module
    loss: Loss | None = None
    metrics: Metrics | None = None
    notes: tuple[str, ...] = ()


def make_model(
    name: str,
    shape: tuple[int, int, int] = (1, 28, 28),
    classes: int = 10,
    seed: int = 0,
    weights: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> BuiltModel:
    """Build a model.

    Args:
        name: a name of `MODELS`; `module:attribute` or `file.py:attribute` of a factory; or `hf:FOLDER`, a folder with
            a config.json of transformers.
        shape: channels, height and width of an image.
        classes: how many classes.
        seed: fixes the initial weights.
        weights: a file of weights to start from.
        options: further arguments of the factory.

    Returns:
        The model, with its loss and metrics if it has its own.

    Raises:
        UserError: there is no such model, it cannot be built, or the weights do not fit.
    """
    arguments = dict(options or {})
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        if name.startswith(HF):
            built = _from_transformers(name.removeprefix(HF), classes, arguments, weights)
            weights = None
        elif ":" in name:
            built = _from_users_factory(name, shape, classes, arguments)
        elif name in MODELS:
            built = _from_package(name, shape, classes, arguments)
        else:
            raise unknown("model", name, [*MODELS, "module:factory", "hf:FOLDER"])
    if weights is not None:
        built.notes += _load_weights(built.module, weights, seed)
    return built


def _from_package(name: str, shape: tuple[int, int, int], classes: int, options: dict[str, Any]) -> BuiltModel:
    factory = MODELS[name]
    known = [p for p in inspect.signature(factory).parameters if p not in ("classes", "shape")]
    for option in options:
        if option not in known:
            raise UserError(
                f"model.{option}: expected an option of {name} ({', '.join(known) or 'it has none'}), got {option!r}"
            )
    module = factory(classes, shape, **options)
    return BuiltModel(module, getattr(module, "own_loss", None), getattr(module, "own_metrics", None))


def load_attribute(name: str, key: str) -> Any:
    """Import an attribute of a user's module.

    Args:
        name: `module:attribute` or `path/to/file.py:attribute`; modules are also searched for in the current folder.
        key: the key of the configuration that has the name, for messages.

    Returns:
        The attribute.

    Raises:
        UserError: it does not exist, or its module cannot be imported.
    """
    module_name, _, attribute = name.rpartition(":")
    if not module_name or not attribute:
        raise UserError(f"{key}: expected module:attribute or file.py:attribute, got {name!r}")
    _add_to_path(Path.cwd())  # worker processes get the same path
    if module_name.endswith(".py"):
        path = Path(module_name).resolve()
        if not path.is_file():
            raise UserError(f"{key}: expected a Python file, got {module_name}, which does not exist")
        _add_to_path(path.parent)
        module_name = path.stem
    try:
        value: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise UserError(
                f"{key}: expected a module in the current folder or an installed one, got {module_name!r}"
            ) from None
        raise UserError(f"{key}: {module_name} could not be imported: {with_line(error)}") from error
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{key}: {module_name} could not be imported: {with_line(error)}") from error
    for part in attribute.split("."):
        if not hasattr(value, part):
            raise UserError(f"{key}: expected a name in {module_name}, got {attribute!r}, which it does not have")
        value = getattr(value, part)
    return value


def _add_to_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def call_factory(factory: Any, name: str, key: str, defaults: dict[str, Any], options: dict[str, Any]) -> Any:
    """Call a user's factory.

    Args:
        factory: a function or class; anything that cannot be called is returned as it is.
        name: the name of the factory, for messages.
        key: the key of the configuration that has the name, for messages.
        defaults: arguments that are passed if the factory has parameters of their names.
        options: arguments from the configuration.

    Returns:
        What the factory returns.

    Raises:
        UserError: the factory does not accept an option, or fails.
    """
    if not callable(factory):
        return factory
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        parameters = {}  # type: ignore[assignment]
    any_name = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for option in options:
        if option not in parameters and not any_name:
            raise UserError(
                f"{key}.{option}: expected an argument of {name} ({', '.join(parameters) or 'it has none'}), got {option!r}"
            )
    arguments = {k: v for k, v in defaults.items() if k in parameters} | options
    try:
        return factory(**arguments)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{key.removesuffix('.options')}: {name} failed: {with_line(error)}") from error


def _from_users_factory(name: str, shape: tuple[int, int, int], classes: int, options: dict[str, Any]) -> BuiltModel:
    value = load_attribute(name, "model")
    if not isinstance(value, nn.Module):  # a module can be called too
        value = call_factory(value, name, "model.options", {"classes": classes, "shape": shape}, options)
    module, loss, metrics = (*value, None, None)[:3] if isinstance(value, tuple) else (value, None, None)
    if not isinstance(module, nn.Module):
        raise UserError(
            f"model: expected {name} to return an nn.Module, (model, loss) or (model, loss, metrics), got "
            f"{type(module).__name__}"
        )
    return BuiltModel(module, loss, metrics)


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise UserError("model: expected the extra `hf` for hf:, got none: pip install 'fedbcgd[hf]'") from None
    return transformers


def _architecture(config: Any) -> Any:
    """Return the class that a configuration of transformers names; None if it names none."""
    return getattr(_transformers(), (config.architectures or [""])[0], None)


def _from_transformers(folder: str, classes: int, options: dict[str, Any], weights: str | None) -> BuiltModel:
    transformers, path = _transformers(), Path(folder)
    if not (path / "config.json" if path.is_dir() else path).is_file():
        raise UserError(f"model: expected a folder written by save_pretrained, got {folder}, which has no config.json")
    try:
        config = transformers.AutoConfig.from_pretrained(folder, num_labels=classes, **options)
        architecture = _architecture(config)
        loader = architecture or transformers.AutoModelForImageClassification
        if weights is not None:
            return BuiltModel(loader.from_pretrained(weights, config=config, ignore_mismatched_sizes=True))
        return BuiltModel(loader.from_config(config) if architecture is None else architecture(config))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise UserError(f"model: {folder}: {error}") from None


def from_transformers_values(values: Mapping[str, Any]) -> nn.Module:
    """Build a transformers model from the values of its configuration; nothing is fetched.

    Args:
        values: the values of a config.json.

    Returns:
        The model, with new weights.

    Raises:
        UserError: transformers is not installed, or cannot build it.
    """
    transformers = _transformers()
    try:
        config = transformers.AutoConfig.for_model(**values)
        architecture = _architecture(config)
        if not (isinstance(architecture, type) and issubclass(architecture, transformers.PreTrainedModel)):
            raise UserError(f"model: expected an architecture of transformers, got {config.architectures}")
        return architecture(config)
    except UserError:
        raise
    except Exception as error:  # a wrong value can fail anywhere
        raise UserError(f"model: its configuration builds no model: {type(error).__name__}: {error}") from None


def _load_weights(module: nn.Module, weights: str, seed: int) -> tuple[str, ...]:
    from fedbcgd.models.pretrained import load_exactly, load_pretrained
    from fedbcgd.models.vit import ViT

    try:
        if isinstance(module, ViT):
            return tuple(load_pretrained(module, weights, seed).lines())
        return (f"weights from {load_exactly(module, weights)}",)
    except UserError as error:
        raise UserError(f"model.weights: {error}") from None
