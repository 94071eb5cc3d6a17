"""Unequal clients: what they cost in hours, and what helps. On the embedded images; seeds 0, 1, 2.

    python results/unequal.py            # about 25 minutes on two cores; writes results/unequal/

100 clients of 100 images, 10 in a round, Dirichlet 0.6, one local epoch of batch 10, lr 0.1, N = 5, momentum 0.5.
1. `matched.csv`, `matched.png`, `bias.csv`: LeNet-5, 40 rounds. Uplinks from 0.5 to 50 Mbit/s (loguniform, hundredfold), the
   rest as in the 4g profile: even blocks assigned at random against blocks matched to the links.
2. `knob.csv`: the same for values of `haste` from 0 to 1; `asked.csv`: matched against over-sampling; both from the plans of
   400 rounds, without training.
3. `reach.csv`, `reach.png`: time to accuracy of five algorithms on four profiles; a network of two hidden layers, 60 rounds.
4. `correlated.csv`: as 1, but fast clients hold other data than slow ones; the same network.
5. `closing.csv`: deadlines and over-sampling on the 4g profile; the same network.
6. `dropout.csv`: every sampled client drops out with probability 1/2; every algorithm, logistic regression.
"""

import math
import statistics
import sys
from itertools import pairwise
from pathlib import Path

from matplotlib.figure import Figure
from torch import nn

from fedbcgd.algorithms.registry import algorithm_names, make_algorithm
from fedbcgd.display.plots import line, save
from fedbcgd.display.progress import progress_display
from fedbcgd.display.styles import line_style
from fedbcgd.engine.assemble import make_job, make_server
from fedbcgd.engine.loop import Outcome, Stop
from fedbcgd.engine.traffic import Round, read
from fedbcgd.files import as_csv, make_folder, write_text
from fedbcgd.network.profiles import PROFILES
from fedbcgd.network.settings import as_network
from fedbcgd.network.simulator import NetworkSimulator, fit_to_links
from fedbcgd.runs import config as configuration
from fedbcgd.runs.batch import PlannedRun, run_all
from fedbcgd.runs.bias import block_biases
from fedbcgd.runs.experiment import make_experiment
from fedbcgd.runs.retiming import bias, hours, to_reach

OUT = Path(__file__).parent / "unequal"
RUNS = Path("runs/unequal")
SEEDS = (0, 1, 2)
LOCAL = {"lr": 0.1, "local_epochs": 1, "batch_size": 10}
BLOCKS = {"name": "fedbcgd", "blocks": 5, "momentum": 0.5, **LOCAL}
HUNDREDFOLD = {"profile": "4g", "uplink_mbit": {"median": 5, "spread": 100, "shape": "loguniform"}}
TARGET = 0.7
ROUNDS = 40
EVEN = "random, even blocks"

MATCHED = {
    EVEN: {"divider": "even"},
    "matched, haste 0.9": {"uplink": "matched", "haste": 0.9},
    "matched, haste 1": {"uplink": "matched", "haste": 1.0},
}
HASTES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 1.0)
KNOB = {EVEN: MATCHED[EVEN]} | {f"haste {h}": {"uplink": "matched", "haste": h} for h in HASTES}
KNOB["haste 1, even blocks"] = {"uplink": "matched", "haste": 1.0, "divider": "even"}
ASKED: dict[str, tuple[dict, dict]] = {
    EVEN: (MATCHED[EVEN], {}),
    "random, even blocks, 20 asked": (MATCHED[EVEN], {"oversample": 2.0}),
    "matched, haste 0.9": (MATCHED["matched, haste 0.9"], {}),
    "matched, haste 0.9, 20 asked": (MATCHED["matched, haste 0.9"], {"oversample": 2.0}),
}
ALGORITHMS = {
    "fedavg": LOCAL,
    "fedbcgd": {"blocks": 5, "momentum": 0.5, **LOCAL},
    "fedbcgd+": {
        "blocks": 5,
        "momentum": 0.5,
        **LOCAL,
        "lr": 0.03,
    },  # chosen after a first run: at 0.1 the accuracy jumps and does not reach the target
    "fedpaq": LOCAL,
    "topk": LOCAL,
}
QUICK = {"rounds": 60, "model": f"{Path(__file__).resolve()}:two_layers", "workers": 0}
CLOSING = {
    "everybody is waited for": {},
    "deadline 2 s": {"deadline": 2.0},
    "15 asked, 2 of each block": {"oversample": 1.5},
    "20 asked, 2 of each block": {"oversample": 2.0},
    "half drop out, 20 asked, deadline 2 s": {"oversample": 2.0, "dropout": 0.5, "deadline": 2.0},
}


