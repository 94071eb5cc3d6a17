"""The Flower strategy: the same `Server`, with Flower's grid as the backend."""

import contextlib
import inspect
import logging
import secrets
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from fedbcgd.backends.flower.folder import Begun, Restored, ServerFolder
from fedbcgd.backends.flower.late import LateReplies
from fedbcgd.backends.flower.legacy import LegacyRounds
from fedbcgd.backends.flower.monitor import Monitor
from fedbcgd.backends.flower.plain import ROUND, read_evaluation
from fedbcgd.backends.flower.privacy import refuse_changed, refuse_wrapper
from fedbcgd.backends.flower.questions import Answer, OpenQuestions
from fedbcgd.backends.flower.resets import ControlResets
from fedbcgd.backends.flower.results import add_values, listed, log_line, record_round, train_record
from fedbcgd.backends.flower.roster import Roster, read_roster
from fedbcgd.core.algorithm import Algorithm
from fedbcgd.core.messages import Broadcast, Plan, Task
from fedbcgd.core.metric_means import means_over_clients
from fedbcgd.core.objective import Loss, Metrics, Precision
from fedbcgd.core.reading import APP, FUNCTION, MOST_STEPS, RULE, Evaluation, Malformed, Trains, shorten
from fedbcgd.core.server import Server
from fedbcgd.core.vector import Layout
from fedbcgd.display.metrics import make_target
from fedbcgd.engine.assemble import Run, make_job
from fedbcgd.engine.loop import Callback, Outcome, RoundInfo, Row, Stop
from fedbcgd.engine.traffic import Round
from fedbcgd.errors import UserError
from fedbcgd.rng import stream

log = logging.getLogger("flwr.fedbcgd")  # shown where Flower shows its own

MAX_NORM = "20x"  # `max_norm` of algorithms that have none: clients of a federation are not trusted

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


