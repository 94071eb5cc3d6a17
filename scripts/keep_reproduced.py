"""Keep what `fedbcgd reproduce` has finished: `python scripts/keep_reproduced.py RUNS-OUT results/reproduce [NAME=OTHER …]`.

Of each finished run the configuration, the metrics and the summary are copied (no models, no checkpoints), which is all that
`reproduce` needs to know it as finished; then the pages of all items that have any are written anew, and claims.md, and the
claims and figures between the marks in the README.md above.
"""

import json
import shutil
import sys
from pathlib import Path

from fedbcgd.cli.common import display
from fedbcgd.display.progress import wide_console
from fedbcgd.files import as_json, make_folder, write_text
from fedbcgd.paper import command, engine, table1, tables
from fedbcgd.paper.items import ITEMS
from fedbcgd.paper.origin import FILE
from fedbcgd.paper.spec import NOT_RUN

BEGIN, END = "<!-- claims: scripts/keep_reproduced.py -->", "<!-- end of claims -->"
KEPT = ("config.toml", "metrics.jsonl", FILE)


def keep(source: Path, out: Path) -> None:
    for summary in sorted((source / "runs").glob("*/summary.json")):
        run = make_folder(out / "runs" / summary.parent.name)
        for name in KEPT:
            if (summary.parent / name).exists():
                shutil.copyfile(summary.parent / name, run / name)
        told = json.loads(summary.read_text(encoding="utf-8"))
        told.pop("command", None)  # it names folders of the machine that ran it
        write_text(run / "summary.json", as_json(told, indent=1) + "\n")


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
    keep(source, out)
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
