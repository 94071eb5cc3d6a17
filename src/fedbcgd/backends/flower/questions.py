"""The messages that were sent to clients and are not answered yet: those of the open round, and late ones."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from flwr.app import Message
from flwr.serverapp import Grid

from fedbcgd.backends.flower import wire
from fedbcgd.backends.flower.exchange import pull
from fedbcgd.backends.flower.log import log
from fedbcgd.core.messages import Task


@dataclass(frozen=True)
class Question:
    """A message that was sent to a client, and the task in it."""

    message: Message
    task: Task


class OpenQuestions:
    """The questions that are not answered yet, by the token that the reply must return."""

    def __init__(self) -> None:
        self._open: dict[str, Question] = {}

    def add(self, token: str, message: Message, task: Task) -> None:
        """Add a question that is about to be sent."""
        self._open[token] = Question(message, task)

    @property
    def messages(self) -> list[Message]:
        """The messages of all open questions."""
        return [question.message for question in self._open.values()]

    def answered(self, reply: Message) -> Task | None:
        """Close the question that a reply answers, and return its task; None if it answers none.

        The reply returns the question's token. An error that Flower made has none: it names the message it is about.
        """
        if reply.has_error():
            token = next(self._tokens(reply.metadata.reply_to_message_id), None)
        else:
            token = wire.token(reply) or reply.metadata.group_id
        question = self._open.pop(token, None) if token is not None else None
        return None if question is None else question.task

    def _tokens(self, message_id: str) -> Iterator[str]:
        return (token for token, q in self._open.items() if q.message.metadata.message_id == message_id)

    def close(self) -> list[Question]:
        """Close and return all open questions."""
        left, self._open = list(self._open.values()), {}
        return left


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
            seconds: how long ago it was sent.
        """
        until = time.monotonic() + question.message.metadata.ttl - seconds
        self._late[question.task.client] = _Late(question, until)

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
