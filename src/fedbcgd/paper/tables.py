"""What an item leaves: tables with the paper's numbers beside ours, the search, the verdicts, the circumstances."""

import json
import math
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from fedbcgd.backends.workers.processes import cores
from fedbcgd.engine.loop import Outcome
from fedbcgd.errors import UserError
from fedbcgd.files import as_csv, as_json, make_folder, write_text
from fedbcgd.paper import figures
from fedbcgd.paper.claims import judge
from fedbcgd.paper.engine import Asked
from fedbcgd.paper.reductions import reductions
from fedbcgd.paper.results import PanelResult, shown, shown_final, shown_floats
from fedbcgd.paper.spec import NOT_RUN, Item, Printed, Verdict
from fedbcgd.version import __version__


def write(item: Item, asked: Asked, results: list[PanelResult]) -> Path:
    """Everything about an item, from what is finished."""
    folder = make_folder(asked.out / item.name)
    for name, rows in (
        ("scores.csv", scores(results)),
        ("runs.csv", runs(results)),
        ("curves.csv", curves(results)),
        ("search.csv", search(results)),
    ):
        if rows:
            write_text(folder / name, as_csv(rows))
    drawn = figures.draw(results, folder, f"{item.title} — scale {asked.scale}")
    verdicts = judged(item, asked, results)
    about = circumstances(asked.command(item), results)
    told = {"scale": asked.scale, **about, "claims": verdicts}
    write_text(folder / "about.json", as_json(told, indent=1) + "\n")
    write_text(folder / "README.md", markdown(item, asked, results, verdicts, about, drawn))
    return folder


def judged(item: Item, asked: Asked, results: list[PanelResult]) -> list[dict[str, str]]:
    by_key = {result.panel.key: result for result in results}
    out = []
    for claim in item.claims:
        verdict: Verdict = judge(item, claim, by_key, asked.scale)
        out.append({"key": claim.key, "claim": claim.text, "verdict": verdict.status, "evidence": verdict.evidence})
    return out


# -- rows of the CSV files


def scores(results: list[PanelResult]) -> list[dict[str, Any]]:
    """A row for each contender: ours and the paper's."""
    rows = []
    for result in results:
        for contender in result.contenders:
            mean, deviation = result.final(contender.key)
            printed = result.panel.printed.get(contender.key)
            rows.append(
                {
                    "panel": result.panel.key,
                    "contender": contender.key,
                    "seeds": len(result.outcomes[contender.key]),
                    result.panel.metric: mean,
                    "deviation": deviation,
                    "target": result.target,
                    "floats_d": result.to_target(contender.key),
                    "paper": printed and printed.mean,
                    "paper_deviation": printed and printed.deviation,
                    "paper_floats_d": printed and printed.floats,
                    **{f"chosen_{k}": v for k, v in result.hyper_parameters(contender.key).items()},
                }
            )
    return rows


def runs(results: list[PanelResult]) -> list[dict[str, Any]]:
    return [
        {
            "panel": result.panel.key,
            "contender": contender.key,
            "seed": seed,
            "stopped": outcome.stopped,
            "rounds": outcome.rounds,
            "last_tenth": result.finals(contender.key)[k],
            "floats_d": dict(enumerate(result.floats(contender.key))).get(k),
            "upload_d": outcome.ledger.upload_d,
            "upload_max_bytes": outcome.ledger.upload_max_bytes,
            "gradient_evaluations": outcome.ledger.gradient_evaluations,
            "seconds": round(outcome.seconds, 1),
        }
        for result in results
        for contender in result.contenders
        for k, (seed, outcome) in enumerate(result.outcomes[contender.key].items())
    ]


def curves(results: list[PanelResult]) -> list[dict[str, Any]]:
    kept = ("round", "upload_d", "gradient_evaluations", "test_accuracy", "test_loss", "train_loss")
    return [
        {"panel": r.panel.key, "contender": c.key, "seed": seed, **{k: row[k] for k in kept if k in row}}
        for r in results
        for c in r.contenders
        for seed, outcome in r.outcomes[c.key].items()
        for row in outcome.rows
    ]


