"""Metrics of the model on each client's own held-out examples, and how they are spread over the clients."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from fedbcgd.algorithms.local_rules.sgd import SGD
from fedbcgd.data.sources import Source, as_source
from fedbcgd.engine.evaluation import combine, evaluate_span, spans
from fedbcgd.engine.job import Job
from fedbcgd.errors import UserError

PREFIX = "clients_"  # begins the names of these columns
SPREAD = ("mean", "std", "worst_tenth", "lowest_quarter")  # ends them

Choose = Callable[[Collection[str]], tuple[str, bool]]  # of names of metrics: returns one, and whether it should fall


@dataclass
class ClientEvaluation:
    """Evaluates the model on each client's own examples, in this process; it changes nothing of the run.

    Attributes:
        job: model, algorithm and seed.
        tests: the held-out examples of each client; None: this client has none and does not count.
        choose: chooses the metric that is reported.
        personal: local steps before a second, personal evaluation; None: there is none.
        clients: the data of each client, for these steps.
    """

    job: Job
    tests: Sequence[Source | None]
    choose: Choose
    personal: int | None = None
    clients: Sequence[Any] = ()

    def measure(self, x: Tensor, round: int) -> tuple[dict[str, float], dict[int, dict[str, float]]]:
        """Measure the model x after this many rounds.

        Returns:
            The columns: `clients_…`, then `clients_personal_…`; and the metrics of each client.
        """
        clients = [k for k, test in enumerate(self.tests) if test is not None]
        self.job.client.model.load(x)
        each = {k: self._metrics(k) for k in clients}
        out = self._spread("", [*each.values()])
        if self.personal is not None:
            personal = {k: self._personal_metrics(x, round, k) for k in clients}
            out |= self._spread("personal_", [*personal.values()])
            each = {k: each[k] | {f"personal_{name}": v for name, v in personal[k].items()} for k in clients}
        return out, each

    def _spread(self, kind: str, metrics: Sequence[dict[str, float]]) -> dict[str, float]:
        name, falls = self.choose(metrics[0])
        values = [own.get(name, math.nan) for own in metrics]
        return {f"{PREFIX}{kind}{name}_{part}": value for part, value in spread(values, falls).items()}

    def _personal_metrics(self, x: Tensor, round: int, client: int) -> dict[str, float]:
        local = self.job.algorithm.local
        alike = {name: getattr(local, name) for name in ("lr", "lr_decay", "weight_decay", "clip_norm", "batch_size")}
        data = as_source(self.clients[client], f"client {client}")
        try:
            self.job.client.adapt(x, round, client, data, SGD(**alike, local_steps=self.personal))
        except Exception as error:
            error.add_note(f"while the model was adapted to client {client} after round {round}")
            raise
        return self._metrics(client)

    def _metrics(self, client: int) -> dict[str, float]:
        """Return the metrics of the model that is loaded."""
        module, test = self.job.client.model.module, self.tests[client]
        assert test is not None
        return combine([evaluate_span(module, self.job.objective, test, *span) for span in spans(len(test))])


def spread(values: Sequence[float], falls: bool = False) -> dict[str, float]:
    """Return how a metric is spread over clients, each of which counts equally.

    Args:
        values: the metric of each client.
        falls: whether it should fall, so that the largest values are the worst.

    Returns:
        The mean; the standard deviation over these clients; the mean of the worst tenth and of the worst quarter of them,
        rounded up to whole clients.
    """
    worst_first = sorted(values, key=lambda value: (not math.isnan(value), -value if falls else value))

    tenth, quarter = (worst_first[: -(-len(values) // share)] for share in (10, 4))
    with np.errstate(invalid="ignore", over="ignore"):  # of a model that diverged
        measured = np.mean(values), np.std(values), np.mean(tenth), np.mean(quarter)
    return dict(zip(SPREAD, map(float, measured), strict=True))


def check_tests(tests: Any, clients: int) -> list[Source | None]:
    """Return the held-out examples of each client as sources.

    Raises:
        UserError: they are not a list with an entry for each client, or all are None.
    """
    if not isinstance(tests, Sequence) or len(tests) != clients:
        found = f"{len(tests)}" if isinstance(tests, Sequence) else type(tests).__name__
        raise UserError(f"client_tests: expected a list with the data of each of {clients} clients, got {found}")
    sources = [None if own is None else as_source(own, f"client_tests: client {k}") for k, own in enumerate(tests)]
    if all(source is None for source in sources):
        raise UserError("client_tests: expected examples of at least one client, got none")
    return sources
