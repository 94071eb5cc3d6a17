"""The options of `fedbcgd.flower.strategy`, which are read and checked here alone; those of Flower's own are among them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, MetricRecord
from torch import nn

from fedbcgd.backends.flower.log import log
from fedbcgd.backends.flower.plain import ROUND, RecordNames
from fedbcgd.core.algorithm import Algorithm
from fedbcgd.core.objective import Loss, Metrics, Precision
from fedbcgd.engine.loop import Callback
from fedbcgd.errors import UserError

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]

# Options of Flower's that have another name here.
_SAME = {"fraction_train": "cohort", "min_available_nodes": "min_clients", "fraction_evaluate": "evaluate_clients"}
_MAIN = "which needs a ServerApp with @app.main()"  # in one with server_fn, Flower calls `start`
# Options of Flower's that are refused, and what to write instead.
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


def _is_count(value: Any, least: int = 1) -> bool:
    return isinstance(value, int) and value >= least


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


_COUNT = (_is_count, "an integer ≥ 1")
_COUNT_OR_0 = (lambda value: _is_count(value, 0), "an integer ≥ 0")
_SHARE = (lambda value: _is_number(value) and 0 < value <= 1, "a share above 0, up to 1")
_SHARE_OR_0 = (lambda value: _is_number(value) and 0 <= value <= 1, "a share from 0 to 1")
_NAME = (lambda value: isinstance(value, str) and bool(value), "a name")
# What a value must be, as a function and in words.
_EXPECTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("clients", "cohort", "max_examples", "max_empty_rounds"), _COUNT),
    **dict.fromkeys(("min_clients", "evaluate_every", "checkpoint_every"), _COUNT),
    **dict.fromkeys(("min_available_nodes", "min_train_nodes", "min_evaluate_nodes"), _COUNT_OR_0),
    **dict.fromkeys(("evaluate_clients", "fraction_evaluate"), _SHARE_OR_0),
    **dict.fromkeys(("fraction_train", "close_at"), _SHARE),
    "oversample": (lambda value: _is_number(value) and 1 <= value <= 100, "a number from 1 to 100"),
    **dict.fromkeys(("weighted_by_key", "arrayrecord_key", "configrecord_key"), _NAME),
}
# Options that are never None.
_NEEDED = {"min_clients", "evaluate_every", "checkpoint_every", "evaluate_clients", "close_at", "oversample"}


def _check(name: str, value: Any) -> None:
    """Raise a UserError if an option has a wrong value."""
    if name in _EXPECTED:
        fits, expected = _EXPECTED[name]
        if not fits(value):
            raise UserError(f"{name}: expected {expected}, got {value!r}")


@dataclass(frozen=True)
class Options:
    """The options of `fedbcgd.flower.strategy`; its docstring describes them.

    Raises:
        UserError: a value is wrong.
    """

    clients: int | None = None
    roster: str | Path | None = None
    authenticated: bool = False
    max_examples: int | None = None
    cohort: int | None = None
    fraction_train: float | None = None
    min_train_nodes: int | None = None
    min_clients: int = 2
    patience: float = 3600.0
    close_at: float = 1.0
    oversample: float = 1.0
    max_empty_rounds: int | None = 3
    seed: int = 0
    precision: Precision = "fp32"
    channels_last: bool | None = None
    test: Any = None
    loss: Loss | nn.Module | None = None
    metrics: Metrics | None = None
    evaluate_every: int = 1
    evaluate_clients: float = 0.0
    min_evaluate_nodes: int | None = None
    budget: float | None = None
    target: Any = None
    folder: str | Path | None = None
    checkpoint_every: int = 1
    callbacks: Sequence[Callback] = ()
    progress_seconds: float = 30.0
    metrics_file: str | Path | None = None
    weighted_by_key: str | None = None
    arrayrecord_key: str | None = None
    configrecord_key: str | None = None

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            if value is not None or option.name in _NEEDED:
                _check(option.name, value)
        self.record_names()

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> tuple["Options", dict[str, Any]]:
        """Return the options among those that a user gave, and what is left, which is the algorithm's.

        Raises:
            UserError: a value is wrong, or an option of Flower's is not possible here or contradicts another one.
        """
        for name, value in given.items():
            if name in _INSTEAD:
                raise UserError(
                    f"{name}: expected an option of fedbcgd's strategy, got one of Flower's; {_INSTEAD[name]}"
                )
            if value is not None:
                _check(name, value)
        rest = dict(given)
        for name, ours in _SAME.items():
            if rest.get(name) is not None and rest.get(ours) is not None:
                raise UserError(f"{name}, {ours}: expected one of them, got both, which mean the same; leave one out")
        least = max(rest.pop("min_available_nodes", 0) or 0, rest.get("min_train_nodes") or 0)
        if least:
            rest["min_clients"] = max(least, rest.get("min_clients", 1))
        if (share := rest.pop("fraction_evaluate", None)) is not None:
            rest["evaluate_clients"] = float(share)
        names = {option.name for option in fields(cls)}
        return cls(**{n: v for n, v in rest.items() if n in names}), {n: v for n, v in rest.items() if n not in names}

    def record_names(self) -> RecordNames:
        """Return the names in messages to clients that train in an app of their own."""
        default = RecordNames()
        return RecordNames(
            self.arrayrecord_key or default.arrays,
            self.configrecord_key or default.config,
            self.weighted_by_key or default.weighted_by,
        )

    def cohort_of(self, clients: int) -> int:
        """Return how many of the clients are asked in a round."""
        share = clients if self.fraction_train is None else int(clients * self.fraction_train)
        return min(clients, self.cohort or max(share, self.min_train_nodes or 1))

    def evaluating(self, online: int) -> int:
        """Return how many of the clients that are online evaluate."""
        if not self.evaluate_clients:
            return 0
        return min(online, max(round(self.evaluate_clients * online), self.min_evaluate_nodes or 1))


@dataclass(frozen=True)
class Settings:
    """What one call of the strategy's `start` sets.

    Attributes:
        timeout: seconds that a round waits for its clients.
        train: settings for the clients' own training.
        evaluate: settings for the clients' own evaluation.
    """

    timeout: float = 3600.0
    train: Mapping[str, Any] = field(default_factory=dict)
    evaluate: Mapping[str, Any] = field(default_factory=dict)

    def check(self, algorithm: Algorithm) -> None:
        """Check the settings if clients train by the algorithm's local rule, which reads only the algorithm's options.

        Raises:
            UserError: a setting contradicts the algorithm's option of that name.
        """
        for name, value in self.train.items():
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
                    f"train_config: expected {name} = {ours!r}, since the clients train by the rule of {algorithm.name}, "
                    f"got {value!r}; say fedbcgd.flower.strategy(…, {option}={value!r}), or train by a function of your own"
                )
