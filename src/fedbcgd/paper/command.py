"""What `fedbcgd reproduce` does, step by step."""

import csv
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fedbcgd.errors import UserError, unknown
from fedbcgd.files import make_folder, write_text
from fedbcgd.paper import engine, table1, tables
from fedbcgd.paper.costs import cost
from fedbcgd.paper.engine import Asked, Display
from fedbcgd.paper.items import ITEMS
from fedbcgd.paper.plan import Machine
from fedbcgd.paper.reductions import reductions
from fedbcgd.paper.results import PanelResult, shown_final, shown_floats
from fedbcgd.paper.spec import SCALES, Item, Scale

ALL = "all"


def check_scale(scale: str) -> Scale:
    for known in SCALES:
        if known == scale:
            return known
    raise unknown("scale", scale, SCALES)


def names(item: str, scale: str = "cpu", only: str = "") -> list[str]:
    """The items that are meant; of all, those with a panel that is wanted."""
    if item != ALL and item not in ITEMS:
        raise unknown("item", item, [*ITEMS, ALL])
    if item != ALL or not only:
        return list(ITEMS) if item == ALL else [item]
    found = [name for name, it in ITEMS.items() if any(only in panel.key for panel in it.panels[check_scale(scale)])]
    if not found:
        keys = dict.fromkeys(panel.key for it in ITEMS.values() for panel in it.panels[check_scale(scale)])
        raise UserError(f"--only {only}: no panel is called so; there are {', '.join(keys)}")
    return found


def check(wanted: Sequence[str], asked: Asked, run: bool = True) -> None:
    """Before hours of work: that the folder is of this scale, that data sets have the names of some, and that those which
    are needed are here."""
    for path in sorted(asked.out.glob("*/about.json")):
        found = tables.read_about(path.parent)["scale"]
        if found != asked.scale:
            raise UserError(
                f"--out {asked.out}: it holds results of scale {found}; take another folder for {asked.scale}"
            )
    used = {panel.data["name"] for name in wanted for panel in ITEMS[name].panels[asked.scale]}
    for name in asked.data:
        if name not in used:
            raise unknown("data set in --data", name, sorted(used))
    if table1.NAME in wanted:
        table1.check(asked)
    for name in wanted:
        if run:
            engine.check(ITEMS[name], asked)
        _keeps(name, asked)


def _keeps(name: str, asked: Asked) -> None:
    """A page must not lose what it has because a data set is missing, without which a run cannot be told from others."""
    path = asked.out / name / "scores.csv"
    if not path.exists():
        return
    with path.open(encoding="utf-8", newline="") as file:
        there = {row["panel"] for row in csv.DictReader(file)}
    for result in engine.gather(engine.panels(ITEMS[name], asked), asked):
        if result.unknown and result.panel.key in there:
            raise UserError(
                f"{path.parent} has results of {result.panel.title}, which cannot be told again: {result.unknown}. "
                "With another data set in its place, say so with --data"
            )


def asked(
    scale: str,
    out: Path | None,
    only: str = "",
    seeds: int | None = None,
    data: Sequence[str] = (),
    workers: int | None = None,
    device: str = "cpu",
) -> Asked:
    other = {}
    for pair in data:
        name, equals, instead = pair.partition("=")
        if not equals or not name or not instead:
            raise UserError(f"--data {pair}: wanted is NAME=OTHER, such as emnist-byclass=my-emnist")
        other[name] = instead
    folder = out or Path(f"runs/reproduce-{scale}")
    return Asked(check_scale(scale), folder, seeds, only, other, Machine(workers, device))


def show_list(console: Console, scale: str) -> None:
    known = check_scale(scale)
    table = Table(title=f"scale {scale}; times are for two cores, nothing being finished before", title_justify="left")
    for column in ("item", "what", "cost"):
        table.add_column(column)
    for item in ITEMS.values():
        told = table1.COSTS[known] if item.name == table1.NAME else str(cost(item, known))
        table.add_row(item.name, item.title, f"the runs of {' and '.join(item.shares)}" if item.shares else told)
    console.print(table)


def reproduce(name: str, asked: Asked, display: Display, console: Console, run: bool = True) -> list[dict[str, str]]:
    """Run an item, or only look at what is finished; tell, and write everything. The verdicts on its claims."""
    item = ITEMS[name]
    make_folder(asked.out)
    console.print(f"{item.title} — scale {asked.scale}", markup=False, highlight=False)
    if name == table1.NAME:
        verdicts = table1.reproduce(asked, console.print, run)
        write_text(asked.out / "claims.md", tables.all_claims(asked.out, ITEMS, asked.scale))
    else:
        verdicts = _panels(item, asked, display, console, run)
    for verdict in verdicts:
        console.print(f"{verdict['verdict']}: {verdict['claim']}", markup=False, highlight=False)
        if verdict["evidence"]:
            console.print(f"  {verdict['evidence']}", markup=False, highlight=False)
    console.print(f"{asked.out / item.name}: {_left(asked.out / item.name)}", markup=False, highlight=False)
    return verdicts


def _left(folder: Path) -> str:
    """The files of an item, and that nothing was run where there are no scores."""
    files = ", ".join(sorted(p.name for p in folder.iterdir() if p.is_file()))
    return (
        files
        if any((folder / name).exists() for name in ("scores.csv", "measured.csv"))
        else f"{files}; nothing was run"
    )


def _panels(item: Item, asked: Asked, display: Display, console: Console, run: bool) -> list[dict[str, str]]:
    every = engine.panels(item, asked)
    for line in reductions(item, every):
        console.print(f"  {line}", markup=False, highlight=False)

    def write(results: list[PanelResult]) -> None:
        tables.write(item, asked, results)
        write_text(asked.out / "claims.md", tables.all_claims(asked.out, ITEMS, asked.scale))

    if run:
        results = engine.run(item, asked, display, write)
    else:
        results = engine.gather(every, asked)
        write(results)
    for result in results:
        console.print(_table(result))
    return tables.judged(item, asked, results)


def _table(result: PanelResult) -> Table:
    panel = result.panel
    out = Table(title=f"{panel.title}, {panel.budget:g}d", title_justify="left")
    out.add_column("")
    for column in ("accuracy, %" if result.higher else "test loss", "to target", "paper", "paper, to target"):
        out.add_column(column, justify="right")
    for contender in result.contenders:
        printed = panel.printed.get(contender.key)
        theirs = ("–", "–")
        if printed is not None:
            theirs = (f"{printed.mean:.1f} ± {printed.deviation:.1f}", tables.printed_floats(printed))
        out.add_row(contender.title, shown_final(result, contender.key), shown_floats(result, contender.key), *theirs)
    return out