def search(results: list[PanelResult]) -> list[dict[str, Any]]:
    return [
        {
            "panel": result.panel.key,
            "contender": trial.contender,
            **trial.options,
            f"validation_{result.panel.metric}": trial.score,
            "rounds": trial.rounds,
            "chosen": int(trial.chosen),
        }
        for result in results
        for trial in result.trials
    ]


# -- the page in Markdown


def markdown(
    item: Item,
    asked: Asked,
    results: list[PanelResult],
    verdicts: list[dict[str, str]],
    about: Mapping[str, Any],
    drawn: list[str],
) -> str:
    parts = [
        f"# {item.title}",
        f"Scale `{asked.scale}`. Mean ± standard deviation over seeds of the last 10 % of rounds.",
    ]
    less = reductions(item, [r.panel for r in results], {r.panel.key: seeds_run(r) for r in results if r.contenders})
    if less:
        parts.append("Against the paper's setting:\n\n" + "\n".join(f"- {line}" for line in less))
    parts += [_panel(result) for result in results]
    if drawn:
        parts.append(f"![{item.title}]({drawn[0]})")
    parts.append("## Claims\n\n" + claims_table(verdicts))
    if any(result.trials for result in results):
        parts.append("## The search\n\n" + _search(results))
    if item.notes:
        parts.append("## Where the paper is silent\n\n" + "\n".join(f"- {note}" for note in item.notes))
    parts.append(_circumstances(about))
    return "\n\n".join(parts) + "\n"


def seeds_run(result: PanelResult) -> str:
    """How many seeds were finished: `2`, or `1 to 2` where contenders differ."""
    counts = {len(result.outcomes[contender.key]) for contender in result.contenders}
    return f"{min(counts)} to {max(counts)}" if len(counts) > 1 else str(min(counts))


def claims_table(verdicts: list[dict[str, str]]) -> str:
    rows = [f"| {v['claim']} | **{v['verdict']}** | {v['evidence']} |" for v in verdicts]
    return "\n".join(["| claim | verdict | evidence |", "|---|---|---|", *rows])


def _panel(result: PanelResult) -> str:
    panel = result.panel
    if not result.contenders:
        return f"## {panel.title}\n\nNot run."
    what = "accuracy, %" if result.higher else "test loss"
    target = "–" if result.target is None else shown(result.target, 1 if result.higher else 4)
    whose = (
        ""
        if panel.target is not None or result.reference is None
        else (f", which is what {panel.contender(result.reference).title} ends with")
    )
    head = (
        f"| | seeds | {what} | to {target} | paper: % | paper: to target | rounds | largest upload of a client, d | "
        "gradient evaluations | lr, λ |"
    )
    rows = [head, "|---|---|---|---|---|---|---|---|---|---|"]
    for contender in panel.contenders:
        by_seed = result.outcomes.get(contender.key)
        printed = panel.printed.get(contender.key)
        theirs = f"{printed.mean:.1f} ± {printed.deviation:.1f} | {printed_floats(printed)}" if printed else "– | –"
        if not by_seed:
            rows.append(f"| {contender.title} | 0 | {NOT_RUN} | – | {theirs} | – | – | – | – |")
            continue
        first = next(iter(by_seed.values()))
        chosen = ", ".join(f"{v:g}" for v in result.hyper_parameters(contender.key).values())
        rows.append(
            f"| {contender.title} | {len(by_seed)} | {shown_final(result, contender.key)} | "
            f"{shown_floats(result, contender.key)} | {theirs} | {first.rounds} | {_largest(by_seed.values())} | "
            f"{first.ledger.gradient_evaluations:,} | {chosen or '–'} |"
        )
    rest = f"Upload budget {panel.budget:g}d. Target: {target}{whose}."
    return f"## {panel.title}\n\n{rest}\n\n" + "\n".join(rows)


def _largest(outcomes: Iterable[Outcome]) -> str:
    """The largest upload of any one client in any one round: blocks are of different sizes."""
    return f"{max(o.ledger.upload_max_bytes / (o.ledger.dim * o.ledger.itemsize) for o in outcomes):.2f}"


