"""The steps of `fedbcgd reproduce`."""

import csv
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from fedbcgd.backends.workers.processes import cores
from fedbcgd.display.tables import text_table
from fedbcgd.engine.precision import native_bf16
from fedbcgd.errors import UserError, unknown
from fedbcgd.files import make_folder, write_text
from fedbcgd.paper import engine, pages, table1
from fedbcgd.paper.costs import cost, total
from fedbcgd.paper.engine import Display, Engine
from fedbcgd.paper.items import ITEMS
from fedbcgd.paper.plan import Machine
from fedbcgd.paper.reductions import reductions
from fedbcgd.paper.request import Request, no_panel, panels_for, select_panels
from fedbcgd.paper.results import PanelResult
from fedbcgd.paper.spec import SCALES, Item, Scale
from fedbcgd.runs.config import Data
from fedbcgd.runs.experiment import load_data

ALL = "all"


def check_scale(scale: str) -> Scale:
    """Return the scale.

    Raises:
        UserError: there is no such scale.
    """
    for known in SCALES:
        if known == scale:
            return known
    raise unknown("scale", scale, SCALES)


def item_names(item: str, scale: str = "cpu", only: str = "") -> list[str]:
    """Return the names of the requested items.

    Args:
        item: the name of an item, or "all".
        scale: the scale.
        only: with "all", items without a panel whose key contains this are left out.

    Raises:
        UserError: there is no such item, scale or panel.
    """
    known = check_scale(scale)
    here = [name for name, it in ITEMS.items() if it.panels[known] or name == table1.NAME]
    if item != ALL:
        if item not in ITEMS:
            raise unknown("item", item, [*ITEMS, ALL])
        if item not in here:
            raise UserError(
                f"{item}: scale {scale} leaves it out; expected one of {', '.join(here)}, or another --scale"
            )
        return [item]
    if not only:
        return here
    keys = {name: [panel.key for panel in it.panels[known]] for name, it in ITEMS.items()}
    names = [name for name, own in keys.items() if any(only in key for key in own)]
    if not names:
        raise no_panel(only, dict.fromkeys(key for own in keys.values() for key in own))
    return names


def check(names: Sequence[str], request: Request, run: bool = True) -> None:
    """Check a request before hours of work.

    Args:
        names: names of the items.
        request: what was asked for.
        run: whether runs are to be computed, which needs their data sets.

    Raises:
        UserError: the folder has results of another scale, or a data set or panel is unknown or missing.
    """
    for path in sorted(request.out.glob("*/about.json")):
        about = pages.read_about(path.parent)
        if about is not None and about.scale != request.scale:
            raise UserError(
                f"--out {request.out}: expected results of scale {request.scale}, got results of scale {about.scale}; "
                "choose another folder"
            )
    used = {panel.data["name"] for name in names for panel in ITEMS[name].panels[request.scale]}
    for name in request.data:
        if name not in used:
            raise unknown("--data", name, sorted(used))
    if table1.NAME in names and request.only:
        raise UserError(
            f"--only: expected none with {table1.NAME}, which has no panels, got {request.only!r}; leave it out"
        )
    for name in names:
        for panel in select_panels(panels_for(ITEMS[name], request), request.only) if run else ():
            load_data(Data(**panel.data))
        _check_keeps_results(name, request)


def _check_keeps_results(name: str, request: Request) -> None:
    """Raise a UserError if a page would be rewritten without a panel that it has, since the panel's data set is missing."""
    path = request.out / name / "scores.csv"
    if not path.exists():
        return
    with path.open(encoding="utf-8", newline="") as file:
        on_page = {row["panel"] for row in csv.DictReader(file)}
    for result in engine.gather(panels_for(ITEMS[name], request), request):
        if result.unavailable and result.panel.key in on_page:
            raise UserError(
                f"{path.parent}: expected the data of {result.panel.title}, whose results would be lost, got none: "
                f"{result.unavailable}. If another data set replaces it, name that with --data"
            )


def make_request(
    scale: str,
    out: Path | None,
    only: str = "",
    seeds: int | None = None,
    data: Sequence[str] = (),
    workers: int | None = None,
    device: str = "cpu",
    precision: str | None = None,
) -> Request:
    """Return the request that these command-line options make.

    Args:
        scale: the scale.
        out: the folder for everything; None: runs/reproduce-SCALE.
        only: only panels whose key contains this.
        seeds: the number of seeds; None: that of the scale.
        data: texts such as "emnist-byclass=mine", which replace a data set by another.
        workers: how many processes; None: one per core.
        device: where clients compute.
        precision: "fp32" or "bf16"; None: that of the results in the folder; without results "bf16" at scale `desk` if
            the device computes in it, else "fp32".

    Raises:
        UserError: the scale is unknown, or a text in `data` has another form.
    """
    replaced = {}
    for pair in data:
        name, equals, other = pair.partition("=")
        if not equals or not name or not other:
            raise UserError(f"--data: expected NAME=OTHER, such as emnist-byclass=my-emnist, got {pair!r}")
        replaced[name] = other
    folder = out or Path(f"runs/reproduce-{scale}")
    known = check_scale(scale)
    if precision is None:
        precision = _recorded_precision(folder)
    if precision is None:
        precision = "bf16" if known == "desk" and native_bf16(torch.device(device)) else "fp32"
    return Request(known, folder, seeds, only, replaced, Machine(workers, device, precision))


