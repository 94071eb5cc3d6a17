"""What a run trains: built from what a configuration names, or given by a program."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedbcgd.core.objective import Loss, Metrics
from fedbcgd.core.own_training import Train
from fedbcgd.data import partition, store
from fedbcgd.data.images import Images
from fedbcgd.data.names import PYTHON, QUADRATICS
from fedbcgd.data.sources import Source, Tensors, as_source, split
from fedbcgd.engine.loop import Callback
from fedbcgd.errors import UserError
from fedbcgd.models.make import HF, call_factory, load_attribute, make_model
from fedbcgd.models.problems import quadratics
from fedbcgd.models.stored import ModelInfo, transformers_values
from fedbcgd.rng import stream
from fedbcgd.runs.config import Config, Data, Quadratics
from fedbcgd.runs.secrets import mask_config

Splittable = Images | Tensors


@dataclass
class Experiment:
    """What a run trains.

    Attributes:
        model: the model, with its initial weights.
        clients: the data of each client.
        test: the data on which metrics are computed.
        prefix: begins the metrics' names in a row: "test" or "validation".
        loss: the loss; None: cross entropy.
        metrics: the metrics; None: those of classification.
        counts: `counts[client, label]`, the client's examples of this label; None if there are no labels.
        classes: names of the labels.
        digest: identifies the data set.
        notes: messages for the user.
        info: how the model is built again.
        weights: a state_dict that replaces the model's values.
        train: a user's own training function.
        callbacks: a user's own, called after each round.
        client_tests: held-out examples of each client; None: there are none.
        held_out: the share of each client's examples that was held out for this; None: they were given.
        own_code: whether a user's own code is in it, which is tried before a run.
    """

    model: nn.Module
    clients: Sequence[Any]
    test: Any
    prefix: str
    loss: Loss | None = None
    metrics: Metrics | None = None
    counts: np.ndarray | None = None
    classes: tuple[str, ...] = ()
    digest: str = ""
    notes: tuple[str, ...] = ()
    info: ModelInfo = field(default_factory=ModelInfo)
    weights: Mapping[str, Tensor] | None = None
    train: Train | None = None
    callbacks: Sequence[Callback] = ()
    client_tests: Sequence[Any] | None = None
    held_out: float | None = None
    own_code: bool = False


@dataclass
class LoadedData:
    """A data set before it is split over clients; labels and groups are those of the training examples."""

    train: Splittable
    test: Splittable
    labels: np.ndarray | None  # None: there are none, as in regression
    groups: np.ndarray | None
    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    digest: str


def make_experiment(config: Config) -> Experiment:
    """Build model and data of a run.

    Args:
        config: the configuration of the run.

    Returns:
        The model, the data of each client, and the data on which metrics are computed.

    Raises:
        UserError: the model or the data cannot be built.
    """
    seed, data, model = config.run.seed, config.data, config.model
    if data.name == PYTHON:
        program = config.origin.get("program", "a Python program")
        raise UserError(
            f"data.name: expected data that a configuration can name, got the objects of {program}; run that again"
        )
    if data.name == QUADRATICS:
        chosen = config.quadratics or Quadratics()
        p = quadratics(data.clients, seed=seed, **chosen.model_dump())
        info = ModelInfo.of_module(p.model)
        return Experiment(p.model, p.clients, p.test, "test", p.loss, p.metrics, info=info)
    partitioned = partition_data(config)
    assert partitioned is not None
    loaded = partitioned.loaded
    test, prefix = loaded.test, "test"
    if partitioned.validation is not None:
        test = _without_augmentation(loaded.train).subset(torch.from_numpy(partitioned.validation))
        prefix = "validation"
    tests = None
    if partitioned.held_out is not None:
        shown = _without_augmentation(loaded.train)
        tests = [shown.subset(torch.from_numpy(own)) if len(own) else None for own in partitioned.held_out]
    options = {k: v for k in ("width", "norm") if (v := getattr(model, k)) is not None} | model.options
    built = make_model(model.name, loaded.shape, len(loaded.classes) or 1, seed, model.weights, options)
    spread = () if partitioned.counts is None else (str(partition.Heterogeneity.of(partitioned.counts)),)
    return Experiment(
        built.module,
        split(loaded.train, partitioned.parts),
        test,
        prefix,
        built.loss,
        built.metrics,
        partitioned.counts,
        loaded.classes,
        loaded.digest,
        (*built.notes, *spread),
        _model_info(config, built.module, loaded, options),
        client_tests=tests,
        held_out=data.held_out,
        own_code=":" in model.name + data.name,
    )


def _model_info(config: Config, module: nn.Module, loaded: LoadedData, options: dict[str, Any]) -> ModelInfo:
    is_transformers = config.model.name.startswith(HF)
    return ModelInfo(
        name=HF + type(module).__name__ if is_transformers else config.model.name,
        kind=type(module).__qualname__,
        options=mask_config({} if is_transformers else options),
        config=transformers_values(module) if is_transformers else None,
        shape=loaded.shape,
        classes=len(loaded.classes) or 1,
        class_names=loaded.classes,
        precision=config.run.precision,
    ).with_data(loaded.test)


@dataclass
class PartitionedData:
    """A data set split over clients.

    Attributes:
        loaded: the data set.
        parts: rows of the training set, for each client.
        held_out: rows of the training set on which each client is evaluated; None: there are none.
        validation: rows of the training set that are held out for validation.
        counts: examples of each label at each client; None if there are no labels.
    """

    loaded: LoadedData
    parts: list[np.ndarray]
    held_out: list[np.ndarray] | None
    validation: np.ndarray | None
    counts: np.ndarray | None


def partition_data(config: Config) -> PartitionedData | None:
    """Split the data set of a configuration over the clients.

    Returns:
        Which rows each client has; None if the data are quadratics, which have no rows to split.

    Raises:
        UserError: the data cannot be loaded, or cannot be split in this way.
    """
    data, seed = config.data, config.run.seed
    if data.name == QUADRATICS:
        return None
    loaded = load_data(data)
    rows, validation = np.arange(len(loaded.train)), None
    if data.validation:
        order = stream(seed, "validation").permutation(len(rows))
        count = round(len(order) * data.validation)
        if not 0 < count < len(order):
            raise UserError(
                "data.validation: expected a share that leaves examples to both training and validation, got "
                f"{data.validation:g} of {len(order)} examples"
            )
        rows, validation = np.sort(order[count:]), np.sort(order[:count])
    parts = [rows[part] for part in _make_parts(loaded, data, rows, seed)]
    tests = None
    if data.held_out is not None:
        drawn = [partition.held_out(len(own), data.held_out, seed, "held_out", k) for k, own in enumerate(parts)]
        tests = [own[held] for own, (_, held) in zip(parts, drawn, strict=True)]
        parts = [own[kept] for own, (kept, _) in zip(parts, drawn, strict=True)]
    counts = None if loaded.labels is None else partition.label_counts(loaded.labels, parts)
    return PartitionedData(loaded, parts, tests, validation, counts)


def load_data(data: Data) -> LoadedData:
    """Load the data set that a configuration names, and prepare it as the configuration says.

    Raises:
        UserError: the data set is missing or damaged, or cannot be prepared in this way.
    """
    loaded = _from_user(data) if ":" in data.name else _from_store(data)
    if data.positive is not None:
        if data.positive >= len(loaded.classes):
            raise UserError(f"data.positive: expected a label from 0 to {len(loaded.classes) - 1}, got {data.positive}")
        _make_binary(loaded, data.positive)
    return loaded


def _make_parts(loaded: LoadedData, data: Data, rows: np.ndarray, seed: int) -> list[np.ndarray]:
    """Split these rows of the training set; return positions in `rows` for each client."""
    labels = np.empty(0) if loaded.labels is None else loaded.labels[rows]
    if loaded.labels is None and data.partition in ("dirichlet", "dirichlet-unequal", "shards"):
        raise UserError(
            f"data.partition: expected iid, quantity or group with data that has no class labels, got {data.partition!r}"
        )
    match data.partition:
        case "iid":
            return partition.iid(len(rows), data.clients, seed)
        case "dirichlet":
            return partition.dirichlet(labels, data.clients, data.dirichlet, seed)
        case "dirichlet-unequal":
            return partition.dirichlet_unequal(labels, data.clients, data.dirichlet, seed)
        case "shards":
            return partition.shards(labels, data.clients, data.shards, seed)
        case "quantity":
            return partition.quantity(len(rows), data.clients, data.spread, seed)
        case "group":
            if loaded.groups is None:
                raise UserError(
                    f"data.partition: expected a data set with groups, got {data.name}, which has none; `fedbcgd data "
                    "add` takes them from an .npz file (group_train)"
                )
            return partition.by_group(loaded.groups[rows], data.clients, seed)


def _from_store(data: Data) -> LoadedData:
    if data.options:
        raise UserError(
            f"data.options: expected none with data.name = {data.name!r}, got {', '.join(data.options)}; they are for a "
            "loader of your own (data.name = 'module:attribute')"
        )
    stored = store.load(data.name)
    side = min(data.resize or n for n in stored.shape[1:])
    if data.crop is not None and data.crop > side:
        raise UserError(f"data.crop: expected at most {side} pixels, the side of an image, got {data.crop}")
    train = stored.train.shown_as(data.augment, data.resize, data.crop)
    test = stored.test.shown_as(False, data.resize, data.crop)
    return LoadedData(train, test, train.labels.numpy(), stored.groups, stored.classes, train.shape, stored.digest)


def _from_user(data: Data) -> LoadedData:
    """Call a user's loader. It returns (train, test), each a pair (x, y) or a dictionary of tensors with `labels`."""
    for option in ("augment", "resize", "crop"):
        if getattr(data, option):
            raise UserError(
                f"data.{option}: expected none with a loader of your own, which prepares its data itself, got "
                f"{getattr(data, option)!r}; leave it out"
            )
    result = call_factory(load_attribute(data.name, "data"), data.name, "data.options", {}, data.options)
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        raise UserError(
            f"data: expected {data.name} to return (train, test) or (train, test, groups), got {type(result).__name__}"
        )
    sources = []
    for split_data, name in zip(result[:2], ("train", "test"), strict=True):
        source = as_source(split_data, f"data: {data.name}: {name}")
        if not isinstance(source, (Tensors, Images)):
            raise UserError(
                f"data: {data.name}: {name}: expected a pair (x, y) or a dictionary of tensors, got "
                f"{type(split_data).__name__}"
            )
        sources.append(source)
    train, test = sources
    labels = labels_of(train)
    groups = np.asarray(result[2]) if len(result) == 3 else None
    if groups is not None and len(groups) != len(train):
        raise UserError(f"data: {data.name}: expected a group for each of {len(train)} examples, got {len(groups)}")
    classes = () if labels is None else tuple(str(c) for c in range(int(labels.max()) + 1))
    return LoadedData(train, test, labels, groups, classes, shape_of(train), "")


