"""Clients are unequal: what it costs in hours, and what helps. On the embedded images; seeds 0, 1, 2.

    python results/unequal.py            # about 25 minutes on two cores; writes results/unequal/

LeNet-5, 100 clients of 100 images, 10 in a round, Dirichlet 0.6, one local epoch of batch 10, lr 0.1, N = 5, momentum 0.5.
1. `matched.csv`, `matched.png`, `bias.csv`: uplinks from 0.5 to 50 Mbit/s (loguniform, hundredfold), the rest as in the 4g
   profile: blocks dealt at random with even blocks against blocks matched to the links, for several values of `haste`.
2. `reach.csv`, `reach.png`: time to accuracy of five algorithms on four profiles.
3. `closing.csv`: deadlines and over-sampling on the 4g profile.
4. `dropout.csv`: half of every cohort drops out; every algorithm, logistic regression.
"""

import math
import statistics
import sys
from pathlib import Path

from matplotlib.figure import Figure

from fedbcgd import config as configuration
from fedbcgd.algorithm import algorithm_names
from fedbcgd.experiments.batch import Planned, as_csv, run_all
from fedbcgd.files import make_folder, write_text, write_whole
from fedbcgd.loop import Outcome
from fedbcgd.network.afterwards import bias, hours, to_reach
from fedbcgd.network.profiles import PROFILES
from fedbcgd.report.plots import look
from fedbcgd.report.progress import watch

OUT = Path(__file__).parent / "unequal"
RUNS = Path("runs/unequal")
SEEDS = (0, 1, 2)
LOCAL = {"lr": 0.1, "local_epochs": 1, "batch_size": 10}
BLOCKS = {"name": "fedbcgd", "blocks": 5, "momentum": 0.5, **LOCAL}
HUNDREDFOLD = {"profile": "4g", "uplink_mbit": {"median": 5, "spread": 100, "shape": "loguniform"}}
TARGET = 0.75
ROUNDS = 50
EVEN = "random, even blocks"

MATCHED = {
    EVEN: {"divider": "even"},
    "matched, haste 0.5": {"uplink": "matched", "haste": 0.5},
    "matched, haste 0.9": {"uplink": "matched", "haste": 0.9},
    "matched, haste 1": {"uplink": "matched", "haste": 1.0},
}
ALGORITHMS = {
    "fedavg": LOCAL,
    "fedbcgd": {},  # as in the first study: watching changes nothing, so one run serves every profile
    "fedbcgd+": {"blocks": 5, "momentum": 0.5, **LOCAL},
    "fedpaq": LOCAL,
    "topk": LOCAL,
}
CLOSING = {
    "deadline 4 s": {"deadline": 4.0},
    "15 asked, 2 of each block": {"oversample": 1.5},
    "15 asked, 2 of each block, half drop out": {"oversample": 1.5, "dropout": 0.5, "deadline": 4.0},
}


def even(seed: int) -> Planned:
    return planned("matched", EVEN, seed, BLOCKS | MATCHED[EVEN], HUNDREDFOLD, rounds=ROUNDS)


def planned(study: str, label: str, seed: int, algorithm: dict, network: dict | None, **run: object) -> Planned:
    model = run.pop("model", "lenet5")
    raw = {"algorithm": algorithm, "run": {"seed": seed, "cohort": 10, "evaluate_every": 2, **run}}
    raw |= {"model": {"name": model}, **({"network": network} if network else {})}
    folder = f"{study}/{label.replace(' ', '-').replace(',', '')}/seed-{seed}"
    return Planned(f"{study}: {label}, seed {seed}", f"{study}: {label}", folder, configuration.check(raw, label))


def last(outcome: Outcome, metric: str, rows: int = 5) -> float:
    """The mean of the last evaluations: single ones jump by several points."""
    return statistics.fmean(row[metric] for row in outcome.rows[-rows:])


def spread(values: list[float], digits: int) -> str:
    return f"{statistics.fmean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


