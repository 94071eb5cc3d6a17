"""Table 1: the orders of rounds and floats in numbers, and the floats until ε measured on quadratics."""

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fedbcgd.files import as_csv, as_json, make_folder, write_text
from fedbcgd.paper import printed as paper
from fedbcgd.paper import quadratics, theory, theory_figures
from fedbcgd.paper.measurement_cache import MeasurementCache
from fedbcgd.paper.origin import current_commit
from fedbcgd.paper.pages import about_runs, claims_table, command_line, markdown_table, write_about
from fedbcgd.paper.quadratics import SETTING, Size
from fedbcgd.paper.request import Request
from fedbcgd.paper.spec import FAILS, HOLDS, NOT_RUN, SCALES, UNTESTABLE, Claim, Item, Scale, Verdict

NAME = "table1"
SIZES: dict[Scale, Size] = {
    "paper": Size(),
    "desk": Size(),
    "cpu": Size(blocks=(1, 2, 4, 8), seeds=2),
    "smoke": Size(
        replace(SETTING, beta=10.0, epsilon=0.1), blocks=(1, 2), dim=8, rates=(1.0, 0.25), seeds=1, rounds=60
    ),
}
COSTS: dict[Scale, str] = {
    "paper": "about 20 minutes",
    "desk": "about 20 minutes",
    "cpu": "about 10 minutes",
    "smoke": "under a minute",
}
_TEXTS = {
    "fedbcgd": "FedBCGD's floats until ε fall with N, at σ and G of order 1 and β/μ = 100 (Theorem 1, Section 4.1)",
    "fedbcgd+": "FedBCGD+'s floats until ε fall with N as Theorem 2 says (Section 4.2)",
}
ITEM = Item(
    NAME,
    "Table 1: orders of rounds and floats until ε, and measured",
    dict.fromkeys(SCALES, ()),
    tuple(Claim(f"{NAME}-{name}", text, lambda results: Verdict(NOT_RUN, "")) for name, text in _TEXTS.items()),
    theory.NOTES,
)

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Comparison:
    """Measured floats beside the theorem's, and the commits and hours of the measurement."""

    rows: list[dict[str, Any]]  # from `quadratics.compare`
    commits: list[str]
    hours: float


def reproduce(request: Request, log: Callable[[str], None], run: bool = True) -> list[dict[str, str]]:
    """Write the files of Table 1, measuring what was not measured before.

    Args:
        request: what was asked for.
        log: called with a line about each measurement.
        run: whether to measure at all.

    Returns:
        Key, text, verdict and evidence of each claim.
    """
    folder = make_folder(request.out / NAME)
    size = SIZES[request.scale] if request.seeds is None else replace(SIZES[request.scale], seeds=request.seeds)
    setting = theory.Setting(clients=paper.CLIENTS, cohort=paper.COHORT)
    swept = theory_figures.sweep(setting)
    write_text(folder / "theory.csv", as_csv(swept))
    theory_figures.figure(swept, folder / "figure.png")
    known = read_measured(folder, size)
    if known is None and run:
        known = measure(folder, size, log)
    if known is not None:
        theory_figures.measured_figure(known.rows, folder / "measured.png")
    rows = None if known is None else known.rows
    verdicts = judge(rows, request.scale)
    command = request.command(ITEM)
    if known is None:
        about = about_runs(command, [current_commit()], [], 0, "–")
    else:
        seeds = list(range(1, 1 + size.seeds))
        about = about_runs(command, known.commits, seeds, len(known.rows) * size.seeds, known.hours)
    write_about(folder, request, about, verdicts)
    write_text(folder / "README.md", _markdown(setting, size, request.scale, rows, verdicts, about))
    return verdicts


def measure(
    folder: Path | None, size: Size, log: Callable[[str], None], about: Mapping[str, Any] | None = None
) -> Comparison:
    """Measure floats until ε, and write search.csv, runs.csv, measured.csv and measured.json.

    Args:
        folder: where to write the files and, in `points`, each measurement, so that an interruption loses at most one.
            None: nothing is written.
        size: how much to measure.
        log: called with a line about each measurement.
        about: further values for measured.json.
    """
    cache = MeasurementCache(None if folder is None else folder / "points", current_commit())
    measured = quadratics.measure(size, log, cache)
    comparison = Comparison(quadratics.compare(size, measured), sorted(cache.commits), cache.hours)
    if folder is not None:
        write_text(folder / "search.csv", as_csv(measured.search))
        write_text(folder / "runs.csv", as_csv(measured.runs))
        write_text(folder / "measured.csv", as_csv(comparison.rows))
        content = {
            **(about or {}),
            "size": asdict(size),
            "commits": comparison.commits,
            "hours": comparison.hours,
            "verdicts": quadratics.verdicts(comparison.rows),
        }
        write_text(folder / "measured.json", as_json(content, indent=1) + "\n")
    return comparison