def strategy(algorithm: str | Algorithm, model: nn.Module, **options: Any) -> "Federation":
    """Return a strategy for Flower's ServerApp that runs one of our algorithms.

    Example:
        >>> strategy = fedbcgd.flower.strategy("fedbcgd", net, blocks=3, fraction_train=0.5)
        >>> result = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=100)

    What is trained:
        algorithm: a registered name (`fedbcgd.algorithm_names()` lists them) or an Algorithm.
        model: any nn.Module; training begins with its weights, unless `start` is given others.
        **options: besides those below, hyper-parameters of a named algorithm: `blocks=5, lr=0.1, momentum=0.8`. If
            clients train in an app of their own, the app determines learning rate, batches and epochs.
        precision: "fp32" or "bf16", for the forward and backward passes here and on every client; as in
            `fedbcgd.simulate`.
        channels_last: whether to compute in that memory format; default: if a trial on `test` shows that the model can.
        seed: fixes the cohorts and every client's draws.

    Who takes part:
        clients: M, the number of all clients of the federation, online or not; default: as many as the roster lists;
            without a roster, as many nodes as are connected when the run begins.
        roster: a TOML or JSON file that says which node is which client (docs/flower.md).
        authenticated: whether each node has a key that it keeps (`--enable-supernode-auth`): the index of a client is then
            never given to a node with another key.
        max_examples: the most examples that a client counts for, in means weighted by examples and in evaluations.

    Who is asked in a round, and how long it lasts:
        cohort: how many clients are asked in a round; default: all that are online. Instead of it, Flower's
            `fraction_train` (a share of the M clients) and `min_train_nodes` may be given.
        min_clients: no round begins with fewer clients online; default 2. Flower's `min_available_nodes` is the same.
        patience: seconds to wait for that many clients; default 3600.
        close_at: a round closes when each block has this share of its clients' uploads, rounded up; default 1, which
            waits for all.
        oversample: factor by which more clients than the cohort are asked, so that slow ones need not be waited for.
        max_empty_rounds: after so many rounds in a row without an accepted upload the run fails with the reasons; default
            3; None: never.

    How it is evaluated:
        test, loss, metrics: data and functions for the evaluation on the server, as in `fedbcgd.simulate`.
        evaluate_every: rounds between evaluations.
        evaluate_clients: share of the online clients that evaluate too; default 0. Flower's `fraction_evaluate` is the
            same; `min_evaluate_nodes` is how many evaluate at least.

    When it stops, besides the number of rounds:
        budget: the mean upload of a client, in units of the model's size d.
        target: a metric to be reached, as in `fedbcgd.simulate`.

    What is saved and shown:
        folder: where to write checkpoints, metrics, summary and model; a run that is in the folder already is resumed.
        checkpoint_every: rounds between checkpoints; default 1.
        callbacks: called with a RoundInfo after each round; `info.stop()` ends the run.
        progress_seconds: seconds between two lines in the log about the current round; default 30.
        metrics_file: a file for OpenMetrics text about the run, written after each round.

    Names in messages to clients that train in an app of their own, as in Flower's FedAvg:
        weighted_by_key: the metric by which clients are weighted; sets `weighting="examples"`.
        arrayrecord_key: the name of the record with the model; default "arrays".
        configrecord_key: the name of the record with the settings; default "config".

    Returns:
        The strategy; call its `start`.

    Raises:
        UserError: an option does not exist, or its value is wrong.
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
                f"options: expected none of the algorithm with an Algorithm, which has its own, got {', '.join(rest)}; pass "
                "its name to set them"
            )
        return Federation(algorithm, model, **own)
    return Federation(make_algorithm(algorithm, **rest), model, **own)


def _check(algorithm: Algorithm, model: Any) -> None:
    """Raise a UserError if this algorithm or model cannot be trained in a federation."""
    if algorithm.uplink.pooled:
        raise UserError(
            f"algorithm: expected one whose clients upload, got {algorithm.name!r}, which has all data in one place; take "
            "another one, such as 'fedbcgd'"
        )
    if not isinstance(model, nn.Module):
        raise UserError(f"model: expected an nn.Module (an instance, not a class), got {model!r}")


@dataclass(frozen=True)
class _Evaluated:
    """The values of the user's `evaluate_fn`, and the round after which it was called."""

    round: int = -1
    values: Mapping[str, Any] = field(default_factory=dict)


