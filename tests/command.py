"""The command `fedbcgd`: within this process, or, where the process itself matters, as one of its own."""

import contextlib
import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from typer.testing import CliRunner

from fedbcgd.cli import app, register_commands

COMMAND = [sys.executable, "-m", "fedbcgd"]


def fedbcgd(*args: str, cwd: Path | str = ".", check: int | None = 0) -> Any:
    """Run the command in this process: no interpreter is started, and torch is imported already.

    Args:
        args: What stands after `fedbcgd` on the command line.
        cwd: The folder to be in.
        check: The exit code to expect; None for any.

    Returns:
        An object with `returncode`, `stdout` and `stderr`, as of `subprocess.run`.
    """
    warnings = logging.lastResort  # writes to sys.stderr, as in a process without handlers; here pytest has some
    assert warnings is not None
    log = logging.getLogger("fedbcgd")
    log.addHandler(warnings)
    register_commands()
    try:
        with contextlib.chdir(cwd):
            result = CliRunner().invoke(app, list(args), catch_exceptions=False, prog_name="python -m fedbcgd")
    finally:
        log.removeHandler(warnings)
    return _checked(SimpleNamespace(returncode=result.exit_code, stdout=result.stdout, stderr=result.stderr), check)


def process(*args: str, cwd: Path | str = ".", check: int | None = 0, timeout: float = 240) -> Any:
    """Run the command as a process of its own."""
    return _checked(subprocess.run([*COMMAND, *args], capture_output=True, text=True, cwd=cwd, timeout=timeout), check)


def _checked(done: Any, check: int | None) -> Any:
    assert check is None or done.returncode == check, done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    return done
