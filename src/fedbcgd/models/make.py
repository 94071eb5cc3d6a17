"""A model from what a user names: one of ours, a factory of the user's own, or a transformers configuration."""

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
from fedbcgd.errors import UserError, unknown
from fedbcgd.models import MODELS

HF = "hf:"


@dataclass
class Made:
    module: nn.Module
    loss: Loss | None = None  # classification, unless the model comes with another
    metrics: Metrics | None = None
    notes: tuple[str, ...] = ()  # what a user should hear


def make_model(
    name: str,
    shape: tuple[int, int, int] = (1, 28, 28),
    classes: int = 10,
    seed: int = 0,
    weights: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Made:
    """name: of MODELS; `module:attribute` or `file.py:attribute`, a factory; or `hf:FOLDER`, with a config.json.

    Initial weights are drawn from the seed. weights: a file to start from. options: further arguments of the factory.
    """
    given = dict(options or {})
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        if name.startswith(HF):
            made = _transformers(name.removeprefix(HF), classes, given, weights)
            weights = None
        elif ":" in name:
            made = _users(name, shape, classes, given)
        elif name in MODELS:
            made = _ours(name, shape, classes, given)
        else:
            raise unknown("model", name, [*MODELS, "module:factory", "hf:FOLDER"])
    if weights is not None:
        made.notes += _start_from(made.module, weights, seed)
    return made


def _ours(name: str, shape: tuple[int, int, int], classes: int, options: dict[str, Any]) -> Made:
    factory = MODELS[name]
    known = [p for p in inspect.signature(factory).parameters if p not in ("classes", "shape")]
    for option in options:
        if option not in known:
            raise UserError(f"model.{option}: {name} has no such option; it has {', '.join(known) or 'none'}")
    module = factory(classes, shape, **options)
    return Made(module, getattr(module, "own_loss", None), getattr(module, "own_metrics", None))


def load_attribute(name: str, what: str) -> Any:
    """What `module:attribute` or `path/to/file.py:attribute` names; modules are also looked for in the current folder."""
    where, _, attribute = name.rpartition(":")
    if not where or not attribute:
        raise UserError(f"{what}: wanted is module:attribute or file.py:attribute, given {name!r}")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # worker processes get the same path
    try:
        if where.endswith(".py"):
            path = Path(where).resolve()
            if not path.is_file():
                raise UserError(f"{what}: {where} does not exist")
            if str(path.parent) not in sys.path:
                sys.path.insert(0, str(path.parent))
            where = path.stem
        module: Any = importlib.import_module(where)
    except UserError:
        raise
    except ModuleNotFoundError as error:
        if error.name and (where == error.name or where.startswith(error.name + ".")):
            raise UserError(f"{what}: there is no module {where!r} in the current folder or installed") from None
        raise UserError(f"{what}: {where} could not be imported: {error}") from error
    except Exception as error:
        raise UserError(f"{what}: {where} could not be imported: {type(error).__name__}: {error}") from error
    for step in attribute.split("."):
        if not hasattr(module, step):
            raise UserError(f"{what}: {where} has no {attribute!r}")
        module = getattr(module, step)
    return module


def call(factory: Any, name: str, what: str, offered: dict[str, Any], options: dict[str, Any]) -> Any:
    """Call a user's factory with its options, and with what we offer where it takes that."""
    if not callable(factory):
        return factory
    try:
        taken = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        taken = {}  # type: ignore[assignment]
    any_name = any(p.kind is p.VAR_KEYWORD for p in taken.values())
    for option in options:
        if option not in taken and not any_name:
            raise UserError(f"{what}.{option}: {name} takes no such argument; it takes {', '.join(taken) or 'none'}")
    arguments = {k: v for k, v in offered.items() if k in taken} | options
    try:
        return factory(**arguments)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{what}: {name} failed: {type(error).__name__}: {error}") from error


def _users(name: str, shape: tuple[int, int, int], classes: int, options: dict[str, Any]) -> Made:
    found = load_attribute(name, "model")
    made = (
        found
        if isinstance(found, nn.Module)
        else call(found, name, "model", {"classes": classes, "shape": shape}, options)
    )
    module, loss, metrics = (*made, None, None)[:3] if isinstance(made, tuple) else (made, None, None)
    if not isinstance(module, nn.Module):
        raise UserError(
            f"model: {name} gives {type(module).__name__}; wanted is an nn.Module, or a tuple (model, loss) or "
            "(model, loss, metrics)"
        )
    return Made(module, loss, metrics)


def _transformers(where: str, classes: int, options: dict[str, Any], weights: str | None) -> Made:
    try:
        import transformers
    except ImportError:
        raise UserError("model: hf: needs the extra `hf`: pip install 'fedbcgd[hf]'") from None
    path = Path(where)
    if not (path / "config.json" if path.is_dir() else path).is_file():
        raise UserError(f"model: {where} has no config.json; wanted is a folder as save_pretrained writes it")
    try:
        config = transformers.AutoConfig.from_pretrained(where, num_labels=classes, **options)
        named = getattr(transformers, (config.architectures or [""])[0], None)
        if weights is not None:
            maker: Any = named or transformers.AutoModelForImageClassification
            module = maker.from_pretrained(weights, config=config, ignore_mismatched_sizes=True)
        elif named is not None:
            module = named(config)
        else:
            module = transformers.AutoModelForImageClassification.from_config(config)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise UserError(f"model: {where}: {error}") from None
    return Made(module)


def _start_from(module: nn.Module, weights: str, seed: int) -> tuple[str, ...]:
    from fedbcgd.models.pretrained import load_exactly, load_pretrained
    from fedbcgd.models.vit import ViT

    try:
        if isinstance(module, ViT):
            return tuple(load_pretrained(module, weights, seed).lines())
        return (f"weights from {load_exactly(module, weights)}",)
    except UserError as error:
        raise UserError(f"model.weights: {error}") from None
