"""Writes the arguments of `fedbcgd.simulate` as a configuration; what has no name there is recorded by its origin."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from fedbcgd.core.algorithm import Algorithm
from fedbcgd.data import partition
from fedbcgd.data.images import Images
from fedbcgd.data.names import PYTHON
from fedbcgd.data.sources import ClientSubsets, Source, Tensors, as_source, once, pooled
from fedbcgd.errors import UserError
from fedbcgd.files import bytes_checksum
from fedbcgd.models.make import call_factory, load_attribute, make_model
from fedbcgd.models.stored import ModelInfo
from fedbcgd.network.settings import Network
from fedbcgd.runs import config as configuration
from fedbcgd.runs.config import Config, RunSection
from fedbcgd.runs.experiment import Experiment, labels_of, shape_of
from fedbcgd.runs.secrets import mask_config

MAX_CLASSES = 1000  # integer targets with more values than this are not taken for labels


def described(experiment: Experiment, settings: RunSection, name: str | None = None, **options: Any) -> Experiment:
    """Return the experiment with what follows from its data and model: label counts, digest, how the model is built again.

    Args:
        experiment: model and clients; the data of a user's own training function is not looked at.
        settings: those of the run.
        name: the name of the model in a configuration; None: what the module itself says.
        **options: arguments of the factory of this name.
    """
    model, clients, test = experiment.model, experiment.clients, experiment.test
    info = ModelInfo.of_module(model, precision=settings.precision)
    if name is not None:
        info = info.model_copy(update={"name": name, "options": options})
    own_data = experiment.train is not None or not isinstance(clients, (list, tuple, ClientSubsets))
    sources = [] if own_data else [as_source(data, f"client {k}") for k, data in enumerate(clients)]
    counts = _label_counts(sources)
    classes = () if counts is None else tuple(map(str, range(counts.shape[1])))
    if test is not None or sources:
        data = as_source(test, "test") if test is not None else sources[0]
        info = info.with_data(data).model_copy(update={"class_names": classes})
        if isinstance(data, Tensors) and info.shape is None:
            info = info.model_copy(update={"shape": shape_of(data), "classes": len(classes) or 1})
    notes = () if counts is None else (str(partition.Heterogeneity.of(counts)),)
    return replace(
        experiment,
        counts=counts,
        classes=classes,
        digest=_digest([*_whole(sources, experiment), *([] if test is None else [as_source(test, "test")])]),
        notes=(*experiment.notes, *notes),
        info=info,
        own_code=True,
    )


def from_loader(config: Config) -> Experiment:
    """Build model and clients of a configuration whose clients come from a user's own loader.

    Raises:
        UserError: they cannot be built.
    """
    data, model, seed = config.data, config.model, config.run.seed
    name = str(data.clients_from)
    made = call_factory(load_attribute(name, "data.clients_from"), name, "data.options", {"seed": seed}, data.options)
    several = isinstance(made, tuple) and len(made) in (2, 3)
    clients, test, tests = (*made, None)[:3] if several else (made, None, None)
    if not isinstance(clients, list) or not clients:
        raise UserError(
            f"data.clients_from: expected {name} to return a list of clients, (clients, test) or (clients, test, "
            f"client_tests), got {type(made).__name__}"
        )
    sources, prefix = [as_source(own, f"{name}: client {k}") for k, own in enumerate(clients)], "test"
    if data.validation:
        clients, test = hold_out(clients, data.validation, seed)
        prefix = "validation"
    if data.held_out is not None:
        if tests is not None:
            raise UserError(f"data.held_out: expected none with client_tests of {name}, got {data.held_out:g}")
        clients, tests = hold_out_per_client(clients, data.held_out, seed)
        sources = clients
    first, counts = sources[0], _label_counts(sources)
    shape = shape_of(first) if isinstance(first, (Tensors, Images)) else (1, 1, 1)
    options = {k: v for k in ("width", "norm") if (v := getattr(model, k)) is not None} | model.options
    built = make_model(model.name, shape, 1 if counts is None else counts.shape[1], seed, model.weights, options)
    experiment = Experiment(built.module, clients, test, prefix, built.loss, built.metrics, notes=built.notes)
    experiment = replace(experiment, client_tests=tests, held_out=data.held_out)
    return described(experiment, config.run, model.name, **mask_config(options))


def hold_out(clients: Sequence[Any], share: float, seed: int) -> tuple[list[Source], Source]:
    """Return the clients without a share of each one's examples, and these examples as one source.

    A client of a single example keeps it.

    Raises:
        UserError: no client has more than one example.
    """
    kept, held = hold_out_per_client(clients, share, seed, "validation")
    return kept, pooled([own for own in held if own is not None])


def hold_out_per_client(
    clients: Sequence[Any], share: float, seed: int, purpose: str = "held_out"
) -> tuple[list[Source], list[Source | None]]:
    """Return the clients without a share of each one's examples, and these examples of each client.

    A client of a single example keeps it; None stands for what is held out from it.

    Raises:
        UserError: no client has more than one example.
    """
    kept: list[Source] = []
    held: list[Source | None] = []
    for k, data in enumerate(clients):
        source = as_source(data, f"client {k}")
        rest, own = map(torch.from_numpy, partition.held_out(len(source), share, seed, purpose, k))
        kept.append(_subset(source, rest))
        if isinstance(source, Images):
            source = source.shown_as(False, source.resize, source.crop)
        held.append(_subset(source, own) if len(own) else None)
    if all(own is None for own in held):
        raise UserError(f"{purpose}: expected clients with more than one example each, got none")
    return kept, held


def _subset(source: Source, rows: Tensor) -> Source:
    if isinstance(source, (Tensors, Images)):
        return source.subset(rows)
    dataset: Any = getattr(source, "dataset", source)
    return as_source(Subset(dataset, rows.tolist()), "client")


def as_config(
    experiment: Experiment, algorithm: Algorithm, settings: RunSection, network: Network | None, where: str
) -> Config:
    """Return the configuration of a run of given objects, as far as a configuration can name them.

    Args:
        experiment: what is trained.
        algorithm: how; perhaps with parts of the user's own.
        settings: those of the run.
        network: the simulated network.
        where: what was called, for messages.

    Raises:
        UserError: a value is wrong.
    """
    own = {name: getattr(experiment, name) for name in ("loss", "metrics", "train")}
    origin = {name: origin_of(value) for name, value in own.items() if value is not None}
    data = {"name": PYTHON, "clients": len(experiment.clients)}
    return configuration.check(
        {
            "data": data if experiment.held_out is None else {**data, "held_out": experiment.held_out},
            "model": {"name": experiment.info.name or origin_of(type(experiment.model))},
            "algorithm": _plain(algorithm.options()),
            "run": settings.model_dump(),
            "network": None if network is None else network.model_dump(),
            "origin": {"program": _program(), **origin, "data": experiment.digest},
        },
        where,
    )


def origin_of(value: Any) -> str:
    """Return where a function, a class or an object comes from: module and name, as a configuration would have them."""
    if isinstance(value, nn.Module):
        return f"{origin_of(type(value))}: {' '.join(repr(value).split())}"[:500]
    if hasattr(value, "func"):  # functools.partial
        return f"{origin_of(value.func)}, in part"
    kind = value if hasattr(value, "__qualname__") else type(value)
    module = kind.__module__ if kind.__module__ != "__main__" else Path(_program()).stem
    return f"{module}:{kind.__qualname__}"


def _program() -> str:
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    return "an interactive session" if main is None else str(Path(main).resolve())


def _plain(value: Any) -> Any:
    """Return a value that TOML can hold; an object becomes the name of its class."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else origin_of(value)