def _recorded_precision(folder: Path) -> str | None:
    """Return the precision of the results in a folder, if there are any."""
    abouts = [pages.read_about(path.parent) for path in sorted(folder.glob("*/about.json"))]
    return next((about.precision for about in abouts if about is not None and about.precision), None)


def show_list(console: Console, scale: str, machine: Machine | None = None) -> None:
    """Print the items and what each costs at a scale, on this machine."""
    known = check_scale(scale)
    machine = machine or Machine()

    def price(item: Item) -> str:
        if item.runs_of:
            return f"the runs of {' and '.join(item.runs_of)}"
        if item.name == table1.NAME:
            return table1.COSTS[known]
        return str(cost(item, known, machine)) if item.panels[known] else "not at this scale"

    rows = [(item.name, item.title, price(item)) for item in ITEMS.values()]
    title = f"scale {scale}; {_timed(machine)}, nothing being finished before"
    console.print(text_table(title, ("item", "what", "cost"), rows, texts=3))


def run(names: Sequence[str], request: Request, display: Display, console: Console) -> None:
    """Do all unfinished runs of some items, those that decide most claims first.

    Args:
        names: names of the items.
        request: what was asked for.
        display: makes the progress display.
        console: where to print how the scale differs from the paper, what is left and what is done.
    """
    items = [ITEMS[name] for name in names]
    differences: dict[str, list[str]] = {}
    for item in items:
        for line in () if item.runs_of and len(items) > 1 else reductions(item, panels_for(item, request)):
            differences.setdefault(line, []).append(item.name)
    if differences:
        _print(console, "against the paper's setting:")
    for line, where in differences.items():
        _print(console, f"  {line}" + (f" ({', '.join(where)})" if len(names) > 1 else ""))
    work = Engine(items, request)
    if work.steps and request.scale != "smoke":
        console.print(_cost_table(work, request.machine))
    work.run(display, lambda line: _print(console, line), lambda item, results: _write(item, request, results))


def show(name: str, request: Request, console: Console, run: bool = False) -> list[dict[str, str]]:
    """Write the files of an item from its finished runs, and print its tables and verdicts.

    Args:
        name: name of the item.
        request: what was asked for.
        console: where to print.
        run: whether to measure what was not measured before, if the item is Table 1.

    Returns:
        Key, text, verdict and evidence of each claim.
    """
    item = ITEMS[name]
    make_folder(request.out)
    _print(console, f"{item.title} — scale {request.scale}")
    if name == table1.NAME:
        verdicts = table1.reproduce(request, console.print, run)
        _write_claims(request)
    else:
        results = engine.gather(panels_for(item, request), request)
        _write(item, request, results)
        for result in results:
            head, rows = pages.panel_table(result)
            title = f"{result.panel.title}, {result.panel.budget:g}d"
            console.print(text_table(title, head[:6], [cells[:6] for cells in rows]))
        verdicts = pages.judge_all(item, request, results)
    for verdict in verdicts:
        _print(console, f"{verdict['verdict']}: {verdict['claim']}")
        if verdict["evidence"]:
            _print(console, f"  {verdict['evidence']}")
    _print(console, f"{request.out / item.name}: {_list_files(request.out / item.name)}")
    return verdicts


def _write(item: Item, request: Request, results: list[PanelResult]) -> None:
    pages.write(item, request, results)
    _write_claims(request)


def _timed(machine: Machine) -> str:
    """Return a text that says what the estimates of costs hold for."""
    workers = cores() if machine.workers is None else machine.workers
    return f"hours with {workers} workers in {machine.precision}, by a short timing, if the machine does nothing else"


def _cost_table(work: Engine, machine: Machine) -> Table:
    costs = work.costs()
    costs["all"] = total(searches for searches, _ in costs.values()), total(runs for _, runs in costs.values())
    rows = [
        (title, str(searches.runs), f"{searches.hours:.1f}", str(runs.runs), f"{runs.hours:.1f}")
        for title, (searches, runs) in costs.items()
    ]
    head = ("in this order", "runs of the search", "hours", "runs", "hours, at most")
    return text_table(f"what is left; {_timed(machine)}", head, rows)


def _print(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False)


def _write_claims(request: Request) -> None:
    write_text(request.out / "claims.md", pages.claims_page(request.out, ITEMS, request.scale))


def _list_files(folder: Path) -> str:
    """Return the names of an item's files, and whether nothing was run."""
    names = sorted(p.name for p in folder.iterdir() if p.is_file())
    return ", ".join(names) + ("" if {"scores.csv", "measured.csv"} & set(names) else "; nothing was run")
