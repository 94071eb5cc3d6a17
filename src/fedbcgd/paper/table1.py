"""Table 1: the orders of rounds and floats with numbers, and the floats until ε that were measured on quadratics."""

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fedbcgd.errors import UserError
from fedbcgd.files import as_csv, as_json, make_folder, write_text
from fedbcgd.paper import printed as paper
from fedbcgd.paper import quadratics, theory
from fedbcgd.paper import theory_figures as report
from fedbcgd.paper.engine import Asked
from fedbcgd.paper.origin import commit
from fedbcgd.paper.points import Points
from fedbcgd.paper.quadratics import SETTING, Size
from fedbcgd.paper.spec import FAILS, HOLDS, NOT_RUN, UNTESTABLE, Claim, Item, Scale, Verdict
from fedbcgd.paper.tables import claims_table, told_circumstances

NAME = "table1"
SIZES: dict[Scale, Size] = {
    "paper": Size(),
    "cpu": Size(blocks=(1, 2, 4, 8), seeds=2),
    "smoke": Size(
        replace(SETTING, beta=10.0, epsilon=0.1), blocks=(1, 2), dim=8, rates=(1.0, 0.25), seeds=1, rounds=60
    ),
}
COSTS: dict[Scale, str] = {"paper": "about 20 minutes", "cpu": "about 10 minutes", "smoke": "under a minute"}
_TEXTS = {
    "fedbcgd": "FedBCGD's floats until ε fall with N, at σ and G of order 1 and β/μ = 100 (Theorem 1, Section 4.1)",
    "fedbcgd+": "FedBCGD+'s floats until ε fall with N as Theorem 2 says (Section 4.2)",
}
ITEM = Item(
    NAME,
    "Table 1: orders of rounds and floats until ε, and measured",
    {"paper": (), "cpu": (), "smoke": ()},
    tuple(Claim(f"{NAME}-{name}", text, lambda results: Verdict(NOT_RUN, "")) for name, text in _TEXTS.items()),
    theory.NOTES,
)


def check(asked: Asked) -> None:
    if asked.only:
        raise UserError(f"--only {asked.only}: {NAME} has no panels")


def size_of(asked: Asked) -> Size:
    size = SIZES[asked.scale]
    return size if asked.seeds is None else replace(size, seeds=asked.seeds)


def reproduce(asked: Asked, say: Callable[[str], None], run: bool = True) -> list[dict[str, str]]:
    """Write the item; the verdicts. What was measured with the same settings before is not measured again."""
    folder = make_folder(asked.out / NAME)
    size = size_of(asked)
    setting = theory.Setting(clients=paper.CLIENTS, cohort=paper.COHORT)
    swept = report.sweep(setting)
    write_text(folder / "theory.csv", as_csv(swept))
    report.figure(swept, folder / "figure.png")
    known = measured_before(folder, size)
    if known is None and run:
        known = _measure(folder, size, say)
    rows = None if known is None else known.rows
    if rows is not None:
        report.measured_figure(rows, folder / "measured.png")
    verdicts = judge(rows, asked.scale)
    about = told_circumstances(
        asked.command(ITEM),
        [commit()] if known is None else known.commits,
        [] if rows is None else list(range(1, 1 + size.seeds)),
        0 if rows is None else len(rows) * size.seeds,
    ) | {"hours": "–" if known is None else known.hours}
    write_text(folder / "about.json", as_json({"scale": asked.scale, **about, "claims": verdicts}, indent=1) + "\n")
    write_text(folder / "README.md", _markdown(setting, size, asked.scale, rows, verdicts, about))
    return verdicts


@dataclass(frozen=True)
class Known:
    """What was measured, and by which source in how many hours."""

    rows: list[dict[str, Any]]
    commits: list[str]
    hours: float


def _measure(folder: Path, size: Size, say: Callable[[str], None]) -> Known:
    """Each point is kept as it is measured, so that an interruption costs one of them."""
    kept = Points(folder / "points", commit())
    measured = quadratics.measure(size, say, kept)
    known = Known(quadratics.compare(size, measured), sorted(kept.commits), kept.hours)
    write_text(folder / "search.csv", as_csv(measured.search))
    write_text(folder / "runs.csv", as_csv(measured.runs))
    write_text(folder / "measured.csv", as_csv(known.rows))
    taken = {"size": asdict(size), "commits": known.commits, "hours": known.hours}
    write_text(folder / "measured.json", as_json(taken, indent=1) + "\n")
    return known


def reduced(size: Size) -> list[str]:
    """In what a scale measures less than `paper`."""
    most, here = asdict(SIZES["paper"]), asdict(size)
    flat = {**most.pop("setting"), **most}, {**here.pop("setting"), **here}
    return [
        f"{name}: {_told_value(flat[0][name])} → {_told_value(v)}" for name, v in flat[1].items() if v != flat[0][name]
    ]