class Federation(LegacyRounds, Strategy):
    """Any algorithm of the registry as a Flower strategy.

    `fedbcgd.flower.strategy` makes one; its docstring describes all options that are not listed here.

    Args:
        algorithm: the four choices.
        model: the module.
        flower: the options of Flower's FedAvg, which `fedbcgd.flower.strategy` takes as keywords.

    Attributes:
        rows: the metrics so far, as in `metrics.jsonl`.
        outcome: how the run went; None until it has ended.
        traffic: what was sent in the last round.
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
        _check(algorithm, model)
        check_counts(min_clients=min_clients, evaluate_every=evaluate_every)
        check_counts(
            or_none=True, clients=clients, cohort=cohort, max_examples=max_examples, max_empty_rounds=max_empty_rounds
        )
        check_shares(evaluate_clients, close_at, oversample)
        given = read_roster(roster) if roster is not None else {}
        if given and clients not in (None, len(given)):
            raise UserError(f"clients: expected {len(given)}, as in the roster, got {clients}; leave it out")

        # What the user asked for.
        self._clients, self._cohort = clients or len(given) or None, cohort
        self._min_clients, self._patience = min_clients, patience
        self._every, self._evaluating_share = evaluate_every, evaluate_clients
        self._budget, self.target = budget, make_target(target)
        self._folder = None if folder is None else Path(folder)
        self._checkpoint_every, self._callbacks = checkpoint_every, callbacks
        self.close_at, self.oversample = close_at, oversample
        self.flower = flower
        self.form = flower.form()  # of messages to clients that train in an app of their own

        # What the clients do.
        if algorithm.max_norm is None:  # clients of a federation are not trusted
            algorithm = replace(algorithm, max_norm=MAX_NORM)
        self._asked = algorithm  # may have blocks="auto", which is settled when it is known how many clients there are
        if self._clients:
            algorithm = algorithm.for_cohort(self._cohort_of(self._clients))
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

        # The run, its clients, and what an operator sees of them.
        asks = {"examples": algorithm.weighting == "examples", "test_examples": evaluate_clients > 0}
        self.roster = Roster(given, authenticated, max_examples, [what for what, asked in asks.items() if asked])
        self.monitor = Monitor(max_empty_rounds, progress_seconds, None if metrics_file is None else Path(metrics_file))
        self.late = LateReplies()
        self.run_id = uuid.uuid4().hex
        self.accepted: dict[int, int] = {}  # client → round of its last accepted upload in this control epoch
        self.rows: list[Row] = []
        self.outcome: Outcome | None = None
        self.traffic: Round | None = None
        self._resets = ControlResets()
        self._run: Run | None = None
        self._begun_blocks: int | None = None  # N of the run in the folder

        # The open round.
        self._plan: Plan | None = None
        self._questions = OpenQuestions()
        self._accepted_now: dict[int, int] = {}  # client → round, as in `accepted`

        # Arguments of the last call of `start`, or of the last call by Flower's loop.
        self.grid: Grid | None = None
        self.timeout = 3600.0  # seconds
        self.train_config: Mapping[str, Any] = {}
        self.evaluate_config: Mapping[str, Any] = {}
        # `initial_arrays`: it has the names that the clients' apps use, and values that are not trained.
        self._initial: ArrayRecord | None = None
        self._returned: ArrayRecord | None = None  # what the last call of `aggregate_train` returned
        self._evaluate_fn: EvaluateFn | None = None
        self._evaluated = _Evaluated()

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
            grid: Flower's grid.
            initial_arrays: weights to begin with instead of the model's; ignored if there is a checkpoint.
            num_rounds: rounds of the whole run, those before a checkpoint included.
            timeout: seconds that a round waits for its clients.
            train_config: settings for the clients' own training; each client gets them, with `server-round`.
            evaluate_config: the same for the clients' own evaluation.
            evaluate_fn: called with the round and the model, before the first round and after each round.

        Returns:
            Flower's result: the model, and the metrics of each round.

        Raises:
            UserError: settings or algorithm do not fit the clients that are connected.
            NothingAccepted: no upload was accepted in `max_empty_rounds` rounds in a row.
            Diverged: at least two thirds of the uploads were refused in each of three rounds in a row.
        """
        self.timeout = timeout
        self.train_config, self.evaluate_config = dict(train_config or {}), dict(evaluate_config or {})
        self._evaluate_fn, self._evaluated = evaluate_fn, _Evaluated()
        folder = ServerFolder(self._folder, self._checkpoint_every) if self._folder is not None else None
        with folder or contextlib.nullcontext():
            if folder is not None and (begun := folder.peek()) is not None:
                self._expect(begun)
            stop = Stop(num_rounds, self._budget, self.target)
            run = self._open(grid, initial_arrays, stop)
            seconds = 0.0
            if folder is not None:
                restored = folder.restore(run, self.definition.digest, self.close_at)
                self._go_on(restored)
                seconds = restored.seconds
            result = Result()
            if run.server.round == 0:
                self._evaluate_first(result)
            after = [folder.after(self)] if folder is not None else []
            loop = run.start(
                lambda job, store, cohort: GridBackend(self, grid, job, store),
                stop=stop,
                every=self._every,
                callbacks=[self._recorder(result), *self._callbacks, *after, self._check_round],
                rows=self.rows,
                seconds=seconds,
            )
            self.outcome = run.outcome(loop.run())
            if folder is not None:
                folder.finish(self.outcome)
            result.arrays = self.arrays()
            return result

    def _expect(self, begun: Begun) -> None:
        """Restore who the clients are, from the run in the folder."""
        self._clients = self._clients or begun.clients
        self._begun_blocks = begun.blocks
        self.roster.restore(begun.roster)
        self._resets.restore(begun.resets)

    def _go_on(self, restored: Restored) -> None:
        """Restore metrics, run id and accepted rounds, from the run in the folder."""
        self.rows = list(restored.rows)
        if restored.run_id is not None:
            self.run_id, self.accepted = restored.run_id, dict(restored.accepted)

    def snapshot(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the federation, beside the server's own state."""
        return {
            "run": self.run_id,
            "accepted": {str(client): round for client, round in self.accepted.items()},
            "claims": self._resets.snapshot(),
            "roster": self.roster.snapshot(),
            "model": self.definition.digest,
        }

    def _evaluate_first(self, result: Result) -> None:
        """Call `evaluate_fn` before the first round."""
        values = self.evaluate_centrally()
        add_values(result.evaluate_metrics_serverapp, 0, values)
        if shown := listed(values):
            log.info("round 0: %s", shown)

    def _recorder(self, result: Result) -> Callback:
        """Return a callback that reports each round: in Flower's result, in the log, and in the metrics file."""

        def record(info: RoundInfo) -> None:
            values = self.evaluate_centrally()
            record_round(result, info, values)
            log.info("round %d: %s", info.server.round, log_line(info.row, values, info.report, info.server))
            self.monitor.write(info, len(self.roster.node))

        return record

    def _check_round(self, info: RoundInfo) -> None:
        self.monitor.check(info.report)

    def _open(self, grid: Grid, arrays: ArrayRecord | None, stop: Stop | None = None) -> Run:
        """Return the run; the first call waits for clients and makes it."""
        self.grid = grid
        if self._run is None:
            if self._clients is not None:
                self.roster.expect(self._clients)
            least = min(self._min_clients, self._clients or self._min_clients)
            self.roster.wait(grid, least, self._patience)
            self._check_clients()
            count = self._clients or len(self.roster.node)
            self.roster.settle(count)
            state = None if arrays is None else arrays.to_torch_state_dict()
            if state is not None:
                self.job.module.load_state_dict(state, strict=False)  # also values that are not trained
            self._initial = arrays
            self.definition = Definition.of(self.job.module)
            cohort = self._cohort_of(count)
            self._settle_blocks(self._begun_blocks or cohort)
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

    def _cohort_of(self, clients: int) -> int:
        """Return how many of the clients are asked in a round."""
        return min(self._cohort or self.flower.cohort(clients), clients)

    def _check_clients(self) -> None:
        """Raise a UserError if settings or algorithm do not fit the way in which most clients train."""
        if self.most_train(APP) and (why := unfit_reason(self.algorithm)):
            raise UserError(why)
        if self.most_train(RULE):
            check_train_config(self.train_config, self.algorithm)

    def most_train(self, how: Trains) -> bool:
        """Return whether more than half of the connected clients train in this way."""
        trains = [self.roster.trains[client] for client in self.roster.node]
        return 2 * trains.count(how) > len(trains)

    def _settle_blocks(self, cohort: int) -> None:
        """With blocks="auto", divide the model into as many blocks as a cohort of this size can serve."""
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
            raise UserError("strategy: expected a run that has begun, got none; call start, or configure_train, first")
        return self._run.server

    def arrays(self) -> ArrayRecord:
        """Return the model as an ordinary state_dict, in Flower's form; bfloat16 becomes float32."""
        # Flower keeps arrays in NumPy's form, which has no bfloat16; float32 holds all its values exactly.
        wide = {n: t.float() if t.dtype == torch.bfloat16 else t for n, t in self.state_dict().items()}
        return ArrayRecord(wide)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the model as an ordinary state_dict."""
        return self.job.state_dict(self.server.x)

    def evaluate_centrally(self) -> Mapping[str, Any]:
        """Return the values of `evaluate_fn` for the current model; empty if there is no such function."""
        if self._evaluate_fn is None:
            return {}
        now = self.server.round
        if self._evaluated.round != now:
            self._evaluated = _Evaluated(now, dict(self._evaluate_fn(now, self.arrays()) or {}))
        return self._evaluated.values

    def _app_arrays(self) -> ArrayRecord:
        """Return the model under the names that the clients' own apps use."""
        ours = self.arrays()
        return ours if self._initial is None else ArrayRecord({n: ours.get(n, a) for n, a in self._initial.items()})

    # -- a round ------------------------------------------------------------------------------------------------------

    def online(self, grid: Grid) -> Sequence[int]:
        """Wait for enough clients, and return those that can be asked.

        These are all that are connected and have answered their last task, or all that are connected if none has.

        Raises:
            UserError: fewer than `min_clients` are connected within `patience` seconds.
        """
        least = min(self._min_clients, self.server.clients)
        connected = self.roster.wait(grid, least, self._patience)
        self.late.drop_arrived(grid)
        busy = self.late.busy(self.roster.node)
        return [client for client in connected if client not in busy] or connected

    def messages(self, plan: Plan) -> list[Message]:
        """Open a round, and return a message for each client of its cohort, with the model and the client's task."""
        self._plan, self._accepted_now = plan, {}
        messages = self._send(filter(self.server.expects, plan.tasks), plan.broadcast, MessageType.TRAIN)
        self.monitor.opened(plan.broadcast.round + 1, len(messages))
        return messages

    def _send(self, tasks: Iterable[Task], broadcast: Broadcast, kind: str) -> list[Message]:
        """Return a message for each task, and remember which client was asked what."""
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
                # An app's own evaluation does not return our token, but Flower returns the group id of a message.
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

    def take(self, reply: Message) -> Answer | None:
        """Hand the upload in a reply to the server, or report the client as lost; raise nothing, whatever the reply is.

        Returns:
            The task and whether its upload was accepted; None if the reply belongs to no open question.
        """
        task = self._questions.answered(reply)
        if task is None:
            log.warning("a reply is ignored: it answers no open question")
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
        return Answer(task, task.client in self._accepted_now)

    def give_up(self, task: Task, why: str) -> None:
        """Count a client as lost for this round."""
        self.monitor.lost(task, why)
        self.server.lost(task, why)

    def give_up_missing(self, closed_early: bool = False) -> None:
        """Count all clients that have not answered as lost.

        Args:
            closed_early: whether the round closed because enough had answered.
        """
        seconds = self.monitor.elapsed
        for question in self._questions.close():
            if closed_early:
                self.late.add(question, self.timeout - seconds)
                self.give_up(question.task, f"late: enough uploads of each block were in after {seconds:.0f} s")
            else:
                self.give_up(question.task, f"no answer within {seconds:.0f} s")

    def _take(self, reply: Message, task: Task, nbytes: int) -> str:
        """Hand an upload to the server; return why the client is lost, empty if it is not."""
        server = self.server
        if reply.has_error():
            return f"Flower reports: {shorten(reply.error.reason)}"
        failure = wire.read_failure(reply.content)
        if failure is not None:
            if failure.state_lost and self._resets.allow(task.client, task.round):
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

    def committed(self) -> None:
        """Record which uploads of the round count; none does if the controls were reset in this round."""
        assert self.server.last is not None
        self.monitor.closed(self.server.last)
        if self._plan is not None:
            self.traffic = Round.of(self.server, self._plan.tasks, waited=0.0)
            same = self.server.epoch == self._plan.broadcast.epoch
            self.accepted = self.accepted | self._accepted_now if same else {}
        self._plan, self._accepted_now, self._questions = None, {}, OpenQuestions()

    # -- the hooks of Flower's own loop, for users who call it instead of `start` --------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Open the next round, and return the messages to send.

        Args:
            server_round: Flower's number of the round, from 1; the strategy counts rounds by itself.
            arrays: weights to begin with, in round 1; after that, what `aggregate_train` returned.
            config: settings for the clients' own training.
            grid: Flower's grid.

        Raises:
            UserError: the arrays are not what `aggregate_train` returned, or the settings do not fit the clients.
        """
        refuse_wrapper(self, sys._getframe(1))
        refuse_changed(self._returned, arrays)
        self.train_config = dict(config or {})
        run = self._open(grid, arrays if server_round <= 1 else None)
        run.hooks.prepare()
        return self.messages(run.server.plan())

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Close the round with these replies; clients without one are lost.

        Args:
            server_round: Flower's number of the round.
            replies: the clients' replies, in any order.

        Returns:
            The model, and the metrics of the round.

        Raises:
            NothingAccepted: no upload was accepted in `max_empty_rounds` rounds in a row.
            Diverged: most uploads of the last rounds were refused.
        """
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
        **legacy: Any,
    ) -> Iterable[Message]:
        """Return the messages that ask clients for an evaluation; empty if none evaluates.

        Args:
            server_round: Flower's number of the round.
            arrays: not used: the server has the model.
            config: settings for the clients' own evaluation; None: those of the last call.
            grid: not used.
            **legacy: arguments that Flower passes to a strategy from a `server_fn`. That strategy evaluates in its own
                rounds, so nothing is returned.
        """
        if legacy:
            return []
        if config is not None:
            self.evaluate_config = dict(config)
        server = self.server
        connected = sorted(client for client in self.roster.node if client < server.clients)
        count = self.flower.evaluating(self._evaluating_share, len(connected))
        if not count:
            return []
        chosen = stream(server.seed, "evaluation", server.round).choice(connected, count, replace=False)
        tasks = [Task(server.round, int(client), 0) for client in sorted(chosen)]
        return self._send(tasks, Broadcast(server.round, server.epoch, server.x, {}), MessageType.EVALUATE)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return the clients' metrics, averaged over examples; one that at most half of those who answered have is left out.

        Args:
            server_round: Flower's number of the round.
            replies: the clients' replies, in any order.
        """
        answers: dict[int, Evaluation] = {}
        for reply in replies:
            task = self._questions.answered(reply)
            if task is None:
                log.warning("an evaluation is ignored: it answers no open question")
                continue
            try:
                answers[task.client] = self._evaluation(reply, task.client)
            except Exception as error:  # a client's message must never end the run
                log.warning("client %d did not evaluate: %s", task.client, shorten(str(error)))
        means = means_over_clients([(answer.examples, answer.metrics) for _, answer in sorted(answers.items())])
        if left := self._questions.close():
            silent = ", ".join(str(question.task.client) for question in left[:20])
            log.warning("evaluation: no answer from %d clients: %s", len(left), silent)
        return MetricRecord(dict(means)) if means else None

    def _evaluation(self, reply: Message, client: int) -> Evaluation:
        """Read a client's evaluation; its examples are limited to what it registered."""
        if reply.has_error():
            raise Malformed(f"Flower reports: {shorten(reply.error.reason)}")
        of_app = self.roster.trains[client] == APP
        failure = None if of_app else wire.read_failure(reply.content)
        if failure is not None:
            raise Malformed(failure.failed)
        if of_app:
            evaluation = read_evaluation(reply.content, self.form.weighted_by)
            self.roster.limit("test_examples", client, evaluation.examples)  # an app of its own is not asked before
        else:
            evaluation = wire.read_evaluation(reply.content)
        most = self.roster.most["test_examples"].get(client)
        if most is None:
            raise Malformed("it did not say how many test examples it has when it first came")
        return evaluation.model_copy(update={"examples": min(evaluation.examples, most)})

    def summary(self) -> None:
        """Log the algorithm and its size; Flower calls this when a run begins."""
        refuse_wrapper(self, sys._getframe(1))
        log.info(
            "%s: d = %s, N = %d, mean upload %.4f d", self.algorithm.name, f"{self.layout.dim:,}", self.layout.blocks,
            self.algorithm.upload_d(self.layout),
        )  # fmt: skip
