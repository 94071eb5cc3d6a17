"""What commands share: options, and how workers are prepared."""

import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[Path, typer.Argument(help="A TOML file; `fedbcgd init` writes one.", show_default=False)]
Out = Annotated[Path, typer.Option("--out", help="Folder for everything the run leaves.", show_default=False)]
Sets = Annotated[
    list[str] | None, typer.Option("--set", help="Change a value of the file: section.key=value. May be repeated.")
]


def expect_workers(config: Path, sets: list[str] | None) -> None:
    """Have worker processes prepared while this one imports what it needs, if the file looks like a run that has some.
    Whatever is wrong with it is said later."""
    from fedbcgd.backends.placement import Placement
    from fedbcgd.errors import UserError

    try:
        run = tomllib.loads(config.read_text(encoding="utf-8")).get("run", {})
    except (OSError, ValueError):
        return
    if not isinstance(run, dict):
        return
    given = {key.strip(): value.strip(" '\"") for key, _, value in (text.partition("=") for text in sets or [])}
    chosen = {key: given.get(f"run.{key}", str(run.get(key, ""))) for key in ("workers", "backend", "device")}
    workers = 0 if chosen["workers"] == "0" else None
    with suppress(UserError):
        Placement(chosen["backend"] or "workers", workers, device=chosen["device"] or "cpu").entry.start_early()
