"""The Flower strategy: the same `Server`, with Flower's grid as the carrier."""

import contextlib
import copy
import inspect
import logging
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import nn

from fedbcgd.algorithm import Algorithm, make_algorithm
from fedbcgd.data.sources import as_source
from fedbcgd.errors import UserError
from fedbcgd.evaluation import Total, total
from fedbcgd.flat import FlatModel, Layout
from fedbcgd.flower import wire
from fedbcgd.flower.carrier import GridCarrier, GridLoop
from fedbcgd.flower.folder import ServerFolder
from fedbcgd.flower.roster import Roster
from fedbcgd.loop import Callback, Outcome, Row, Stop
from fedbcgd.messages import Plan, RoundReport, Task
from fedbcgd.objective import Loss, Metrics, objective
from fedbcgd.server import Server
from fedbcgd.simulation import likes_channels_last, make_target
from fedbcgd.streams import stream

log = logging.getLogger("flwr.fedbcgd")  # shown where Flower shows its own


def strategy(algorithm: str | Algorithm, model: nn.Module, **options: Any) -> "Federation":
    """A strategy by the algorithm's name; what `Federation` does not take are the algorithm's hyper-parameters."""
    own = {k: v for k, v in options.items() if k in inspect.signature(Federation).parameters}
    rest = {k: v for k, v in options.items() if k not in own}
    if isinstance(algorithm, Algorithm):
        if rest:
            raise UserError(
                f"options {', '.join(rest)}: an Algorithm has its options already; pass its name to set some"
            )
        return Federation(algorithm, model, **own)
    return Federation(make_algorithm(algorithm, **rest), model, **own)


