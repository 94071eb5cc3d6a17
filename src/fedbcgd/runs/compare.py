"""Comparison of algorithms with the same data, budget and seeds."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from fedbcgd.algorithms.registry import KINDS, algorithm_names, option_names
from fedbcgd.display import plots
from fedbcgd.display.metrics import in_words, metric_of
from fedbcgd.display.progress import printable
from fedbcgd.display.tables import text_table
from fedbcgd.engine.loop import Outcome
from fedbcgd.errors import UserError, unknown
from fedbcgd.files import as_csv, write_text
from fedbcgd.runs.batch import PlannedRun, run_all
from fedbcgd.runs.config import Config, check
from fedbcgd.runs.user_code import own_option_names

Outcomes = Mapping[str, dict[int, Outcome]]  # by algorithm and seed


def plan(config: Config, names: Sequence[str], seeds: int) -> list[PlannedRun]:
    """Plan a run for each algorithm and seed.

    Options of `[algorithm]` go to all algorithms that have them, those of `[compare.NAME]` to one.

    Args:
        config: the configuration that the runs have in common.
        names: the algorithms.
        seeds: how many runs for each; the first has `run.seed`, each other the next integer.

    Returns:
        The runs.

    Raises:
        UserError: an algorithm or an option does not exist, or is named twice.
    """
    if not names:
        raise UserError("algorithms: expected at least one name, got none")
    for name in (*names, *config.compare):
        if name not in algorithm_names() and ":" not in name:
            raise unknown("algorithm", name, algorithm_names())
    if len(set(names)) < len(names):
        raise UserError(f"algorithms: expected each name once, got {', '.join(names)}")
    for kind in KINDS & set(config.algorithm):
        raise UserError(
            f"algorithm.{kind}: expected none in a comparison, got {config.algorithm[kind]!r}; set it for one algorithm in "
            "[compare.NAME]"
        )
    for name, own in config.compare.items():
        if "name" in own:
            raise UserError(
                f"compare.{name}.name: expected none, since the section is for {name}, got {own['name']!r}; leave it out"
            )
    runs = []
    for name in names:
        algorithm = options_of(name, config.algorithm, config.compare.get(name, {}))
        group = name.rpartition(":")[2]
        for seed in range(config.run.seed, config.run.seed + seeds):
            raw = config.model_dump()
            raw |= {"algorithm": algorithm, "compare": {}}
            raw["run"] |= {"seed": seed}
            label = group if seeds == 1 else f"{group}, seed {seed}"
            runs.append(PlannedRun(label, group, f"{group}/seed-{seed}", check(raw, f"compare {name}")))
    return runs


def options_of(name: str, common: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return name and options of an algorithm: those of the common options that it has, and its own."""
    known = own_option_names(name, own) if ":" in name else option_names(name, own)
    return {"name": name, **{k: v for k, v in common.items() if k != "name" and k in known}, **own}


def run(runs: Sequence[PlannedRun], folder: Path, shown: Any) -> dict[str, dict[int, Outcome]]:
    """Do the runs; see `run_all` for the arguments.

    Returns:
        The outcomes by algorithm and seed.
    """
    done = run_all(runs, folder, shown)
    outcomes: dict[str, dict[int, Outcome]] = {}
    for planned in runs:
        outcomes.setdefault(planned.group, {})[planned.config.run.seed] = done[planned.label]
    return outcomes


def rows(outcomes: Outcomes) -> list[dict[str, Any]]:
    """Make a row for each run, with its last metrics and its cost."""
    return [
        {
            "algorithm": name,
            "seed": seed,
            "rounds": o.rounds,
            "stopped": o.stopped,
            **{x: y for x, y in o.final.items() if x != "round"},
        }
        for name, group in outcomes.items()
        for seed, o in group.items()
    ]


def write(outcomes: Outcomes, folder: Path) -> None:
    """Write compare.csv and compare.png to a folder."""
    write_text(folder / "compare.csv", as_csv(rows(outcomes)))
    curves = {name: [o.rows for o in group.values() if o.rows] for name, group in outcomes.items()}
    drawn = {name: rows for name, rows in curves.items() if rows}
    if drawn:
        stated = next((o.metric for group in outcomes.values() for o in group.values()), None)
        plots.bands(drawn, folder / "compare.png", metric=stated)


def table(outcomes: Outcomes) -> Table:
    """Make the table of means and standard deviations over the seeds."""
    metric = metric_of(o for group in outcomes.values() for o in group.values())
    prefix = "validation" if metric is not None and metric.startswith("validation_") else "test"
    metrics = [name for name in dict.fromkeys((metric, f"{prefix}_loss")) if name is not None]
    named = map(in_words, metrics)
    head = ("algorithm", "seeds", *named, "rounds", "upload, d", "largest upload\nof a client, MB")
    rows = []
    for name, by_seed in outcomes.items():
        group = list(by_seed.values())
        converged = [o for o in group if not o.diverged]
        diverged = f"{len(group) - len(converged)} of {len(group)} diverged" if len(converged) < len(group) else ""
        last = [_spread([o.final[m] for o in converged if m in o.final]) for m in metrics]
        if diverged and last:
            last[0] = f"{last[0]} ({diverged})" if converged else diverged
        cells = (
            printable(name),
            str(len(group)),
            *last,
            _spread([o.rounds for o in group], 0),
            _spread([o.ledger.upload_d for o in group], 2),
            f"{max(o.ledger.upload_max_bytes for o in group) / 1e6:.3f}",
            _spread([o.ledger.gradient_evaluations for o in group], 0),
            _spread([o.seconds for o in group], 0),
        )
        rows.append(cells)
    return text_table("mean ± standard deviation over seeds", (*head, "gradient\nevaluations", "seconds"), rows)


def _spread(values: Sequence[float], digits: int = 4) -> str:
    """Format mean ± standard deviation; the mean alone if all values are equal, and a dash if there are none."""
    if not values:
        return "–"
    mean = f"{statistics.fmean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 and len(set(values)) > 1 else mean