def two_layers() -> nn.Module:
    """784-200-200-10 (McMahan et al. 2017): 199,210 parameters, and quick on a CPU."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10)
    )


def even(seed: int) -> PlannedRun:
    return planned("matched", EVEN, seed, BLOCKS | MATCHED[EVEN], HUNDREDFOLD, rounds=ROUNDS)


def planned(study: str, label: str, seed: int, algorithm: dict, network: dict | None, **run: object) -> PlannedRun:
    model = run.pop("model", "lenet5")
    raw = {"algorithm": algorithm, "run": {"seed": seed, "cohort": 10, "evaluate_every": 2, **run}}
    raw |= {"model": {"name": model}, **({"network": network} if network else {})}
    folder = f"{study}/{label.replace(' ', '-').replace(',', '')}/seed-{seed}"
    return PlannedRun(f"{study}: {label}, seed {seed}", f"{study}: {label}", folder, configuration.check(raw, label))


def last(outcome: Outcome, metric: str, rows: int = 5) -> float:
    """Return the mean of the last evaluations: single ones vary by several points."""
    return statistics.fmean(row[metric] for row in outcome.rows[-rows:])


def spread(values: list[float], digits: int) -> str:
    return f"{statistics.fmean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


def go(runs: dict[tuple[str, int], PlannedRun]) -> dict[tuple[str, int], Outcome]:
    plans = list(runs.values())
    with progress_display([p.label for p in plans]) as shown:
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
            panel.plot(x, y, label=label, color=["#000000", "#0072B2", "#D55E00"][k])
            panel.set_xlabel({"hours": "virtual hours", "round": "rounds"}[axis])
            panel.grid(alpha=0.25)
    panels[0].set_ylabel("test accuracy (mean of three seeds)")
    panels[1].legend(frameon=False)
    save(figure, OUT / "matched.png")


def study_reach() -> None:
    runs = {
        (name, seed): planned("reach", name, seed, {"name": name, **options}, None, **QUICK)
        for name, options in ALGORITHMS.items()
        for seed in SEEDS
    }
    outcomes = go(runs)
    table = []
    curves: dict[tuple[str, str], list[list[float]]] = {}
    for (name, seed), o in outcomes.items():
        times = {profile: hours(RUNS / runs[name, seed].folder, profile) for profile in PROFILES}
        for profile, at in times.items():
            curves.setdefault((name, profile), []).append(at)
        for target in (TARGET, 0.8):
            row = {"to_reach": f"{name} {target}", "seed": seed, "accuracy": last(o, "test_accuracy")}
            row |= {x: to_reach(o.rows, [r[x] for r in o.rows], "test_accuracy", target) for x in ("round", "upload_d")}
            row |= {f"hours_{p}": to_reach(o.rows, at, "test_accuracy", target) for p, at in times.items()}
            table.append(row)
    write_text(OUT / "reach.csv", as_csv(table))
    means(table, "to_reach")
    figure = Figure(figsize=(14, 4), layout="constrained")
    panels = figure.subplots(1, len(PROFILES), sharey=True)
    for panel, profile in zip(panels, PROFILES, strict=True):
        for k, name in enumerate(ALGORITHMS):
            group, at = [outcomes[name, seed].rows for seed in SEEDS], curves[name, profile]
            short = min(map(len, group))
            x = [statistics.fmean(values[i] for values in at) for i in range(short)]
            y = [statistics.fmean(rows[i]["test_accuracy"] for rows in group) for i in range(short)]
            panel.plot(x, y, label=name, **line(line_style(name, k)))
        panel.axhline(TARGET, color="#bbbbbb", linewidth=0.8)
        panel.set_xscale("log")
        panel.set_xlabel("virtual hours")
        panel.set_title(profile)
        panel.grid(alpha=0.25)
    panels[0].set_ylabel("test accuracy (mean of three seeds)")
    panels[0].legend(frameon=False)
    save(figure, OUT / "reach.png")


def study_knob() -> None:
    rows = [planned_rounds(label, seed, options, HUNDREDFOLD) for seed in SEEDS for label, options in KNOB.items()]
    write_text(OUT / "knob.csv", as_csv(rows))
    means(rows, "assignment")


def study_asked() -> None:
    """Compare matching with over-sampling: what each gains, and which clients are left out."""
    rows = [
        planned_rounds(label, seed, options, HUNDREDFOLD | own)
        for seed in SEEDS
        for label, (options, own) in ASKED.items()
    ]
    write_text(OUT / "asked.csv", as_csv(rows))
    means(rows, "assignment")


def planned_rounds(label: str, seed: int, options: dict, given: dict) -> dict:
    """Plan and time 400 rounds without training: all uploads are assumed to arrive."""
    network = as_network(given)
    experiment = make_experiment(even(seed).config)
    algorithm = fit_to_links(
        make_algorithm(**BLOCKS | options), network, experiment.model, experiment.clients, 10, seed
    )
    job = make_job(experiment.model, experiment.clients, algorithm, None, seed)
    simulator = NetworkSimulator(job, network)
    server = make_server(job, 10, Stop(rounds=1), simulator)
    assert simulator.links is not None
    rounds, seconds = [], []
    for _ in range(400):
        tasks = [task for task in simulator.plan(server).tasks if server.expects(task)]
        who, what, n = [t.client for t in tasks], [t.block for t in tasks], len(tasks)
        seconds.append(simulator.costs[who, what].max())
        rounds.append(Round(server.round, n, 0, 0.0, who, what, [0] * n, [0] * n, [1] * n))
        server.round += 1
    blocks = block_biases(rounds, simulator.links)
    sizes = [(b - a) / job.layout.dim for a, b in pairwise(job.layout.bounds)]
    row = {"assignment": label, "seed": seed, "seconds_per_round": statistics.fmean(seconds)}
    row |= {"arrived_per_round": statistics.fmean(len(sent.clients) for sent in rounds)}
    row |= {"largest_block": max(sizes), "smallest_block": min(sizes)}
    row |= {"largest_distance": max(b.distance for b in blocks), "fewest_clients": min(b.clients for b in blocks)}
    least = min(min(b.shares) for b in blocks)
    return row | {"mean_rank_of_largest": blocks[-1].rank, "smallest_share_of_a_fifth": least}


def means(table: list[dict], by: str) -> None:
    """Print mean and standard deviation over the seeds."""
    for label in dict.fromkeys(row[by] for row in table):
        mine = [row for row in table if row[by] == label]
        keys = [key for key in mine[0] if key not in (by, "seed")]
        values = {key: [row[key] for row in mine if row[key] is not None] for key in keys}
        print(label, {key: spread(v, 5) if len(v) == len(mine) else None for key, v in values.items()})


def study_correlated() -> None:
    """Study the worst case for matching: the speed of a client depends on its data.

    Clients are ranked by their mean label, and their uplinks, up to a factor of 100 apart, follow that rank. Dirichlet 0.1,
    so that labels differ much.
    """
    runs = {}
    for seed in SEEDS:
        raw = planned("correlated", "counts", seed, BLOCKS, None, **QUICK).config.model_dump()
        raw["data"] |= {"dirichlet": 0.1}
        counts = make_experiment(configuration.check(raw, "counts")).counts
        rank = (counts @ range(10) / counts.sum(1)).argsort().argsort()  # type: ignore[operator]
        links = make_folder(RUNS).resolve() / f"links-{seed}.csv"
        head = "client,uplink_mbit,downlink_mbit,latency_ms,gradient_ms\n"
        write_text(links, head + "".join(f"{i},{0.5 * 100 ** (r / 99):.6f},30,45,20\n" for i, r in enumerate(rank)))
        for label, options in (MATCHED | {"matched, haste 0.5": {"uplink": "matched", "haste": 0.5}}).items():
            own = {**raw, "algorithm": BLOCKS | options, "network": {"csv": str(links)}}
            checked = configuration.check(own, label)
            folder = f"correlated/{label.replace(' ', '-').replace(',', '')}/seed-{seed}"
            runs[label, seed] = PlannedRun(f"correlated: {label}, seed {seed}", f"correlated: {label}", folder, checked)
    table = []
    outcomes = go(runs)
    for (label, seed), o in outcomes.items():
        row = {"assignment": label, "seed": seed, "seconds_per_round": o.rows[-1]["hours"] * 3600 / o.rounds}
        row |= {"accuracy": last(o, "test_accuracy"), "loss": last(o, "test_loss")}
        by_then = [r["test_accuracy"] for r in outcomes[EVEN, seed].rows if r["hours"] <= o.rows[-1]["hours"]]
        row |= {"even_at_same_time": statistics.fmean(by_then[-5:])}
        blocks = bias(RUNS / runs[label, seed].folder)
        table.append(row | {"largest_distance": max(b.distance for b in blocks)})
    write_text(OUT / "correlated.csv", as_csv(table))
    means(table, "assignment")


def study_closing() -> None:
    runs = {
        (label, seed): planned("closing", label, seed, BLOCKS, {"profile": "4g", **own}, **QUICK)
        for label, own in CLOSING.items()
        for seed in SEEDS
    }
    table = []
    for (label, seed), o in go(runs).items():
        at = [row["hours"] for row in o.rows]
        arrived = _uploads(RUNS / runs[label, seed].folder)
        row = {"rule": label, "seed": seed, "seconds_per_round": at[-1] * 3600 / o.rounds}
        row |= {"accuracy": last(o, "test_accuracy"), "target": TARGET}
        row |= {"hours_to_target": to_reach(o.rows, at, "test_accuracy", TARGET)}
        table.append(row | {"arrived_per_round": arrived / o.rounds, "lost_per_round": o.ledger.lost / o.rounds})
    write_text(OUT / "closing.csv", as_csv(table))
    means(table, "rule")


def _uploads(folder: Path) -> int:
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


STUDIES = {"matched": study_matched, "reach": study_reach, "knob": study_knob, "closing": study_closing}
STUDIES |= {"asked": study_asked, "correlated": study_correlated, "dropout": study_dropout}

if __name__ == "__main__":
    make_folder(OUT)
    for name in sys.argv[1:] or STUDIES:
        STUDIES[name]()
