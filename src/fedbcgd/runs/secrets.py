"""Masking of secrets: values with the name of a secret are not written to run folders and reports."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fedbcgd.errors import UserError

MASK = "***"
# Anywhere in a name (db_password, client_secret), or at its end (hf_token, apiKey; but not max_tokens or key_size).
_SECRET = re.compile(r"passw|passphrase|secret|credential|(token|key)$", re.IGNORECASE)


def looks_secret(name: str) -> bool:
    """Return whether any part of a dotted name, such as `data.options.token`, looks like the name of a secret."""
    return any(_SECRET.search(part.strip(" \t\"'")) for part in name.split("."))


def mask_config(values: Any) -> Any:
    """Replace every value whose name looks like that of a secret by `***`, in nested tables and lists too."""
    if isinstance(values, Mapping):
        return {k: MASK if looks_secret(str(k)) and v is not None else mask_config(v) for k, v in values.items()}
    return [mask_config(v) for v in values] if isinstance(values, (list, tuple)) else values


def mask_command(arguments: Sequence[str]) -> list[str]:
    """Replace what follows `name=` or `--name` by `***` in the arguments of a command, if the name looks secret."""
    out: list[str] = []
    for argument in arguments:
        previous = out[-1] if out else ""
        is_value = previous.startswith("-") and "=" not in previous and looks_secret(previous)
        out.append(MASK if is_value else _mask_argument(argument))
    return out


def _mask_argument(argument: str) -> str:
    """Mask the value after a secret name, also inside tables: `data.options={user="a", token="b"}`."""
    name, equals, value = argument.partition("=")
    if not equals:
        return argument
    return f"{name}={MASK if looks_secret(name) else _mask_argument(value)}"


def refuse_masked(values: Mapping[str, Any], prefix: str = "") -> None:
    """Check that no secret is masked, as in a configuration from a run folder.

    Args:
        values: the values of a configuration.
        prefix: the beginning of their dotted names.

    Raises:
        UserError: a value is `***`; the message says how to set it.
    """
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            refuse_masked(value, f"{name}.")
        elif value == MASK and looks_secret(name):
            raise UserError(
                f"{name}: expected a value, got {MASK}, which replaces secrets in run folders; use --set {name}=…"
            )