def labels_of(source: Source) -> np.ndarray | None:
    """Return the label of each example; None if they have none, as in regression."""
    if isinstance(source, Images):
        labels = source.labels
    elif isinstance(source, Tensors):
        t = source.tensors
        labels = t.get("labels", next(reversed(list(t.values())))) if isinstance(t, Mapping) else t[-1]
    else:
        return None
    if labels.ndim != 1 or labels.is_floating_point() or (isinstance(source, Tensors) and len(source.tensors) < 2):
        return None
    return labels.numpy() if source.rows is None else labels[source.rows].numpy()


def shape_of(source: Splittable) -> tuple[int, int, int]:
    """Return the shape of an example as channels, height and width."""
    if isinstance(source, Images):
        return source.shape
    t = source.tensors
    first: Tensor = next(iter(t.values())) if isinstance(t, Mapping) else t[0]
    shape = tuple(first.shape[1:])
    return shape if len(shape) == 3 else (1, 1, int(np.prod(shape)) if shape else 1)


def _make_binary(loaded: LoadedData, positive: int) -> None:
    """Relabel one class as 1 and all others as 0."""
    if not isinstance(loaded.train, Images) or not isinstance(loaded.test, Images):
        raise UserError(f"data.positive: expected none with data that are no images, got {positive}; leave it out")
    loaded.train, loaded.test = (
        images.relabelled((images.labels == positive).long()) for images in (loaded.train, loaded.test)
    )
    assert loaded.labels is not None
    loaded.labels = (loaded.labels == positive).astype(np.int64)
    loaded.classes = ("others", loaded.classes[positive])


def _without_augmentation(source: Splittable) -> Splittable:
    return source.shown_as(False, source.resize, source.crop) if isinstance(source, Images) else source
