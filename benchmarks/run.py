"""`make bench`: what the machinery costs, as ratios of things run in turn in the same minutes.

    python benchmarks/run.py [name …]

Prints a table for each benchmark and writes benchmarks/latest.json. Absolute figures belong to one machine and one
minute; the ratios are what to look at.
"""

import json
import platform
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))

import codecs_copy
import fedbcgd_plus_cost
import loader
import local_steps
import one_two_workers
import ray_workers

BENCHMARKS = {
    "local": local_steps.measure,
    "plus": fedbcgd_plus_cost.measure,
    "workers": one_two_workers.measure,
    "codecs": codecs_copy.measure,
    "loader": loader.measure,
    "ray": ray_workers.measure,
}


def main() -> None:
    console = Console(width=110) if not sys.stdout.isatty() else Console()
    names = sys.argv[1:] or list(BENCHMARKS)
    if unknown := [name for name in names if name not in BENCHMARKS]:
        sys.exit(f"unknown benchmark {unknown[0]!r}; known: {', '.join(BENCHMARKS)}")
    out = {"machine": f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"}
    for name in names:
        rows = BENCHMARKS[name](console)
        if not rows:  # it has said why
            continue
        table = Table(title=name, title_justify="left")
        for column in rows[0]:
            table.add_column(column, justify="left" if isinstance(rows[0][column], str) else "right")
        for row in rows:
            table.add_row(*(value if isinstance(value, str) else f"{value:.4g}" for value in row.values()))
        console.print(table)
        out[name] = rows
    Path(__file__).with_name("latest.json").write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
