"""What a node does in every ClientApp: it answers the server, says which client it is, and keeps that client's state."""

import contextlib
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict

from fedbcgd.backends.flower import wire
from fedbcgd.backends.flower.log import log
from fedbcgd.backends.flower.memory import ClientMemory, ContextStorage, FolderStorage
from fedbcgd.backends.flower.wire import TaskRequest
from fedbcgd.core.reading import Trains
from fedbcgd.core.vector import Layout
from fedbcgd.errors import UserError, users_frames, with_line

Serve = Callable[[Message, Context], Message]


class StateLost(UserError):
    """The client's control variates are lost, so that those of all clients must be reset."""


def partition_id(context: Context) -> int:
    """Return the client's index from the node's configuration.

    Raises:
        UserError: the configuration has none.
    """
    given = context.node_config.get("partition-id")
    try:
        return int(given)  # type: ignore[arg-type]
    except (ValueError, TypeError):
        raise UserError(
            f"partition-id: expected this client's index in the node's configuration, got {given!r}; start the SuperNode "
            'with --node-config "partition-id=0" (each with a number of its own), or pass index=…'
        ) from None


def serving(work: Callable[[Message, Context], RecordDict]) -> Serve:
    """Return a function for a ClientApp that replies with the result of the work, or with why it failed.

    If an app raises an error, Flower tells the server that it failed, but not why.
    """

    def serve(message: Message, context: Context) -> Message:
        task: Any = message.content[wire.TASK]
        token = task[wire.TOKEN]
        try:
            wire.check_server(message.content)
            content = work(message, context)
        except UserError as error:
            log.error("%s", error)
            content = wire.failure(str(error), state_lost=isinstance(error, StateLost))
        except Exception as error:
            log.error(
                "%s", "".join(traceback.format_exception(error.with_traceback(users_frames(error.__traceback__))))
            )
            content = wire.failure(with_line(error))
        values: Any = content.get(wire.VALUES, {})
        content[wire.VALUES] = ConfigRecord({**values, wire.TOKEN: token})
        return Message(content, reply_to=message)

    return serve


@dataclass
class Node:
    """What a node keeps and says.

    Attributes:
        index: a function that returns the client's index; None: `partition_id`.
        folder: where the client's state is kept; None: in Flower's context.
        trains: how the client trains.
    """

    index: Callable[[Context], int] | None
    folder: str | Path | None
    trains: Trains

    def client_index(self, context: Context) -> int:
        """Return the client's index."""
        return (self.index or partition_id)(context)

    def hello(self, message: Message, context: Context) -> RecordDict:
        """Say which client this is, and how it trains."""
        values = {"client": self.client_index(context), "of": int(context.node_config.get("num-partitions", 0))}
        return RecordDict({wire.VALUES: ConfigRecord({**values, "trains": self.trains, **wire.versions()})})

    @contextlib.contextmanager
    def memory(self, request: TaskRequest, context: Context, layout: Layout) -> Iterator[ClientMemory]:
        """Load the client's state, as the request says which of it counts; keep it when the task is done.

        Raises:
            StateLost: the algorithm has control variates, and the state is not that of the server's request.
        """
        if not request.algorithm.state_names:
            yield ClientMemory()
            return
        keeper: ContextStorage | FolderStorage = ContextStorage(context.state, layout.dtype)
        if self.folder is not None:
            keeper = FolderStorage(Path(self.folder), request.task.client)
        memory = keeper.load()
        if not memory.settle(request, layout.dim, layout.dtype):
            if request.algorithm.local.controls:  # c is no longer the mean of the c_i, so the server must reset it
                keeper.save(memory)
                raise StateLost(
                    f"state: expected the client's state of {_version(request.accepted)}, got that of "
                    f"{_version(memory.version)}; client_app(folder=…) keeps it over restarts"
                )
            memory.reset_to(request)
        yield memory
        keeper.save(memory)


def _version(round: int) -> str:
    return "no round" if round < 0 else f"round {round + 1}"
