"""Who is online: clients by the index they report, whatever node id Flower gave them today."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedbcgd.errors import UserError
from fedbcgd.flower import wire

log = logging.getLogger("flwr.fedbcgd")  # shown where Flower shows its own

POLL = 1.0  # seconds between looks at who has come
HELLO_SECONDS = 120.0  # a node that has not said who it is by then is asked again later


class Roster:
    def __init__(self) -> None:
        self.node: dict[int, int] = {}  # client → node id, of those that are connected
        self.most = 0  # the largest number of clients that anybody spoke of
        self._known: dict[int, int] = {}  # node id → client

    def refresh(self, grid: Grid) -> None:
        """Ask those who are new who they are; forget those who have gone."""
        connected = set(grid.get_node_ids())
        new = connected - set(self._known)
        if new:
            questions = [
                Message(RecordDict({wire.TASK: ConfigRecord({"ask": "who"})}), node, wire.HELLO, ttl=HELLO_SECONDS)
                for node in sorted(new)
            ]
            for answer in grid.send_and_receive(questions, timeout=HELLO_SECONDS):
                self._enter(answer)
        self.node = {}
        for (
            node,
            client,
        ) in self._known.items():  # of two nodes with one index the newer counts: the older was restarted
            if node in connected:
                if client in self.node:
                    log.warning("two nodes say that they are client %d: only the newer one is asked", client)
                self.node[client] = node

    def _enter(self, answer: Message) -> None:
        node = answer.metadata.src_node_id
        if answer.has_error():
            log.warning("node %d did not say who it is: %s", node, answer.error.reason)
            return
        told = wire.told(answer.content)
        client = told.get("client")
        if not isinstance(client, int) or isinstance(client, bool) or client < 0:
            log.warning("node %d cannot take part: %s", node, told.get("failed", "it reports no index"))
            return
        self._known.pop(node, None)
        self._known[node] = client
        self.most = max(self.most, client + 1, int(told.get("of", 0) or 0))

    def wait(self, grid: Grid, least: int, known: Callable[[int], bool], patience: float) -> Sequence[int]:
        """The clients that are online, once there are at least so many."""
        deadline = time.monotonic() + patience
        said = -1
        while True:
            self.refresh(grid)
            there = sorted(client for client in self.node if known(client))
            if len(there) >= least:
                return there
            if time.monotonic() > deadline:
                raise UserError(
                    f"{len(there)} clients are online after {patience:g} s, {least} are needed (min_clients)"
                )
            if len(there) != said:
                said = len(there)
                log.warning("waiting for clients: %d online, %d needed", said, least)
            time.sleep(POLL)

    def clients(self, nodes: Iterable[int]) -> list[int]:
        return [self._known[node] for node in nodes if node in self._known]
