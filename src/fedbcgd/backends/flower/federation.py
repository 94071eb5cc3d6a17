"""The Flower strategy: the same `Server`, with Flower's grid as the backend."""

import contextlib
import inspect
import logging
import secrets
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
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
from fedbcgd.backends.flower.dropin import unfit_reason
from fedbcgd.backends.flower.flower_options import FlowerOptions, check_counts, check_shares, check_train_config
from fedbcgd.backends.flower.folder import ServerFolder
from fedbcgd.backends.flower.late import LateReplies
from fedbcgd.backends.flower.legacy import LegacyRounds
from fedbcgd.backends.flower.monitor import Monitor
from fedbcgd.backends.flower.plain import ROUND, read_evaluation
from fedbcgd.backends.flower.privacy import refuse_changed, refuse_wrapper
from fedbcgd.backends.flower.questions import OpenQuestions
from fedbcgd.backends.flower.results import add_values, listed, log_line, record_round, train_record
from fedbcgd.backends.flower.roster import Roster, read_roster
from fedbcgd.core.algorithm import Algorithm
from fedbcgd.core.messages import Broadcast, Plan, Task
from fedbcgd.core.metric_means import means_over_clients
from fedbcgd.core.objective import Loss, Metrics, Precision
from fedbcgd.core.reading import APP, FUNCTION, MOST_STEPS, RULE, Evaluation, Malformed, shorten
from fedbcgd.core.server import Server
from fedbcgd.core.vector import Layout
from fedbcgd.engine.assemble import Run, make_job, make_target
from fedbcgd.engine.loop import Callback, Outcome, RoundInfo, Row, Stop
from fedbcgd.engine.traffic import Round
from fedbcgd.errors import UserError
from fedbcgd.rng import stream

log = logging.getLogger("flwr.fedbcgd")  # shown where Flower shows its own

MAX_NORM = "20x"  # of an upload, unless the algorithm says another limit

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]

CLAIM_ROUNDS = 10  # rounds until a client that lost its state again may reset all controls again; doubles each time


def strategy(algorithm: str | Algorithm, model: nn.Module, **options: Any) -> "Federation":
    """Return a strategy by the algorithm's name.

    Args:
        algorithm: a registered name, or an Algorithm.
        model: the module; its weights are the ones to begin with.
        **options: those of `Federation`, those of Flower's FedAvg (`fraction_train`, `min_train_nodes`,
            `min_available_nodes`, `fraction_evaluate`, `min_evaluate_nodes`, `weighted_by_key`, `arrayrecord_key`,
            `configrecord_key`), and the hyper-parameters of the algorithm.

    Raises:
        UserError: an option is not known, or not possible.
    """
    flower = FlowerOptions.take(options)
    if flower.weighted_by_key is not None and isinstance(algorithm, str):
        options.setdefault("weighting", "examples")
    options["flower"] = flower
    own = {k: v for k, v in options.items() if k in inspect.signature(Federation).parameters}
    rest = {k: v for k, v in options.items() if k not in own}
    if isinstance(algorithm, Algorithm):
        if rest:
            raise UserError(
                f"options {', '.join(rest)}: an Algorithm has its options already; pass its name to set some"
            )
        return Federation(algorithm, model, **own)
    return Federation(make_algorithm(algorithm, **rest), model, **own)


