"""Clients that were still at work when their round closed."""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass

from flwr.app import Message
from flwr.serverapp import Grid

from fedbcgd.backends.flower.exchange import pull
from fedbcgd.core.messages import Task

log = logging.getLogger("flwr.fedbcgd")  # shown where Flower shows its own


@dataclass(frozen=True)
class _Open:
    question: Message
    task: Task
    until: float  # when Flower gives the question up


class LateReplies:
    """Questions whose round closed without them. Who has such a question is not asked another one meanwhile.

    A reply that comes late is fetched, so that the SuperLink need not keep it, and dropped without being decoded. The
    client learns from its next task that its upload was not accepted, and drops the state that went with it.
    """

    def __init__(self) -> None:
        self._open: dict[int, _Open] = {}  # by client

    def add(self, question: Message, task: Task, seconds: float) -> None:
        """Take note of a question that is given up; Flower keeps it for so many seconds more."""
        self._open[task.client] = _Open(question, task, time.monotonic() + seconds)

    def drop_arrived(self, grid: Grid) -> None:
        """Drop the replies that have come, and forget the questions whose time is over."""
        for client, late in list(self._open.items()):
            if time.monotonic() >= late.until:
                del self._open[client]
            elif pull(grid, late.question.metadata.message_id, late.question) is not None:
                del self._open[client]
                log.info("client %d answered after round %d had closed: dropped", client, late.task.round + 1)

    def busy(self, nodes: Mapping[int, int]) -> set[int]:
        """Return the clients that are still at work.

        Args:
            nodes: the node of each client that is connected; one that comes back as another node is not at work.
        """
        return {c for c, late in self._open.items() if nodes.get(c) == late.question.metadata.dst_node_id}
