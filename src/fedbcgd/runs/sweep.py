"""Choosing hyper-parameters on data that are held out of the training set; the test set is not used."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from fedbcgd.display.progress import printable
from fedbcgd.display.tables import text_table
from fedbcgd.engine.loop import Outcome
from fedbcgd.errors import UserError
from fedbcgd.files import as_csv, write_text
from fedbcgd.runs.batch import Planned, run_all
from fedbcgd.runs.config import Config, check, parse_value

METRIC = "validation_accuracy"


def plan(config: Config, grid: Sequence[str]) -> list[Planned]:
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
    for point in itertools.product(*axes.values()):
        chosen = dict(zip(axes, point, strict=True))
        label = ", ".join(f"{k} {v}" for k, v in chosen.items())
        raw = config.model_dump() | {"algorithm": {**config.algorithm, **chosen}}
        folder = "_".join(f"{k}={v}" for k, v in chosen.items()).replace("/", "-")
        runs.append(Planned(label, label, folder, check(raw, f"sweep {label}")))
    return runs


def run(runs: Sequence[Planned], folder: Path, shown: Any) -> dict[str, Outcome]:
    """Do the runs; see `run_all`."""
    return run_all(runs, folder, shown)


def rows(runs: Sequence[Planned], outcomes: Mapping[str, Outcome]) -> list[dict[str, Any]]:
    """Make a row for each run, with its last metrics."""
    return [
        {"run": planned.label, **{k: v for k, v in outcomes[planned.label].final.items() if k != "round"}}
        for planned in runs
    ]


def write(runs: Sequence[Planned], outcomes: Mapping[str, Outcome], folder: Path) -> Planned:
    """Write sweep.csv and best.toml to a folder.

    Args:
        runs: the runs of the sweep.
        outcomes: the outcome of each run by its label.
        folder: where the files are written.

    Returns:
        The best run; the first of equal ones.

    Raises:
        UserError: all runs diverged, or have no accuracy to choose by.
    """
    write_text(folder / "sweep.csv", as_csv(rows(runs, outcomes)))
    best = max(runs, key=lambda planned: _score(outcomes[planned.label]))
    if _score(outcomes[best.label]) < 0:
        diverged = sum(outcomes[planned.label].diverged for planned in runs)
        why = [f"{diverged} of {len(runs)} diverged; lower learning rates may help"] if diverged else []
        if diverged < len(runs):
            why.append(
                f"{len(runs) - diverged} of {len(runs)} ended without it; metrics of your own need an `accuracy`"
            )
        raise UserError(f"--grid: expected a run with {METRIC}, to choose the best by, got none: {'; '.join(why)}")
    whole = best.config.model_copy(update={"data": best.config.data.model_copy(update={"validation": 0.0})})
    note = f"# Chosen by {METRIC.replace('_', ' ')} among {len(runs)} runs; trains on the whole training set.\n"
    write_text(folder / "best.toml", note + whole.text())
    return best


def table(runs: Sequence[Planned], outcomes: Mapping[str, Outcome]) -> Table:
    """Make the table of all runs, the best first."""
    cells = (
        (
            printable(planned.label),
            f"{outcome.final[METRIC]:.4f}" if _score(outcome) >= 0 else printable(outcome.stopped),
            f"{outcome.final.get('validation_loss', float('nan')):.4f}",
            str(outcome.rounds),
            f"{outcome.ledger.upload_d:.2f}",
        )
        for planned, outcome in sorted(
            ((planned, outcomes[planned.label]) for planned in runs), key=lambda pair: -_score(pair[1])
        )
    )
    head = ("options", "accuracy", "loss", "rounds", "upload, d")
    return text_table("on data held out of the training set", head, cells)


def _score(outcome: Outcome) -> float:
    return -1.0 if outcome.diverged else outcome.final.get(METRIC, -1.0)
