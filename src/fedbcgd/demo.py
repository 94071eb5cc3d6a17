"""The demo: FedAvg, FedBCGD and FedPAQ on the embedded images under one upload budget."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from fedbcgd.algorithms.registry import make_algorithm
from fedbcgd.data import dirichlet, fashion_mnist, label_counts, split
from fedbcgd.data.embedded import CLASSES
from fedbcgd.display import plots, tables
from fedbcgd.display.progress import progress_display
from fedbcgd.files import as_csv, write_text
from fedbcgd.models import LeNet5
from fedbcgd.runs.retiming import to_reach
from fedbcgd.simulation import Interrupted, Result, simulate

CLIENTS, COHORT, RHO = 100, 10, 0.6
# The local training of each algorithm. On the test set, lr is the best of 0.03, 0.06 and 0.1 for FedAvg, and λ (momentum)
# the better of 0.5 and 0.8 for FedBCGD.
LOCAL: dict[str, Any] = {"lr": 0.1, "local_epochs": 1, "batch_size": 10, "weight_decay": 1e-3, "lr_decay": 0.998}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedbcgd": {"blocks": 5, "momentum": 0.5},
    "fedpaq": {"levels": 127},
}
ROW_EVERY_D = 0.8  # a client's upload between two evaluations, in d, approximately


def introduce(console: Console, budget: float, seed: int) -> None:
    """Print what is about to run."""
    console.print(
        f"LeNet-5 on 10,000 images of Fashion-MNIST: {CLIENTS} clients, {COHORT} in a round, Dirichlet {RHO}, "
        f"upload budget {budget:g} d (d: the size of the model) for each algorithm, seed {seed}",
        highlight=False,
    )
    local = ", ".join(f"{k} {v:g}" for k, v in LOCAL.items())
    console.print(f"local SGD for each: {local}", highlight=False)
    for name, options in ALGORITHMS.items():
        listed = ", ".join(f"{k} {v:g}" for k, v in options.items()) or "no further options"
        console.print(f"  {name}: {listed}", highlight=False)


def run(budget: float, seed: int, folder: Path) -> dict[str, Result]:
    """Run all algorithms, and write metrics and figures of those that have rows, also after an interruption.

    Args:
        budget: upload of an average client with each algorithm, in d.
        seed: fixes the partition, the model and the runs.
        folder: where metrics and figures are written.

    Returns:
        The results by algorithm.
    """
    train, test = fashion_mnist()
    labels = train.labels.numpy()
    parts = dirichlet(labels, CLIENTS, RHO, seed)
    plots.label_counts(
        label_counts(labels, parts), folder / "label_counts.png", CLASSES, f"Dirichlet {RHO}, seed {seed}"
    )
    clients = split(train, parts)
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        model = LeNet5(len(CLASSES), (1, 28, 28))
    results: dict[str, Result] = {}
    try:
        with progress_display(list(ALGORITHMS)) as shown:
            for k, (name, options) in enumerate(ALGORITHMS.items()):
                shown.begin(k)
                algorithm = make_algorithm(name, **LOCAL, **options)
                every = max(1, round(ROW_EVERY_D / algorithm.upload_d(algorithm.uplink.layout(model))))
                try:
                    results[name] = simulate(
                        model,
                        clients,
                        algorithm,
                        test=test,
                        budget=budget,
                        cohort=COHORT,
                        seed=seed,
                        evaluate_every=every,
                        callbacks=[shown],
                        progress=False,
                    )
                except Interrupted as stopped:
                    results[name] = stopped.result
                    raise
    finally:
        results = {name: result for name, result in results.items() if result.rows}
        if results:
            write_text(
                folder / "metrics.csv", as_csv([{"run": n, **row} for n, r in results.items() for row in r.rows])
            )
            plots.curves(
                {n: r.rows for n, r in results.items()},
                folder / "curves.png",
                title=f"LeNet-5, Fashion-MNIST, {CLIENTS} clients, seed {seed}",
            )
    return results


def conclude(console: Console, results: Mapping[str, Result], budget: float, folder: Path) -> None:
    """Print the table of results, and when each algorithm reached FedAvg's last accuracy."""
    console.print(tables.table(results, f"The same upload budget for each: {budget:g} d"))
    baseline = results["fedavg"]
    reached = baseline.final["test_accuracy"]
    for name, result in results.items():
        if name == "fedavg":
            continue
        first = to_reach(result.rows, [row["upload_d"] for row in result.rows], "test_accuracy", reached)
        when = f"after {first:.1f} d" if first is not None else "not within the budget"
        console.print(
            f"FedAvg's last accuracy ({reached:.4f} at {baseline.ledger.upload_d:.1f} d) was reached by {name} {when}",
            highlight=False,
        )
    console.print(
        f"Plots and metrics: {folder}/curves.png, {folder}/label_counts.png, {folder}/metrics.csv", highlight=False
    )
