"""Which node is which client: each client index belongs to one node, known by its public key."""

import hashlib
import json
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
from pydantic import Field, TypeAdapter, ValidationError

from fedbcgd.backends.flower import wire
from fedbcgd.backends.flower.exchange import LONGEST, SHORTEST, pull, push
from fedbcgd.backends.flower.log import log
from fedbcgd.core.parts import Section
from fedbcgd.core.reading import MOST_STEPS, Hello, Malformed, Trains, shorten
from fedbcgd.errors import UserError

HELLO_SECONDS = 120.0  # a node that has not answered by then is asked again later
FIRST_WAIT, LONGEST_WAIT = 2.0, 600.0  # seconds before a node is asked again; they double each time


class Entry(Section):
    """The roster's entry of one client.

    Attributes:
        key: the public key of the client's node, or the file that has it.
        node: the node's id in Flower, instead of a key.
        examples: the most examples that the client counts for in a mean.
        test_examples: the same in evaluations.
    """

    key: str | None = None
    node: int | None = Field(None, ge=1)
    examples: int | None = Field(None, ge=1, le=MOST_STEPS)
    test_examples: int | None = Field(None, ge=1, le=MOST_STEPS)


def read_roster(path: str | Path) -> dict[int, Entry]:
    """Read a roster file: TOML, or JSON if its name ends in .json.

    Args:
        path: the file. A table `clients` has an entry for each index from 0 on, with `key` (a public key as OpenSSH or
            PEM writes it, or the name of a file beside the roster) or `node` (Flower's node id), and, if wanted,
            `examples` and `test_examples`.

    Returns:
        The entries by index; every key is given as text.

    Raises:
        UserError: the file cannot be read, or is not a roster.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        tables = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        if not isinstance(tables, dict) or set(tables) != {"clients"}:
            raise ValueError("expected one table, clients")
        entries = TypeAdapter(dict[str, Entry]).validate_python(tables["clients"])
        clients = {int(index): entry for index, entry in entries.items() if index.isdecimal()}
        if sorted(clients) != list(range(len(entries))) or not entries:
            raise ValueError("clients: expected an entry for each index from 0 to M − 1")
        for index, entry in clients.items():
            if (entry.key is None) == (entry.node is None):
                raise ValueError(f"clients.{index}: expected either key or node")
            if entry.key is not None and not entry.key.startswith(("ecdsa-", "-----BEGIN")):
                clients[index] = entry.model_copy(update={"key": (path.parent / entry.key).read_text("utf-8")})
        if len(set(map(_identity_of_entry, clients.values()))) < len(clients):
            raise ValueError("clients: expected a different key or node for each index")
        return clients
    except OSError as error:
        raise UserError(f"roster: {error.filename} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"roster: {path}: clients.{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except (ValueError, UnsupportedAlgorithm) as error:
        raise UserError(f"roster: {path}: {error}") from None


def _identity_of_entry(entry: Entry) -> str:
    if entry.key is None:
        return f"node {entry.node}"
    data = entry.key.strip().encode()
    load = serialization.load_pem_public_key if data.startswith(b"-----") else serialization.load_ssh_public_key
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return identity_of_key(load(data).public_bytes(serialization.Encoding.PEM, form))  # as Flower keeps it


def identity_of_key(key: bytes) -> str:
    """Return the identity of a node with this public key, in PEM form as Flower keeps it."""
    return f"key {hashlib.sha256(key).hexdigest()}"


@dataclass
class _Retry:
    """When to ask a node again whose last answer was not accepted."""

    at: float = 0.0
    wait: float = FIRST_WAIT  # seconds; doubled each time


@dataclass(frozen=True)
class _HelloQuestion:
    """A node that was asked who it is."""

    question: Message
    until: float  # when to stop waiting for the answer, in the time of time.monotonic

    @property
    def node(self) -> int:
        return self.question.metadata.dst_node_id


@dataclass
class Roster:
    """Which node is which client, and which clients are connected.

    An index belongs to the node that `given` names or, without `given`, to the node that reported it first. A node is
    identified by its public key, or by its node id if Flower has no key of it. An index may pass to another node only if
    there is no `given`, `fixed` is False, and the node that it belongs to is not connected.

    Attributes:
        given: the operator's entry for each client; empty: nodes report which client they are.
        fixed: whether nodes keep their keys, so that an index never passes to another node.
        max_examples: the most examples that a client counts for in a mean; None: its own first report is the limit.
        questions: which of `examples` and `test_examples` the nodes are asked for.
        size: M; None until it is known.
    """

    given: Mapping[int, Entry] = field(default_factory=dict)
    fixed: bool = False
    max_examples: int | None = None
    questions: Sequence[str] = ()
    size: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.nodes: dict[int, int] = {}  # client → id of its node, if that is connected
        # Client → identity (key or node id) of the node that its index belongs to.
        self.owners: dict[int, str] = {c: _identity_of_entry(e) for c, e in self.given.items()}
        self.trains: dict[int, Trains] = {}  # client → how it trains, as it reports
        self.reported_sizes: dict[int, int] = {}  # client → the number of all clients that it reports; 0: unknown
        # Upper limit of the examples that a client is weighted by: its first report, or the operator's value.
        self.limits: dict[str, dict[int, int]] = {"examples": {}, "test_examples": {}}
        for client, entry in self.given.items():
            for what, most in self.limits.items():
                if (count := getattr(entry, what)) is not None:
                    most[client] = count
        self._identity: dict[int, str] = {}  # id of a connected node → its identity
        self._retries: dict[int, _Retry] = {}  # by node
        self._asked: dict[str, _HelloQuestion] = {}  # by message id
        self._begun = False  # whether the first wait is over

    # -- who is online ------------------------------------------------------------------------------------------------

    def refresh(self, grid: Grid) -> None:
        """Ask new nodes which client they are, without waiting for the answers; forget nodes that are gone."""
        identity = {info.node_id: self._identify(info) for info in grid.get_nodes()}
        self._identity = identity
        self.nodes = {client: node for client, node in self.nodes.items() if node in identity}
        self._retries = {node: retry for node, retry in self._retries.items() if node in identity}
        self._ask(grid)
        now = time.monotonic()
        for key, asked in list(self._asked.items()):
            reply = pull(grid, key, asked.question)
            if reply is None and now < asked.until:
                continue
            del self._asked[key]
            if asked.node in identity:
                self._read_answer(asked, reply)

    @staticmethod
    def _identify(info: Any) -> str:
        return identity_of_key(bytes(info.public_key)) if info.public_key else f"node {info.node_id}"

    def _ask(self, grid: Grid) -> None:
        now = time.monotonic()
        waiting = {asked.node for asked in self._asked.values()}
        questions = []
        for node in sorted(set(self._identity) - set(self.nodes.values()) - waiting):
            if self._retries.get(node, _Retry()).at > now:
                continue
            if self.given and self._identity[node] not in self.owners.values():
                self._refuse(node, "it is not in the roster")
                continue
            values: dict[str, Any] = {"ask": list(self.questions) or "who", wire.TOKEN: secrets.token_hex(16)}
            values |= wire.versions()
            content = RecordDict({wire.TASK: ConfigRecord(values)})
            questions.append(Message(content, node, wire.HELLO, ttl=HELLO_SECONDS))
        if questions:
            self._asked |= {
                key: _HelloQuestion(question, now + HELLO_SECONDS) for key, question in push(grid, questions).items()
            }

    def _read_answer(self, asked: _HelloQuestion, reply: Message | None) -> None:
        """Read a node's answer, and record which client it is."""
        try:
            if reply is None:
                raise Malformed("it did not answer")
            if reply.has_error():
                raise Malformed(f"Flower reports: {shorten(reply.error.reason)}{_advice(reply.error.reason or '')}")
            if wire.token(reply) != asked.question.content[wire.TASK][wire.TOKEN]:
                raise Malformed("its answer is to another question")
            try:
                hello = wire.read_hello(reply.content)
            except Malformed:
                if (failure := wire.read_failure(reply.content)) is not None:
                    raise Malformed(failure.failed) from None
                raise
            self._register(asked.node, hello)
        except Malformed as error:
            self._refuse(asked.node, str(error))

    def _refuse(self, node: int, why: str) -> None:
        retry = self._retries.setdefault(node, _Retry())
        retry.at = time.monotonic() + retry.wait
        log.warning("node %d cannot take part: %s; it is asked again in %.0f s", node, why, retry.wait)
        retry.wait = min(LONGEST_WAIT, retry.wait * 2)

    def _register(self, node: int, hello: Hello) -> None:
        client, mine = hello.client, self._identity[node]
        if problem := wire.format_problem(hello.wire_format, hello.version, f"client {client}"):
            raise Malformed(problem)
        if self.size is not None and client >= self.size:
            raise Malformed(
                f"it says that it is client {client}, but the federation has {self.size} clients, 0 to {self.size - 1}"
            )
        owner = self.owners.get(client)
        other = next((c for c, identity in self.owners.items() if identity == mine and c != client), None)
        if other is not None:
            raise Malformed(f"it says that it is client {client}, but its key is that of client {other}")
        if owner is not None and owner != mine:
            connected = owner in self._identity.values()
            if self.given or self.fixed or connected:
                why = "connected" if connected else "known"
                raise Malformed(f"it says that it is client {client}, but that one is {why} with another key")
            log.warning("client %d comes back as node %d with another key", client, node)
        for what in self.limits:
            count = getattr(hello, what)
            if what in self.questions and count is not None:
                self.limit(what, client, count)
        self.owners[client] = mine
        self.trains[client] = hello.trains
        self.reported_sizes[client] = hello.of
        self.nodes[client] = node
        self._retries.pop(node, None)

    def limit(self, what: str, client: int, count: int) -> None:
        """Make the number of examples that a client reports its limit, unless it has a limit already.

        Args:
            what: "examples" or "test_examples".
            client: the client's index.
            count: the number that it reports.
        """
        self.limits[what].setdefault(client, min(count, self.max_examples or count))

    def wait(self, grid: Grid, least: int, patience: float) -> Sequence[int]:
        """Wait for enough clients; the first time also until all nodes that were asked have answered or timed out.

        Args:
            grid: Flower's grid.
            least: how many clients are needed.
            patience: how many seconds to wait for them.

        Returns:
            The clients that are connected.

        Raises:
            UserError: fewer are connected after that time.
        """
        start = time.monotonic()
        logged, pause = -1, SHORTEST
        while True:
            self.refresh(grid)
            passed = time.monotonic() - start
            enough = len(self.nodes) >= least
            if enough and (self._begun or not self._asked or passed > min(patience, HELLO_SECONDS)):
                self._begun = True
                return sorted(self.nodes)
            if passed > patience:
                raise UserError(
                    f"min_clients: expected at least {least} clients online within {patience:g} s (patience), got "
                    f"{len(self.nodes)}; start more nodes, or see in the log why others cannot take part"
                )
            if not enough and len(self.nodes) != logged:
                logged = len(self.nodes)
                log.warning("waiting for clients: %d online, %d needed", logged, least)
            time.sleep(pause)
            pause = min(LONGEST, pause * 1.5)

    # -- M ------------------------------------------------------------------------------------------------------------

    def expect(self, size: int) -> None:
        """Refuse nodes that report an index of `size` or more from now on."""
        self.size = size

    def settle(self, size: int) -> None:
        """Fix M, the number of clients. Forget clients beyond it; warn if nodes report another number."""
        self.expect(size)
        for client in sorted(client for client in self.owners if client >= size):
            log.warning("client %d is beyond the federation's %d clients and is not asked", client, size)
            for table in (self.nodes, self.owners, self.reported_sizes, self.trains, *self.limits.values()):
                table.pop(client, None)  # type: ignore[attr-defined]
        if others := sorted({reported for reported in self.reported_sizes.values() if reported not in (0, size)}):
            log.warning(
                "clients: %d here, but nodes report %s (num-partitions); set clients=… if %d is wrong",
                size, ", ".join(map(str, others[:5])), size
            )  # fmt: skip

    # -- what is kept with a checkpoint -------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """Return what `restore` needs, in a form that JSON can hold."""
        return {"ties": _as_text(self.owners), **{what: _as_text(limits) for what, limits in self.limits.items()}}

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Load a snapshot; the operator's roster takes precedence over it."""
        if not self.given:
            self.owners = {int(client): identity for client, identity in kept.get("ties", {}).items()}
        for what, most in self.limits.items():
            kept_most = {int(client): count for client, count in kept.get(what, {}).items()}
            self.limits[what] = kept_most | {c: n for c, n in most.items() if c in self.given}


def _advice(reason: str) -> str:
    """Return what to do if a node runs an app that cannot answer our messages, such as one made for FedAvg."""
    if f"registered with name '{wire.HELLO_ACTION}'" not in reason:
        return ""
    return (
        "; its ClientApp does not use fedbcgd: say @fedbcgd.flower.train(app) instead of @app.train(), or "
        "fedbcgd.flower.wrap(ClientApp(client_fn=…))"
    )


def _as_text(table: Mapping[int, Any]) -> dict[str, Any]:
    return {str(client): value for client, value in table.items()}
