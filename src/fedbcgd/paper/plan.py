"""The runs of a panel: configurations, each in a folder named by its content, so that items share runs."""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn

from fedbcgd.algorithms.registry import make_algorithm
from fedbcgd.data.catalog import KNOWN
from fedbcgd.models.make import BuiltModel, make_model
from fedbcgd.paper.spec import Contender, Panel
from fedbcgd.runs.batch import PlannedRun
from fedbcgd.runs.config import Data, check
from fedbcgd.runs.experiment import load_data

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Machine:
    """Where runs are computed."""

    # Another device or precision gives other bits, and so another folder for a run; another number of workers does not.
    workers: int | None = None
    device: str = "cpu"
    precision: str = "fp32"


class DataFacts(NamedTuple):
    """What planning needs to know of a data set."""

    shape: tuple[int, int, int]  # of an image
    classes: int
    train: int  # number of training images
    test: int  # number of test images


def data_facts(panel: Panel) -> DataFacts:
    """Return the facts of a panel's data set; one of the catalogue need not be on this machine.

    Raises:
        UserError: the data set is not available, and not in the catalogue either.
    """
    return _data_facts(json.dumps(dict(panel.data)))


@cache
def _data_facts(data: str) -> DataFacts:
    options = json.loads(data)
    known = KNOWN.get(options["name"])
    if known is None:  # the images in the package, or a user's own
        loaded = load_data(Data(**options))
        return DataFacts(loaded.shape, len(loaded.classes), len(loaded.train), len(loaded.test))
    side = options.get("crop") or options.get("resize")
    shape = (known.shape[0], side, side) if side else known.shape
    return DataFacts(shape, 2 if "positive" in options else known.classes, known.train, known.test)


def algorithm_options(panel: Panel, contender: Contender, chosen: Options) -> dict[str, Any]:
    """Return all options of a contender's algorithm; its fixed options override the chosen ones."""
    searched = {k: v for k, v in chosen.items() if k in ("lr", *contender.grid)}
    options = {**panel.local, **searched, **contender.algorithm}
    if contender.rounds_of is not None:  # as many minibatches in a round as a cohort computes
        rule = make_algorithm(**{**panel.local, **contender.algorithm}).local
        options["local_steps"] = panel.run["cohort"] * rule.steps(data_facts(panel).train // panel.data["clients"])
    return options


def build_network(model: Options, shape: tuple[int, int, int], classes: int) -> BuiltModel:
    """Build what a panel's `model` section names, without pretrained weights."""
    options = {k: v for k, v in model.items() if k in ("width", "norm")} | model.get("options", {})
    return make_model(model["name"], shape, classes, options=options)


@cache
def _network_without_memory(model: str, shape: tuple[int, int, int], classes: int) -> nn.Module:
    with torch.device("meta"):
        return build_network(json.loads(model), shape, classes).module


def network_shapes(panel: Panel) -> nn.Module:
    """Return the panel's network on the meta device: with shapes, but without memory."""
    facts = data_facts(panel)
    return _network_without_memory(json.dumps(dict(panel.model)), facts.shape, facts.classes)


def upload_per_round(panel: Panel, contender: Contender) -> float:
    """Return the mean upload of a client in a round, in d."""
    algorithm = make_algorithm(**{**panel.local, **contender.algorithm})
    return algorithm.upload_d(algorithm.uplink.layout(network_shapes(panel)))


def count_rounds(panel: Panel, contender: Contender) -> int:
    """Return the number of rounds that the panel's budget allows."""
    uploading = contender if contender.rounds_of is None else panel.contender(contender.rounds_of)
    return max(1, math.floor(panel.budget / upload_per_round(panel, uploading) * (1 + 1e-9)))


def seed_runs(
    panel: Panel, chosen: Mapping[str, Options], seed: int, machine: Machine
) -> list[tuple[Contender, PlannedRun]]:
    """Plan the runs of one seed, for the contenders whose hyper-parameters are chosen."""
    runs = []
    for contender in panel.contenders:
        if contender.key not in chosen:
            continue
        count = count_rounds(panel, contender)
        stop: dict[str, Any] = {"evaluate_every": max(1, count // panel.effort.evaluations)}
        stop |= {"budget": panel.budget} if contender.rounds_of is None else {"rounds": count}
        if contender.until_target and panel.target is not None:
            stop["target"] = panel.target / 100
        label = f"{panel.title}, {contender.title}, seed {seed}"
        options = chosen[contender.key]
        runs.append((contender, planned(panel, contender, options, seed, stop, {}, label, machine, ("target",))))
    return runs


def planned(
    panel: Panel,
    contender: Contender,
    chosen: Options,
    seed: int,
    stop: Options,
    data: Options,
    label: str,
    machine: Machine,
    extended: Sequence[str] = (),
) -> PlannedRun:
    """Plan a run.

    Args:
        panel: the setting.
        contender: one of its contenders.
        chosen: its hyper-parameters.
        seed: the seed of the run.
        stop: when the run ends and is evaluated, as options of `[run]`.
        data: further options of `[data]`.
        label: the name of the run in progress and messages.
        machine: where it is computed.
        extended: options of `[run]` that may change when the run is resumed, and so do not enter its folder's name.
    """
    run = {k: v for k, v in panel.run.items() if k != "workers"} | {"seed": seed, **stop}
    if machine.device != "cpu":
        run["device"] = machine.device
    if machine.precision != "fp32":
        run["precision"] = machine.precision
    raw: dict[str, Any] = {
        "data": {**panel.data, **data},
        "model": dict(panel.model),
        "algorithm": algorithm_options(panel, contender, chosen),
        "run": run,
    }
    folder = folder_name({**raw, "run": {k: v for k, v in run.items() if k not in extended}})
    workers = machine.workers if machine.workers is not None else panel.run.get("workers")
    if workers is not None:
        raw["run"] = {**run, "workers": workers}
    group = folder_name({**raw, "run": {k: v for k, v in run.items() if k != "seed"}})
    return PlannedRun(label, group, folder, check(raw, label))


def folder_name(raw: Mapping[str, Any]) -> str:
    """Return a run's folder name: data set, model and algorithm, then a digest of the whole configuration."""
    names = "-".join(str(raw[part]["name"]) for part in ("data", "model", "algorithm"))
    digest = hashlib.sha256(json.dumps(raw, sort_keys=True).encode()).hexdigest()[:12]
    return f"{re.sub(r'[^A-Za-z0-9+.-]', '-', names)}-{digest}"
