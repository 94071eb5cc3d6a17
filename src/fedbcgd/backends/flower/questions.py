"""The questions of a round that nobody has answered yet."""

from flwr.app import Message

from fedbcgd.backends.flower import wire
from fedbcgd.core.messages import Task


class OpenQuestions:
    """Messages that went out, and the tasks in them, by the token that the reply must return."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[Message, Task]] = {}

    def add(self, token: str, message: Message, task: Task) -> None:
        self._open[token] = message, task

    @property
    def messages(self) -> list[Message]:
        return [message for message, _ in self._open.values()]

    def answered(self, reply: Message) -> Task | None:
        """Close the question that a reply answers, and return its task; None if it answers none.

        It is known by the token that the reply returns; for an error that Flower made, by the question that it names.
        """
        if reply.has_error():
            asked = reply.metadata.reply_to_message_id
            token = next((t for t, (message, _) in self._open.items() if message.metadata.message_id == asked), None)
        else:
            token = wire.token(reply) or reply.metadata.group_id
        _, task = self._open.pop(token, (None, None)) if token is not None else (None, None)
        return task

    def close(self) -> list[tuple[Message, Task]]:
        """Close all questions, and return those that were open."""
        left, self._open = list(self._open.values()), {}
        return left
