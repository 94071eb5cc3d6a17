"""What a configuration names, made: data, model, clients."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from fedbcgd.config import Config, Quadratics
from fedbcgd.data import dirichlet, fashion_mnist, iid, split
from fedbcgd.data.embedded import CLASSES
from fedbcgd.data.sources import Images
from fedbcgd.errors import UserError, unknown
from fedbcgd.models import MODELS
from fedbcgd.objective import Loss, Metrics
from fedbcgd.problems import quadratics
from fedbcgd.streams import stream


@dataclass
class Task:
    model: nn.Module
    clients: Sequence[Any]
    test: Any
    prefix: str  # of its metrics: test, or validation
    loss: Loss | None = None  # classification, unless the problem says otherwise
    metrics: Metrics | None = None


def make_model(
    name: str, shape: tuple[int, int, int] = (1, 28, 28), classes: int = len(CLASSES), seed: int = 0
) -> nn.Module:
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return MODELS[name](classes, shape)


def parse_shape(text: str) -> tuple[int, int, int]:
    try:
        channels, height, width = (int(n) for n in text.split(","))
    except ValueError:
        raise UserError(f"shape: wanted is channels,height,width such as 3,32,32; given {text!r}") from None
    if not all(1 <= n <= 4096 for n in (channels, height, width)):
        raise UserError(f"shape: each must be from 1 to 4096, given {text!r}")
    return channels, height, width


def make_task(config: Config) -> Task:
    """The training set of the run, split over its clients, and what it is measured on."""
    seed, data = config.run.seed, config.data
    if data.name == "quadratics":
        chosen = config.quadratics or Quadratics()
        p = quadratics(data.clients, seed=seed, **chosen.model_dump())
        return Task(p.model, p.clients, p.test, "test", p.loss, p.metrics)
    train, test = fashion_mnist()
    prefix = "test"
    if data.validation:
        rows = stream(seed, "validation").permutation(len(train))
        held = round(len(train) * data.validation)
        if not 0 < held < len(train):
            raise UserError(f"data.validation: {data.validation:g} of {len(train)} examples leaves one side empty")
        train, test, prefix = _rows(train, rows[held:]), _rows(train, rows[:held]), "validation"
    labels = train.labels.numpy() if train.rows is None else train.labels[train.rows].numpy()
    parts: list[np.ndarray[Any, Any]]
    if data.partition == "iid":
        parts = iid(len(train), data.clients, seed)
    else:
        parts = dirichlet(labels, data.clients, data.dirichlet, seed)
    return Task(make_model(config.model.name, seed=seed), split(train, parts), test, prefix)


def _rows(images: Images, rows: np.ndarray[Any, Any]) -> Images:
    return images.subset(torch.from_numpy(np.sort(rows)))