def _told_value(value: Any) -> str:
    return ", ".join(f"{v:g}" for v in value) if isinstance(value, tuple) else f"{value:g}"


def judge(rows: Sequence[Mapping[str, Any]] | None, scale: Scale) -> list[dict[str, str]]:
    """FedBCGD: the floats at the largest N are below those at N = 1. FedBCGD+: measured and theorem agree on what N does."""
    said = quadratics.verdicts(rows) if rows is not None else {}
    out = []
    for name, text in _TEXTS.items():
        own = {row["blocks"]: row["measured_d"] for row in rows or () if row["algorithm"] == name}
        status = NOT_RUN
        if own:
            falls = own[max(own)] < own[min(own)]
            agrees = name == "fedbcgd" or "theorem agree" in said.get(name, "")
            status = UNTESTABLE if scale == "smoke" else HOLDS if falls and agrees else FAILS
        told = "; ".join(f"N = {n}: {d:.4g}d" for n, d in own.items())
        evidence = f"{told}. {said.get(name, '')}" if own else ""
        out.append({"key": f"{NAME}-{name}", "claim": text, "verdict": status, "evidence": evidence})
    return out


def measured_before(folder: Path, size: Size) -> Known | None:
    """What the files say, where they are whole and of this size."""
    try:
        about = json.loads((folder / "measured.json").read_text(encoding="utf-8"))
        if about["size"] != json.loads(as_json(asdict(size))):
            return None
        with (folder / "measured.csv").open(encoding="utf-8", newline="") as file:
            rows: list[dict[str, Any]] = [
                {k: v if k == "algorithm" else float(v or "nan") for k, v in row.items()}
                for row in csv.DictReader(file)
            ]
        rows = [row | {"blocks": int(row["blocks"])} for row in rows]
        return Known(rows, [str(c) for c in about["commits"]], float(about["hours"])) if rows else None
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _markdown(
    setting: theory.Setting,
    size: Size,
    scale: Scale,
    rows: Sequence[Mapping[str, Any]] | None,
    verdicts: list[dict[str, str]],
    about: Mapping[str, Any],
) -> str:
    parts = [f"# {ITEM.title}", f"Scale `{scale}`. {_told(setting)}"]
    for case in theory.CASES:
        head = f"| {case} | rounds | terms of the rounds | floats a round, d | floats, d | from |\n|---|---|---|---|---|---|"
        lines = [
            f"| {o.name} | {o.rounds:.4g} | {' + '.join(f'{t:.3g}' for t in o.terms)} | {o.floats_per_round:.3g} | "
            f"{o.floats:.4g} | {o.source} |"
            for o in theory.orders(setting, case)
        ]
        parts.append("\n".join([head, *lines]))
    parts.append("![floats over N and G](figure.png)")
    less = reduced(size)
    against = "Against scale `paper`: " + "; ".join(less) + "." if less else "Nothing is reduced against scale `paper`."
    where = "The paper measures none of this: the quadratics and their sizes are ours."
    parts.append(f"## Measured on quadratics\n\n{_told(size.setting)}\n\n{where} {against}")
    if rows is None:
        parts.append("Not run.")
    else:
        head = "| | N | measured, d | theorem, d | measured, to N = 1 | theorem, to N = 1 |\n|---|---|---|---|---|---|"
        lines = [
            f"| {r['algorithm']} | {r['blocks']} | {r['measured_d']:.4g} | {r['theorem_d']:.4g} | "
            f"{r['measured_ratio']:.3f} | {r['theorem_ratio']:.3f} |"
            for r in rows
        ]
        parts += ["\n".join([head, *lines]), "![floats over N, measured](measured.png)"]
    parts.append("## Claims\n\n" + claims_table(verdicts))
    parts.append("\n".join(f"- {note}" for note in theory.NOTES))
    seeds = ", ".join(map(str, about["seeds"])) or "none"
    parts.append(
        f"`{about['command']}`, commit {', '.join(about['commits'])}, seeds {seeds}, {about['hours']} hours. "
        "`fedbcgd theory` takes any other β, μ, σ, G, M, S, N, T and ε."
    )
    return "\n\n".join(parts) + "\n"


def _told(s: theory.Setting) -> str:
    return (
        f"β = {s.beta:g}, μ = {s.mu:g}, σ = {s.sigma:g}, G = {s.G:g}, M = {s.clients}, S = {s.cohort}, T = {s.steps}, "
        f"ε = {s.epsilon:g}; every hidden constant taken as 1."
    )