def _label_counts(sources: Sequence[Source]) -> np.ndarray | None:
    """Return `counts[client, label]`; None if the examples have no labels."""
    labels = [labels_of(source) for source in sources]
    known = [own for own in labels if own is not None]
    if not known or len(known) < len(labels):
        return None
    ends = np.cumsum([len(own) for own in known])
    counts = partition.label_counts(np.concatenate(known), np.split(np.arange(ends[-1]), ends[:-1]))
    return counts if counts.shape[1] <= MAX_CLASSES else None


def _whole(sources: Sequence[Source], experiment: Experiment) -> list[Source]:
    """Return the clients' sources and their held-out ones.

    With `held_out` each client is put together again, so that the digest does not depend on the seed of the split.
    """
    tests = [own if own is None else as_source(own, "client_tests") for own in experiment.client_tests or ()]
    if experiment.held_out is None:
        return [*sources, *(own for own in tests if own is not None)]
    whole = list(sources)
    for k, (source, own) in enumerate(zip(sources, tests, strict=True)):
        if isinstance(source, Tensors) and isinstance(own, Tensors):
            whole[k] = Tensors(source.tensors, torch.cat([source.positions, own.positions]).sort().values)
    return whole


def _digest(sources: Sequence[Source]) -> str:
    """Return a checksum of all examples that are tensors; empty if there are none."""

    def checksum(t: Tensor) -> Tensor:
        return torch.tensor(bytes_checksum(t.detach().cpu().contiguous().view(-1).view(torch.uint8)))

    of_shared = once(checksum)
    parts: list[Tensor] = []
    for source in sources:
        if type(source) is Tensors:
            parts += [*map(of_shared, source.columns()), *([] if source.rows is None else [checksum(source.rows)])]
    return f"{int(checksum(torch.stack(parts))):08x}" if parts else ""
