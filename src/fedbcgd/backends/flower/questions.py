"""The messages of a round that were sent to clients, until each is answered."""

from collections.abc import Iterator
from dataclasses import dataclass

from flwr.app import Message

from fedbcgd.backends.flower import wire
from fedbcgd.core.messages import Task


@dataclass(frozen=True)
class Question:
    """A message that was sent to a client, and the task in it."""

    message: Message
    task: Task


@dataclass(frozen=True)
class Answer:
    """The result of a task whose client replied."""

    task: Task
    accepted: bool  # whether the upload was accepted


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
