"""All clients in this process, one after the other: for debugging, and the reference for every other carrier."""

from collections.abc import Callable, Sequence
from typing import Any

from fedbcgd.client import Client
from fedbcgd.data.sources import as_source
from fedbcgd.messages import Plan, Upload
from fedbcgd.server import Server
from fedbcgd.state import Memory
from fedbcgd.threads import one_thread

Transport = Callable[[Upload], Upload | None]


class InProcess:
    """`transport` stands for the network: it may lose an upload (None) or damage it."""

    def __init__(self, client: Client, clients: Sequence[Any], transport: Transport | None = None):
        self.client = client
        self.clients = clients
        self.transport = transport
        self.state = Memory(client.layout.dim, client.layout.dtype)

    def carry(self, server: Server, plan: Plan) -> None:
        with one_thread():
            for task in plan.tasks:
                data = as_source(self.clients[task.client], f"client {task.client}")
                state = self.state.load(task.client, plan.broadcast.epoch)
                try:
                    upload, update = self.client.fit(plan.broadcast, task, data, state)
                except Exception as error:
                    error.add_note(f"while client {task.client} trained in round {task.round}")
                    raise
                arrived = self.transport(upload) if self.transport else upload
                if arrived is None:
                    server.lost(task, "the upload did not arrive")
                elif server.receive(arrived).accepted:
                    self.state.store(update)

    def close(self) -> None:
        pass
