"""In what a scale differs from the paper: found by comparing the settings, so that nothing can be forgotten."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from fedbcgd.paper.spec import Contender, Effort, Item, Panel, left_out

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
    "effort.least": "rounds of a run of the search, at least",
    "effort.validation": "share of the training set held out for the search",
    "blocks": "blocks N",
}
_LEFT_OUT = {"run.workers"}
_DEFAULTS = {"model.width": 1.0, "target": "what the reference (FedAvg, where it takes part) ends with"}


def reductions(item: Item, used: list[Panel], seeds: Mapping[str, str] | None = None) -> list[str]:
    """Lines such as `LeNet-5, CIFAR-10: local epochs E: 5 → 1`; what all panels have in common stands once. `seeds` says for
    panels how many there are, where it is not what was meant."""
    originals = item.panels["paper"]
    by_key = {panel.key: panel for panel in originals}
    each = [_differences(by_key.get(panel.key, originals[0]), panel, (seeds or {}).get(panel.key)) for panel in used]
    common = [line for line in (each[0] if each else []) if all(line in lines for lines in each)]
    out = list(common)
    for panel, lines in zip(used, each, strict=True):
        own = [line for line in lines if line not in common]
        if own:
            out.append(f"{panel.title}: " + "; ".join(own))
    left = left_out(item, used)
    if left:
        out.append(f"left out: {'; '.join(panel.title for panel in left)}")
    return out


def _differences(original: Panel, panel: Panel, seeds: str | None) -> list[str]:
    one, two = _flat(original), _flat(panel)
    if seeds is not None:
        two["effort.seeds"] = seeds if seeds != str(one["effort.seeds"]) else one["effort.seeds"]
    lines = _changes(one, two)
    own = {c.key: c for c in original.contenders}
    each = {c.title: _changes(_chosen(own[c.key]), _chosen(c)) for c in panel.contenders if c.key in own}
    differing = {title: changes for title, changes in each.items() if changes}
    for change in dict.fromkeys(change for changes in differing.values() for change in changes):
        titles = [title for title, changes in differing.items() if change in changes]
        lines.append(f"{change} (of {', '.join(titles)})" if len(titles) < len(panel.contenders) else change)
    left = [c.title for c in original.contenders if c.key not in {p.key for p in panel.contenders}]
    if left:
        lines.append(f"without {', '.join(left)}")
    return lines


def _changes(one: Mapping[str, Any], two: Mapping[str, Any]) -> list[str]:
    keys = [key for key in {**one, **two} if one.get(key) != two.get(key) and key not in _LEFT_OUT]
    return [f"{_NAMES.get(key, key)}: {_shown(key, one.get(key))} → {_shown(key, two.get(key))}" for key in keys]


def _chosen(contender: Contender) -> dict[str, Any]:
    """A contender's options, and how the others are found."""
    return {**contender.algorithm, "searched": contender.grid, "tuned as": contender.tuned_as}


def _flat(panel: Panel) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name in _FIELDS:
        value = getattr(panel, name)
        if isinstance(value, Effort):
            value = {**value.grid, **{f.name: getattr(value, f.name) for f in fields(value) if f.name != "grid"}}
        if isinstance(value, Mapping):
            out |= {f"{name}.{key}": v for key, v in value.items()}
        else:
            out[name] = value
    return out


def _shown(key: str, value: Any) -> str:
    if value is None:
        return str(_DEFAULTS.get(key, "none"))
    if isinstance(value, Mapping):
        return " ".join(f"{k} {v}" for k, v in value.items())
    if isinstance(value, (tuple, list)):
        return ", ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in sorted(value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)
