"""The Flower strategy: the same `Server`, with Flower's grid as the backend."""

import contextlib
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor, nn

from fedbcgd.algorithms.registry import make_algorithm
from fedbcgd.backends.flower import plain
from fedbcgd.backends.flower.backend import GridBackend, GridHooks
from fedbcgd.backends.flower.definition import Definition
from fedbcgd.backends.flower.dropin import unfit_reason
from fedbcgd.backends.flower.evaluations import CentralEvaluation, ClientEvaluation
from fedbcgd.backends.flower.folder import EarlierRun, ResumedState, ServerFolder
from fedbcgd.backends.flower.legacy import LegacyRounds
from fedbcgd.backends.flower.log import log
from fedbcgd.backends.flower.monitor import Monitor
from fedbcgd.backends.flower.options import EvaluateFn, Options, Settings
from fedbcgd.backends.flower.privacy import refuse_changed, refuse_wrapper
from fedbcgd.backends.flower.resets import ControlResets
from fedbcgd.backends.flower.results import log_line, record_round, record_start, train_record
from fedbcgd.backends.flower.roster import Roster, read_roster
from fedbcgd.backends.flower.rounds import Rounds
from fedbcgd.core.algorithm import Algorithm
from fedbcgd.core.reading import APP, RULE, Trains
from fedbcgd.core.server import Server
from fedbcgd.core.vector import Layout
from fedbcgd.display.metrics import make_target
from fedbcgd.engine.assemble import Run, make_job
from fedbcgd.engine.loop import Callback, Outcome, RoundInfo, Row, Stop
from fedbcgd.errors import UserError

MAX_NORM = "20x"  # `max_norm` of algorithms that have none: clients of a federation are not trusted


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
    ours, rest = Options.read(options)
    if isinstance(algorithm, Algorithm):
        if rest:
            raise UserError(
                f"options: expected none of the algorithm with an Algorithm, which has its own, got {', '.join(rest)}; pass "
                "its name to set them"
            )
        return Federation(algorithm, model, ours)
    if ours.weighted_by_key is not None:
        rest.setdefault("weighting", "examples")
    return Federation(make_algorithm(algorithm, **rest), model, ours)


def _check(algorithm: Algorithm, model: Any) -> None:
    """Raise a UserError if this algorithm or model cannot be trained in a federation."""
    if algorithm.uplink.pooled:
        raise UserError(
            f"algorithm: expected one whose clients upload, got {algorithm.name!r}, which has all data in one place; take "
            "another one, such as 'fedbcgd'"
        )
    if not isinstance(model, nn.Module):
        raise UserError(f"model: expected an nn.Module (an instance, not a class), got {model!r}")


