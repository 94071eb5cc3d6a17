"""How a scale differs from the paper, found by comparing all settings so that no difference is forgotten."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from fedbcgd.paper.spec import Contender, Effort, Item, Panel, omitted_panels

_FIELDS = ("data", "model", "local", "run", "budget", "metric", "target", "reference", "effort")
_NAMES = {
    "data.name": "data set",
    "data.clients": "clients M",
    "data.augment": "augmentation",
    "model.name": "model",
    "model.width": "width of the network",
    "model.weights": "pretrained weights",
    "model.options": "size of the model",
    "local.local_epochs": "local epochs E",
    "local.local_steps": "local steps",
    "local.batch_size": "batch size B",
    "local.weight_decay": "weight decay",
    "budget": "upload budget, d",
    "target": "target",
    "effort.lr": "learning rates tried",
    "effort.momentum": "momenta λ tried",
    "effort.seeds": "seeds",
    "effort.evaluations": "evaluations of a run, about",
    "effort.share": "share of the rounds that a run of the search gets",
    "effort.min_rounds": "rounds of a run of the search, at least",
    "effort.validation": "share of the training set held out for the search",
    "effort.halving": "search by successive halving",
    "effort.alpha": "α of FedDC tried",
    "effort.server_lr": "server learning rates of FedAdam tried",
    "blocks": "blocks N",
    "alpha": "α",
}
_IGNORED = {"run.workers"}
_DEFAULTS = {
    "model.width": 1.0,
    "alpha": "searched",
    "effort.halving": "no, all of the grid",
    "run to the target only": "no",
    "target": "what the reference (FedAvg, where it takes part) ends with",
}


def reductions(item: Item, used: list[Panel], seeds: Mapping[str, str] | None = None) -> list[str]:
    """Return the differences as lines such as `LeNet-5, CIFAR-10: local epochs E: 5 → 1`.

    Args:
        item: the item, with its panels at scale `paper`.
        used: its panels at another scale.
        seeds: how many seeds were run, as text, by panel; None: as many as each panel plans.

    Returns:
        First the differences that all panels have in common, then those of single panels, then the panels left out.
    """
    originals = item.panels["paper"]
    by_key = {panel.key: panel for panel in originals}
    each = [_differences(by_key.get(panel.key, originals[0]), panel, (seeds or {}).get(panel.key)) for panel in used]
    common = [line for line in (each[0] if each else []) if all(line in lines for lines in each)]
    out = list(common)
    for panel, lines in zip(used, each, strict=True):
        own = [line for line in lines if line not in common]
        if own:
            out.append(f"{panel.title}: " + "; ".join(own))
    omitted = omitted_panels(item, used)
    if omitted:
        out.append(f"left out: {'; '.join(panel.title for panel in omitted)}")
    return out


def _differences(original: Panel, panel: Panel, seeds: str | None) -> list[str]:
    before, after = _flatten(original), _flatten(panel)
    if seeds is not None:
        after["effort.seeds"] = seeds if seeds != str(before["effort.seeds"]) else before["effort.seeds"]
    lines = _changes(before, after)
    originals = {c.key: c for c in original.contenders}
    by_title = {
        c.title: _changes(_options(originals[c.key]), _options(c)) for c in panel.contenders if c.key in originals
    }
    for change in dict.fromkeys(change for changes in by_title.values() for change in changes):
        titles = [title for title, changes in by_title.items() if change in changes]
        lines.append(f"{change} (of {', '.join(titles)})" if len(titles) < len(panel.contenders) else change)
    kept = {c.key for c in panel.contenders}
    omitted = [c.title for c in original.contenders if c.key not in kept]
    if omitted:
        lines.append(f"without {', '.join(omitted)}")
    added = [c.title for c in panel.contenders if c.key not in originals]
    if added and kept & set(originals):
        lines.append(f"and {', '.join(added)}, which the paper does not have")
    return lines


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    keys = [key for key in {**before, **after} if before.get(key) != after.get(key) and key not in _IGNORED]
    return [f"{_NAMES.get(key, key)}: {_format(key, before.get(key))} → {_format(key, after.get(key))}" for key in keys]


def _options(contender: Contender) -> dict[str, Any]:
    """Return a contender's fixed options, and how the others are chosen."""
    options = {**contender.algorithm, "searched": contender.grid, "tuned as": contender.tuned_as}
    return options | ({"run to the target only": True} if contender.until_target else {})


def _flatten(panel: Panel) -> dict[str, Any]:
    """Return the settings of a panel by dotted names such as `local.lr_decay`."""
    out: dict[str, Any] = {}
    for name in _FIELDS:
        value = getattr(panel, name)
        if isinstance(value, Effort):
            searched = {name: v for name, v in value.grid.items() if any(name in c.grid for c in panel.contenders)}
            value = {**searched, **{f.name: getattr(value, f.name) for f in fields(value) if f.name != "grid"}}
        if isinstance(value, Mapping):
            out |= {f"{name}.{key}": v for key, v in value.items()}
        else:
            out[name] = value
    return out


def _format(key: str, value: Any) -> str:
    if value is None:
        return str(_DEFAULTS.get(key, "none"))
    if isinstance(value, Mapping):
        return " ".join(f"{k} {v}" for k, v in value.items())
    if isinstance(value, (tuple, list)):
        return ", ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in sorted(value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)
