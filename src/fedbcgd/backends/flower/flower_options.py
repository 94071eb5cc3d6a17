"""Options of Flower's own strategies: which of them `fedbcgd.flower.strategy` takes, and which it refuses."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from fedbcgd.backends.flower.plain import ROUND, Form
from fedbcgd.core.algorithm import Algorithm
from fedbcgd.errors import UserError

log = logging.getLogger("flwr.fedbcgd")  # shown where Flower shows its own

_MAIN = "which needs a ServerApp with @app.main()"  # in one with server_fn, Flower calls `start`
# The options that are refused, and what to write instead.
_INSTEAD = {
    "fraction_fit": "say fraction_train=…",
    "min_fit_clients": "say min_train_nodes=…",
    "min_evaluate_clients": "say min_evaluate_nodes=…",
    "min_available_clients": "say min_available_nodes=…",
    "train_metrics_aggr_fn": "metrics are means weighted by examples; leave it out",
    "evaluate_metrics_aggr_fn": "metrics are means weighted by examples; leave it out",
    "fit_metrics_aggregation_fn": "metrics are means weighted by examples; leave it out",
    "evaluate_metrics_aggregation_fn": "metrics are means weighted by examples; leave it out",
    "evaluate_fn": f"pass it to start: strategy.start(grid, evaluate_fn=…), {_MAIN}",
    "on_fit_config_fn": f"pass the settings to start: strategy.start(grid, train_config=…), {_MAIN}",
    "on_evaluate_config_fn": f"pass the settings to start: strategy.start(grid, evaluate_config=…), {_MAIN}",
    "initial_parameters": f"the model itself is given; other weights go to strategy.start(grid, initial_arrays=…), {_MAIN}",
    "accept_failures": "a failed client is lost for its round, and the round goes on; leave it out",
    "eta": "say server_lr=…",
    "eta_l": "the rate of the clients is lr=…, or a setting of your own in train_config",
    "beta_1": "say beta1=…",
    "beta_2": "say beta2=…",
}


@dataclass(frozen=True)
class FlowerOptions:
    """Options of Flower's FedAvg, with the same meaning. None: not given.

    Attributes:
        fraction_train: share of the clients that train in a round.
        min_train_nodes: how many train at least.
        fraction_evaluate: share of the online clients that evaluate.
        min_evaluate_nodes: how many evaluate at least.
        min_available_nodes: no round begins with fewer clients online.
        weighted_by_key: the metric by which clients are weighted.
        arrayrecord_key: the name of the model's record in messages to clients that train in an app of their own.
        configrecord_key: the name of the settings' record in these messages.

    Raises:
        UserError: a value is wrong.
    """

    fraction_train: float | None = None
    min_train_nodes: int | None = None
    fraction_evaluate: float | None = None
    min_evaluate_nodes: int | None = None
    min_available_nodes: int | None = None
    weighted_by_key: str | None = None
    arrayrecord_key: str | None = None
    configrecord_key: str | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            if field.name == "fraction_train" and not (_is_number(value) and 0 < value <= 1):
                raise UserError(f"fraction_train: expected a share above 0, up to 1, got {value!r}")
            if field.name == "fraction_evaluate" and not (_is_number(value) and 0 <= value <= 1):
                raise UserError(f"fraction_evaluate: expected a share from 0 to 1, got {value!r}")
            if field.name.startswith("min_") and (not isinstance(value, int) or value < 0):
                raise UserError(f"{field.name}: expected an integer ≥ 0, got {value!r}")
            if field.name.endswith("_key") and (not isinstance(value, str) or not value):
                raise UserError(f"{field.name}: expected a name, got {value!r}")

    @classmethod
    def take(cls, options: dict[str, Any]) -> "FlowerOptions":
        """Remove Flower's options from `options`, and set our options that follow from them.

        Raises:
            UserError: an option of Flower is not possible here, or has the same meaning as one of ours that is given too.
        """
        for name in options:
            if name in _INSTEAD:
                raise UserError(
                    f"{name}: expected an option of fedbcgd's strategy, got one of Flower's; {_INSTEAD[name]}"
                )
        given = cls(**{f.name: options.pop(f.name) for f in fields(cls) if f.name in options})
        least = {n: getattr(given, n) for n in ("min_available_nodes", "min_train_nodes")}
        for name, ours in (
            ("fraction_train", "cohort"),
            ("min_available_nodes", "min_clients"),
            ("fraction_evaluate", "evaluate_clients"),
        ):
            if getattr(given, name) is not None and options.get(ours) is not None:
                raise UserError(f"{name}, {ours}: expected one of them, got both, which mean the same; leave one out")
        if any(least.values()):
            options["min_clients"] = max([options.get("min_clients", 1), *(n for n in least.values() if n)])
        if given.fraction_evaluate is not None:
            options["evaluate_clients"] = float(given.fraction_evaluate)
        return given

    def form(self) -> Form:
        """Return the names in messages to clients that train in an app of their own."""
        default = Form()
        return Form(
            self.arrayrecord_key or default.arrays,
            self.configrecord_key or default.config,
            self.weighted_by_key or default.weighted_by,
        )

    def cohort(self, clients: int) -> int:
        """Return how many of the clients train in a round."""
        share = clients if self.fraction_train is None else int(clients * self.fraction_train)
        return min(clients, max(share, self.min_train_nodes or 1))

    def evaluating(self, share: float, online: int) -> int:
        """Return how many of the online clients evaluate.

        Args:
            share: the share of them that is to evaluate; 0: none.
            online: how many clients are online.
        """
        if not share:
            return 0
        return min(online, max(round(share * online), self.min_evaluate_nodes or 1))


def check_train_config(config: Mapping[str, Any], algorithm: Algorithm) -> None:
    """Check settings for clients that train by the algorithm's local rule, which reads only the algorithm's options.

    Raises:
        UserError: a setting contradicts the algorithm's option of that name.
    """
    for name, value in config.items():
        option = name.replace("-", "_")
        if name == ROUND:
            continue
        if option not in type(algorithm.local).options():
            log.warning(
                "train_config: %r has no effect, since the clients train by the rule of %s, which has no such option",
                name, algorithm.name
            )  # fmt: skip
        elif value != (ours := getattr(algorithm.local, option)):
            raise UserError(
                f"train_config: expected {name} = {ours!r}, since the clients train by the rule of {algorithm.name}, got "
                f"{value!r}; say fedbcgd.flower.strategy(…, {option}={value!r}), or train by a function of your own"
            )


def check_counts(*, or_none: bool = False, **counts: Any) -> None:
    """Check options that count something.

    Args:
        or_none: whether None is allowed, too.
        **counts: the options by name.

    Raises:
        UserError: one is not an integer, or below 1.
    """
    for name, value in counts.items():
        if value is None and or_none:
            continue
        if not isinstance(value, int) or value < 1:
            raise UserError(f"{name}: expected an integer ≥ 1, got {value!r}")


def check_shares(evaluate_clients: float, close_at: float, oversample: float) -> None:
    """Check the options of `fedbcgd.flower.strategy` that are shares of the clients, or a factor.

    Raises:
        UserError: one is out of range.
    """
    if not 0 <= evaluate_clients <= 1:
        raise UserError(f"evaluate_clients: expected a share from 0 to 1, got {evaluate_clients!r}")
    if not 0 < close_at <= 1:
        raise UserError(f"close_at: expected a share above 0 and at most 1, got {close_at!r}")
    if not 1 <= oversample <= 100:
        raise UserError(f"oversample: expected a number from 1 to 100, got {oversample!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
