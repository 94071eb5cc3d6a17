"""Clients that were still at work when their round closed."""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass

from flwr.serverapp import Grid

from fedbcgd.backends.flower.exchange import pull
from fedbcgd.backends.flower.questions import Question

log = logging.getLogger("flwr.fedbcgd")  # shown where Flower shows its own


@dataclass(frozen=True)
class _Late:
    question: Question
    until: float  # when Flower discards it, in the time of time.monotonic


class LateReplies:
    """Questions that were not answered when their round closed. While such a question is open, its client gets no other.

    A late reply is fetched, so that the SuperLink need not keep it, and dropped without being decoded. The client learns
    from its next task that its upload was not accepted, and drops the state that belongs to it.
    """

    def __init__(self) -> None:
        self._late: dict[int, _Late] = {}  # by client

    def add(self, question: Question, seconds: float) -> None:
        """Add a question that the round no longer waits for.

        Args:
            question: the question.
            seconds: how long Flower still keeps it.
        """
        self._late[question.task.client] = _Late(question, time.monotonic() + seconds)

    def drop_arrived(self, grid: Grid) -> None:
        """Drop the replies that have arrived, and forget the questions that Flower has discarded."""
        for client, late in list(self._late.items()):
            question = late.question
            if time.monotonic() >= late.until:
                del self._late[client]
            elif pull(grid, question.message.metadata.message_id, question.message) is not None:
                del self._late[client]
                log.info("client %d answered after round %d had closed: dropped", client, question.task.round + 1)

    def busy(self, nodes: Mapping[int, int]) -> set[int]:
        """Return the clients that are still at work.

        Args:
            nodes: the node of each client that is connected; one that comes back as another node is not at work.
        """
        return {c for c, late in self._late.items() if nodes.get(c) == late.question.message.metadata.dst_node_id}
