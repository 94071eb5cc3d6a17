"""TOML, written: the standard library only reads it."""

import json
from collections.abc import Mapping
from typing import Any


def dumps(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """Sections of plain values; a value of None is left out, since TOML has no word for it."""
    parts = []
    for name, values in sections.items():
        tables = {k: v for k, v in values.items() if isinstance(v, Mapping)}
        lines = [f"{k} = {value(v)}" for k, v in values.items() if v is not None and k not in tables]
        if lines:
            parts.append("\n".join([f"[{name}]", *lines]))
        if tables:
            parts.append(dumps({f"{name}.{_key(k)}": v for k, v in tables.items()}).rstrip("\n"))
    return "\n\n".join(parts) + "\n"


def value(v: Any) -> str:
    if isinstance(v, bool):
        return "true" if v else "false"
    if isinstance(v, str):
        return json.dumps(v, ensure_ascii=False)
    if isinstance(v, (list, tuple)):
        return "[" + ", ".join(value(item) for item in v) + "]"
    if isinstance(v, (int, float)):
        return repr(v)
    raise TypeError(f"no TOML for {type(v).__name__}")


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else json.dumps(key)
