"""Invented run folders for the tests of the page, and their content as the page reads it."""

import json
import re
from pathlib import Path
from typing import Any

import tomli_w

from fedbcgd.report import page
from fedbcgd.report.collect import Collector, Problem, RunData

ROUNDS = {"fedavg": 10, "scaffold": 10, "fedpaq": 40, "fedbcgd": 50}
D = 1000  # parameters


def rows(algorithm: str, seed: int, count: int | None = None) -> list[dict[str, float]]:
    """A round of FedAvg and SCAFFOLD uploads d, of FedBCGD d/5, of FedPAQ d/4; accuracy 1 − 1/(1 + round/10) and a bit."""
    out = []
    for r in range(1, (count or ROUNDS[algorithm]) + 1):
        share = 10 / ROUNDS[algorithm]
        out.append(
            {
                "round": r,
                "test_accuracy": 1 - 1 / (1 + r / 10) + 0.001 * seed,
                "test_loss": 2 / (1 + r / 10),
                "train_loss": 2 / (1 + r / 9),
                "upload_d": r * share,
                "upload_bytes": int(r * share * 10 * 4 * D),
                "upload_max_bytes": int(share * 4 * D),
                "upload_wait_bytes": int(r * share * 4 * D),
                "download_bytes": r * 10 * 4 * D,
                "gradient_evaluations": r * 100,
                "seconds": r * 0.5,
            }
        )
    return out


def write_rows(folder: Path, metrics: list[dict[str, float]]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))


def make(
    folder: Path,
    algorithm: str = "fedavg",
    seed: int = 0,
    *,
    count: int | None = None,
    finished: bool = True,
    stopped: str = "rounds",
    data: str = "embedded",
    validation: float | None = None,
    notes: tuple[str, ...] = (),
    **options: Any,
) -> Path:
    folder.mkdir(parents=True)
    blocks = 5 if algorithm == "fedbcgd" else 1
    chosen = {"name": algorithm, "lr": 0.1, **({"blocks": 5} if blocks > 1 else {}), **options}
    config: dict[str, Any] = {
        "data": {"name": data, "clients": 20, **({} if validation is None else {"validation": validation})},
        "model": {"name": "lenet5"},
        "algorithm": chosen,
        "run": {"seed": seed, "cohort": 10},
    }
    (folder / "config.toml").write_text(tomli_w.dumps(config))
    (folder / ".lock").touch()
    metrics = rows(algorithm, seed, count)
    write_rows(folder, metrics)
    counts = [[(3 * i + 7 * label + seed) % 10 for label in range(4)] for i in range(20)]
    (folder / "label_counts.json").write_text(json.dumps({"classes": ["cat", "dog", "cow", "hen"], "counts": counts}))
    if finished:
        total = metrics[-1]["upload_bytes"]
        ledger = {
            "dim": D,
            "itemsize": 4,
            "blocks": blocks,
            "refused": 0,
            "lost": 0,
            "upload_d": metrics[-1]["upload_d"],
        }
        ledger |= {"block_bytes": [total // blocks] * blocks, "upload_bytes": total}
        summary = {
            "algorithm": algorithm,
            "rounds": metrics[-1]["round"],
            "seconds": metrics[-1]["seconds"],
            "stopped": stopped,
            "final": metrics[-1],
            "ledger": ledger,
            "seed": seed,
            "blocks": [D // blocks] * blocks,
            "shared": 0,
            "config": config,
            "command": "fedbcgd compare x.toml",
            "notes": list(notes),
        }
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def comparison(folder: Path) -> Path:
    """FedAvg, FedBCGD and FedPAQ, three seeds each."""
    for algorithm in ("fedavg", "fedbcgd", "fedpaq"):
        for seed in range(3):
            make(folder / algorithm / f"seed-{seed}", algorithm, seed)
    return folder


def add_to_run(folder: Path, **options: Any) -> None:
    """More options for [run], which is the last table."""
    lines = "".join(f"{key} = {value}\n" for key, value in options.items())
    (folder / "config.toml").write_text((folder / "config.toml").read_text() + lines)


def collect(*folders: Path) -> tuple[list[RunData], list[Problem]]:
    return Collector(folders).collect()


def shown(*folders: Path) -> dict[str, Any]:
    return page.content(*collect(*folders))


def embedded(html: str) -> dict[str, Any]:
    """The data as a browser reads it."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    return dict(json.loads(found[1]))
