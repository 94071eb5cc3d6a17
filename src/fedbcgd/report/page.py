"""The page of runs: one self-contained HTML file."""

import base64
import hashlib
import html
import math
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from fedbcgd.display.styles import LineStyle
from fedbcgd.files import as_json
from fedbcgd.report.collect import Collector, Problem, RunData
from fedbcgd.report.groups import IGNORED_OPTIONS, group
from fedbcgd.version import __version__

SCRIPTS = ("base.js", "numbers.js", "chart.js", "pictures.js", "panels.js", "tables.js", "main.js")
_FACTS = (
    "stopped",
    "seconds",
    "rounds",
    "finished",
    "command",
    "versions",
    "machine",
    "divider",
    "notes",
    "backend",
    "metric",
    "goal",
)
_LEDGER = ("dim", "itemsize", "blocks", "block_bytes", "upload_bytes", "upload_max_bytes", "refused", "lost")


def write(folders: Sequence[Path], path: Path) -> tuple[int, list[Problem]]:
    """Write the page about the runs in these folders.

    Args:
        folders: folders of runs, or folders that contain some.
        path: the HTML file.

    Returns:
        The number of runs on the page, and the problems with folders and files.
    """
    from fedbcgd.files import write_text

    runs, problems = Collector(folders).collect()
    write_text(path, document(content(runs, problems)))
    return len(runs), problems


def content(runs: Sequence[RunData], problems: Sequence[Problem]) -> dict[str, Any]:
    """Return everything the page shows, as JSON values."""
    grouped = group(runs)
    tables: dict[str, dict[str, Any]] = {}  # label counts, each once: runs often share them
    shown = []
    for run in runs:
        key = repr(run.label_counts)
        if run.label_counts:
            tables.setdefault(key, run.label_counts)
        shown.append(_run(run) | {"label_counts": list(tables).index(key) if key in tables else None})
    return {
        "version": __version__,
        "ignored_options": sorted(IGNORED_OPTIONS),
        "tasks": list(grouped.tasks),
        "groups": [
            {"task": g.task, "name": g.name, "algorithm": g.algorithm, "look": _style(g.style), "runs": list(g.runs)}
            for g in grouped.groups
        ],
        "runs": shown,
        "label_counts": list(tables.values()),
        "problems": [{"where": p.where, "what": p.what} for p in problems],
    }


def document(data: dict[str, Any], watch: bool = False) -> str:
    """Return the page as HTML. Nothing in `data` is read as markup: it is JSON, and the script only sets text.

    Args:
        data: what `content` returned.
        watch: whether the page asks its server for changes.
    """
    style, script = _part("page.css"), "\n".join(_part(name) for name in SCRIPTS)
    connect = "'self'" if watch else "'none'"
    policy = (
        f"default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; "
        f"style-src {_digest(style)}; script-src {_digest(script)}; connect-src {connect}"
    )
    filled = {
        "POLICY": html.escape(policy),
        "TITLE": html.escape(title(data)),
        "STYLE": style,
        "SCRIPT": script,
        "DATA": as_script(data | {"watch": watch}),
    }
    return re.sub(r"\{\{([A-Z]+)\}\}", lambda match: filled[match[1]], _part("page.html"))


def title(data: dict[str, Any]) -> str:
    """Return the title of the page."""
    names = data["tasks"]
    if not names:
        return "fedbcgd: no runs yet"
    return f"fedbcgd: {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def as_script(data: Any) -> str:
    """Return JSON that is safe inside a script element: nothing in it can end the element or begin a comment."""
    text = as_json(data)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _part(name: str) -> str:
    return resources.files("fedbcgd.report").joinpath("page", name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _style(style: LineStyle) -> dict[str, Any]:
    return {"colour": style.colour, "dark": style.dark, "dash": list(style.dash), "marker": style.marker}


def _run(run: RunData) -> dict[str, Any]:
    columns = dict.fromkeys(key for row in run.rows for key in row)
    ledger = run.summary.get("ledger", {"block_bytes": run.block_bytes})
    return {
        "folder": run.folder,
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
    """Round to seven digits, more than a chart or a table shows."""
    return float(f"{value:.7g}") if isinstance(value, float) and math.isfinite(value) else value
