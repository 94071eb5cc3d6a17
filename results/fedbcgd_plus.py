"""FedBCGD+ in practice: exact in the long run, and not behind at small budgets?

    python results/fedbcgd_plus.py           # about 15 minutes on one core; writes results/fedbcgd-plus/
    python results/fedbcgd_plus.py --draw    # only the figures, from the existing CSV files

1. Multinomial logistic regression on the embedded Fashion-MNIST images: M = 100, S = 10, N = 5, Dirichlet 0.1, E = 1,
   B = 50. Each variant's learning rate and momentum are chosen by the train loss at 60 d with seed 0; curves: seeds 1, 2, 3.
2. Heterogeneous quadratics with a known optimum: M = 40, S = 8, N = 4, float64; the gap over the rounds.
"""

import csv
import itertools
import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

import fedbcgd
from fedbcgd.data import dirichlet, fashion_mnist, split
from fedbcgd.display import plots
from fedbcgd.display.styles import variant_styles
from fedbcgd.files import make_folder, write_text
from fedbcgd.models import Logistic
from fedbcgd.models.problems import quadratics

OUT = Path(__file__).parent / "fedbcgd-plus"
BUDGET, RATES, MOMENTA, SEEDS = 60, (0.01, 0.03, 0.1), (0.0, 0.5, 0.8), (1, 2, 3)
VARIANTS = {
    "FedAvg": ("fedavg", {}),
    "SCAFFOLD (derived)": ("scaffold", {"derived": True}),
    "FedBCGD": ("fedbcgd", {"blocks": 5}),
    "FedBCGD with SVRG": ("fedbcgd", {"blocks": 5, "local": "svrg"}),
    "FedBCGD+ (2d/N)": ("fedbcgd+", {"blocks": 5}),
    "FedBCGD+ adaptive (2d/N)": ("fedbcgd+", {"blocks": 5, "damping": "adaptive"}),
    "FedBCGD+ derived (d/N)": ("fedbcgd+derived", {"blocks": 5}),
}
STYLES = dict(zip(VARIANTS, variant_styles([name for name, _ in VARIANTS.values()]), strict=True))


def regression(variant: str, lr: float, momentum: float, seed: int, every: int) -> list[dict[str, float]]:
    train, _ = fashion_mnist()
    clients = split(train, dirichlet(train.labels.numpy(), 100, 0.1, seed))
    name, options = VARIANTS[variant]
    if "fedbcgd" in name:
        options = {**options, "momentum": momentum}
    common = {"local_epochs": 1, "batch_size": 50, "weight_decay": 1e-4, "lr": lr, "workers": 0, "seed": seed}
    try:
        return fedbcgd.simulate(
            Logistic(), clients, name, budget=BUDGET, cohort=10, test=train, evaluate_every=every, **common, **options
        ).rows
    except fedbcgd.Diverged:
        return [{"test_loss": float("inf"), "upload_d": float(BUDGET)}]


def study_regression() -> None:
    search, curves = [], []
    for variant, (name, _) in VARIANTS.items():
        grid = list(itertools.product(RATES, MOMENTA if "fedbcgd" in name else (0.0,)))
        losses = {(lr, m): regression(variant, lr, m, 0, 10**6)[-1]["test_loss"] for lr, m in grid}
        search += [{"variant": variant, "lr": lr, "momentum": m, "train_loss": v} for (lr, m), v in losses.items()]
        lr, momentum = min(losses, key=losses.__getitem__)
        for seed in SEEDS:
            rows = regression(variant, lr, momentum, seed, 2 if name in ("fedavg", "scaffold") else 10)
            curves += [{"variant": variant, "lr": lr, "momentum": momentum, "seed": seed, **row} for row in rows]
        last = [[r for r in curves if r["variant"] == variant and r["seed"] == s][-1]["test_loss"] for s in SEEDS]
        print(
            f"{variant}: lr {lr}, momentum {momentum}, train loss {np.mean(last):.4f} ± {np.std(last, ddof=1):.4f}",
            flush=True,
        )
    save(search, "search.csv")
    save(curves, "regression.csv")
    draw_regression(curves)


def draw_regression(curves: list[dict]) -> None:
    with matplotlib.rc_context(plots.STYLE):
        figure, panel = empty("upload (in d)", "train loss (three seeds: mean, range)")
        for variant, style in STYLES.items():
            runs = [[r for r in curves if r["variant"] == variant and r["seed"] == s] for s in SEEDS]
            x = [r["upload_d"] for r in runs[0]]
            y = np.array([[r["test_loss"] for r in run] for run in runs])
            panel.plot(x, y.mean(0), label=variant, **plots.line(style))
            panel.fill_between(x, y.min(0), y.max(0), color=style.colour, alpha=0.15, linewidth=0)
        panel.set_ylim(0.35, 1.2)
        panel.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        plots.save(figure, OUT / "regression.png")


def study_quadratics() -> None:
    p = quadratics(clients=40, dim=20, beta=10, mu=1, sigma=5, G=10, examples=10)
    rows = []
    for variant, (name, options) in VARIANTS.items():
        options = {**options, "blocks": 4, "momentum": 0.0} if "fedbcgd" in name else options
        result = fedbcgd.simulate(
            p.model, p.clients, name, rounds=800, cohort=8, workers=0, loss=p.loss, metrics=p.metrics, test=p.test,
            evaluate_every=10, lr=0.02, lr_decay=1, weight_decay=0, batch_size=5, local_epochs=1, **options,
        )  # fmt: skip
        rows += [
            {"variant": variant, "round": r["round"], "upload_d": r["upload_d"], "gap": r["test_gap"]}
            for r in result.rows
        ]
        print(f"{variant}: gap {result.final['test_gap']:.1e} after 800 rounds", flush=True)
    save(rows, "quadratics.csv")
    draw_quadratics(rows)


def draw_quadratics(rows: list[dict]) -> None:
    with matplotlib.rc_context(plots.STYLE):
        figure, panel = empty("rounds", "f(x) − f(x*)")
        for variant, style in STYLES.items():
            own = [r for r in rows if r["variant"] == variant]
            gaps = [max(r["gap"], 1e-33) for r in own]
            panel.semilogy([r["round"] for r in own], gaps, label=variant, **plots.line(style))
        panel.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        plots.save(figure, OUT / "quadratics.png")


def empty(x_label: str, y_label: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=(plots.PAGE, 3.2), layout="constrained")
    panel = figure.subplots()
    panel.set_xlabel(x_label)
    panel.set_ylabel(y_label)
    panel.grid(True)
    return figure, panel


def save(rows: list[dict], name: str) -> None:
    lines = [",".join(rows[0])] + [",".join(str(v) for v in row.values()) for row in rows]
    assert all(len(next(csv.reader([line]))) == len(rows[0]) for line in lines)
    write_text(OUT / name, "\n".join(lines) + "\n")


def load(name: str) -> list[dict]:
    with (OUT / name).open() as file:
        return [{k: v if k == "variant" else float(v) for k, v in row.items()} for row in csv.DictReader(file)]


if __name__ == "__main__":
    if "--draw" in sys.argv:
        draw_quadratics(load("quadratics.csv"))
        draw_regression(load("regression.csv"))
        sys.exit()
    make_folder(OUT)
    study_quadratics()
    study_regression()