def go(runs: dict[tuple[str, int], Planned]) -> dict[tuple[str, int], Outcome]:
    plans = list(runs.values())
    with watch([p.label for p in plans]) as shown:
        outcomes = run_all(plans, make_folder(RUNS), shown)
    return {key: outcomes[p.label] for key, p in runs.items()}


def study_matched() -> None:
    runs = {
        (label, seed): planned("matched", label, seed, BLOCKS | options, HUNDREDFOLD, rounds=ROUNDS)
        for label, options in MATCHED.items()
        for seed in SEEDS
    }
    outcomes = go(runs)
    table, lean = [], []
    for (label, seed), o in outcomes.items():
        at = [row["hours"] for row in o.rows]
        row = {"assignment": label, "seed": seed, "seconds_per_round": at[-1] * 3600 / o.rounds}
        row |= {"accuracy": last(o, "test_accuracy"), "hours_to_target": to_reach(o.rows, at, "test_accuracy", TARGET)}
        row |= {"target": TARGET, "largest_upload_MB": o.ledger.upload_max_bytes / 1e6}
        blocks = bias(RUNS / runs[label, seed].folder)
        row |= {"largest_distance": max(b.distance for b in blocks), "fewest_clients": min(b.clients for b in blocks)}
        table.append(row)
        lean += [{"assignment": label, "seed": seed, **b.row()} for b in blocks]
    write_text(OUT / "matched.csv", as_csv(table))
    write_text(OUT / "bias.csv", as_csv(lean))
    first = {r["seed"]: r["seconds_per_round"] for r in table if r["assignment"] == EVEN}
    for label in MATCHED:
        mine = [r for r in table if r["assignment"] == label]
        saved = spread([first[r["seed"]] / r["seconds_per_round"] for r in mine], 2)
        print(label, "| s/round", spread([r["seconds_per_round"] for r in mine], 2), "| times faster", saved,
              "| accuracy", spread([r["accuracy"] for r in mine], 4), "| hours", [r["hours_to_target"] for r in mine],
              "| distance", spread([r["largest_distance"] for r in mine], 2))  # fmt: skip
    figure = Figure(figsize=(9, 4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for k, label in enumerate(MATCHED):
        group = [outcomes[label, seed].rows for seed in SEEDS]
        for panel, axis in zip(panels, ("hours", "round"), strict=True):
            x = [statistics.fmean(rows[i][axis] for rows in group) for i in range(len(group[0]))]
            y = [statistics.fmean(rows[i]["test_accuracy"] for rows in group) for i in range(len(group[0]))]
            panel.plot(x, y, label=label, color=["#000000", "#56B4E9", "#0072B2", "#D55E00"][k])
            panel.set_xlabel({"hours": "virtual hours", "round": "rounds"}[axis])
            panel.grid(alpha=0.25)
    panels[0].set_ylabel("test accuracy (mean of three seeds)")
    panels[1].legend(frameon=False)
    write_whole(OUT / "matched.png", lambda path: figure.savefig(path, dpi=130))


def study_reach() -> None:
    runs = {
        (name, seed): planned("reach", name, seed, {"name": name, **options}, None, rounds=ROUNDS)
        if options
        else even(seed)
        for name, options in ALGORITHMS.items()
        for seed in SEEDS
    }
    outcomes = go(runs)
    table = []
    curves: dict[tuple[str, str], list[list[float]]] = {}
    for (name, seed), o in outcomes.items():
        row = {"algorithm": name, "seed": seed, "accuracy": last(o, "test_accuracy"), "target": TARGET}
        row |= {
            axis: to_reach(o.rows, [r[axis] for r in o.rows], "test_accuracy", TARGET) for axis in ("round", "upload_d")
        }
        for profile in PROFILES:
            at = hours(RUNS / runs[name, seed].folder, profile)
            curves.setdefault((name, profile), []).append(at)
            row[f"hours_{profile}"] = to_reach(o.rows, at, "test_accuracy", TARGET)
        table.append(row)
    write_text(OUT / "reach.csv", as_csv(table))
    for name in ALGORITHMS:
        mine = [r for r in table if r["algorithm"] == name]
        print(name, [(r["accuracy"], r["round"], *(r[f"hours_{p}"] for p in PROFILES)) for r in mine])
    figure = Figure(figsize=(14, 4), layout="constrained")
    panels = figure.subplots(1, len(PROFILES), sharey=True)
    for panel, profile in zip(panels, PROFILES, strict=True):
        for k, name in enumerate(ALGORITHMS):
            group, at = [outcomes[name, seed].rows for seed in SEEDS], curves[name, profile]
            short = min(map(len, group))
            x = [statistics.fmean(values[i] for values in at) for i in range(short)]
            y = [statistics.fmean(rows[i]["test_accuracy"] for rows in group) for i in range(short)]
            panel.plot(x, y, label=name, **look(name, k))
        panel.axhline(TARGET, color="#bbbbbb", linewidth=0.8)
        panel.set_xscale("log")
        panel.set_xlabel("virtual hours")
        panel.set_title(profile)
        panel.grid(alpha=0.25)
    panels[0].set_ylabel("test accuracy (mean of three seeds)")
    panels[0].legend(frameon=False)
    write_whole(OUT / "reach.png", lambda path: figure.savefig(path, dpi=130))


def study_closing() -> None:
    runs = {
        (label, seed): planned("closing", label, seed, BLOCKS | MATCHED[EVEN], {"profile": "4g", **own}, rounds=ROUNDS)
        for label, own in CLOSING.items()
        for seed in SEEDS
    }
    runs = {("everybody is waited for", seed): even(seed) for seed in SEEDS} | runs
    table = []
    for (label, seed), o in go(runs).items():
        at = [row["hours"] for row in o.rows] if label in CLOSING else hours(RUNS / runs[label, seed].folder, "4g")
        row = {
            "rule": label,
            "seed": seed,
            "seconds_per_round": at[-1] * 3600 / o.rounds,
            "accuracy": last(o, "test_accuracy"),
        }
        row |= {"hours_to_target": to_reach(o.rows, at, "test_accuracy", TARGET), "target": TARGET}
        table.append(
            row | {"discarded": o.ledger.lost, "asked": o.ledger.lost + _uploads(RUNS / runs[label, seed].folder)}
        )
    write_text(OUT / "closing.csv", as_csv(table))
    for row in table:
        print(row)


def _uploads(folder: Path) -> int:
    from fedbcgd.network.traffic import read

    return sum(len(sent.clients) for sent in read(folder / "traffic.jsonl"))


def study_dropout() -> None:
    names = [name for name in algorithm_names() if name != "central"]
    runs = {
        (name, share, seed): planned(
            "dropout", f"{name} {share}", seed, {"name": name, **LOCAL, "lr": 0.01}, {"profile": "4g", "dropout": share},
            rounds=40, model="logistic", workers=0,
        )
        for name in names
        for share in (0.0, 0.5)
        for seed in SEEDS
    }  # fmt: skip
    outcomes = go(runs)  # type: ignore[arg-type]
    table = []
    for (name, share, seed), o in outcomes.items():  # type: ignore[misc]
        arrived = _uploads(RUNS / runs[name, share, seed].folder)
        row = {
            "algorithm": name,
            "dropout": share,
            "seed": seed,
            "accuracy": last(o, "test_accuracy"),
            "stopped": o.stopped,
        }
        table.append(row | {"arrived": arrived, "lost": o.ledger.lost, "upload_bytes": o.ledger.upload_bytes})
    write_text(OUT / "dropout.csv", as_csv(table))
    for name in names:
        both = [
            [r["accuracy"] for r in table if r["algorithm"] == name and r["dropout"] == share] for share in (0.0, 0.5)
        ]
        print(name, *(f"{statistics.fmean(v):.4f}" if not math.isnan(sum(v)) else v for v in both))


STUDIES = {"matched": study_matched, "reach": study_reach, "closing": study_closing, "dropout": study_dropout}

if __name__ == "__main__":
    make_folder(OUT)
    for name in sys.argv[1:] or STUDIES:
        STUDIES[name]()