class Federation(Strategy):
    """Any algorithm of the registry as a Flower strategy.

    clients: M, all clients of the federation, online or not; default: what the nodes say (`num-partitions`), or how many are
        there in the first round. cohort: clients asked in a round; default all that are online.
    min_clients: no round begins with fewer online; waits up to `patience` seconds for them.
    seed: of cohorts and of every client's draws. test, loss, metrics: for evaluation here, as in `fedbcgd.simulate`.
    evaluate_every: rounds between evaluations. evaluate_clients: share of the online clients that evaluate too.
    budget, target: further ends of the run, beside the number of rounds.
    folder: checkpoints, metrics, summary and model are kept there, and a run that is there goes on.
    checkpoint_every: rounds. callbacks: as in `fedbcgd.simulate`.
    channels_last: compute so; default: for convolutional models (tried out if `test` is given).
    """

    def __init__(
        self,
        algorithm: Algorithm,
        model: nn.Module,
        *,
        clients: int | None = None,
        cohort: int | None = None,
        min_clients: int = 2,
        patience: float = 3600.0,
        seed: int = 0,
        test: Any = None,
        loss: Loss | nn.Module | None = None,
        metrics: Metrics | None = None,
        evaluate_every: int = 1,
        evaluate_clients: float = 0.0,
        budget: float | None = None,
        target: Any = None,
        folder: str | Path | None = None,
        checkpoint_every: int = 1,
        callbacks: Sequence[Callback] = (),
        channels_last: bool | None = None,
    ):
        if algorithm.uplink.pooled:
            raise UserError(f"{algorithm.name} has all data in one place: there is nothing to federate")
        if not isinstance(model, nn.Module):
            raise UserError(f"model: an nn.Module is wanted, given {model!r}")
        for name, value in (("min_clients", min_clients), ("evaluate_every", evaluate_every), ("cohort", cohort or 1)):
            if not isinstance(value, int) or value < 1:
                raise UserError(f"{name}: a whole number of at least 1 is wanted, given {value!r}")
        if not 0 <= evaluate_clients <= 1:
            raise UserError(f"evaluate_clients: a share from 0 to 1 is wanted, given {evaluate_clients!r}")
        self.algorithm = algorithm
        self.module = copy.deepcopy(model)
        algorithm.check(self.module)
        self.objective = objective(loss, metrics)
        self.test = None if test is None else as_source(test, "test")
        if channels_last is None:
            probe = [test] if test is not None else []
            channels_last = likes_channels_last(self.module, probe, self.objective)
        if channels_last:
            self.module = self.module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.channels_last = channels_last
        self.layout: Layout = algorithm.uplink.layout(self.module)
        self.roster = Roster()
        self.run = uuid.uuid4().hex
        self.server: Server | None = None
        self.accepted: dict[int, int] = {}  # client → round of its last accepted upload in this control epoch
        self.rows: list[Row] = []
        self.outcome: Outcome | None = None
        self._clients, self._cohort, self._seed = clients, cohort, seed
        self._min_clients, self._patience = min_clients, patience
        self._every, self._share = evaluate_every, evaluate_clients
        self._budget, self._target = budget, make_target(target)
        self._folder = None if folder is None else Path(folder)
        self._checkpoint_every, self._callbacks = checkpoint_every, callbacks
        self._plan: Plan | None = None
        self._fresh: dict[int, int] = {}  # accepted in the open round
        self._sent: list[tuple[Message, Task]] = []
        self.timeout = 3600.0

    # -- the whole run ------------------------------------------------------------------------------------------------

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run up to round `num_rounds`, from wherever the folder's last checkpoint stands; rounds are counted as a whole.

        initial_arrays: weights to begin with instead of the model's, unless a checkpoint is there.
        """
        self.timeout = timeout
        server = self._open(grid, initial_arrays)
        server.reliable = False
        folder = ServerFolder(self._folder, self._checkpoint_every) if self._folder is not None else None
        with folder or contextlib.nullcontext() as kept:
            if kept is not None:
                kept.restore(self)
            result = Result()
            carrier = GridCarrier(self, grid)
            stop = Stop(num_rounds, self._budget, self._target)
            loop = GridLoop(server, carrier, stop, self._every, (), "test", self.rows)
            if evaluate_fn is not None and server.round == 0:
                _put(result.evaluate_metrics_serverapp, 0, evaluate_fn(0, self.arrays()))

            def record(info: Any) -> None:
                now = server.round
                result.train_metrics_clientapp[now] = _metrics(info.report, server)
                if info.row:
                    values = {k: float(v) for k, v in info.row.items() if k.startswith("test_")}
                    if values:
                        result.evaluate_metrics_serverapp[now] = MetricRecord(dict(values))
                    values = {
                        k.removeprefix("clients_"): float(v) for k, v in info.row.items() if k.startswith("clients_")
                    }
                    if values:
                        result.evaluate_metrics_clientapp[now] = MetricRecord(dict(values))
                if evaluate_fn is not None:
                    _put(result.evaluate_metrics_serverapp, now, evaluate_fn(now, self.arrays()))
                log.info("round %d: %s", now, _line(info.row, info.report, server))

            loop.callbacks = [record, *self._callbacks, *([kept.after(self, loop)] if kept is not None else [])]
            if kept is not None:
                loop.seconds = kept.seconds
            reason = loop.run()
            self.outcome = Outcome.of(loop, reason)
            if kept is not None:
                kept.finish(self, self.outcome)
            result.arrays = self.arrays()
            return result

    def _open(self, grid: Grid, arrays: ArrayRecord | None) -> Server:
        """The server, once it is known how many clients there are."""
        if self.server is None:
            self.roster.wait(grid, self._min_clients, lambda _: True, self._patience)
            count = self._clients or max(self.roster.most, len(self.roster.node))
            state: Mapping[str, torch.Tensor] = self.module.state_dict()
            if arrays is not None:
                state = arrays.to_torch_state_dict()
            x = self.layout.vector(state)
            self.server = Server(self.algorithm, self.layout, x, count, min(self._cohort or count, count), self._seed)
        return self.server

    def arrays(self) -> ArrayRecord:
        """The model as an ordinary state_dict."""
        return ArrayRecord(self.state_dict())

    def state_dict(self) -> dict[str, torch.Tensor]:
        flat = FlatModel(copy.deepcopy(self.module), self.layout)
        flat.load(self._server().x)
        return flat.state_dict()

    def _server(self) -> Server:
        if self.server is None:
            raise UserError("the federation has not started: call start, or configure_train, first")
        return self.server

    # -- a round ------------------------------------------------------------------------------------------------------

    def online(self, grid: Grid) -> Sequence[int]:
        server = self._server()

        def known(client: int) -> bool:
            if client >= server.clients:
                log.warning("client %d is beyond the federation's %d clients and is not asked", client, server.clients)
            return client < server.clients

        least = min(self._min_clients, server.clients)
        return self.roster.wait(grid, least, known, self._patience)

    def messages(self, plan: Plan) -> list[Message]:
        """One for each client of the cohort: the same vectors, a task of its own."""
        self._plan, self._fresh = plan, {}
        vectors = wire.vectors(plan.broadcast)
        asked = filter(self._server().expects, plan.tasks)
        self._sent = [(self._message(task, vectors, MessageType.TRAIN), task) for task in asked]
        return [message for message, _ in self._sent]

    def _message(self, task: Task, vectors: ArrayRecord, kind: str) -> Message:
        server = self._server()
        order = wire.Order(
            task,
            server.epoch,
            self.accepted.get(task.client, -1),
            self.run,
            server.seed,
            self.layout.digest,
            self.channels_last,
            self.algorithm,
        )
        content = RecordDict({wire.BROADCAST: vectors, wire.TASK: order.record()})
        return Message(content, self.roster.node[task.client], kind, ttl=self.timeout, group_id=str(task.round))

    def take(self, reply: Message) -> None:
        """One reply: checked by the server like any upload, or counted as lost."""
        server, task = self._server(), self._task_of(reply)
        if task is None:
            log.warning("a reply came from node %d, which was not asked: passed over", reply.metadata.src_node_id)
            return
        if reply.has_error():
            server.lost(task, f"Flower reports: {reply.error.reason}")
            return
        told = wire.told(reply.content)
        if "failed" in told:
            if told.get("state_lost"):
                server.forget_controls(f"client {task.client}: {told['failed']}")
            server.lost(task, str(told["failed"]))
            return
        server.ledger.wire_bytes += wire.counted(reply)
        try:
            upload = wire.read_upload(reply.content)
        except ValueError as error:
            server.lost(task, str(error))
            return
        if upload.client != task.client:
            server.lost(task, f"its node answered for client {upload.client}")
        elif server.receive(upload).accepted:
            self._fresh[task.client] = task.round

    def _task_of(self, reply: Message) -> Task | None:
        """Whose it is: of a client's reply by the node it came from, of an error that Flower made itself by the question."""
        if reply.has_error():
            asked = reply.metadata.reply_to_message_id
            return next((task for message, task in self._sent if message.metadata.message_id == asked), None)
        senders = self.roster.clients([reply.metadata.src_node_id])
        return next((task for _, task in self._sent if [task.client] == senders), None)

    def committed(self) -> None:
        """After a commit: what was accepted now holds, unless all controls began again."""
        if self._plan is not None:
            same = self._server().epoch == self._plan.broadcast.epoch
            self.accepted = self.accepted | self._fresh if same else {}
        self._plan, self._fresh, self._sent = None, {}, []

    # -- for users with a loop of their own ---------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        server = self._open(grid, arrays if server_round <= 1 else None)
        server.available = self.online(grid)
        return self.messages(server.plan())

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        server = self._server()
        for reply in replies:
            self.take(reply)
        report = server.commit()
        self.committed()
        return self.arrays(), _metrics(report, server)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        server = self._server()
        there = sorted(client for client in self.roster.node if client < server.clients)
        count = round(self._share * len(there)) or (1 if self._share else 0)
        if not count:
            return []
        chosen = stream(server.seed, "evaluation", server.round).choice(there, count, replace=False)
        vectors = ArrayRecord({wire.X: wire.array(server.x)})
        return [
            self._message(Task(server.round, int(client), 0), vectors, MessageType.EVALUATE)
            for client in sorted(chosen)
        ]

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Means over the examples of all that answered."""
        totals: dict[str, Total] = {}
        examples = 0
        for reply in sorted(replies, key=lambda r: self.roster.clients([r.metadata.src_node_id])):
            values = None if reply.has_error() else reply.content.get("metrics")
            if not isinstance(values, MetricRecord):
                why = reply.error.reason if reply.has_error() else wire.told(reply.content).get("failed", "no metrics")
                log.warning("node %d did not evaluate: %s", reply.metadata.src_node_id, why)
                continue
            n = int(values["examples"])  # type: ignore[arg-type]
            examples += n
            for name, value in values.items():
                if name != "examples":
                    totals[name] = totals.get(name, 0) + total(value, n)
        return MetricRecord({name: float(value / examples) for name, value in totals.items()}) if examples else None

    def summary(self) -> None:
        log.info(
            "%s: d = %s, N = %d, mean upload %.4f d", self.algorithm.name, f"{self.layout.dim:,}", self.layout.blocks,
            self.algorithm.upload_d(self.layout),
        )  # fmt: skip


def _put(where: dict[int, MetricRecord], round: int, values: MetricRecord | None) -> None:
    if values is not None:
        where[round] = MetricRecord({**where.get(round, {}), **values})


def _metrics(report: RoundReport, server: Server) -> MetricRecord:
    return MetricRecord(
        {
            "train_loss": report.train_loss,
            "accepted": report.accepted,
            "refused": len(report.refused),
            "lost": len(report.lost),
            "upload_d": server.ledger.upload_d,
            "upload_bytes": server.ledger.upload_bytes,
            "wire_bytes": server.ledger.wire_bytes,
        }
    )


def _line(row: Row | None, report: RoundReport, server: Server) -> str:
    parts = [f"{name} {value:.4f}" for name, value in (row or {}).items() if name.endswith(("accuracy", "loss"))]
    parts.append(f"{report.accepted} uploads, {len(report.refused)} refused, {len(report.lost)} lost")
    parts.append(f"{server.ledger.upload_d:.2f} d")
    return ", ".join(parts)
