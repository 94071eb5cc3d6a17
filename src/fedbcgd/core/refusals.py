"""Counts refused uploads over the rounds; decides when a client is no longer sampled, and when training has diverged."""

import logging
from collections.abc import Iterable, Mapping
from statistics import median_low
from typing import Any

from fedbcgd.core.reading import shorten

log = logging.getLogger("fedbcgd")

MAX_MOSTLY_REFUSED_ROUNDS = 3  # successive rounds with at least two thirds of the uploads refused; then training stops
MAX_LOGGED = 5  # refusals of a round that are logged one by one; the others are counted
MAX_BLAMED_STEPS = 3  # steps rolled back because of a client, after which it is no longer sampled
OUTLIER_RATIO = 10  # an upload whose norm is more than this multiple of the median is blamed for a rolled-back step


class Refusals:
    """The refusals of a run. `reasons` and `clients` are those of the open round."""

    def __init__(self) -> None:
        self.strikes: dict[int, int] = {}  # client → steps rolled back because of it
        self.reasons: list[str] = []
        self.clients: set[int] = set()
        # Of the successive rounds, up to the last one, in which at least two thirds of the uploads were refused:
        self._mostly_refused_rounds = 0
        self._refused_clients: set[int] = set()
        self._sampled_clients: set[int] = set()

    def open_round(self) -> None:
        """Forget the refusals of the round before."""
        self.reasons, self.clients = [], set()

    def add(self, reason: str, client: int | None) -> str:
        """Record a refused upload; return its reason, shortened."""
        reason = shorten(reason)
        self.reasons.append(reason)
        if len(self.reasons) <= self._logged:
            log.warning("upload refused: %s", reason)
        if client is not None:
            self.clients.add(client)
        return reason

    @property
    def _logged(self) -> int:
        """How many refusals of this round are logged one by one; few if most uploads of the last round were refused too."""
        return min(MAX_LOGGED, 1) if self._mostly_refused_rounds else MAX_LOGGED

    def blame(self, norms: Mapping[int, float], round: int, why: str) -> None:
        """Count a step that was rolled back against the clients whose uploads are far larger than the others'.

        If no upload is an outlier, all of them count as refused, since training diverges.

        Args:
            norms: the norm of each client's upload that went into the step.
            round: the round of the step, counted from 1.
            why: what was wrong with it, and what was done.
        """
        middle = median_low(norms.values())
        outliers = {client: size for client, size in norms.items() if size > OUTLIER_RATIO * middle or len(norms) == 1}
        for client, size in (outliers or norms).items():
            details = f"the norm of this upload is {size:.3g}, the median {middle:.3g}"
            self.add(f"round {round}, client {client}: {why}; {details}", client)
        for client in outliers:
            self.strikes[client] = self.strikes.get(client, 0) + 1
            if self.strikes[client] == MAX_BLAMED_STEPS:
                log.warning(
                    "client %d is no longer sampled: %d steps were rolled back because of it", client, MAX_BLAMED_STEPS
                )

    def excluded(self) -> set[int]:
        """Return the clients that are no longer sampled."""
        return {client for client, strikes in self.strikes.items() if strikes >= MAX_BLAMED_STEPS}

    def close_round(self, counted: set[int], sampled: Iterable[int]) -> None:
        """Count this round if at least two thirds of its uploads were refused; otherwise reset the count.

        Args:
            counted: the clients whose uploads were added; those blamed for a rolled-back step are refused as well.
            sampled: the clients of the round.
        """
        if len(self.reasons) > self._logged:
            log.warning("and %d more uploads of this round were refused", len(self.reasons) - self._logged)
        if not self.clients or len(self.clients) < 2 * len(counted - self.clients):
            self._mostly_refused_rounds, self._refused_clients, self._sampled_clients = 0, set(), set()
            return
        self._mostly_refused_rounds += 1
        self._refused_clients |= self.clients
        self._sampled_clients |= set(sampled)

    @property
    def diverged(self) -> bool:
        """Whether most uploads of the last rounds were refused, and not only those of a single client."""
        several = len(self._refused_clients) >= min(2, len(self._sampled_clients))
        return self._mostly_refused_rounds >= MAX_MOSTLY_REFUSED_ROUNDS and several

    def snapshot(self) -> dict[str, Any]:
        """Return what `restore` needs."""
        return {
            "barren": self._mostly_refused_rounds,  # the name that checkpoints of all versions have
            "barren_clients": [sorted(self._refused_clients), sorted(self._sampled_clients)],
            "strikes": [[client, n] for client, n in sorted(self.strikes.items())],
        }

    def restore(self, values: Mapping[str, Any]) -> None:
        """Load a snapshot; those of earlier versions have the first value only."""
        self._mostly_refused_rounds = values["barren"]
        self._refused_clients, self._sampled_clients = map(set, values.get("barren_clients", [(), ()]))
        self.strikes = dict(values.get("strikes", []))
