"""What precision = "bf16" does to speed, to accuracy, and to the exact fixed point of FedBCGD+.

    python benchmarks/precision.py steps                   # a minute
    python benchmarks/precision.py accuracy                # hours on two cores; the same command goes on after Ctrl-C
    python benchmarks/precision.py accuracy --trial        # minutes, on the images in the package: a trial of the script
    python benchmarks/precision.py fixed-point             # a minute

`steps` has one client trained in turn in fp32 and in bf16, in one process of one thread, and prints medians; the seconds
are those of the thread, so that other processes disturb little.

`accuracy` trains LeNet-5, ResNet-18 (width ¼) and the small ViT on CIFAR-10 (`fedbcgd data get cifar10` first) with four
algorithms and three seeds, in fp32 and in bf16: 100 clients, 10 in a round, Dirichlet 0.6, one local epoch of batch 50, lr
0.1, N = 5, momentum 0.5. A run in bf16 meets the same cohorts and minibatches as that in fp32 with its seed. The folder
--scores gets scores.csv, a row for each finished run, which is not run again, and table.md; the runs go to --out.

`fixed-point` runs FedAvg and FedBCGD+ on heterogeneous least squares in float32 and prints how far each ends from the
optimum, as a share of the optimum's norm.
"""

import argparse
import csv
import itertools
import os
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from workloads import WORKLOADS

import fedbcgd
from fedbcgd.backends.workers.processes import ENVIRONMENT
from fedbcgd.core.objective import PRECISIONS
from fedbcgd.display.progress import progress_display
from fedbcgd.engine.assemble import make_job, make_server
from fedbcgd.engine.loop import Outcome, Stop
from fedbcgd.engine.threads import threads
from fedbcgd.files import as_csv, make_folder, write_text
from fedbcgd.paper.measures import last_share
from fedbcgd.paper.origin import current_commit
from fedbcgd.runs import config as configuration
from fedbcgd.runs.batch import PlannedRun, run_all

SEEDS = (0, 1, 2)
LOCAL = {"lr": 0.1, "local_epochs": 1, "batch_size": 50, "lr_decay": 0.998, "weight_decay": 1e-3}
BLOCKS = {"blocks": 5, "momentum": 0.5}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedbcgd": BLOCKS,
    "fedbcgd+derived": BLOCKS,
    "qsgd+fedbcgd": BLOCKS,
}
NETWORKS: dict[str, tuple[dict[str, Any], int]] = {  # model and rounds
    "LeNet-5": ({"name": "lenet5"}, 40),
    "ResNet-18, width ¼": ({"name": "resnet18", "width": 0.25}, 20),
    "small ViT": ({"name": "vit-small", "options": {"dim": 48, "depth": 4, "heads": 3}}, 20),
}
DATA = {"name": "cifar10", "clients": 100, "dirichlet": 0.6, "augment": True}
TRIAL: dict[str, tuple[dict[str, Any], int]] = {
    "LeNet-5": ({"name": "lenet5", "width": 0.1}, 3),
    "ResNet-18, width ¼": ({"name": "resnet18", "width": 0.04}, 2),
    "small ViT": ({"name": "vit-small", "options": {"dim": 12, "depth": 1, "heads": 1}}, 2),
}
TRIAL_DATA = {"name": "embedded", "clients": 100, "dirichlet": 0.6, "resize": 16}

Key = tuple[str, str, str, int]
KEY = ("network", "algorithm", "precision", "seed")


