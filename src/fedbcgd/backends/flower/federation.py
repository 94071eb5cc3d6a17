"""The Flower strategy: the same `Server`, with Flower's grid as the backend."""

import contextlib
import inspect
import logging
import math
import secrets
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import nn

from fedbcgd.algorithms.registry import make_algorithm
from fedbcgd.backends.flower import wire
from fedbcgd.backends.flower.backend import GridBackend, GridHooks
from fedbcgd.backends.flower.definition import Definition
from fedbcgd.backends.flower.folder import ServerFolder
from fedbcgd.backends.flower.late import LateReplies
from fedbcgd.backends.flower.monitor import Monitor
from fedbcgd.backends.flower.roster import Roster, read_roster
from fedbcgd.core.algorithm import Algorithm
from fedbcgd.core.messages import Plan, RoundReport, Task
from fedbcgd.core.objective import Loss, Metrics
from fedbcgd.core.reading import MOST_STEPS, Evaluation, Malformed, shorten
from fedbcgd.core.server import Server
from fedbcgd.core.vector import Layout
from fedbcgd.engine.assemble import Run, make_job, make_target
from fedbcgd.engine.evaluation import total
from fedbcgd.engine.loop import Callback, Outcome, RoundInfo, Row, Stop
from fedbcgd.engine.traffic import Round
from fedbcgd.errors import UserError
from fedbcgd.rng import stream

log = logging.getLogger("flwr.fedbcgd")  # shown where Flower shows its own

MAX_NORM = "20x"  # of an upload, unless the algorithm says another limit

