"""What `fedbcgd reproduce` does, step by step."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fedbcgd.errors import UserError, unknown
from fedbcgd.files import make_folder, write_text
from fedbcgd.reproduce import engine, table1, tables
from fedbcgd.reproduce.costs import cost
from fedbcgd.reproduce.engine import Asked, Display
from fedbcgd.reproduce.items import ITEMS
from fedbcgd.reproduce.plan import Machine
from fedbcgd.reproduce.reductions import reductions
from fedbcgd.reproduce.results import PanelResult, shown_final, shown_floats
from fedbcgd.reproduce.spec import SCALES, Item, Scale

ALL = "all"


def check_scale(scale: str) -> Scale:
    for known in SCALES:
        if known == scale:
            return known
    raise unknown("scale", scale, SCALES)


def names(item: str) -> list[str]:
    if item == ALL:
        return list(ITEMS)
    if item not in ITEMS:
        raise unknown("item", item, [*ITEMS, ALL])
    return [item]


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


def reproduce(name: str, asked: Asked, display: Display, console: Console, run: bool = True) -> None:
    """Run an item, or only look at what is finished; tell, and write everything."""
    item = ITEMS[name]
    make_folder(asked.out)
    console.print(f"{item.title} — scale {asked.scale}", markup=False, highlight=False)
    if name == table1.NAME:
        verdicts = table1.reproduce(asked.out, asked.scale, console.print, run)
        write_text(asked.out / "claims.md", tables.all_claims(asked.out, ITEMS, asked.scale))
    else:
        verdicts = _panels(item, asked, display, console, run)
    for verdict in verdicts:
        console.print(f"{verdict['verdict']}: {verdict['claim']}", markup=False, highlight=False)
        if verdict["evidence"]:
            console.print(f"  {verdict['evidence']}", markup=False, highlight=False)
    console.print(f"{asked.out / item.name}: README.md, CSV files and the figure", markup=False, highlight=False)


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
