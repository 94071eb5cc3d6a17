"""Limits how often clients that have lost their state cause a reset of all control variates."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedbcgd.backends.flower.log import log

FIRST_INTERVAL = 10  # rounds from a client's first reset until it may cause another one; doubles with each


@dataclass(frozen=True)
class _Reset:
    """The last reset that a client caused."""

    round: int
    count: int  # how many it has caused so far

    @property
    def next_round(self) -> int:
        """The first round in which the client may cause another one."""
        return self.round + FIRST_INTERVAL * 2 ** (self.count - 1)


class ControlResets:
    """Limits the resets that each client can cause by saying that its state is lost.

    c is the mean of all c_i, so if one client loses its state, all controls begin again from zero. A client that reports a
    loss in every round must not keep all others from using control variates.
    """

    def __init__(self) -> None:
        self._last: dict[int, _Reset] = {}  # by client

    def allow(self, client: int, round: int) -> bool:
        """Return whether a client's report of lost state resets the controls in this round, and count it if so."""
        last = self._last.get(client)
        if last is not None and round < last.next_round:
            log.warning(
                "client %d lost its state again, as in round %d: the controls are kept until round %d, and its uploads are "
                "lost", client, last.round + 1, last.next_round
            )  # fmt: skip
            return False
        self._last[client] = _Reset(round, 1 if last is None else last.count + 1)
        return True

    def snapshot(self) -> dict[str, Any]:
        """Return what `restore` needs, in a form that JSON can hold."""
        return {str(client): [reset.round, reset.count] for client, reset in self._last.items()}

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Load a snapshot."""
        self._last = {int(client): _Reset(*reset) for client, reset in kept.items()}
