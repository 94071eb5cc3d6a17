"""The files of an item: tables of the paper's numbers and ours, its search, its verdicts, and how it was run."""

import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel

from fedbcgd.backends.workers.processes import cores
from fedbcgd.engine.loop import Outcome
from fedbcgd.errors import UserError
from fedbcgd.files import as_csv, as_json, make_folder, write_text
from fedbcgd.paper import figures
from fedbcgd.paper.claims import judge
from fedbcgd.paper.reductions import reductions
from fedbcgd.paper.request import Request
from fedbcgd.paper.results import PanelResult, Trial, format_final, format_floats, format_number, format_printed
from fedbcgd.paper.spec import NOT_RUN, Contender, Item
from fedbcgd.version import __version__

_SYMBOLS = {"lr": "η", "momentum": "λ", "alpha": "α", "server_lr": "η of the server"}


def write(item: Item, request: Request, results: list[PanelResult]) -> None:
    """Write README.md, about.json, the CSV files and the figure of an item from its finished runs."""
    folder = make_folder(request.out / item.name)
    for name, rows in (
        ("scores.csv", scores(results)),
        ("runs.csv", runs(results)),
        ("curves.csv", curves(results)),
        ("search.csv", search(results)),
    ):
        if rows:
            write_text(folder / name, as_csv(rows))
    drawn = figures.draw(results, folder, f"{item.title} — scale {request.scale}")
    verdicts = judge_all(item, request, results)
    about = _about_results(request.command(item), results)
    write_about(folder, request, about, verdicts)
    write_text(folder / "README.md", markdown(item, request, results, verdicts, about, drawn))


def judge_all(item: Item, request: Request, results: list[PanelResult]) -> list[dict[str, str]]:
    """Return key, text, verdict and evidence of each claim of an item."""
    by_key = {result.panel.key: result for result in results}
    records = []
    for claim in item.claims:
        verdict = judge(item, claim, by_key, request.scale)
        records.append({"key": claim.key, "claim": claim.text, "verdict": verdict.status, "evidence": verdict.evidence})
    return records


# -- rows of the CSV files


def scores(results: list[PanelResult]) -> list[dict[str, Any]]:
    """Return a row for each contender: our numbers and the paper's."""
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
                    result.panel.metric: None if result.ended_early(contender.key) else mean,
                    "deviation": None if result.ended_early(contender.key) else deviation,
                    "target": result.target,
                    "floats_d": result.mean_floats_to_target(contender.key),
                    "paper": printed and printed.mean,
                    "paper_deviation": printed and printed.deviation,
                    "paper_floats_d": printed and printed.floats,
                    **{f"chosen_{k}": v for k, v in result.hyper_parameters(contender.key).items()},
                }
            )
    return rows