class Federation(LegacyRounds, Strategy):
    """Any algorithm of the registry as a Flower strategy.

    `fedbcgd.flower.strategy` makes one.

    Args:
        algorithm: the four choices.
        model: the module.
        options: the other options of `fedbcgd.flower.strategy`.

    Attributes:
        options: the options.
        settings: what the last call of `start` set.
        job: the clients' work.
        roster: which node is which client.
        monitor: what an operator sees of the run.
        target: when the run ends, as (metric, "<=" or ">=", value).
        rows: the metrics so far, as in `metrics.jsonl`.
        outcome: how the run went; None until it has ended.
    """

    def __init__(self, algorithm: Algorithm, model: nn.Module, options: Options):
        _check(algorithm, model)
        given = read_roster(options.roster) if options.roster is not None else {}
        if given and options.clients not in (None, len(given)):
            raise UserError(f"clients: expected {len(given)}, as in the roster, got {options.clients}; leave it out")
        if algorithm.max_norm is None:
            algorithm = replace(algorithm, max_norm=MAX_NORM)
        self.options = options
        self.settings = Settings()
        self._clients = options.clients or len(given) or None  # M, if it is known
        # May have blocks="auto", which is settled when it is known how many clients there are.
        self._given_algorithm = algorithm
        self.job = make_job(
            model,
            (),
            algorithm.for_cohort(options.cohort_of(self._clients)) if self._clients else algorithm,
            options.test,
            options.seed,
            loss=options.loss,
            metrics=options.metrics,
            channels_last=options.channels_last,
            precision=options.precision,
        )
        self.target = make_target(options.target)
        # What nodes are asked when they register.
        questions = ["examples"] * (algorithm.weighting == "examples") + ["test_examples"] * (
            options.evaluate_clients > 0
        )
        self.roster = Roster(given, options.authenticated, options.max_examples, questions)
        file = None if options.metrics_file is None else Path(options.metrics_file)
        self.monitor = Monitor(options.max_empty_rounds, options.progress_seconds, file)
        self.rows: list[Row] = []
        self.outcome: Outcome | None = None
        self.grid: Grid | None = None  # of the last call
        self._resets = ControlResets()
        self._earlier_blocks: int | None = None  # N of the run in the folder
        self._returned: ArrayRecord | None = None  # what the last call of `aggregate_train` returned
        # Made when the run begins.
        self._run: Run | None = None
        self.definition: Definition
        self.rounds: Rounds
        self.evaluation: ClientEvaluation

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
        self.settings = Settings(timeout, dict(train_config or {}), dict(evaluate_config or {}))
        options = self.options
        folder = None if options.folder is None else ServerFolder(Path(options.folder), options.checkpoint_every)
        with folder or contextlib.nullcontext():
            if folder is not None and (earlier := folder.peek()) is not None:
                self._restore_clients(earlier)
            stop = Stop(num_rounds, options.budget, self.target)
            run = self._open(grid, initial_arrays, stop)
            seconds, callbacks = 0.0, list(options.callbacks)
            if folder is not None:
                restored = folder.restore(run, self.definition.digest, options.close_at)
                self._restore_progress(restored)
                seconds = restored.seconds
                callbacks.append(folder.after(self))
            result, central = Result(), CentralEvaluation(evaluate_fn, run)
            if run.server.round == 0:
                record_start(result, central.values())
            loop = run.start(
                lambda job, store, cohort: GridBackend(self, grid, central, job, store),
                stop=stop,
                every=options.evaluate_every,
                callbacks=[self._recorder(result, central), *callbacks, lambda info: self.monitor.check(info.report)],
                rows=self.rows,
                seconds=seconds,
            )
            self.outcome = run.outcome(loop.run())
            if folder is not None:
                folder.finish(self.outcome)
            result.arrays = self.arrays()
            return result

    def _restore_clients(self, earlier: EarlierRun) -> None:
        """Restore who the clients are, from the run in the folder."""
        self._clients = self._clients or earlier.clients
        self._earlier_blocks = earlier.blocks
        self.roster.restore(earlier.roster)
        self._resets.restore(earlier.resets)

    def _restore_progress(self, restored: ResumedState) -> None:
        """Restore metrics, run id and accepted rounds, from the run in the folder."""
        self.rows = list(restored.rows)
        if restored.run_id is not None:
            self.rounds.run_id, self.rounds.accepted = restored.run_id, dict(restored.accepted)

    def snapshot(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the federation, beside the server's own state."""
        return {
            "run": self.rounds.run_id,
            "accepted": {str(client): round for client, round in self.rounds.accepted.items()},
            "claims": self._resets.snapshot(),
            "roster": self.roster.snapshot(),
            "model": self.definition.digest,
        }

    def _recorder(self, result: Result, central: CentralEvaluation) -> Callback:
        """Return a callback that reports each round: in Flower's result, in the log, and in the metrics file."""

        def record(info: RoundInfo) -> None:
            values = central.values()
            record_round(result, info, values)
            log.info("round %d: %s", info.server.round, log_line(info.row, values, info.report, info.server))
            self.monitor.write(info, len(self.roster.nodes))

        return record

    def _open(self, grid: Grid, arrays: ArrayRecord | None, stop: Stop | None = None) -> Run:
        """Return the run; the first call waits for clients and makes it."""
        self.grid = grid
        if self._run is None:
            options, roster = self.options, self.roster
            if self._clients is not None:
                roster.expect(self._clients)
            roster.wait(grid, min(options.min_clients, self._clients or options.min_clients), options.patience)
            self._check_clients()
            count = self._clients or len(roster.nodes)
            roster.settle(count)
            state = None if arrays is None else arrays.to_torch_state_dict()
            if state is not None:
                self.job.module.load_state_dict(state, strict=False)  # also values that are not trained
            self.definition = Definition.of(self.job.module)
            cohort = options.cohort_of(count)
            self._settle_blocks(self._earlier_blocks or cohort)  # a cohort of the earlier N gives that N again
            self._run = Run(
                self.job,
                stop or Stop(),
                cohort=cohort,
                hooks=GridHooks(self),
                clients=count,
                x=None if state is None else self.layout.vector(state),
                keeps_state=False,
            )
            self.rounds = Rounds(self._run, self.definition, options, roster, self.monitor, self._resets, arrays)
            self.evaluation = ClientEvaluation(self._run, self.rounds, options, roster)
        return self._run

    def _check_clients(self) -> None:
        """Raise a UserError if settings or algorithm do not fit the way in which most clients train."""
        if self.most_train(APP) and (why := unfit_reason(self.algorithm)):
            raise UserError(why)
        if self.most_train(RULE):
            self.settings.check(self.algorithm)

    def most_train(self, how: Trains) -> bool:
        """Return whether more than half of the connected clients train in this way."""
        trains = [self.roster.trains[client] for client in self.roster.nodes]
        return 2 * trains.count(how) > len(trains)

    def _settle_blocks(self, cohort: int) -> None:
        """With blocks="auto", divide the model into as many blocks as a cohort of this size can serve."""
        algorithm = self._given_algorithm.for_cohort(cohort)
        if algorithm != self.algorithm:
            self.job = replace(self.job, algorithm=algorithm, layout=algorithm.uplink.layout(self.job.module))

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm; blocks="auto" becomes a number when the number of clients is known."""
        return self.job.algorithm

    @property
    def layout(self) -> Layout:
        """Where each parameter lies in the model's vector."""
        return self.job.layout

    @property
    def run(self) -> Run:
        """The run.

        Raises:
            UserError: it has not begun.
        """
        if self._run is None:
            raise UserError("strategy: expected a run that has begun, got none; call start, or configure_train, first")
        return self._run

    @property
    def server(self) -> Server:
        """The server of the run."""
        return self.run.server

    def arrays(self) -> ArrayRecord:
        """Return the model as an ordinary state_dict, in Flower's form; bfloat16 becomes float32."""
        return plain.arrays(self.state_dict())

    def state_dict(self) -> dict[str, Tensor]:
        """Return the model as an ordinary state_dict."""
        return self.run.state_dict()

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
        self.settings = replace(self.settings, train=dict(config or {}))
        run = self._open(grid, arrays if server_round <= 1 else None)
        run.hooks.prepare()
        return self.rounds.ask(run.server.plan(), self.settings)

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
            self.rounds.take(reply)
        self.rounds.give_up_missing()
        report = server.commit()
        self.rounds.committed()
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
            **legacy: what Flower's older server (`server_fn`) passes. There `configure_fit` runs and evaluates whole rounds,
                so nothing is left to ask.
        """
        if legacy:
            return []
        if config is not None:
            self.settings = replace(self.settings, evaluate=dict(config))
        return self.evaluation.ask(self.settings)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return the clients' metrics, averaged over examples, if more than half of those who answered have them.

        Args:
            server_round: Flower's number of the round.
            replies: the clients' replies, in any order.
        """
        means = self.evaluation.means(replies)
        return MetricRecord(dict(means)) if means else None

    def summary(self) -> None:
        """Log the algorithm and its size; for Flower's own loop, since `start` does not call it."""
        refuse_wrapper(self, sys._getframe(1))
        log.info(
            "%s: d = %s, N = %d, mean upload %.4f d", self.algorithm.name, f"{self.layout.dim:,}", self.layout.blocks,
            self.algorithm.upload_d(self.layout),
        )  # fmt: skip
