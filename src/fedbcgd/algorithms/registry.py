"""The named algorithms: each is one line that names four parts."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedbcgd.algorithms.codecs import CODECS, Codec
from fedbcgd.algorithms.local_rules import LOCALS, LocalRule
from fedbcgd.algorithms.server_rules import SERVERS, ServerRule
from fedbcgd.algorithms.uplinks import UPLINKS, Uplink
from fedbcgd.core.algorithm import Algorithm
from fedbcgd.core.parts import Part, Registry, build
from fedbcgd.errors import UserError, other_name, unknown

log = logging.getLogger("fedbcgd")

_REGISTRIES: dict[str, Registry[Any]] = {"uplink": UPLINKS, "local": LOCALS, "server": SERVERS, "codec": CODECS}
KINDS = frozenset(_REGISTRIES)
_ALGORITHM_OPTIONS = ("weighting", "max_norm", "over_norm")  # of the algorithm as a whole, not of a part
_BASES: dict[str, type[Part]] = {"uplink": Uplink, "local": LocalRule, "server": ServerRule, "codec": Codec}


@dataclass(frozen=True)
class _Recipe:
    uplink: str
    local: str
    server: str
    codec: str
    summary: str
    options: Mapping[str, Any] = field(default_factory=dict)  # defaults that replace those of the parts


_RECIPES = {
    "fedavg": _Recipe("whole", "sgd", "average", "plain", "McMahan et al. 2017"),
    "fedavgm": _Recipe("whole", "sgd", "momentum", "plain", "FedAvg with server momentum, Hsu et al. 2019"),
    "fedbcgd": _Recipe("blocks", "sgd", "momentum", "plain", "a block per client, momentum per block, Liu et al. 2024"),
    "scaffold": _Recipe("whole", "scaffold", "average", "plain", "control variates, Karimireddy et al. 2020"),
    "fedbcgd+": _Recipe(
        "blocks", "svrg+control", "momentum", "plain", "FedBCGD with SVRG and control variates, Liu et al. 2024"
    ),
    "fedbcgd+derived": _Recipe(
        "blocks",
        "svrg+control",
        "momentum",
        "plain",
        "FedBCGD+ at half the upload: docs/fedbcgd-plus.md",
        {"derived": True},
    ),
    "fedpaq": _Recipe("whole", "sgd", "average", "qsgd", "quantised uploads, Reisizadeh et al. 2020"),
    "qsgd+fedbcgd": _Recipe("blocks", "sgd", "momentum", "qsgd", "FedBCGD with quantised uploads"),
    "qsgd+fedbcgd+": _Recipe("blocks", "svrg+control", "momentum", "qsgd", "FedBCGD+ with quantised uploads"),
    "topk": _Recipe("whole", "sgd", "average", "topk", "the largest values with error feedback, Aji and Heafield 2017"),
    "feddc": _Recipe("whole", "feddc", "average", "plain", "drift decoupling, Gao et al. 2022"),
    "fedadam": _Recipe("whole", "sgd", "adam", "plain", "adaptive server, Reddi et al. 2021"),
    "fedyogi": _Recipe("whole", "sgd", "yogi", "plain", "adaptive server, Reddi et al. 2021"),
    "fedprox": _Recipe("whole", "prox", "average", "plain", "proximal local objective, Li et al. 2020"),
    "fedbcgd-frozen": _Recipe(
        "blocks", "frozen", "momentum", "plain", "ablation: only the uploaded block moves locally"
    ),
    "fedbcgd-matched": _Recipe(
        "matched", "sgd", "momentum", "plain", "FedBCGD with blocks that fit the links of a [network]: docs/network.md"
    ),
    "central": _Recipe("central", "sgd", "average", "plain", "SGD on all data in one place: no federation, no upload"),
}


def register(name: str, *, uplink: str, local: str, server: str, codec: str, summary: str = "") -> None:
    """Register an algorithm: a name for a combination of four registered parts.

    Args:
        name: the algorithm's name.
        uplink: name of a registered uplink.
        local: name of a registered local rule.
        server: name of a registered server rule.
        codec: name of a registered codec.
        summary: one line on what it is, for `algorithm_names`.

    Raises:
        UserError: the name is taken, or a part is not registered.
    """
    if name in _RECIPES:
        raise UserError(f"name: expected one that is not registered yet, got {name!r}")
    for kind, part in (("uplink", uplink), ("local", local), ("server", server), ("codec", codec)):
        _REGISTRIES[kind].get(part)
    _RECIPES[name] = _Recipe(uplink, local, server, codec, summary)


def algorithm_names() -> dict[str, str]:
    """Return the names of the registered algorithms, each with a line on what it is."""
    return {name: recipe.summary for name, recipe in _RECIPES.items()}


def option_names(name: str, choice: Mapping[str, Any]) -> set[str]:
    """Return the options that a named algorithm takes.

    Args:
        name: the algorithm's name.
        choice: by kind, names of parts that replace the algorithm's own; other entries are ignored.

    Raises:
        UserError: a part is not a registered name.
    """
    chosen = {kind: choice.get(kind, getattr(_RECIPES[name], kind)) for kind in _REGISTRIES}
    for kind, part in chosen.items():
        if not isinstance(part, str):
            raise UserError(f"{kind}: expected a name ({', '.join(_REGISTRIES[kind])}), got {part!r}")
    parts = {option for kind, part in chosen.items() for option in _REGISTRIES[kind].get(part).options()}
    return parts | set(_ALGORITHM_OPTIONS)


def registries() -> dict[str, Registry[Any]]:
    """Return the registries of parts by their kind: uplink, local, server, codec."""
    return dict(_REGISTRIES)


def parts_of(name: str) -> dict[str, str]:
    """Return the names of the four parts of a registered algorithm, by their kind."""
    return {kind: getattr(_RECIPES[name], kind) for kind in _REGISTRIES}


def all_option_names() -> set[str]:
    """Return the options of all registered parts and of algorithms as a whole."""
    parts = {
        option for registry in _REGISTRIES.values() for part in registry for option in registry.get(part).options()
    }
    return parts | {*_REGISTRIES, *_ALGORITHM_OPTIONS}


def make_algorithm(name: str = "fedbcgd", **options: Any) -> Algorithm:
    """Make a named algorithm, with some of its hyper-parameters changed.

    Example:
        >>> make_algorithm("fedbcgd", blocks=10, codec="qsgd", levels=7)

    Args:
        name: one of `algorithm_names()`.
        **options: `uplink`, `local`, `server` and `codec` replace a part, by its name or by an object; every other option
            goes to the part that has it.

    Returns:
        The algorithm.

    Raises:
        UserError: an option is unknown or its value is wrong; the message says which, and what was expected.
    """
    if not isinstance(name, str) or name not in _RECIPES:
        raise unknown("algorithm", str(name), _RECIPES)
    options = {**_RECIPES[name].options, **options}
    own = {option: options.pop(option) for option in _ALGORITHM_OPTIONS if option in options}
    choice: dict[str, Any] = {kind: options.pop(kind, getattr(_RECIPES[name], kind)) for kind in _REGISTRIES}
    classes = {
        kind: registry.get(choice[kind]) for kind, registry in _REGISTRIES.items() if isinstance(choice[kind], str)
    }
    _check_options(name, options, classes)
    parts: dict[str, Any] = {}
    for kind, chosen in choice.items():
        if kind in classes:
            parts[kind] = build(classes[kind], {k: v for k, v in options.items() if k in classes[kind].options()})
        elif isinstance(chosen, _BASES[kind]):
            parts[kind] = chosen
        else:
            names, base = ", ".join(_REGISTRIES[kind]), _BASES[kind].__name__
            raise UserError(f"{kind}: expected a name ({names}) or an object of class {base}, got {chosen!r}")
    algorithm = Algorithm(name, **own, **parts)
    if algorithm.codec.residual and algorithm.local.controls:
        log.warning(
            "%s with top-k: controls and residuals of rarely sampled clients become outdated; FedDC with fraction = 0.05 "
            "diverged on least squares. Compare with codec='qsgd'", name
        )  # fmt: skip
    return algorithm


def _check_options(name: str, options: dict[str, Any], classes: dict[str, type[Part]]) -> None:
    """Refuse options that none of the parts has, and name the part that would have them."""
    allowed = {option for part in classes.values() for option in part.options()}
    for option in options:
        if option in allowed:
            continue
        if option not in (known := all_option_names()) and (hint := other_name(option, known)):
            raise UserError(f"{option}: {hint}")
        for kind, registry in _REGISTRIES.items():
            for other in registry:
                if option in registry.get(other).options():
                    raise UserError(
                        f"{option}: expected only with the {registry.kind} {other!r}, got it with {name}; leave it out, "
                        f"or use that part ({kind}={other!r})"
                    )
        raise unknown(f"option of {name}", option, [*allowed, *_REGISTRIES, *_ALGORITHM_OPTIONS])
