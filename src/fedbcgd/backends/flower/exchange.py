"""Messages to nodes, and their replies. Replies are fetched one by one, so that an unreadable one does not lose others."""

import time
from collections.abc import Callable, Iterator, Sequence

from flwr.app import Error, Message
from flwr.serverapp import Grid
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from fedbcgd.core.reading import shorten

SHORTEST, LONGEST = 0.02, 1.0  # seconds between two checks for replies, which become rarer with time
UNREADABLE = 0  # Flower's code for unknown errors

# What Flower raises when a node's bytes do not make a message. Errors of the network are not among them.
_BAD_BYTES = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    RecursionError,
    MemoryError,
    DecodeError,
)


def push(grid: Grid, messages: Sequence[Message]) -> dict[str, Message]:
    """Send messages; return those that Flower accepted, by their message id."""
    taken = set(grid.push_messages(messages))
    return {m.metadata.message_id: m for m in messages if m.metadata.message_id in taken}


def pull(grid: Grid, key: str, question: Message) -> Message | None:
    """Return the reply to a message; None if there is none yet.

    Args:
        grid: Flower's grid.
        key: the id of the message.
        question: the message.

    Returns:
        The reply. In place of a reply that cannot be read: a message of Flower with an error.
    """
    try:
        replies = list(grid.pull_messages([key]))
        if replies and not isinstance(replies[0], Message):
            raise TypeError(f"expected a Message, got {type(replies[0]).__name__}")
        return replies[0] if replies else None
    except _BAD_BYTES as error:
        reason = shorten(f"its reply cannot be read: {type(error).__name__}: {error}")
        return Message(Error(code=UNREADABLE, reason=reason), reply_to=question)


def exchange(
    grid: Grid,
    messages: Sequence[Message],
    timeout: float,
    on_wait: Callable[[], None] = lambda: None,
    enough: Callable[[], bool] = lambda: False,
) -> Iterator[Message]:
    """Send messages, and yield each reply as it arrives, until all have arrived or the time is up.

    Args:
        grid: Flower's grid.
        messages: what to send.
        timeout: seconds to wait for the replies.
        on_wait: called after each check for replies.
        enough: called after `on_wait`, when all replies that have arrived were yielded; returns whether to stop.
    """
    deadline = time.monotonic() + timeout
    waiting = push(grid, messages)
    pause = SHORTEST
    while waiting:
        for key, question in list(waiting.items()):
            reply = pull(grid, key, question)
            if reply is not None:
                del waiting[key]
                yield reply
        on_wait()
        left = deadline - time.monotonic()
        if left <= 0 or enough():
            break
        if waiting:
            time.sleep(min(pause, left))
            pause = min(LONGEST, pause * 1.5)