CLAIM_ROUNDS = 10  # rounds before a client that lost its state may again set all controls back; doubled each time


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

    clients: M, all clients of the federation, online or not; default: as many as the roster has, else how many nodes are
        there when the run begins. cohort: clients asked in a round; default all that are online.
    roster: a TOML or JSON file that says which node is which client (docs/flower.md). authenticated: nodes have keys of
        their own, which they keep (`--enable-supernode-auth`): an index is never given to another key.
    max_examples: what a client may weigh at most, in means by examples and in evaluations.
    min_clients: no round begins with fewer online; waits up to `patience` seconds for them.
    seed: of cohorts and of every client's draws. test, loss, metrics: for evaluation here, as in `fedbcgd.simulate`.
    evaluate_every: rounds between evaluations. evaluate_clients: share of the online clients that evaluate too.
    budget, target: further ends of the run, beside the number of rounds.
    folder: checkpoints, metrics, summary and model are kept there, and a run that is there goes on.
    checkpoint_every: rounds. callbacks: as in `fedbcgd.simulate`.
    close_at: a round closes when each block has this share of its clients' uploads, rounded up; 1: all are waited for.
    oversample: so many times the cohort is asked, so that enough are there although some are slow.
    max_empty_rounds: rounds in a row without an accepted upload after which the run fails with the reasons; None: never.
    progress_seconds: between two lines in the log about a round that goes on.
    metrics_file: OpenMetrics text about the run, written after each round.
    channels_last: compute so; default: if a trial on `test` shows that the model can; without `test`, no.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        model: nn.Module,
        *,
        clients: int | None = None,
        roster: str | Path | None = None,
        authenticated: bool = False,
        max_examples: int | None = None,
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
        close_at: float = 1.0,
        oversample: float = 1.0,
        max_empty_rounds: int | None = 3,
        progress_seconds: float = 30.0,
        metrics_file: str | Path | None = None,
    ):
        if algorithm.uplink.pooled:
            raise UserError(f"{algorithm.name} has all data in one place: there is nothing to federate")
        if not isinstance(model, nn.Module):
            raise UserError(f"model: expected an nn.Module, got {model!r}")
        given = read_roster(roster) if roster is not None else {}
        counts = {
            "min_clients": min_clients,
            "evaluate_every": evaluate_every,
            "cohort": 1 if cohort is None else cohort,
        }
        counts |= {
            "clients": 1 if clients is None else clients,
            "max_examples": 1 if max_examples is None else max_examples,
            "max_empty_rounds": 1 if max_empty_rounds is None else max_empty_rounds,
        }
        for name, value in counts.items():
            if not isinstance(value, int) or value < 1:
                raise UserError(f"{name}: expected an integer ≥ 1, got {value!r}")
        if given and clients not in (None, len(given)):
            raise UserError(f"clients: expected {len(given)}, as in the roster, got {clients}")
        if not 0 <= evaluate_clients <= 1:
            raise UserError(f"evaluate_clients: expected a share from 0 to 1, got {evaluate_clients!r}")
        if not 0 < close_at <= 1:
            raise UserError(f"close_at: expected a share above 0 and at most 1, got {close_at!r}")
        if not 1 <= oversample <= 100:
            raise UserError(f"oversample: expected a number from 1 to 100, got {oversample!r}")
        if algorithm.max_norm is None:  # clients of a federation are not trusted
            algorithm = replace(algorithm, max_norm=MAX_NORM)
        self._asked = algorithm  # perhaps with blocks="auto", to be settled when it is known how many clients there are
        known = min(filter(None, (cohort, clients or len(given))), default=None)
        self.algorithm = algorithm = algorithm if known is None else algorithm.for_cohort(known)
        self.job = make_job(model, (), algorithm, test, seed, loss, metrics, channels_last=channels_last)
        self.layout: Layout = self.job.layout
        self.definition = Definition.of(self.job.module)
        asks = {"examples": algorithm.weighting == "examples", "test_examples": evaluate_clients > 0}
        self.roster = Roster(given, authenticated, max_examples, [what for what, asked in asks.items() if asked])
        self.run_id = uuid.uuid4().hex
        self.accepted: dict[int, int] = {}  # client → round of its last accepted upload in this control epoch
        self.claims: dict[int, tuple[int, int]] = {}  # client → round of its last claim that was honoured, how many
        self.rows: list[Row] = []
        self.outcome: Outcome | None = None
        self.target = make_target(target)
        self.timeout = 3600.0  # seconds
        self.grid: Grid | None = None  # that of the last call
        self._clients, self._cohort = clients or len(given) or None, cohort
        self._min_clients, self._patience = min_clients, patience
        self._every, self._evaluating_share = evaluate_every, evaluate_clients
        self._budget = budget
        self._folder = None if folder is None else Path(folder)
        self._checkpoint_every, self._callbacks = checkpoint_every, callbacks
        file = None if metrics_file is None else Path(metrics_file)
        self.monitor = Monitor(max_empty_rounds, progress_seconds, file)
        self.close_at, self.oversample = close_at, oversample
        self.late = LateReplies()
        self._run: Run | None = None
        self._begun_blocks: int | None = None  # N of the run in the folder
        self._plan: Plan | None = None
        self.traffic: Round | None = None  # what was sent in the last round
        self._accepted_now: dict[int, int] = {}  # those of the open round
        self._sent: dict[str, tuple[Message, Task]] = {}  # questions without an answer yet, by their token

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
        folder = ServerFolder(self._folder, self._checkpoint_every) if self._folder is not None else None
        with folder or contextlib.nullcontext():
            if folder is not None:
                begun_with, self._begun_blocks = folder.peek(self)
                self._clients = self._clients or begun_with
            stop = Stop(num_rounds, self._budget, self.target)
            run = self._open(grid, initial_arrays, stop)
            seconds = folder.restore(self, run) if folder is not None else 0.0
            server, result = run.server, Result()
            if evaluate_fn is not None and server.round == 0:
                _put(result.evaluate_metrics_serverapp, 0, evaluate_fn(0, self.arrays()))

            def record(info: RoundInfo) -> None:
                now = server.round
                result.train_metrics_clientapp[now] = _metrics(info.report, server)
                row = {name: float(value) for name, value in (info.row or {}).items()}
                of_clients = {n.removeprefix("clients_"): v for n, v in row.items() if n.startswith("clients_")}
                _put(result.evaluate_metrics_serverapp, now, {n: v for n, v in row.items() if n.startswith("test_")})
                _put(result.evaluate_metrics_clientapp, now, of_clients)
                if evaluate_fn is not None:
                    _put(result.evaluate_metrics_serverapp, now, evaluate_fn(now, self.arrays()))
                log.info("round %d: %s", now, _line(info.row, info.report, server))
                self.monitor.write(info, len(self.roster.node))

            def check(info: RoundInfo) -> None:
                self.monitor.check(info.report)

            loop = run.start(
                lambda job, store, cohort: GridBackend(self, grid, job, store),
                stop=stop,
                every=self._every,
                callbacks=[record, *self._callbacks, *([folder.after(self)] if folder is not None else []), check],
                rows=self.rows,
                seconds=seconds,
            )
            self.outcome = run.outcome(loop.run())
            if folder is not None:
                folder.finish(self, self.outcome)
            result.arrays = self.arrays()
            return result

    def _open(self, grid: Grid, arrays: ArrayRecord | None, stop: Stop | None = None) -> Run:
        """Make the run as soon as it is known how many clients there are; a later call goes on with it."""
        self.grid = grid
        if self._run is None:
            self.roster.size = self._clients
            least = min(self._min_clients, self._clients or self._min_clients)
            self.roster.wait(grid, least, self._patience)
            count = self._clients or len(self.roster.node)
            self.roster.settle(count)
            self.settle_blocks(self._begun_blocks or min(self._cohort or count, count))
            self._run = Run(
                self.job,
                stop or Stop(),
                cohort=min(self._cohort or count, count),
                hooks=GridHooks(self),
                clients=count,
                x=None if arrays is None else self.layout.vector(arrays.to_torch_state_dict()),
                keeps_state=False,
            )
        return self._run

    def settle_blocks(self, cohort: int) -> None:
        """Take as many blocks as a cohort of this size can serve, if the user left that open."""
        algorithm = self._asked.for_cohort(cohort)
        if algorithm != self.algorithm:
            self.algorithm, self.layout = algorithm, algorithm.uplink.layout(self.job.module)
            self.job = replace(self.job, algorithm=algorithm, layout=self.layout)

    @property
    def server(self) -> Server:
        """The server of the run.

        Raises:
            UserError: the run has not begun.
        """
        if self._run is None:
            raise UserError("the federation has not started: call start, or configure_train, first")
        return self._run.server

    def arrays(self) -> ArrayRecord:
        """Return the model as an ordinary state_dict, in Flower's form; what is bfloat16 becomes float32."""
        # NumPy, in which Flower keeps arrays, has no bfloat16; float32 holds every value of it.
        wide = {n: t.float() if t.dtype == torch.bfloat16 else t for n, t in self.state_dict().items()}
        return ArrayRecord(wide)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the model as an ordinary state_dict."""
        return self.job.state_dict(self.server.x)

    # -- a round ------------------------------------------------------------------------------------------------------

    def online(self, grid: Grid) -> Sequence[int]:
        least = min(self._min_clients, self.server.clients)
        connected = self.roster.wait(grid, least, self._patience)
        self.late.drop_arrived(grid)
        busy = self.late.busy(self.roster.node)
        return [client for client in connected if client not in busy] or connected

    def messages(self, plan: Plan) -> list[Message]:
        """One for each client of the cohort: the same vectors, a task of its own."""
        self._plan, self._accepted_now = plan, {}
        messages = self._send(filter(self.server.expects, plan.tasks), wire.vectors(plan.broadcast), MessageType.TRAIN)
        self.monitor.opened(plan.broadcast.round + 1, len(messages))
        return messages

    def _send(self, tasks: Iterable[Task], vectors: ArrayRecord, kind: str) -> list[Message]:
        """Make the questions, and remember who was asked what."""
        self._sent = {}
        for task in tasks:
            token = secrets.token_hex(16)
            self._sent[token] = self._message(task, vectors, kind, token), task
        return [message for message, _ in self._sent.values()]

    def _message(self, task: Task, vectors: ArrayRecord, kind: str, token: str) -> Message:
        server = self.server
        order = wire.Order(
            task,
            server.epoch,
            self.accepted.get(task.client, -1),
            self.run_id,
            server.seed,
            self.layout.digest,
            self.job.channels_last,
            self.algorithm,
        )
        record = ConfigRecord({**order.record(), **wire.versions(), wire.TOKEN: token})
        model = ConfigRecord({"definition": self.definition.packed})
        content = RecordDict({wire.BROADCAST: vectors, wire.TASK: record, wire.MODEL: model})
        return Message(content, self.roster.node[task.client], kind, ttl=self.timeout, group_id=str(task.round))

    def take(self, reply: Message) -> tuple[Task, bool] | None:
        """Take one reply: it is checked like any upload, or counts as lost; it raises nothing, whatever it is.

        Returns:
            The task that it answers, and whether the upload was accepted; None if it answers no open question.
        """
        task = self._task_of(reply)
        if task is None:
            log.warning("a reply came that answers no open question: passed over")
            return None
        nbytes = 0 if reply.has_error() else wire.counted(reply)
        self.monitor.answered(nbytes)
        try:
            why = self._take(reply, task, nbytes)
        except Malformed as error:
            why = f"its reply is refused: {error}"
        except Exception as error:  # a client's message must never end the run
            why = f"its reply is refused: {type(error).__name__}: {error}"
        if why:
            self.give_up(task, shorten(why))
        return task, task.client in self._accepted_now

    def give_up(self, task: Task, why: str) -> None:
        """Count a client as lost for this round."""
        self.monitor.lost(task, why)
        self.server.lost(task, why)

    def give_up_missing(self, closed_early: bool = False) -> None:
        """Count all that have not answered as lost."""
        seconds = self.monitor.elapsed
        for question, task in self._sent.values():
            if closed_early:
                self.late.add(question, task, self.timeout - seconds)
                self.give_up(task, f"late: enough uploads of each block were in after {seconds:.0f} s")
            else:
                self.give_up(task, f"no answer within {seconds:.0f} s")
        self._sent = {}

    def _take(self, reply: Message, task: Task, nbytes: int) -> str:
        """Hand an upload to the server; else say why there is none."""
        server = self.server
        if reply.has_error():
            return f"Flower reports: {shorten(reply.error.reason)}"
        failure = wire.read_failure(reply.content)
        if failure is not None:
            if failure.state_lost and self._honoured(task):
                server.forget_controls(f"client {task.client}: {failure.failed}")
            return failure.failed
        upload = wire.read_upload(reply.content, self.algorithm.lengths(self.layout, task.block))
        most = self.roster.most["examples"].get(task.client)
        if most is not None and isinstance(upload.examples, int) and most < upload.examples <= MOST_STEPS:
            upload = replace(upload, examples=most)
        server.ledger.wire_bytes += nbytes
        if server.receive(upload, sender=task.client).accepted:
            self._accepted_now[task.client] = task.round
        return ""

    def _honoured(self, task: Task) -> bool:
        """Whether a client may set all controls back now: once in 10 rounds at first, then half as often each time."""
        last, times = self.claims.get(task.client, (0, 0))
        if times and task.round - last < CLAIM_ROUNDS * 2 ** (times - 1):
            log.warning("client %d: it said so in round %d already; the controls stay", task.client, last + 1)
            return False
        self.claims[task.client] = task.round, times + 1
        return True

    def _task_of(self, reply: Message) -> Task | None:
        """The task that a reply answers, by the token it returns; an error that Flower made, by the question it names."""
        if reply.has_error():
            asked = reply.metadata.reply_to_message_id
            token = next((t for t, (message, _) in self._sent.items() if message.metadata.message_id == asked), None)
        else:
            token = wire.token(reply)
        _, task = self._sent.pop(token, (None, None)) if token is not None else (None, None)
        return task

    def committed(self) -> None:
        """After a commit: what was accepted now holds, unless all controls began again."""
        assert self.server.last is not None
        self.monitor.closed(self.server.last)
        if self._plan is not None:
            self.traffic = Round.of(self.server, self._plan.tasks, waited=0.0)
            same = self.server.epoch == self._plan.broadcast.epoch
            self.accepted = self.accepted | self._accepted_now if same else {}
        self._plan, self._accepted_now, self._sent = None, {}, {}

    # -- for users with a loop of their own ---------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        run = self._open(grid, arrays if server_round <= 1 else None)
        run.hooks.prepare()
        return self.messages(run.server.plan())

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        server = self.server
        for reply in replies:
            self.take(reply)
        self.give_up_missing()
        report = server.commit()
        self.committed()
        self.monitor.check(report)
        return self.arrays(), _metrics(report, server)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        server = self.server
        there = sorted(client for client in self.roster.node if client < server.clients)
        count = round(self._evaluating_share * len(there)) or (1 if self._evaluating_share else 0)
        if not count:
            return []
        chosen = stream(server.seed, "evaluation", server.round).choice(there, count, replace=False)
        vectors = ArrayRecord({wire.X: wire.array(server.x)})
        tasks = [Task(server.round, int(client), 0) for client in sorted(chosen)]
        return self._send(tasks, vectors, MessageType.EVALUATE)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Means over the examples of all that answered; a metric that half of them or fewer have is left out."""
        answers: dict[int, Evaluation] = {}
        for reply in replies:
            task = self._task_of(reply)
            if task is None:
                log.warning("an evaluation came that answers no open question: passed over")
                continue
            try:
                answers[task.client] = self._evaluation(reply, task.client)
            except Exception as error:  # a client's message must never end the run
                log.warning("client %d did not evaluate: %s", task.client, shorten(str(error)))
        if self._sent:
            silent = ", ".join(str(task.client) for _, task in list(self._sent.values())[:20])
            log.warning("%d clients did not answer to the evaluation: %s", len(self._sent), silent)
        means: dict[str, float] = {}
        for name in {name: None for client in sorted(answers) for name in answers[client].metrics}:
            those = [answers[client] for client in sorted(answers) if name in answers[client].metrics]
            examples = sum(answer.examples for answer in those)
            mean = float(sum(total(answer.metrics[name], answer.examples) for answer in those) / examples)
            if not math.isfinite(mean):  # a sum overflowed
                mean = sum(answer.examples / examples * answer.metrics[name] for answer in those)
            if len(those) > len(answers) / 2 and math.isfinite(mean):
                means[name] = mean
        return MetricRecord(dict(means)) if means else None

    def _evaluation(self, reply: Message, client: int) -> Evaluation:
        if reply.has_error():
            raise Malformed(f"Flower reports: {shorten(reply.error.reason)}")
        failure = wire.read_failure(reply.content)
        if failure is not None:
            raise Malformed(failure.failed)
        found = wire.read_evaluation(reply.content)
        most = self.roster.most["test_examples"].get(client)
        if most is None:
            raise Malformed("it has not said how many test examples it has")
        return found.model_copy(update={"examples": min(found.examples, most)})

    def summary(self) -> None:
        log.info(
            "%s: d = %s, N = %d, mean upload %.4f d", self.algorithm.name, f"{self.layout.dim:,}", self.layout.blocks,
            self.algorithm.upload_d(self.layout),
        )  # fmt: skip


def _put(records: dict[int, MetricRecord], round: int, values: Mapping[str, Any] | None) -> None:
    """Add values to the record of a round."""
    if values:
        records[round] = MetricRecord({**records.get(round, {}), **values})


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
