"""Algorithms side by side: the same data, the same budget, the same seeds."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from fedbcgd.algorithms.registry import KINDS, algorithm_names, option_names
from fedbcgd.display import plots
from fedbcgd.display.progress import printable
from fedbcgd.engine.loop import Outcome
from fedbcgd.errors import UserError, unknown
from fedbcgd.files import as_csv, write_text
from fedbcgd.runs.batch import Planned, run_all
from fedbcgd.runs.config import Config, check

Outcomes = Mapping[str, dict[int, Outcome]]  # by algorithm and seed


def plan(config: Config, names: Sequence[str], seeds: int) -> list[Planned]:
    """A run for each algorithm and seed. `[algorithm]` speaks to all that have the option, `[compare.NAME]` to one."""
    if not names:
        raise UserError("algorithms: none is named")
    for name in (*names, *config.compare):
        if name not in algorithm_names():
            raise unknown("algorithm", name, algorithm_names())
    if len(set(names)) < len(names):
        raise UserError(f"algorithms: one is named twice: {', '.join(names)}")
    for kind in KINDS & set(config.algorithm):
        raise UserError(f"algorithm.{kind}: in a comparison each algorithm has its own; [compare.NAME] sets it for one")
    for name, own in config.compare.items():
        if "name" in own:
            raise UserError(f"compare.{name}.name: [compare.{name}] is {name}; it cannot be another")
    runs = []
    for name in names:
        own = config.compare.get(name, {})
        common = {k: v for k, v in config.algorithm.items() if k != "name" and k in option_names(name, own)}
        for seed in range(config.run.seed, config.run.seed + seeds):
            raw = config.model_dump()
            raw |= {"algorithm": {"name": name, **common, **own}, "compare": {}}
            raw["run"] |= {"seed": seed}
            checked = check(raw, f"compare {name}")
            label = name if seeds == 1 else f"{name}, seed {seed}"
            runs.append(Planned(label, name, f"{name}/seed-{seed}", checked))
    return runs


def run(runs: Sequence[Planned], folder: Path, shown: Any) -> dict[str, dict[int, Outcome]]:
    done = run_all(runs, folder, shown)
    outcomes: dict[str, dict[int, Outcome]] = {}
    for planned in runs:
        outcomes.setdefault(planned.group, {})[planned.config.run.seed] = done[planned.label]
    return outcomes


def rows(outcomes: Outcomes) -> list[dict[str, Any]]:
    """A row for each run: its last metrics and what it cost."""
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
    table_rows = rows(outcomes)
    write_text(folder / "compare.csv", as_csv(table_rows))
    curves = {name: [o.rows for o in group.values() if o.rows] for name, group in outcomes.items()}
    plots.bands({name: rows for name, rows in curves.items() if rows}, folder / "compare.png")


def table(outcomes: Outcomes) -> Table:
    out = Table(title="mean ± standard deviation over seeds", title_justify="left")
    out.add_column("algorithm", no_wrap=True)
    for column in (
        "seeds",
        "accuracy",
        "loss",
        "rounds",
        "upload, d",
        "largest upload\nof a client, MB",
        "gradient\nevaluations",
        "seconds",
    ):
        out.add_column(column, justify="right")
    for name, by_seed in outcomes.items():
        group = list(by_seed.values())
        kept = [o for o in group if not o.diverged]
        lost = f"{len(group) - len(kept)} of {len(group)} diverged" if len(kept) < len(group) else ""
        metric = "validation" if "validation_loss" in group[0].final else "test"
        nan = float("nan")
        out.add_row(
            printable(name),
            str(len(group)),
            _kept([o.final.get(f"{metric}_accuracy", nan) for o in kept], lost),
            _spread([o.final.get(f"{metric}_loss", nan) for o in kept]) if kept else "–",
            _spread([o.rounds for o in group], 0),
            _spread([o.ledger.upload_d for o in group], 2),
            f"{max(o.ledger.upload_max_bytes for o in group) / 1e6:.3f}",
            _spread([o.ledger.gradient_evaluations for o in group], 0),
            _spread([o.seconds for o in group], 0),
        )
    return out


def _kept(values: Sequence[float], lost: str) -> str:
    """Over the seeds that did not diverge; how many did is always told."""
    if not values:
        return lost
    return f"{_spread(values)} ({lost})" if lost else _spread(values)


def _spread(values: Sequence[float], digits: int = 4) -> str:
    mean = f"{statistics.fmean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 and len(set(values)) > 1 else mean
