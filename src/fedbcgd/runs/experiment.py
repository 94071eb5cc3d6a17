"""What a configuration names, made: data, model, clients."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedbcgd.core.objective import Loss, Metrics
from fedbcgd.data import partition, store
from fedbcgd.data.images import Images
from fedbcgd.data.names import QUADRATICS
from fedbcgd.data.sources import Tensors, as_source, split
from fedbcgd.errors import UserError
from fedbcgd.models.make import call_factory, load_attribute, make_model
from fedbcgd.models.problems import quadratics
from fedbcgd.rng import stream
from fedbcgd.runs.config import Config, Data, Quadratics

Splittable = Images | Tensors


@dataclass
class Experiment:
    model: nn.Module
    clients: Sequence[Any]
    test: Any
    prefix: str  # of its metrics: test, or validation
    loss: Loss | None = None  # classification, unless the problem says otherwise
    metrics: Metrics | None = None
    counts: np.ndarray | None = None  # labels of each client, where there are labels
    classes: tuple[str, ...] = ()
    digest: str = ""  # of the data set
    notes: tuple[str, ...] = ()  # what a user should hear


@dataclass
class Loaded:
    """A data set of whatever origin, before it is split over clients."""

    train: Splittable
    test: Splittable
    labels: np.ndarray  # of the training examples
    groups: np.ndarray | None
    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    digest: str


def parse_shape(text: str) -> tuple[int, int, int]:
    try:
        channels, height, width = (int(n) for n in text.split(","))
    except ValueError:
        raise UserError(f"shape: wanted is channels,height,width such as 3,32,32; given {text!r}") from None
    if not all(1 <= n <= 4096 for n in (channels, height, width)):
        raise UserError(f"shape: each must be from 1 to 4096, given {text!r}")
    return channels, height, width


def make_experiment(config: Config) -> Experiment:
    """The training set of the run, split over its clients, and what it is measured on."""
    seed, data, model = config.run.seed, config.data, config.model
    if data.name == QUADRATICS:
        chosen = config.quadratics or Quadratics()
        p = quadratics(data.clients, seed=seed, **chosen.model_dump())
        return Experiment(p.model, p.clients, p.test, "test", p.loss, p.metrics)
    handed = hand_out(config)
    assert handed is not None
    loaded = handed.loaded
    test, prefix = loaded.test, "test"
    if handed.held is not None:
        test, prefix = _plainly(loaded.train).subset(torch.from_numpy(handed.held)), "validation"
    options = {k: v for k in ("width", "norm") if (v := getattr(model, k)) is not None} | model.options
    made = make_model(model.name, loaded.shape, len(loaded.classes), seed, model.weights, options)
    return Experiment(
        made.module,
        split(loaded.train, handed.parts),
        test,
        prefix,
        made.loss,
        made.metrics,
        handed.counts,
        loaded.classes,
        loaded.digest,
        (*made.notes, str(partition.Heterogeneity.of(handed.counts))),
    )


@dataclass
class Handed:
    """A data set split over clients."""

    loaded: Loaded
    parts: list[np.ndarray]  # rows of the training set, for each client
    held: np.ndarray | None  # rows held out for validation
    counts: np.ndarray  # of labels, for each client


def hand_out(config: Config) -> Handed | None:
    """Who gets what; None where the problem makes its own clients."""
    data, seed = config.data, config.run.seed
    if data.name == QUADRATICS:
        return None
    loaded = load_data(data)
    rows, held = np.arange(len(loaded.train)), None
    if data.validation:
        order = stream(seed, "validation").permutation(len(rows))
        count = round(len(order) * data.validation)
        if not 0 < count < len(order):
            raise UserError(f"data.validation: {data.validation:g} of {len(order)} examples leaves one side empty")
        rows, held = np.sort(order[count:]), np.sort(order[:count])
    parts = [rows[part] for part in divide_up(loaded, data, rows, seed)]
    return Handed(loaded, parts, held, partition.label_counts(loaded.labels, parts))


def load_data(data: Data) -> Loaded:
    """The data set that a configuration names, prepared as it says."""
    loaded = _from_user(data) if ":" in data.name else _from_store(data)
    if data.positive is not None:
        if data.positive >= len(loaded.classes):
            raise UserError(f"data.positive: the labels are 0 to {len(loaded.classes) - 1}, given {data.positive}")
        _two_classes(loaded, data.positive)
    return loaded


def divide_up(loaded: Loaded, data: Data, rows: np.ndarray, seed: int) -> list[np.ndarray]:
    """Positions in `rows` for each client."""
    labels = loaded.labels[rows]
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
                    f"data.partition: {data.name} has no group column; `fedbcgd data add` takes one from an .npz file "
                    "(group_train)"
                )
            return partition.by_group(loaded.groups[rows], data.clients, seed)


def _from_store(data: Data) -> Loaded:
    if data.options:
        raise UserError("data.options: they are for a loader of your own (data.name = 'module:attribute')")
    found = store.load(data.name)
    if data.crop is not None and data.crop > min(data.resize or n for n in found.shape[1:]):
        raise UserError(f"data.crop: {data.crop} cannot be cut out of {data.resize or found.shape[1]} pixels")
    train = found.train.shown_as(data.augment, data.resize, data.crop)
    test = found.test.shown_as(False, data.resize, data.crop)
    return Loaded(train, test, train.labels.numpy(), found.groups, found.classes, train.shape, found.digest)


def _from_user(data: Data) -> Loaded:
    """A loader gives (train, test), each a pair (x, y) or a dictionary of tensors with `labels`."""
    for option in ("augment", "resize", "crop"):
        if getattr(data, option):
            raise UserError(f"data.{option}: a loader of your own prepares its data itself")
    found = load_attribute(data.name, "data")
    made = call_factory(found, data.name, "data", {}, data.options)
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise UserError(
            f"data: {data.name} gives {type(made).__name__}; wanted is (train, test) or (train, test, groups)"
        )
    sides = []
    for side, where in zip(made[:2], ("train", "test"), strict=True):
        source = as_source(side, f"data: {data.name}: {where}")
        if not isinstance(source, (Tensors, Images)):
            raise UserError(f"data: {data.name}: {where} must be a pair (x, y) or a dictionary of tensors")
        sides.append(source)
    train, test = sides
    labels = _labels_of(train)
    groups = np.asarray(made[2]) if len(made) == 3 else None
    if groups is not None and len(groups) != len(train):
        raise UserError(f"data: {data.name}: {len(groups)} groups for {len(train)} examples")
    classes = tuple(str(c) for c in range(int(labels.max()) + 1))
    return Loaded(train, test, labels, groups, classes, _shape_of(train), "")


def _labels_of(source: Splittable) -> np.ndarray:
    if isinstance(source, Images):
        labels = source.labels
    else:
        t = source.tensors
        labels = t.get("labels", next(reversed(list(t.values())))) if isinstance(t, Mapping) else t[-1]
    if labels.ndim != 1 or labels.is_floating_point():  # not classes: one label for all, for partitions that need none
        labels = torch.zeros(len(labels), dtype=torch.int64)
    return labels.numpy() if source.rows is None else labels[source.rows].numpy()


def _shape_of(source: Splittable) -> tuple[int, int, int]:
    if isinstance(source, Images):
        return source.shape
    t = source.tensors
    first: Tensor = next(iter(t.values())) if isinstance(t, Mapping) else t[0]
    shape = tuple(first.shape[1:])
    return shape if len(shape) == 3 else (1, 1, int(np.prod(shape)) if shape else 1)


def _two_classes(loaded: Loaded, positive: int) -> None:
    if not isinstance(loaded.train, Images) or not isinstance(loaded.test, Images):
        raise UserError("data.positive: only for data sets of images")
    loaded.train, loaded.test = (
        side.relabelled((side.labels == positive).long()) for side in (loaded.train, loaded.test)
    )
    loaded.labels = (loaded.labels == positive).astype(np.int64)
    loaded.classes = ("others", loaded.classes[positive])


def _plainly(source: Splittable) -> Splittable:
    """Without augmentation: for measuring."""
    return source.shown_as(False, source.resize, source.crop) if isinstance(source, Images) else source
