"""Choosing hyper-parameters on data that are held out of the training set; the test set is not used."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from fedbcgd.display.metrics import falls, in_words, metric_of
from fedbcgd.display.progress import printable
from fedbcgd.display.tables import text_table
from fedbcgd.engine.loop import Outcome
from fedbcgd.errors import UserError
from fedbcgd.files import as_csv, write_text
from fedbcgd.runs.batch import PlannedRun
from fedbcgd.runs.config import Config, check, parse_value


def plan(config: Config, grid: Sequence[str]) -> list[PlannedRun]:
    """Plan a run for each combination of the values of a grid.

    Args:
        config: the configuration that the runs have in common.
        grid: items such as "lr=0.01,0.03,0.1", one for each option of the algorithm.

    Returns:
        The runs.

    Raises:
        UserError: an item is wrong, or an option or a value appears twice.
    """
    axes: dict[str, list[Any]] = {}
    for item in grid:
        option, equals, values = item.partition("=")
        option = option.strip().removeprefix("algorithm.")
        if not equals or not option or not values.strip():
            raise UserError(f"--grid: expected option=value,value,… such as lr=0.01,0.03,0.1, got {item!r}")
        if option in axes:
            raise UserError(f"--grid: expected each option once, got {option} again in {item!r}")
        axes[option] = [parse_value(v) for v in values.split(",")]
        if len(set(map(str, axes[option]))) < len(axes[option]):
            raise UserError(f"--grid: expected each value once, got one twice in {item!r}")
    runs = []
    for chosen, label, folder in points(axes):
        raw = config.model_dump() | {"algorithm": {**config.algorithm, **chosen}}
        runs.append(PlannedRun(label, label, folder, check(raw, f"sweep {label}")))
    return runs


def points(axes: Mapping[str, Sequence[Any]]) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Yield each combination of values as options, with a label and the name of a folder."""
    for point in itertools.product(*axes.values()):
        chosen = dict(zip(axes, point, strict=True))
        label = ", ".join(f"{k} {v}" for k, v in chosen.items())
        yield chosen, label, "_".join(f"{k}={v}" for k, v in chosen.items()).replace("/", "-")


def rows(runs: Sequence[PlannedRun], outcomes: Mapping[str, Outcome]) -> list[dict[str, Any]]:
    """Make a row for each run, with its last metrics."""
    return [
        {"run": planned.label, **{k: v for k, v in outcomes[planned.label].final.items() if k != "round"}}
        for planned in runs
    ]


def write(runs: Sequence[PlannedRun], outcomes: Mapping[str, Outcome], folder: Path) -> PlannedRun:
    """Write sweep.csv and best.toml to a folder.

    Args:
        runs: the runs of the sweep.
        outcomes: the outcome of each run by its label.
        folder: where the files are written.

    Returns:
        The best run; the first of equal ones.

    Raises:
        UserError: all runs diverged, or have no metric to choose by.
    """
    write_text(folder / "sweep.csv", as_csv(rows(runs, outcomes)))
    metric, ranked = _ranked(runs, outcomes)
    if metric is None or not ranked:
        diverged = sum(outcome.diverged for outcome in outcomes.values())
        why = f": {diverged} of {len(runs)} diverged; lower learning rates may help" if diverged else ""
        raise UserError(f"--grid: expected a run with a finite metric, to choose the best by, got none{why}")
    best = ranked[0]
    whole = best.config.model_copy(update={"data": best.config.data.model_copy(update={"validation": 0.0})})
    note = f"# Chosen by {in_words(metric)} among {len(runs)} runs; trains on the whole training set.\n"
    write_text(folder / "best.toml", note + whole.text())
    return best


def table(runs: Sequence[PlannedRun], outcomes: Mapping[str, Outcome]) -> Table:
    """Make the table of all runs, the best first."""
    metric, ranked = _ranked(runs, outcomes)
    metrics = [name for name in dict.fromkeys((metric, "validation_loss")) if name is not None]
    rows = []
    for planned in [*ranked, *(p for p in runs if p not in ranked)]:
        outcome = outcomes[planned.label]
        last = [f"{outcome.final[name]:.4f}" if name in outcome.final else "–" for name in metrics]
        if planned not in ranked:
            last[:1] = [outcome.stopped]
        costs = str(outcome.rounds), f"{outcome.ledger.upload_d:.2f}"
        rows.append((printable(planned.label), *map(printable, last), *costs))
    head = ("options", *(in_words(name).removeprefix("validation ") for name in metrics), "rounds", "upload, d")
    return text_table("on data held out of the training set", head, rows)


def _ranked(runs: Sequence[PlannedRun], outcomes: Mapping[str, Outcome]) -> tuple[str | None, list[PlannedRun]]:
    """Return the metric of the runs, and those that did not diverge and have it, the best first."""
    metric = metric_of(outcomes.values())
    if metric is None:
        return None, []
    scores = {p.label: outcomes[p.label].final.get(metric, math.nan) for p in runs if not outcomes[p.label].diverged}
    first = next(iter(outcomes.values()))
    sign = 1 if falls(metric, first.metric, first.goal) else -1
    known = [p for p in runs if math.isfinite(scores.get(p.label, math.nan))]
    return metric, sorted(known, key=lambda p: sign * scores[p.label])
