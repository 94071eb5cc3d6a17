"""Keep what `fedbcgd reproduce` has finished: `python scripts/keep_reproduced.py RUNS-OUT results/reproduce [NAME=OTHER …]`.

The finished runs of each item are packed into `ITEM/runs.tar.xz` (no models, no checkpoints), from which `reproduce` goes
on. Then the pages of all items that have any are written anew, and claims.md, and the claims and figures between the marks
in the README.md above.
"""

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedbcgd.display.progress import wide_console
from fedbcgd.display.terminal import display
from fedbcgd.files import write_text
from fedbcgd.paper import command, engine, packs, table1, tables
from fedbcgd.paper.items import ITEMS
from fedbcgd.paper.spec import NOT_RUN, Item

BEGIN, END = "<!-- claims: scripts/keep_reproduced.py -->", "<!-- end of claims -->"


def keep(source: Path, out: Path, scale: str, items: Mapping[str, Item] = ITEMS, data: Sequence[str] = ()) -> None:
    """Pack the finished runs of each item."""
    asked = command.asked(scale, source, data=data)
    for name, item in items.items():
        results = engine.gather(engine.panels(item, asked), asked)
        packs.add(out, name, [asked.runs / folder for result in results for folder in result.folders])


def overview(out: Path) -> str:
    """Every claim with its verdict, then every figure, from the pages of the items."""
    table = ["| claim | verdict | measured in |", "|---|---|---|"]
    pictures = []
    for item in ITEMS.values():
        folder = out / item.name
        about = tables.read_about(folder)
        verdicts = {told["key"]: told["verdict"] for told in about.get("claims", ())}
        where = f"[{item.name}]({out.name}/{item.name}/README.md)" if about else item.name
        table += [f"| {claim.text} | **{verdicts.get(claim.key, NOT_RUN)}** | {where} |" for claim in item.claims]
        drawn = [name for name in ("figure.png", "measured.png") if (folder / name).exists()]
        same = any(
            (out / other / "about.json").exists() for other in item.shares
        )  # the runs of other items, drawn there
        pictures += [f"![{item.title}]({out.name}/{item.name}/{name})" for name in drawn if not same]
    return "\n".join(table) + "\n\n" + "\n\n".join(pictures)


def put(page: Path, text: str) -> None:
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise SystemExit(f"{page}: the marks {BEGIN} and {END} are missing")
    write_text(page, f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


def main(source: Path, out: Path, data: list[str]) -> None:
    keep(source, out, "cpu", data=data)
    if (source / table1.NAME / "measured.csv").exists():
        shutil.copytree(
            source / table1.NAME, out / table1.NAME, dirs_exist_ok=True, ignore=shutil.ignore_patterns("points")
        )
    asked = command.asked("cpu", out, data=data)
    for name, item in ITEMS.items():
        found = any(result.contenders for result in engine.gather(engine.panels(item, asked), asked))
        if found or (name == table1.NAME and (out / name / "measured.csv").exists()):
            command.reproduce(name, asked, lambda labels: display(labels, True, False), wide_console(), run=False)
    put(out.parent / "README.md", overview(out))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
