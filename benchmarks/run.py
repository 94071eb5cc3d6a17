"""`make bench`: the cost of the machinery, as ratios of measurements made in turn in the same minutes.

    python benchmarks/run.py [name …]

Each benchmark runs in a separate process. Prints a table for each and writes benchmarks/latest.json. Absolute figures hold
for one machine and one minute only; compare the ratios.
"""

import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from fedbcgd.backends.workers.processes import ENVIRONMENT, cores

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

BENCHMARKS = {
    "peak": "peak:measure",
    "peers": "peers:measure",
    "rounds": "peers:measure_rounds",
    "small": "small_tasks:measure",
    "workers": "one_two_workers:measure",
    "growth": "growth:measure",
    "codecs": "codecs_copy:measure",
    "sums": "codecs_copy:measure_sums",
    "loader": "loader:measure",
    "checkpoints": "footprint:checkpoints",
    "memory": "footprint:memory",
    "resident": "footprint:resident",
    "startup": "footprint:start_up",
    "parts": "parts:measure",
    "ray": "ray_workers:measure",
}
BY_NAME_ONLY = ("workers", "loader", "parts", "ray")  # so that the rest takes a quarter of an hour
AS_A_WORKER = ("codecs", "parts")  # clients encode in worker processes, so in a worker's environment


def main() -> None:
    console = _console()
    names = sys.argv[1:] or [name for name in BENCHMARKS if name not in BY_NAME_ONLY]
    if unknown := [name for name in names if name not in BENCHMARKS]:
        sys.exit(f"unknown benchmark {unknown[0]!r}; known: {', '.join(BENCHMARKS)}")
    out: dict = {"machine": f"{platform.machine()}, {cores()} cores, torch {torch.__version__}"}
    began = time.monotonic()
    for name in names:
        rows = _in_a_child(name)
        if not rows:  # skipped; it printed the reason
            continue
        table = Table(title=name, title_justify="left")
        for column in rows[0]:
            table.add_column(column, justify="left" if isinstance(rows[0][column], str) else "right")
        for row in rows:
            table.add_row(*(value if isinstance(value, str) else f"{value:.4g}" for value in row.values()))
        console.print(table)
        out[name] = rows
    console.print(f"{(time.monotonic() - began) / 60:.1f} minutes", highlight=False)
    (HERE / "latest.json").write_text(json.dumps(out, indent=1) + "\n")


def _console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=110)


def _in_a_child(name: str) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        env = {**os.environ, **(ENVIRONMENT if name in AS_A_WORKER else {})}
        done = subprocess.run([sys.executable, __file__, "--one", name, str(out)], env=env)
        if done.returncode:
            sys.exit(f"{name} failed")
        return json.loads(out.read_text())


def one(name: str, out: Path) -> None:
    module, function = BENCHMARKS[name].split(":")
    out.write_text(json.dumps(getattr(importlib.import_module(module), function)(_console())))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        one(sys.argv[2], Path(sys.argv[3]))
    else:
        main()