def printed_floats(printed: Printed) -> str:
    if printed.floats is None:
        return "–"
    return "∞" if math.isinf(printed.floats) else f"{printed.floats:g}d"


def _search(results: list[PanelResult]) -> str:
    lines = []
    for result in results:
        unit, digits = (100.0, 1) if result.higher else (1.0, 4)
        for key in dict.fromkeys(trial.contender for trial in result.trials):
            trials = [trial for trial in result.trials if trial.contender == key]
            told = []
            for trial in trials:
                point = ", ".join(f"{k} {v:g}" for k, v in trial.options.items())
                score = shown(unit * trial.score, digits)
                told.append(f"**{point}: {score}**" if trial.chosen else f"{point}: {score}")
            best = next(trial for trial in trials if trial.chosen)
            rates = sorted(trial.options["lr"] for trial in trials)
            edge = " (at the edge of the grid)" if best.options["lr"] in (rates[0], rates[-1]) else ""
            lines.append(
                f"- {result.panel.title}, {result.panel.contender(key).title}, {trials[0].rounds} rounds: "
                + "; ".join(told)
                + edge
            )
    return "On data held out of the training set, seed 0; the test set is not looked at.\n\n" + "\n".join(lines)


# -- circumstances


def circumstances(command: str, results: list[PanelResult]) -> dict[str, Any]:
    outcomes = [o for r in results for by_seed in r.outcomes.values() for o in by_seed.values()]
    seeds = sorted({seed for r in results for by_seed in r.outcomes.values() for seed in by_seed})
    hours = round(sum(o.seconds for o in outcomes) / 3600, 3)
    commits = sorted(set().union(*(r.commits for r in results))) if results else []
    return told_circumstances(command, commits, seeds, len(outcomes)) | {"hours": hours}


def told_circumstances(command: str, commits: list[str], seeds: list[int], runs: int) -> dict[str, Any]:
    return {
        "command": command,
        "commits": commits,
        "seeds": seeds,
        "runs": runs,
        "versions": {"fedbcgd": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "machine": {"system": platform.platform(), "cores": cores()},
    }


def _circumstances(about: Mapping[str, Any]) -> str:
    seeds = ", ".join(map(str, about["seeds"])) or "none"
    return (
        f"`{about['command']}`, commit {', '.join(about['commits'])}, seeds {seeds}; {about['runs']} runs took "
        f"{about['hours']:g} hours together with {about['machine']['cores']} cores "
        "(the search not counted; the machine may have done other work)."
    )


def read_about(folder: Path) -> dict[str, Any]:
    """What an item has left about itself; nothing where there is nothing."""
    path = folder / "about.json"
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(about["scale"], str) and all({"key", "verdict", "evidence"} <= set(v) for v in about["claims"]):
            return dict(about)
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError):
        pass
    raise UserError(f"{path} is damaged: delete it, and `fedbcgd reproduce {folder.name} --show` writes it anew")


def all_claims(out: Path, items: Mapping[str, Item], scale: str) -> str:
    """The verdicts on every claim, from what the items have left; what was not run is called so."""
    claims = ["| item | claim | verdict | evidence |", "|---|---|---|---|"]
    state = ["| item | what | seeds | runs | hours |", "|---|---|---|---|---|"]
    for item in items.values():
        about = read_about(out / item.name)
        known = {v["key"]: v for v in about.get("claims", ())}
        name = f"[{item.name}]({item.name}/README.md)" if about else item.name
        for claim in item.claims:
            v = known.get(claim.key, {"verdict": NOT_RUN, "evidence": ""})
            claims.append(f"| {name} | {claim.text} | **{v['verdict']}** | {v['evidence']} |")
        seeds = ", ".join(map(str, about.get("seeds", ()))) or NOT_RUN
        state.append(f"| {name} | {item.title} | {seeds} | {about.get('runs', 0)} | {about.get('hours', '–')} |")
    head = (
        f"# The paper's claims\n\nScale `{scale}`; written by `fedbcgd reproduce` from what it measured. An item's own page "
        "has its tables, figure, search and circumstances."
    )
    return "\n\n".join([head, "\n".join(claims), "## What was run", "\n".join(state)]) + "\n"