def steps(repeats: int) -> None:
    """Print the time of a step of each workload in both precisions."""
    if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | ENVIRONMENT)  # as workers are started
    print("| workload | fp32, ms a step | bf16, ms a step | times as fast |\n|---|---|---|---|")
    for name in ("lenet5", "cnn", "resnet18"):
        workload = WORKLOADS[name]
        algorithm = fedbcgd.make_algorithm("fedavg", batch_size=workload.batch, local_epochs=1)
        ways = {}
        for precision in PRECISIONS:
            job = make_job(workload.module(), workload.sources(), algorithm, None, 0, precision=precision)
            plan = make_server(job, 1, Stop(1)).plan()
            ways[precision] = partial(job.fit, plan.broadcast, plan.tasks[0], {})
        seconds: dict[str, list[float]] = {precision: [] for precision in ways}
        with threads(1):
            for turn in range(repeats + 1):
                for precision, fit in ways.items():
                    start = time.thread_time()
                    fit()
                    if turn:  # the first turn prepares kernels
                        seconds[precision].append(time.thread_time() - start)
        count = -(-workload.images // workload.batch)
        fp32, bf16 = (1e3 * statistics.median(times) / count for times in seconds.values())
        print(f"| {name} | {fp32:.1f} | {bf16:.1f} | {fp32 / bf16:.2f} |", flush=True)


def planned(trial: bool) -> dict[Key, PlannedRun]:
    """Return all runs, a network after the other, so that an interrupted study has whole networks."""
    runs = {}
    for network, (model, rounds) in (TRIAL if trial else NETWORKS).items():
        for seed in SEEDS[:2] if trial else SEEDS:
            for algorithm, options in ALGORITHMS.items():
                for precision in PRECISIONS:
                    run = {"seed": seed, "rounds": rounds, "cohort": 10, "evaluate_every": min(4, rounds)}
                    raw = {
                        "data": TRIAL_DATA if trial else DATA,
                        "model": model,
                        "algorithm": {"name": algorithm, **LOCAL, **options},
                        "run": run | {"precision": precision},
                    }
                    group = f"{model['name']}-{algorithm}-{precision}"
                    config = configuration.check(raw, group)
                    label = f"{network}, {algorithm}, {precision}, seed {seed}"
                    runs[network, algorithm, precision, seed] = PlannedRun(label, group, f"{group}-{seed}", config)
    return runs


def accuracy(out: Path, scores: Path, trial: bool) -> None:
    """Run what has no score yet, network by network, and write scores and table after each."""
    path = make_folder(scores) / "scores.csv"
    rows: list[dict[str, Any]] = read_scores(path)
    finished = {tuple(row[name] for name in KEY) for row in rows}
    runs = {key: plan for key, plan in planned(trial).items() if key not in finished}
    for _, group in itertools.groupby(runs, key=lambda key: (key[3], key[0])):  # a network with a seed
        keys = list(group)
        plans = [runs[key] for key in keys]
        with progress_display([plan.label for plan in plans]) as shown:
            outcomes = run_all(plans, make_folder(out), shown, figures=False)
        for key, plan in zip(keys, plans, strict=True):
            score = {"accuracy": round(_score(outcomes[plan.label]), 3), "commit": current_commit()}
            rows.append(dict(zip(KEY, key, strict=True)) | score)
        write_text(path, as_csv(rows))
        write_text(scores / "table.md", table(rows))
    print(table(rows))


def read_scores(path: Path) -> list[dict[str, Any]]:
    """Return the rows of finished runs."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [row | {"seed": int(row["seed"]), "accuracy": float(row["accuracy"])} for row in csv.DictReader(file)]


def _score(outcome: Outcome) -> float:
    """Return the test accuracy in percent, the mean over the last quarter of the rounds."""
    return 100 * last_share(outcome.rows, "test_accuracy", 0.25)


def table(rows: list[dict[str, Any]]) -> str:
    """Return mean ± standard deviation over the seeds, and whether the means differ by less than seeds do."""
    lines = [
        "| network | algorithm | seeds | fp32, % | bf16, % | bf16 − fp32 | of one seed, at most | within seeds' spread |",
        "|---|---|---|---|---|---|---|---|",
    ]
    scores = {tuple(row[name] for name in KEY): row["accuracy"] for row in rows}
    for network, algorithm in dict.fromkeys((key[0], key[1]) for key in scores):
        seeds = sorted({key[3] for key in scores if key[:2] == (network, algorithm)})
        fp32, bf16 = ([scores[network, algorithm, p, seed] for seed in seeds] for p in PRECISIONS)
        change = statistics.mean(bf16) - statistics.mean(fp32)
        largest = max((b - a for a, b in zip(fp32, bf16, strict=True)), key=abs)
        verdict = "one seed"
        if len(seeds) > 1:
            spread = max(statistics.stdev(fp32), statistics.stdev(bf16))
            verdict = "yes" if abs(change) <= spread else f"no: {spread:.2f}"
        cells = [network, algorithm, str(len(seeds)), _mean(fp32), _mean(bf16), f"{change:+.2f}", f"{largest:+.2f}"]
        lines.append(f"| {' | '.join(cells)} | {verdict} |")
    return "\n".join(lines) + "\n"


def _mean(values: list[float]) -> str:
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{spread}"


def least_squares(
    clients: int = 8, examples: int = 40, features: int = 16
) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """Return the data of clients that disagree, and the weights that minimise the mean of their losses."""
    draw = torch.Generator().manual_seed(0)
    data = []
    for _ in range(clients):
        x = torch.randn(examples, features, generator=draw)
        own = torch.randn(features, 1, generator=draw)  # each client has an optimum of its own
        data.append((x, x @ own))
    gram = sum((x.double().T @ x.double() for x, _ in data), torch.zeros(features, features, dtype=torch.float64))
    right = sum((x.double().T @ y.double() for x, y in data), torch.zeros(features, 1, dtype=torch.float64))
    return data, torch.linalg.solve(gram, right).flatten()


def fixed_point(rounds: int) -> None:
    """Print how far from the optimum the algorithms end."""
    data, optimum = least_squares()
    print("| algorithm | fp32 | bf16 |\n|---|---|---|")
    for name in ("fedavg", "fedbcgd+", "fedbcgd+derived"):
        cells = []
        for precision in PRECISIONS:
            model = nn.Linear(len(optimum), 1, bias=False)
            nn.init.zeros_(model.weight)
            options: dict[str, Any] = {"blocks": 4, "momentum": 0.0, "shared": "none"} if "fedbcgd" in name else {}
            result = fedbcgd.simulate(
                model, data, name, loss=F.mse_loss, rounds=rounds, cohort=len(data), workers=0, progress=False,
                precision=precision, lr=0.05, weight_decay=0.0, batch_size=10, local_epochs=2, **options,
            )  # fmt: skip
            found = result.module.weight.detach().double().flatten()
            cells.append(f"{float((found - optimum).norm() / optimum.norm()):.1e}")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("study", choices=("steps", "accuracy", "fixed-point"))
    parser.add_argument("--trial", action="store_true", help="accuracy: tiny networks on the images in the package")
    parser.add_argument("--out", type=Path, help="accuracy: folder for the runs; runs/precision if not given")
    parser.add_argument("--scores", type=Path, help="accuracy: folder for the scores; results/precision if not given")
    parser.add_argument("--rounds", type=int, default=300, help="fixed-point: rounds of each algorithm")
    parser.add_argument("--repeats", type=int, default=15, help="steps: how often each is measured")
    chosen = parser.parse_args()
    if chosen.study == "accuracy":
        out = chosen.out or Path("runs/precision-trial" if chosen.trial else "runs/precision")
        accuracy(out, chosen.scores or (out if chosen.trial else Path("results/precision")), chosen.trial)
    elif chosen.study == "steps":
        steps(chosen.repeats)
    else:
        fixed_point(chosen.rounds)


if __name__ == "__main__":
    main()