def runs(results: list[PanelResult]) -> list[dict[str, Any]]:
    """Return a row for each run: why it stopped, its final value and its costs."""
    return [
        {
            "panel": result.panel.key,
            "contender": contender.key,
            "seed": seed,
            "stopped": outcome.stopped,
            "rounds": outcome.rounds,
            "last_tenth": result.finals(contender.key)[k],
            "floats_d": dict(enumerate(result.floats_to_target(contender.key))).get(k),
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
    """Return a row for each evaluation of each run."""
    columns = ("round", "upload_d", "gradient_evaluations", "test_accuracy", "test_loss", "train_loss")
    return [
        {"panel": r.panel.key, "contender": c.key, "seed": seed, **{k: row[k] for k in columns if k in row}}
        for r in results
        for c in r.contenders
        for seed, outcome in r.outcomes[c.key].items()
        for row in outcome.rows
    ]


def search(results: list[PanelResult]) -> list[dict[str, Any]]:
    """Return a row for each candidate in each rung of the search."""
    return [
        {
            "panel": result.panel.key,
            "contender": trial.contender,
            **trial.options,
            f"validation_{result.panel.metric}": trial.score,
            "rung": trial.rung,
            "rounds": trial.rounds,
            "chosen": int(trial.chosen),
        }
        for result in results
        for trial in result.trials
    ]


# -- the page in Markdown


def markdown(
    item: Item,
    request: Request,
    results: list[PanelResult],
    verdicts: list[dict[str, str]],
    about: Mapping[str, Any],
    drawn: list[str],
) -> str:
    """Return the README.md of an item.

    Args:
        item: the item.
        request: what was asked for.
        results: the results of all its panels.
        verdicts: what `judge_all` returned.
        about: how the item was run, see `about_runs`.
        drawn: the file names of its figure.
    """
    parts = [
        f"# {item.title}",
        f"Scale `{request.scale}`. Mean ± standard deviation over seeds of the last 10 % of rounds.",
    ]
    seeds = {r.panel.key: _seeds_run(r) for r in results if r.contenders}
    reduced = reductions(item, [r.panel for r in results], seeds)
    if reduced:
        parts.append("Against the paper's setting:\n\n" + "\n".join(f"- {line}" for line in reduced))
    parts += [_panel_section(result) for result in results]
    if drawn:
        parts.append(f"![{item.title}]({drawn[0]})")
    parts.append("## Claims\n\n" + claims_table(verdicts))
    if any(result.trials for result in results):
        parts.append("## The search\n\n" + _search_section(results))
    if item.notes:
        parts.append("## Where the paper is silent\n\n" + "\n".join(f"- {note}" for note in item.notes))
    parts.append(
        f"{command_line(about)}, {request.machine.precision}; {about['runs']} runs took {about['hours']:g} hours together "
        f"with {about['machine']['cores']} cores (the search not counted; the machine may have done other work)."
    )
    return "\n\n".join(parts) + "\n"


def _seeds_run(result: PanelResult) -> str:
    """Return how many seeds were finished: `2`, or `1 to 2` if contenders differ."""
    counts = {len(result.outcomes[contender.key]) for contender in result.contenders}
    return f"{min(counts)} to {max(counts)}" if len(counts) > 1 else str(min(counts))


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table with these names of columns and these cells."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def claims_table(verdicts: list[dict[str, str]]) -> str:
    """Return the verdicts as a Markdown table."""
    rows = [(v["claim"], f"**{v['verdict']}**", v["evidence"]) for v in verdicts]
    return markdown_table(("claim", "verdict", "evidence"), rows)


def command_line(about: Mapping[str, Any]) -> str:
    """Return command, commits and seeds as a phrase."""
    seeds = ", ".join(map(str, about["seeds"])) or "none"
    return f"`{about['command']}`, commit {', '.join(about['commits'])}, seeds {seeds}"


def _panel_section(result: PanelResult) -> str:
    panel = result.panel
    if not result.contenders and not result.trials:
        return f"## {panel.title}\n\nNot run."
    whose = ""
    if panel.target is None and result.reference is not None:
        whose = f", which is what {result.title(result.reference)} ends with"
    parts = [
        f"## {panel.title}",
        f"Upload budget {panel.budget:g}d. Target: {_target(result)}{whose}.",
        markdown_table(*panel_table(result)),
    ]
    missing = _missing(result)
    return "\n\n".join([*parts, f"Not there yet: {'; '.join(missing)}."] if missing else parts)


def panel_table(result: PanelResult) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the names of the columns, and the cells of a row for each contender of a panel."""
    metric = "accuracy, %" if result.higher_is_better else "test loss"
    own = ("", "seeds", metric, f"to {_target(result)}")
    costs = ("rounds", "largest upload of a client, d", "gradient evaluations", "chosen")
    return (*own, "paper: %", "paper: to target", *costs), [
        _contender_cells(result, c) for c in result.panel.contenders
    ]


def _contender_cells(result: PanelResult, contender: Contender) -> tuple[str, ...]:
    by_seed = result.outcomes.get(contender.key)
    printed = format_printed(result.panel.printed.get(contender.key))
    if not by_seed:
        return contender.title, "0", NOT_RUN, "–", *printed, "–", "–", "–", "–"
    first = next(iter(by_seed.values()))
    chosen = ", ".join(f"{_SYMBOLS[k]} {v:g}" for k, v in result.hyper_parameters(contender.key).items())
    own = (
        contender.title,
        str(len(by_seed)),
        format_final(result, contender.key),
        format_floats(result, contender.key),
    )
    gradients = f"{first.ledger.gradient_evaluations:,}"
    return *own, *printed, str(first.rounds), _max_upload(by_seed.values()), gradients, chosen or "–"


def _target(result: PanelResult) -> str:
    return "–" if result.target is None else format_number(result.target, result.digits)


def _missing(result: PanelResult) -> list[str]:
    """Return the contenders with planned seeds that were not run, and those seeds."""
    out = []
    for contender in result.panel.contenders:
        seeds = set(range(1, 1 + result.panel.effort.seeds)) - set(result.outcomes.get(contender.key, {}))
        waits = "" if contender.key in result.chosen else ", which waits for its search"
        if seeds:
            out.append(f"{contender.title}, seed {', '.join(map(str, sorted(seeds)))}{waits}")
    return out


def _max_upload(outcomes: Iterable[Outcome]) -> str:
    """Return the largest upload in d of any client in any round: blocks differ in size."""
    return f"{max(o.ledger.upload_max_bytes / (o.ledger.dim * o.ledger.itemsize) for o in outcomes):.2f}"


def _search_section(results: list[PanelResult]) -> str:
    lines = []
    for result in results:
        for key in dict.fromkeys(trial.contender for trial in result.trials):
            trials = [trial for trial in result.trials if trial.contender == key]
            rates = sorted(trial.options["lr"] for trial in trials)
            chosen = next((trial.options["lr"] for trial in trials if trial.chosen), None)
            edge = " (at the edge of the grid)" if chosen in (rates[0], rates[-1]) else ""
            unfinished = " (not finished)" if chosen is None else ""
            rungs = [
                _rung_text(result, [trial for trial in trials if trial.rung == rung])
                for rung in range(1, 1 + max(trial.rung for trial in trials))
            ]
            head = f"- {result.panel.title}, {result.title(key)}, "
            lines.append(head + ". Then ".join(rungs) + edge + unfinished)
    return "On data held out of the training set, seed 0; the test set is not looked at.\n\n" + "\n".join(lines)


def _rung_text(result: PanelResult, trials: list[Trial]) -> str:
    texts = []
    for trial in trials:
        point = ", ".join(f"{k} {v:g}" for k, v in trial.options.items())
        text = f"{point}: {format_number(result.unit * trial.score, result.digits)}"
        texts.append(f"**{text}**" if trial.chosen else text)
    return f"{trials[0].rounds} rounds: {'; '.join(texts)}"


# -- about.json: how an item was run, and its verdicts


class _ClaimRecord(BaseModel):
    key: str
    verdict: str
    evidence: str


class About(BaseModel):
    """What other pages read from an item's about.json."""

    scale: str
    claims: list[_ClaimRecord]
    precision: str = ""
    seeds: list[int] = []
    runs: int = 0
    hours: int | float | str = "–"


def _about_results(command: str, results: list[PanelResult]) -> dict[str, Any]:
    outcomes = [o for r in results for by_seed in r.outcomes.values() for o in by_seed.values()]
    seeds = sorted({seed for r in results for by_seed in r.outcomes.values() for seed in by_seed})
    hours = round(sum(o.seconds for o in outcomes) / 3600, 3)
    commits = sorted({commit for r in results for commit in r.commits})
    return about_runs(command, commits, seeds, len(outcomes), hours)


def about_runs(command: str, commits: list[str], seeds: list[int], runs: int, hours: float | str) -> dict[str, Any]:
    """Return how runs were made: the arguments, and the versions and machine of this process."""
    return {
        "command": command,
        "commits": commits,
        "seeds": seeds,
        "runs": runs,
        "versions": {"fedbcgd": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "machine": {"system": platform.platform(), "cores": cores()},
        "hours": hours,
    }


def write_about(folder: Path, request: Request, about: Mapping[str, Any], verdicts: list[dict[str, str]]) -> None:
    """Write the about.json of an item."""
    content = {"scale": request.scale, "precision": request.machine.precision, **about, "claims": verdicts}
    write_text(folder / "about.json", as_json(content, indent=1) + "\n")


def read_about(folder: Path) -> About | None:
    """Read the about.json of an item; None if there is none.

    Raises:
        UserError: the file is damaged.
    """
    path = folder / "about.json"
    try:
        return About.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        raise UserError(
            f"{path} is damaged: delete it, and `fedbcgd reproduce {folder.name} --show` writes it again"
        ) from None


def claims_page(out: Path, items: Mapping[str, Item], scale: str) -> str:
    """Return claims.md: the verdicts on every claim, from the about.json of the items."""
    claims, state = [], []
    for item in items.values():
        about = read_about(out / item.name)
        name = f"[{item.name}]({item.name}/README.md)" if about else item.name
        about = about or About(scale=scale, claims=[])
        known = {record.key: record for record in about.claims}
        for claim in item.claims:
            record = known.get(claim.key, _ClaimRecord(key=claim.key, verdict=NOT_RUN, evidence=""))
            claims.append((name, claim.text, f"**{record.verdict}**", record.evidence))
        seeds = ", ".join(map(str, about.seeds)) or NOT_RUN
        state.append((name, item.title, seeds, str(about.runs), str(about.hours)))
    head = (
        f"# The paper's claims\n\nScale `{scale}`; written by `fedbcgd reproduce` from what it measured. An item's own page "
        "has its tables, figure, search and circumstances."
    )
    parts = [
        head,
        markdown_table(("item", "claim", "verdict", "evidence"), claims),
        "## What was run",
        markdown_table(("item", "what", "seeds", "runs", "hours"), state),
    ]
    return "\n\n".join(parts) + "\n"
