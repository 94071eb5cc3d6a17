"""Which node is which client: each client index belongs to one node, known by its public key."""

import hashlib
import json
import logging
import secrets
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from fedbcgd.backends.flower import wire
from fedbcgd.backends.flower.exchange import LONGEST, SHORTEST, pull, push
from fedbcgd.core.reading import MOST_STEPS, Hello, Malformed, Trains, shorten
from fedbcgd.errors import UserError

log = logging.getLogger("flwr.fedbcgd")  # shown where Flower shows its own

HELLO_SECONDS = 120.0  # a node that has not said who it is by then is asked again later
FIRST_WAIT, LONGEST_WAIT = 2.0, 600.0  # seconds before a node is asked again: doubled each time


class Entry(BaseModel):
    """What an operator says about one client."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    key: str | None = None  # the node's public key, or the file that has it
    node: int | None = Field(None, ge=1)  # Flower's node id
    examples: int | None = Field(None, ge=1, le=MOST_STEPS)
    test_examples: int | None = Field(None, ge=1, le=MOST_STEPS)


def read_roster(path: str | Path) -> dict[int, Entry]:
    """Read a roster file: TOML, or JSON if its name ends so.

    Args:
        path: the file. A table `clients` has an entry for each index from 0 on, with `key` (a public key as OpenSSH or
            PEM writes it, or the name of a file beside the roster) or `node` (Flower's node id), and, if wanted,
            `examples` and `test_examples`.

    Returns:
        The entries by index; every key is given as text.

    Raises:
        UserError: the file cannot be read, or is no roster.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        if not isinstance(found, dict) or set(found) != {"clients"}:
            raise ValueError("expected one table, clients")
        entries = TypeAdapter(dict[str, Entry]).validate_python(found["clients"])
        clients = {int(index): entry for index, entry in entries.items() if index.isdecimal()}
        if sorted(clients) != list(range(len(entries))) or not entries:
            raise ValueError("clients: expected an entry for each index from 0 to M − 1")
        for index, entry in clients.items():
            if (entry.key is None) == (entry.node is None):
                raise ValueError(f"clients.{index}: expected either key or node")
            if entry.key is not None and not entry.key.startswith(("ecdsa-", "-----BEGIN")):
                clients[index] = entry.model_copy(update={"key": (path.parent / entry.key).read_text("utf-8")})
        if len(set(map(_of_entry, clients.values()))) < len(clients):
            raise ValueError("clients: expected a different key or node for each index")
        return clients
    except OSError as error:
        raise UserError(f"roster: {error.filename} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"roster: {path}: clients.{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except (ValueError, UnsupportedAlgorithm) as error:
        raise UserError(f"roster: {path}: {error}") from None


def _of_entry(entry: Entry) -> str:
    if entry.key is None:
        return f"node {entry.node}"
    data = entry.key.strip().encode()
    load = serialization.load_pem_public_key if data.startswith(b"-----") else serialization.load_ssh_public_key
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return _of_key(load(data).public_bytes(serialization.Encoding.PEM, form))  # as Flower keeps it


def _of_key(key: bytes) -> str:
    return f"key {hashlib.sha256(key).hexdigest()}"


@dataclass
class _Later:
    """A node that is asked again, since its last answer was not accepted."""

    at: float = 0.0
    wait: float = FIRST_WAIT


@dataclass
class Roster:
    """The clients that are connected, and what ties each index to a node.

    An index belongs to the node that reported it first, known by its public key (by its node id where Flower tells no
    key), or to the one that `given` names. Another node may take it over only if there is no `given`, `fixed` is
    False, and the node that it belongs to is not connected.
    """

    given: Mapping[int, Entry] = field(default_factory=dict)  # by the operator
    fixed: bool = False  # nodes keep their keys, so that no index ever changes hands
    max_examples: int | None = None
    asks: Sequence[str] = ()  # of `examples` and `test_examples`, what nodes are asked for
    size: int | None = None  # M, once it is known

    def __post_init__(self) -> None:
        self.node: dict[int, int] = {}  # client → node id, of those that are connected
        self.ties: dict[int, str] = {client: _of_entry(entry) for client, entry in self.given.items()}
        self.trains: dict[int, Trains] = {}  # client → how it trains, as it says
        self.of: dict[int, int] = {}  # client → the total number of clients that it reports; 0: it does not know
        # Upper limit of the examples that a client is weighted by: its first report, or the operator's value.
        self.most: dict[str, dict[int, int]] = {"examples": {}, "test_examples": {}}
        for client, entry in self.given.items():
            for what, most in self.most.items():
                if (said := getattr(entry, what)) is not None:
                    most[client] = said
        self._identity: dict[int, str] = {}  # of the nodes that are connected
        self._later: dict[int, _Later] = {}
        self._asked: dict[str, tuple[Message, float]] = {}  # questions by message id, and until when each is waited for
        self._begun = False

    # -- who is online ------------------------------------------------------------------------------------------------

    def refresh(self, grid: Grid) -> None:
        """Ask those who are new who they are, without waiting for them; forget those who have gone."""
        identity = {info.node_id: self._identify(info) for info in grid.get_nodes()}
        self._identity = identity
        self.node = {client: node for client, node in self.node.items() if node in identity}
        self._later = {node: later for node, later in self._later.items() if node in identity}
        self._ask(grid)
        now = time.monotonic()
        for key, (question, until) in list(self._asked.items()):
            reply = pull(grid, key, question)
            if reply is None and now < until:
                continue
            del self._asked[key]
            if question.metadata.dst_node_id in identity:
                self._enter(question, reply)

    @staticmethod
    def _identify(info: Any) -> str:
        return _of_key(bytes(info.public_key)) if info.public_key else f"node {info.node_id}"

    def _ask(self, grid: Grid) -> None:
        now = time.monotonic()
        waiting = {question.metadata.dst_node_id for question, _ in self._asked.values()}
        questions = []
        for node in sorted(set(self._identity) - set(self.node.values()) - waiting):
            if self._later.get(node, _Later()).at > now:
                continue
            if self.given and self._identity[node] not in self.ties.values():
                self._refuse(node, "it is not in the roster")
                continue
            values: dict[str, Any] = {"ask": list(self.asks) or "who", wire.TOKEN: secrets.token_hex(16)}
            values |= wire.versions()
            content = RecordDict({wire.TASK: ConfigRecord(values)})
            questions.append(Message(content, node, wire.HELLO, ttl=HELLO_SECONDS))
        if questions:
            self._asked |= {key: (question, now + HELLO_SECONDS) for key, question in push(grid, questions).items()}

    def _enter(self, question: Message, reply: Message | None) -> None:
        """Read a node's answer, and tie it to its index."""
        node = question.metadata.dst_node_id
        try:
            if reply is None:
                raise Malformed("it did not answer")
            if reply.has_error():
                raise Malformed(f"Flower reports: {shorten(reply.error.reason)}{_advice(reply.error.reason or '')}")
            if wire.token(reply) != question.content[wire.TASK][wire.TOKEN]:
                raise Malformed("its answer is to another question")
            try:
                hello = wire.read_hello(reply.content)
            except Malformed:
                if (failure := wire.read_failure(reply.content)) is not None:
                    raise Malformed(failure.failed) from None
                raise
            self._tie(node, hello)
        except Malformed as error:
            self._refuse(node, str(error))

    def _refuse(self, node: int, why: str) -> None:
        later = self._later.setdefault(node, _Later())
        later.at = time.monotonic() + later.wait
        log.warning("node %d cannot take part: %s; it is asked again in %.0f s", node, why, later.wait)
        later.wait = min(LONGEST_WAIT, later.wait * 2)

    def _tie(self, node: int, hello: Hello) -> None:
        client, mine = hello.client, self._identity[node]
        if problem := wire.format_problem(hello.wire_format, hello.version, f"client {client}"):
            raise Malformed(problem)
        if self.size is not None and client >= self.size:
            raise Malformed(
                f"it says that it is client {client}; the federation has {self.size} (0 to {self.size - 1})"
            )
        owner = self.ties.get(client)
        other = next((c for c, who in self.ties.items() if who == mine and c != client), None)
        if other is not None:
            raise Malformed(f"it says that it is client {client}, but its key is that of client {other}")
        if owner is not None and owner != mine:
            connected = owner in self._identity.values()
            if self.given or self.fixed or connected:
                why = "connected" if connected else "known"
                raise Malformed(f"it says that it is client {client}, but that one is {why} with another key")
            log.warning("client %d comes back as node %d with another key", client, node)
        for what in self.most:
            said = getattr(hello, what)
            if what in self.asks and said is not None:
                self.limit(what, client, said)
        self.ties[client] = mine
        self.trains[client] = hello.trains
        self.of[client] = hello.of
        self.node[client] = node
        self._later.pop(node, None)

    def limit(self, what: str, client: int, said: int) -> None:
        """Take what a client says of its examples as the most that it counts for, unless there is a limit already."""
        self.most[what].setdefault(client, min(said, self.max_examples or said))

    def wait(self, grid: Grid, least: int, patience: float) -> Sequence[int]:
        """Wait for `least` clients; the first time also until all nodes that were asked have answered or timed out."""
        start = time.monotonic()
        said, pause = -1, SHORTEST
        while True:
            self.refresh(grid)
            passed = time.monotonic() - start
            enough = len(self.node) >= least
            if enough and (self._begun or not self._asked or passed > min(patience, HELLO_SECONDS)):
                self._begun = True
                return sorted(self.node)
            if passed > patience:
                raise UserError(
                    f"{len(self.node)} clients are online after {patience:g} s, {least} are needed (min_clients)"
                )
            if not enough and len(self.node) != said:
                said = len(self.node)
                log.warning("waiting for clients: %d online, %d needed", said, least)
            time.sleep(pause)
            pause = min(LONGEST, pause * 1.5)

    # -- M ------------------------------------------------------------------------------------------------------------

    def settle(self, size: int) -> None:
        """Fix M, the number of clients. Forget clients beyond it; warn if nodes report another number."""
        self.size = size
        for client in sorted(client for client in self.ties if client >= size):
            log.warning("client %d is beyond the federation's %d clients and is not asked", client, size)
            for table in (self.node, self.ties, self.of, self.trains, *self.most.values()):
                table.pop(client, None)  # type: ignore[attr-defined]
        if others := sorted({of for of in self.of.values() if of and of != size}):
            told = ", ".join(map(str, others[:5]))
            log.warning("%d clients here, but nodes report %s (num-partitions). Is clients= right?", size, told)

    # -- what is kept with a checkpoint -------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        return {"ties": _as_text(self.ties), **{what: _as_text(most) for what, most in self.most.items()}}

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Restore a snapshot; what the operator's roster says takes precedence over it."""
        if not self.given:
            self.ties = {int(client): who for client, who in kept.get("ties", {}).items()}
        for what, most in self.most.items():
            kept_most = {int(client): count for client, count in kept.get(what, {}).items()}
            self.most[what] = kept_most | {c: n for c, n in most.items() if c in self.given}


def _advice(reason: str) -> str:
    """Say what to do where a node runs an app that does not know our questions, such as one made for FedAvg."""
    if f"registered with name '{wire.HELLO_ACTION}'" not in reason:
        return ""
    return (
        ". Its ClientApp is not one of fedbcgd's: say @fedbcgd.flower.train(app) instead of @app.train(), or "
        "fedbcgd.flower.wrap(ClientApp(client_fn=…))"
    )


def _as_text(table: Mapping[int, Any]) -> dict[str, Any]:
    return {str(client): value for client, value in table.items()}
