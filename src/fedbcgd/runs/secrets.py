"""Values that look like secrets by their name are not written down: not in a run folder, not on the page."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fedbcgd.errors import UserError

MASK = "***"
# Anywhere in a name (db_password, client_secret), or at its end (hf_token, apiKey; but not max_tokens or key_size).
_SECRET = re.compile(r"passw|passphrase|secret|credential|(token|key)$", re.IGNORECASE)


def looks_secret(name: str) -> bool:
    """Whether any part of a name with dots, such as `data.options.token`, is one that secrets have."""
    return any(_SECRET.search(part.strip(" \t\"'")) for part in name.split("."))


def mask_config(values: Any) -> Any:
    """The same tables and lists, with `***` for every value whose name looks like that of a secret."""
    if isinstance(values, Mapping):
        return {k: MASK if looks_secret(str(k)) and v is not None else mask_config(v) for k, v in values.items()}
    return [mask_config(v) for v in values] if isinstance(values, (list, tuple)) else values


def mask_command(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command, with `***` after every `name=` and `--name` that looks like that of a secret."""
    out: list[str] = []
    for argument in arguments:
        before = out[-1] if out else ""
        hidden = before.startswith("-") and "=" not in before and looks_secret(before)
        out.append(MASK if hidden else _masked(argument))
    return out


def _masked(argument: str) -> str:
    """Also inside of tables: `data.options={user="a", token="b"}`."""
    name, equals, value = argument.partition("=")
    if not equals:
        return argument
    return f"{name}={MASK if looks_secret(name) else _masked(value)}"


def refuse_masked(values: Mapping[str, Any], prefix: str = "") -> None:
    """A configuration from a run folder lacks its secrets: they must be given again.

    Raises:
        UserError: a value is `***`; the text says how to give it.
    """
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            refuse_masked(value, f"{name}.")
        elif value == MASK and looks_secret(name):
            raise UserError(
                f"{name}: expected its value, got {MASK}, which stands for it in files: --set {name}=… gives it"
            )