class Federation(LegacyRounds, Strategy):
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
    flower: options of Flower's FedAvg; `fedbcgd.flower.strategy` takes them by their names.
    precision: "fp32" or "bf16", of the forward and backward passes here and on every client; as in `fedbcgd.simulate`.
    close_at: a round closes when each block has this share of its clients' uploads, rounded up; 1: all are waited for.
    oversample: factor by which more clients than the cohort are asked, so that slow ones need not be waited for.
    max_empty_rounds: rounds in a row without an accepted upload after which the run fails with the reasons; None: never.
    progress_seconds: between two lines in the log about a round that goes on.
    metrics_file: OpenMetrics text about the run, written after each round.
    channels_last: compute in that memory format; default: if a trial on `test` shows that the model can, else not.
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
        flower: FlowerOptions = FlowerOptions(),  # noqa: B008 (frozen)
        precision: Precision = "fp32",
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
        if given and clients not in (None, len(given)):
            raise UserError(f"clients: expected {len(given)}, as in the roster, got {clients}")
        check_counts(min_clients=min_clients, evaluate_every=evaluate_every)
        limits = {
            "clients": clients,
            "cohort": cohort,
            "max_examples": max_examples,
            "max_empty_rounds": max_empty_rounds,
        }
        check_counts(**{name: value for name, value in limits.items() if value is not None})
        check_shares(evaluate_clients, close_at, oversample)
        if algorithm.max_norm is None:  # clients of a federation are not trusted
            algorithm = replace(algorithm, max_norm=MAX_NORM)
        self._asked = algorithm  # perhaps with blocks="auto", to be settled when it is known how many clients there are
        if count := clients or len(given):
            algorithm = algorithm.for_cohort(min(cohort or flower.cohort(count), count))
        self.algorithm = algorithm
        self.job = make_job(
            model,
            (),
            algorithm,
            test,
            seed,
            loss=loss,
            metrics=metrics,
            channels_last=channels_last,
            precision=precision,
        )
        self.layout: Layout = self.job.layout
        self.definition: Definition  # of the model; made when the run begins
        asks = {"examples": algorithm.weighting == "examples", "test_examples": evaluate_clients > 0}
        self.roster = Roster(given, authenticated, max_examples, [what for what, asked in asks.items() if asked])
        self.run_id = uuid.uuid4().hex
        self.accepted: dict[int, int] = {}  # client → round of its last accepted upload in this control epoch
        self.claims: dict[int, tuple[int, int]] = {}  # client → (last round in which it reset the controls, how often)
        self.rows: list[Row] = []
        self.outcome: Outcome | None = None
        self.target = make_target(target)
        self.timeout = 3600.0  # seconds
        self.grid: Grid | None = None  # that of the last call
        self.flower = flower
        self.form = flower.form()  # of messages to clients that train in an app of their own
        self.train_config: Mapping[str, Any] = {}
        self.evaluate_config: Mapping[str, Any] = {}
        self._initial: ArrayRecord | None = None  # the names that an app's models have, and what is not trained
        self._returned: ArrayRecord | None = None  # by the last call of aggregate_train
        self._evaluate_fn: EvaluateFn | None = None
        self._evaluated: tuple[int, Mapping[str, Any]] = -1, {}  # the round of its last values, and these
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
        self._questions = OpenQuestions()

    # -- the whole run ------------------------------------------------------------------------------------------------

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Run until round `num_rounds` of the whole run; a checkpoint in the folder is resumed.

        Args:
            grid: Flower's.
            initial_arrays: weights to begin with instead of the model's, unless a checkpoint is there.
            num_rounds: rounds of the whole run.
            timeout: seconds that a round waits for its clients.
            train_config: settings for the clients' own training; each gets them, with `server-round`.
            evaluate_config: the same for their own evaluation.
            evaluate_fn: called with the round and the model before the first round and after each.

        Raises:
            UserError: settings and algorithm do not fit the clients that are there.
        """
        self.timeout = timeout
        self.train_config, self.evaluate_config = dict(train_config or {}), dict(evaluate_config or {})
        self._evaluate_fn, self._evaluated = evaluate_fn, (-1, {})
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
                add_values(result.evaluate_metrics_serverapp, 0, values := self.evaluate_centrally())
                if shown := listed(values):
                    log.info("round 0: %s", shown)

            def record(info: RoundInfo) -> None:
                values = self.evaluate_centrally()
                record_round(result, info, values)
                log.info("round %d: %s", server.round, log_line(info.row, values, info.report, server))
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
            self._check_clients()
            count = self._clients or len(self.roster.node)
            self.roster.settle(count)
            state = None if arrays is None else arrays.to_torch_state_dict()
            if state is not None:
                self.job.module.load_state_dict(state, strict=False)  # what is not trained, too
            self._initial = arrays
            self.definition = Definition.of(self.job.module)
            cohort = min(self._cohort or self.flower.cohort(count), count)
            self.settle_blocks(self._begun_blocks or cohort)
            self._run = Run(
                self.job,
                stop or Stop(),
                cohort=cohort,
                hooks=GridHooks(self),
                clients=count,
                x=None if state is None else self.layout.vector(state),
                keeps_state=False,
            )
        return self._run

    def _check_clients(self) -> None:
        """Refuse settings and algorithms that do not fit the way in which most clients train."""
        trains = [self.roster.trains[client] for client in self.roster.node]
        if 2 * trains.count(APP) > len(trains) and (why := unfit_reason(self.algorithm)):
            raise UserError(why)
        if 2 * trains.count(RULE) > len(trains):
            check_train_config(self.train_config, self.algorithm)

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

    def evaluate_centrally(self) -> Mapping[str, Any]:
        """Return the values of `evaluate_fn` for the model as it is now; empty without one."""
        if self._evaluate_fn is None:
            return {}
        now = self.server.round
        if self._evaluated[0] != now:
            self._evaluated = now, dict(self._evaluate_fn(now, self.arrays()) or {})
        return self._evaluated[1]

    def _app_arrays(self) -> ArrayRecord:
        """Return the model under the names that the clients' own apps know it by."""
        ours = self.arrays()
        return ours if self._initial is None else ArrayRecord({n: ours.get(n, a) for n, a in self._initial.items()})

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
        messages = self._send(filter(self.server.expects, plan.tasks), plan.broadcast, MessageType.TRAIN)
        self.monitor.opened(plan.broadcast.round + 1, len(messages))
        return messages

    def _send(self, tasks: Iterable[Task], broadcast: Broadcast, kind: str) -> list[Message]:
        """Make the questions, and remember who was asked what."""
        self._questions = OpenQuestions()
        vectors, arrays = cache(lambda: wire.vectors(broadcast)), cache(self._app_arrays)
        definition = ConfigRecord({"definition": self.definition.packed})
        for task in tasks:
            token = secrets.token_hex(16)
            trains = self.roster.trains[task.client]
            if trains != APP:
                content = RecordDict({wire.BROADCAST: vectors(), wire.MODEL: definition})
                if trains == FUNCTION and kind == MessageType.TRAIN:
                    content[wire.CONFIG] = ConfigRecord({**self.train_config, ROUND: task.round + 1})
                message = self._message(task, content, kind, token)
            elif kind == MessageType.TRAIN:
                content = self.form.content(arrays(), self.train_config, task.round + 1, self.layout)
                message = self._message(task, content, kind, token)
            else:
                # The app's own evaluation knows no token; Flower returns the group of a message with its reply.
                content = self.form.content(arrays(), self.evaluate_config, task.round)
                message = Message(content, self.roster.node[task.client], kind, ttl=self.timeout, group_id=token)
            self._questions.add(token, message, task)
        return self._questions.messages

    def _message(self, task: Task, content: RecordDict, kind: str, token: str) -> Message:
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
            self.job.objective.precision,
        )
        content[wire.TASK] = ConfigRecord({**order.record(), **wire.versions(), wire.TOKEN: token})
        return Message(content, self.roster.node[task.client], kind, ttl=self.timeout, group_id=str(task.round))

    def take(self, reply: Message) -> tuple[Task, bool] | None:
        """Take one reply: it is checked like any upload, or counts as lost; it raises nothing, whatever it is.

        Returns:
            The task that it answers, and whether the upload was accepted; None if it answers no open question.
        """
        task = self._questions.answered(reply)
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
        for question, task in self._questions.close():
            if closed_early:
                self.late.add(question, task, self.timeout - seconds)
                self.give_up(task, f"late: enough uploads of each block were in after {seconds:.0f} s")
            else:
                self.give_up(task, f"no answer within {seconds:.0f} s")

    def _take(self, reply: Message, task: Task, nbytes: int) -> str:
        """Hand an upload to the server; else say why there is none."""
        server = self.server
        if reply.has_error():
            return f"Flower reports: {shorten(reply.error.reason)}"
        failure = wire.read_failure(reply.content)
        if failure is not None:
            if failure.state_lost and self._may_reset_controls(task):
                server.forget_controls(f"client {task.client}: {failure.failed}")
            return failure.failed
        upload = wire.read_upload(reply.content, self.algorithm.lengths(self.layout, task.block))
        most = self.roster.most["examples"].get(task.client, self.roster.max_examples)
        if most is not None and isinstance(upload.examples, int) and most < upload.examples <= MOST_STEPS:
            upload = replace(upload, examples=most)
        server.ledger.wire_bytes += nbytes
        if server.receive(upload, sender=task.client).accepted:
            self._accepted_now[task.client] = task.round
        return ""

    def _may_reset_controls(self, task: Task) -> bool:
        """Whether this client's report of lost state resets all controls: after 10 rounds again, then 20, 40, …"""
        last, times = self.claims.get(task.client, (0, 0))
        if times and task.round - last < CLAIM_ROUNDS * 2 ** (times - 1):
            log.warning("client %d lost its state again (before: round %d); controls are kept", task.client, last + 1)
            return False
        self.claims[task.client] = task.round, times + 1
        return True

    def committed(self) -> None:
        """After a commit: remember which uploads were accepted; forget all of them if the controls were reset."""
        assert self.server.last is not None
        self.monitor.closed(self.server.last)
        if self._plan is not None:
            self.traffic = Round.of(self.server, self._plan.tasks, waited=0.0)
            same = self.server.epoch == self._plan.broadcast.epoch
            self.accepted = self.accepted | self._accepted_now if same else {}
        self._plan, self._accepted_now, self._questions = None, {}, OpenQuestions()

    # -- for users with a loop of their own ---------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        refuse_wrapper(self, sys._getframe(1))
        refuse_changed(self._returned, arrays)
        self.train_config = dict(config or {})
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
        self._returned = self.arrays()
        return self._returned, train_record(report, server)

    def configure_evaluate(
        self,
        server_round: int,
        arrays: ArrayRecord | None = None,
        config: ConfigRecord | None = None,
        grid: Grid | None = None,
        **legacy: Any,  # of a server_fn's strategy: evaluations are part of our rounds there
    ) -> Iterable[Message]:
        if legacy:
            return []
        if config is not None:
            self.evaluate_config = dict(config)
        server = self.server
        there = sorted(client for client in self.roster.node if client < server.clients)
        count = self.flower.evaluating(self._evaluating_share, len(there))
        if not count:
            return []
        chosen = stream(server.seed, "evaluation", server.round).choice(there, count, replace=False)
        tasks = [Task(server.round, int(client), 0) for client in sorted(chosen)]
        return self._send(tasks, Broadcast(server.round, server.epoch, server.x, {}), MessageType.EVALUATE)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Means over the examples of all that answered; a metric that half of them or fewer have is left out."""
        answers: dict[int, Evaluation] = {}
        for reply in replies:
            task = self._questions.answered(reply)
            if task is None:
                log.warning("an evaluation came that answers no open question: passed over")
                continue
            try:
                answers[task.client] = self._evaluation(reply, task.client)
            except Exception as error:  # a client's message must never end the run
                log.warning("client %d did not evaluate: %s", task.client, shorten(str(error)))
        means = means_over_clients([(answer.examples, answer.metrics) for _, answer in sorted(answers.items())])
        if left := self._questions.close():
            silent = ", ".join(str(task.client) for _, task in left[:20])
            log.warning("%d clients did not answer to the evaluation: %s", len(left), silent)
        return MetricRecord(dict(means)) if means else None

    def _evaluation(self, reply: Message, client: int) -> Evaluation:
        if reply.has_error():
            raise Malformed(f"Flower reports: {shorten(reply.error.reason)}")
        of_app = self.roster.trains[client] == APP
        failure = None if of_app else wire.read_failure(reply.content)
        if failure is not None:
            raise Malformed(failure.failed)
        if of_app:
            found = read_evaluation(reply.content, self.form.weighted_by)
            self.roster.limit("test_examples", client, found.examples)  # it could not be asked before
        else:
            found = wire.read_evaluation(reply.content)
        most = self.roster.most["test_examples"].get(client)
        if most is None:
            raise Malformed("it has not said how many test examples it has")
        return found.model_copy(update={"examples": min(found.examples, most)})

    def summary(self) -> None:
        refuse_wrapper(self, sys._getframe(1))
        log.info(
            "%s: d = %s, N = %d, mean upload %.4f d", self.algorithm.name, f"{self.layout.dim:,}", self.layout.blocks,
            self.algorithm.upload_d(self.layout),
        )  # fmt: skip
