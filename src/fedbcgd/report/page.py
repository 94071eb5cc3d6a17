"""The page: one HTML file with everything in it, that opens without a network."""

import base64
import hashlib
import html
import math
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from fedbcgd.display.looks import Look
from fedbcgd.files import as_json
from fedbcgd.report.collect import Collector, Found, Problem
from fedbcgd.report.groups import ASIDE, group
from fedbcgd.version import __version__

SCRIPTS = ("base.js", "numbers.js", "chart.js", "panels.js", "tables.js", "main.js")
_FACTS = ("stopped", "seconds", "rounds", "finished", "command", "versions", "machine", "divider", "notes", "backend")
_LEDGER = ("dim", "itemsize", "blocks", "block_bytes", "upload_bytes", "upload_max_bytes", "refused", "lost")


def write(places: Sequence[Path], path: Path) -> tuple[int, list[Problem]]:
    """Write the page of these folders; how many runs are on it, and what could not be read."""
    from fedbcgd.files import write_text

    runs, problems = Collector(places).collect()
    write_text(path, document(content(runs, problems)))
    return len(runs), problems


def content(runs: Sequence[Found], problems: Sequence[Problem]) -> dict[str, Any]:
    """Everything the page shows, as plain values."""
    grouped = group(runs)
    holdings: dict[str, dict[str, Any]] = {}
    shown = []
    for run in runs:
        key = _holdings_key(run)
        if key and run.holdings:
            holdings.setdefault(key, run.holdings)
        shown.append(_run(run) | {"holdings": list(holdings).index(key) if key in holdings else None})
    return {
        "version": __version__,
        "aside": sorted(ASIDE),
        "tasks": list(grouped.tasks),
        "groups": [
            {"task": g.task, "name": g.name, "algorithm": g.algorithm, "look": _look(g.look), "runs": list(g.runs)}
            for g in grouped.groups
        ],
        "runs": shown,
        "holdings": list(holdings.values()),
        "problems": [{"where": p.where, "what": p.what} for p in problems],
    }


def document(data: dict[str, Any], watch: bool = False) -> str:
    """The page as HTML. Nothing in `data` is ever read as markup: it travels as JSON, and the script only sets text."""
    style, script = _part("page.css"), "\n".join(_part(name) for name in SCRIPTS)
    reach = "'self'" if watch else "'none'"
    policy = (
        f"default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; "
        f"style-src {_digest(style)}; script-src {_digest(script)}; connect-src {reach}"
    )
    filled = {
        "POLICY": html.escape(policy),
        "TITLE": html.escape(title(data)),
        "STYLE": style,
        "SCRIPT": script,
        "DATA": as_script(data | {"watch": watch}),
    }
    return re.sub(r"\{\{([A-Z]+)\}\}", lambda found: filled[found[1]], _part("page.html"))


def title(data: dict[str, Any]) -> str:
    names = data["tasks"]
    if not names:
        return "fedbcgd: no runs yet"
    return f"fedbcgd: {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def as_script(data: Any) -> str:
    """JSON that can stand inside a script element: no character of it can end that element or begin a comment."""
    text = as_json(data)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _part(name: str) -> str:
    return resources.files("fedbcgd.report").joinpath("page", name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _look(look: Look) -> dict[str, Any]:
    return {"colour": look.colour, "dark": look.dark, "dash": list(look.dash), "marker": look.marker}


def _run(run: Found) -> dict[str, Any]:
    columns = dict.fromkeys(key for row in run.rows for key in row)
    ledger = run.summary.get("ledger", {"block_bytes": run.block_bytes})
    return {
        "place": run.place,
        "algorithm": run.algorithm,
        "seed": run.seed,
        "status": run.status,
        "columns": {name: [_short(row.get(name, math.nan)) for row in run.rows] for name in columns},
        "profiles": {name: [_short(h) for h in hours] for name, hours in run.hours.items()},
        "options": run.options,
        "blocks": run.summary.get("blocks", []),
        "shared": run.summary.get("shared", 0),
        "ledger": {name: ledger[name] for name in _LEDGER if name in ledger},
        "facts": {name: run.summary[name] for name in _FACTS if name in run.summary},
    }


def _short(value: float) -> float:
    """Seven digits are more than a picture or a table shows."""
    return float(f"{value:.7g}") if isinstance(value, float) and math.isfinite(value) else value


def _holdings_key(run: Found) -> str:
    return "" if run.holdings is None else repr(run.holdings)
