"""Figures: one look for an algorithm everywhere, colour-blind safe."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedbcgd.files import write_whole
from fedbcgd.loop import Row

if TYPE_CHECKING:
    from fedbcgd.data.store import DataSet

# Okabe and Ito's colours, with a line style each, so that a figure survives a grey printer.
LOOKS = {
    "fedavg": ("#000000", "-"),
    "fedavgm": ("#000000", "--"),
    "fedprox": ("#000000", ":"),
    "fedadam": ("#999999", "-"),
    "fedyogi": ("#999999", "--"),
    "central": ("#999999", ":"),
    "fedbcgd": ("#D55E00", "-"),
    "qsgd+fedbcgd": ("#D55E00", "--"),
    "fedbcgd-frozen": ("#D55E00", ":"),
    "fedbcgd+": ("#E69F00", "-"),
    "fedbcgd+derived": ("#CC79A7", "-"),
    "qsgd+fedbcgd+": ("#E69F00", "--"),
    "scaffold": ("#0072B2", "-"),
    "feddc": ("#0072B2", "--"),
    "fedpaq": ("#009E73", "-"),
    "topk": ("#56B4E9", "-"),
}
_MORE = [("#F0E442", "-"), ("#F0E442", "--"), ("#009E73", "--"), ("#56B4E9", "--")]
STYLE: dict[Any, Any] = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
AXES = {
    "upload_d": "upload (in d)",
    "round": "rounds",
    "gradient_evaluations": "gradient evaluations (minibatches)",
}


def look(name: str, position: int) -> dict[str, str]:
    colour, style = LOOKS.get(name, _MORE[position % len(_MORE)])
    return {"color": colour, "linestyle": style}


def curves(runs: Mapping[str, Sequence[Row]], path: Path, title: str = "") -> None:
    """One run of each name."""
    bands({name: [rows] for name, rows in runs.items()}, path, title)


def bands(groups: Mapping[str, Sequence[Sequence[Row]]], path: Path, title: str = "") -> None:
    """Mean and band (± one standard deviation) over the seeds of each group, against upload, rounds and gradients:
    what is cheap on one axis may be dear on another."""
    first = next(iter(groups.values()))[0][-1]
    metric = next(m for m in ("test_accuracy", "validation_accuracy", "test_loss", "train_loss") if m in first)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(12, 4), layout="constrained")
        panels = figure.subplots(1, len(AXES), sharey=True)
        for panel, (axis, label) in zip(panels, AXES.items(), strict=True):
            for k, (name, runs) in enumerate(groups.items()):
                shared = set.intersection(*({row["round"] for row in rows if metric in row} for rows in runs))
                x = np.array([[row[axis] for row in rows if row["round"] in shared] for rows in runs]).mean(0)
                y = np.array([[row[metric] for row in rows if row["round"] in shared] for rows in runs])
                line = panel.plot(x, y.mean(0), label=name, linewidth=1.8, **look(name, k))[0]
                if len(runs) > 1:
                    spread = y.std(0, ddof=1)
                    panel.fill_between(
                        x, y.mean(0) - spread, y.mean(0) + spread, color=line.get_color(), alpha=0.15, linewidth=0
                    )
            panel.set_xlabel(label)
            panel.grid(alpha=0.25)
        panels[0].set_ylabel(metric.replace("_", " "))
        if len(groups) <= 6:
            panels[0].legend(frameon=False)
        else:
            figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
        if title:
            figure.suptitle(title)
        _save(figure, path)


def holdings(counts: np.ndarray, path: Path, labels: Sequence[str] | None = None, title: str = "") -> None:
    """Who holds what: a column per client, a row per label, darker for more examples."""
    clients, kinds = counts.shape
    height = min(12.0, 1.6 + kinds * 0.22)
    figure = Figure(figsize=(min(16, 3 + clients * 0.09), height), layout="constrained")
    panel = figure.subplots()
    image = panel.imshow(counts.T, aspect="auto", cmap="Blues", interpolation="nearest")
    panel.set_xlabel("client")
    panel.set_ylabel("label")
    named = labels if labels is not None and len(labels) == kinds else [str(c) for c in range(kinds)]
    every = max(1, round(kinds / (height * 5)))  # as many names as can be read
    panel.set_yticks(range(0, kinds, every), named[::every], fontsize=8 if kinds > 20 else 10)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(image, ax=panel, label="examples")
    if title:
        panel.set_title(title, loc="left")
    _save(figure, path)


def gallery(data: "DataSet", path: Path, rows: int = 20, columns: int = 12) -> None:
    """The first training images of each class; of many classes some."""
    labels = data.train.labels.numpy()
    chosen = np.unique(np.linspace(0, len(data.classes) - 1, min(rows, len(data.classes))).astype(int))
    figure = Figure(figsize=(2 + columns * 0.55, 0.6 + len(chosen) * 0.55), layout="constrained")
    panels = figure.subplots(len(chosen), columns, squeeze=False)
    for line, label in zip(panels, chosen, strict=True):
        found = np.flatnonzero(labels == label)[:columns]
        for k, panel in enumerate(line):
            panel.set_axis_off()
            if k < len(found):
                pixels = data.train.images[found[k]].permute(1, 2, 0).numpy()
                panel.imshow(pixels, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
        line[0].text(-0.15, 0.5, data.classes[label], ha="right", va="center", transform=line[0].transAxes, fontsize=8)
    figure.suptitle(f"{data.name}: {len(data.train):,} train, {len(data.test):,} test, {len(data.classes)} classes")
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    write_whole(path, lambda temporary: figure.savefig(temporary, dpi=150))
