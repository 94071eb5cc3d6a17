"""From a panel to runs: configurations, each in a folder named by what it is, so that items share the runs they have in
common."""

import hashlib
import itertools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import nn

from fedbcgd.algorithms.registry import make_algorithm
from fedbcgd.models.make import make_model
from fedbcgd.paper.spec import Contender, Panel
from fedbcgd.runs.batch import Planned
from fedbcgd.runs.config import Data, check
from fedbcgd.runs.experiment import load_data

SEARCH_SEED = 0  # the seeds of the runs that count come after it
Options = Mapping[str, Any]


@dataclass(frozen=True)
class Machine:
    """Where runs are computed."""

    workers: int | None = None  # no part of what a run is
    device: str = "cpu"  # part of it, as another device has other bits


def points(panel: Panel, contender: Contender) -> list[dict[str, float]]:
    """The values that are tried for a contender."""
    if contender.tuned_as is not None:
        return []
    axes = [name for name in contender.grid if name not in contender.algorithm]
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*(panel.effort.grid[a] for a in axes))]


def algorithm(panel: Panel, contender: Contender, chosen: Options) -> dict[str, Any]:
    """All options of a contender; what it says itself goes before what was chosen."""
    own = dict(contender.algorithm)
    taken = {k: v for k, v in chosen.items() if k in ("lr", *contender.grid)}
    options = {**panel.local, **taken, **own}
    if contender.rounds_of is not None:  # as many minibatches in a round as a cohort does
        each = panel.local.get("local_steps") or panel.local["local_epochs"] * math.ceil(
            examples(panel) / panel.local["batch_size"]
        )
        options["local_steps"] = panel.run["cohort"] * each
    return options


def round_cost(panel: Panel, contender: Contender) -> float:
    """The mean upload of a client in a round, in d."""
    shape, classes, _ = _facts(json.dumps(dict(panel.data)))
    made = make_algorithm(**algorithm(panel, contender, {}))
    return made.upload_d(made.uplink.layout(model(panel.model, shape, classes)))


def model(named: Options, shape: tuple[int, int, int], classes: int) -> nn.Module:
    """The network that a panel names."""
    options = {k: v for k, v in named.items() if k in ("width", "norm")} | named.get("options", {})
    return make_model(named["name"], shape, classes, options=options).module


def examples(panel: Panel) -> int:
    """Of each client."""
    return _facts(json.dumps(dict(panel.data)))[2] // panel.data["clients"]


def classes(panel: Panel) -> int:
    return _facts(json.dumps(dict(panel.data)))[1]


@cache
def _facts(data: str) -> tuple[tuple[int, int, int], int, int]:
    loaded = load_data(Data(**json.loads(data)))
    return loaded.shape, len(loaded.classes), len(loaded.labels)


def rounds(panel: Panel, contender: Contender) -> int:
    """What the budget pays for."""
    paying = contender if contender.rounds_of is None else panel.contender(contender.rounds_of)
    return max(1, math.floor(panel.budget / round_cost(panel, paying) * (1 + 1e-9)))


def search(panel: Panel, machine: Machine) -> list[tuple[Contender, dict[str, float], Planned]]:
    """A run for each contender and point of its grid, on data held out of the training set; none where one point is all."""
    out = []
    for contender in panel.contenders:
        tried = points(panel, contender)
        if len(tried) < 2:
            continue
        whole = rounds(panel, contender)
        count = min(whole, max(panel.effort.least, math.ceil(panel.effort.share * whole)))
        stop = {"rounds": count, "evaluate_every": max(1, count * 5 // (panel.effort.evaluations * 2))}
        for point in tried:
            text = ", ".join(f"{k} {v:g}" for k, v in point.items())
            label = f"search: {panel.title}, {contender.title}, {text}"
            held = {"validation": panel.effort.validation}
            planned = _planned(panel, contender, point, SEARCH_SEED, stop, held, label, machine)
            out.append((contender, point, planned))
    return out


def repetition(
    panel: Panel, chosen: Mapping[str, Options], seed: int, machine: Machine
) -> list[tuple[Contender, Planned]]:
    """The runs of one seed, for the contenders whose hyper-parameters are known."""
    out = []
    for contender in panel.contenders:
        if contender.key not in chosen:
            continue
        count = rounds(panel, contender)
        stop: dict[str, Any] = {"evaluate_every": max(1, count // panel.effort.evaluations)}
        stop |= {"budget": panel.budget} if contender.rounds_of is None else {"rounds": count}
        label = f"{panel.title}, {contender.title}, seed {seed}"
        out.append((contender, _planned(panel, contender, chosen[contender.key], seed, stop, {}, label, machine)))
    return out


def _planned(
    panel: Panel,
    contender: Contender,
    chosen: Options,
    seed: int,
    stop: Options,
    data: Options,
    label: str,
    machine: Machine,
) -> Planned:
    run = {k: v for k, v in panel.run.items() if k != "workers"} | {"seed": seed, **stop}
    if machine.device != "cpu":
        run["device"] = machine.device
    raw: dict[str, Any] = {
        "data": {**panel.data, **data},
        "model": dict(panel.model),
        "algorithm": algorithm(panel, contender, chosen),
        "run": run,
    }
    folder = folder_of(raw)
    workers = machine.workers if machine.workers is not None else panel.run.get("workers")
    if workers is not None:
        raw["run"] = {**run, "workers": workers}
    alike = folder_of({**raw, "run": {k: v for k, v in run.items() if k != "seed"}})
    return Planned(label, alike, folder, check(raw, label))


def folder_of(raw: Mapping[str, Any]) -> str:
    """The folder's name: what people look for, and a digest of everything that is said about the run."""
    names = "-".join(str(raw[part]["name"]) for part in ("data", "model", "algorithm"))
    digest = hashlib.sha256(json.dumps(raw, sort_keys=True).encode()).hexdigest()[:12]
    return f"{re.sub(r'[^A-Za-z0-9+.-]', '-', names)}-{digest}"
