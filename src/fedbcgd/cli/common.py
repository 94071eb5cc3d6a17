"""Arguments and options that commands share, and the early start of worker processes."""

import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[
    Path, typer.Argument(help="A configuration file (TOML); `fedbcgd init` writes one.", show_default=False)
]
Out = Annotated[Path, typer.Option("--out", help="Folder for the files of the run.", show_default=False)]
Sets = Annotated[
    list[str] | None, typer.Option("--set", help="Change a value of the file: section.key=value. May be repeated.")
]


def start_workers_early(config: Path, sets: list[str] | None) -> None:
    """Start worker processes early, while this process imports its modules, if the configuration seems to need some.

    Errors in the configuration are ignored here; loading it reports them.

    Args:
        config: the configuration file.
        sets: the values of --set.
    """
    from fedbcgd.backends.placement import Placement
    from fedbcgd.errors import UserError

    try:
        run = tomllib.loads(config.read_text(encoding="utf-8")).get("run", {})
    except (OSError, ValueError):
        return
    if not isinstance(run, dict):
        return
    overrides = {key.strip(): value.strip(" '\"") for key, _, value in (text.partition("=") for text in sets or [])}
    chosen = {key: overrides.get(f"run.{key}", str(run.get(key, ""))) for key in ("workers", "backend", "device")}
    workers = 0 if chosen["workers"] == "0" else None
    with suppress(UserError):
        Placement(chosen["backend"] or "workers", workers, device=chosen["device"] or "cpu").entry.start_early()