def read_measured(folder: Path, size: Size) -> Comparison | None:
    """Read an earlier measurement; None if there is none of this size, or a file of it is damaged."""
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
        return Comparison(rows, [str(c) for c in about["commits"]], float(about["hours"])) if rows else None
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def judge(rows: Rows | None, scale: Scale) -> list[dict[str, str]]:
    """Return key, text, verdict and evidence of each claim.

    FedBCGD: the floats at the largest N are below those at N = 1. FedBCGD+: also, measured and theorem agree on the
    effect of N.

    Args:
        rows: what `quadratics.compare` returned; None if nothing was measured.
        scale: the scale of the measurement.
    """
    agreement = quadratics.verdicts(rows) if rows is not None else {}
    records = []
    for name, text in _TEXTS.items():
        floats = {row["blocks"]: row["measured_d"] for row in rows or () if row["algorithm"] == name}
        status, evidence = NOT_RUN, ""
        if floats:
            falls = floats[max(floats)] < floats[min(floats)]
            agrees = name == "fedbcgd" or "theorem agree" in agreement.get(name, "")
            status = UNTESTABLE if scale == "smoke" else HOLDS if falls and agrees else FAILS
            numbers = "; ".join(f"N = {n}: {d:.4g}d" for n, d in floats.items())
            evidence = f"{numbers}. {agreement.get(name, '')}"
        records.append({"key": f"{NAME}-{name}", "claim": text, "verdict": status, "evidence": evidence})
    return records


def reductions(size: Size) -> list[str]:
    """Return how a size is smaller than that of scale `paper`, as lines such as `seeds: 3 → 2`."""
    whole, own = ({**values.pop("setting"), **values} for values in (asdict(SIZES["paper"]), asdict(size)))
    return [f"{name}: {_format(whole[name])} → {_format(v)}" for name, v in own.items() if v != whole[name]]


def _format(value: Any) -> str:
    return ", ".join(f"{v:g}" for v in value) if isinstance(value, tuple) else f"{value:g}"


def _markdown(
    setting: theory.Setting,
    size: Size,
    scale: Scale,
    rows: Rows | None,
    verdicts: list[dict[str, str]],
    about: Mapping[str, Any],
) -> str:
    parts = [f"# {ITEM.title}", f"Scale `{scale}`. {_describe(setting)}"]
    parts += [markdown_table(*theory_figures.order_table(setting, case)) for case in theory.CASES]
    parts.append("![floats over N and G](figure.png)")
    reduced = reductions(size)
    against = (
        f"Against scale `paper`: {'; '.join(reduced)}." if reduced else "Nothing is reduced against scale `paper`."
    )
    where = "The paper measures none of this: the quadratics and their sizes are ours."
    parts.append(f"## Measured on quadratics\n\n{_describe(size.setting)}\n\n{where} {against}")
    if rows is None:
        parts.append("Not run.")
    else:
        parts.append(markdown_table(*theory_figures.measured_table(rows)))
        parts.append("![floats over N, measured](measured.png)")
    parts.append("## Claims\n\n" + claims_table(verdicts))
    parts.append("\n".join(f"- {note}" for note in theory.NOTES))
    parts.append(
        f"{command_line(about)}, {about['hours']} hours. `fedbcgd theory` takes any other β, μ, σ, G, M, S, N, T and ε."
    )
    return "\n\n".join(parts) + "\n"


def _describe(s: theory.Setting) -> str:
    return (
        f"β = {s.beta:g}, μ = {s.mu:g}, σ = {s.sigma:g}, G = {s.G:g}, M = {s.clients}, S = {s.cohort}, T = {s.steps}, "
        f"ε = {s.epsilon:g}; every hidden constant taken as 1."
    )
