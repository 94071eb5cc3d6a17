"""Keep finished runs of `fedbcgd reproduce`: `python scripts/keep_reproduced.py RUNS-OUT results/reproduce [NAME=OTHER …]`.

Packs the finished runs of each item into `ITEM/runs.tar.xz` (no models, no checkpoints), from which `reproduce` continues.
Then writes the pages of all items with runs, claims.md, and the claims and figures between the marks in the README.md of
the folder above.
"""

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedbcgd.display.progress import wide_console
from fedbcgd.files import write_text
from fedbcgd.paper import command, engine, packs, pages, table1
from fedbcgd.paper.items import ITEMS
from fedbcgd.paper.request import panels_for
from fedbcgd.paper.spec import NOT_RUN, Item

BEGIN, END = "<!-- claims: scripts/keep_reproduced.py -->", "<!-- end of claims -->"


def keep(source: Path, out: Path, scale: str, items: Mapping[str, Item] = ITEMS, data: Sequence[str] = ()) -> None:
    """Pack the finished runs of each item."""
    request = command.make_request(scale, source, data=data)
    for name, item in items.items():
        results = engine.gather(panels_for(item, request), request)
        packs.add(out, name, [request.runs / folder for result in results for folder in result.folders])


def overview(out: Path) -> str:
    """Return every claim with its verdict, then every figure, from the pages of the items."""
    table = ["| claim | verdict | measured in |", "|---|---|---|"]
    pictures = []
    for item in ITEMS.values():
        folder = out / item.name
        about = pages.read_about(folder)
        verdicts = {record.key: record.verdict for record in about.claims} if about else {}
        where = f"[{item.name}]({out.name}/{item.name}/README.md)" if about else item.name
        table += [f"| {claim.text} | **{verdicts.get(claim.key, NOT_RUN)}** | {where} |" for claim in item.claims]
        drawn = [name for name in ("figure.png", "measured.png") if (folder / name).exists()]
        drawn_elsewhere = any((out / other / "about.json").exists() for other in item.runs_of)
        pictures += [f"![{item.title}]({out.name}/{item.name}/{name})" for name in drawn if not drawn_elsewhere]
    return "\n".join(table) + "\n\n" + "\n\n".join(pictures)


def put(page: Path, text: str) -> None:
    """Replace what stands between the marks in a page."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise SystemExit(
            f"{page}: expected the marks {BEGIN} and {END}, got none; add them where the claims should stand"
        )
    write_text(page, f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


def main(source: Path, out: Path, data: list[str]) -> None:
    """Pack the runs of `source`, then write all pages in `out`."""
    keep(source, out, "cpu", data=data)
    if (source / table1.NAME / "measured.csv").exists():
        shutil.copytree(
            source / table1.NAME, out / table1.NAME, dirs_exist_ok=True, ignore=shutil.ignore_patterns("points")
        )
    request = command.make_request("cpu", out, data=data)
    for name, item in ITEMS.items():
        has_runs = any(result.contenders for result in engine.gather(panels_for(item, request), request))
        if has_runs or (name == table1.NAME and (out / name / "measured.csv").exists()):
            command.show(name, request, wide_console())
    put(out.parent / "README.md", overview(out))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
