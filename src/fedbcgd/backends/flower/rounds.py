"""Rounds on Flower's grid: ask the clients, wait for their replies, close early, and count who is lost."""

import secrets
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedbcgd.backends.flower import plain, wire
from fedbcgd.backends.flower.definition import Definition
from fedbcgd.backends.flower.exchange import exchange
from fedbcgd.backends.flower.log import log
from fedbcgd.backends.flower.monitor import Monitor
from fedbcgd.backends.flower.options import Options, Settings
from fedbcgd.backends.flower.questions import LateReplies, OpenQuestions
from fedbcgd.backends.flower.resets import ControlResets
from fedbcgd.backends.flower.roster import Roster
from fedbcgd.core.messages import Broadcast, Plan, Task
from fedbcgd.core.reading import APP, FUNCTION, MOST_STEPS, Malformed, shorten
from fedbcgd.engine.assemble import Run
from fedbcgd.engine.backend import Timings
from fedbcgd.engine.closing import Quorum
from fedbcgd.engine.traffic import Round


@dataclass(eq=False)
class Rounds:
    """The rounds of a run.

    Args:
        run: the run.
        definition: of the model.
        options: the options of the strategy.
        roster: which node is which client.
        monitor: shows an operator how the rounds go.
        resets: limits how often clients reset the control variates.
        initial: the arrays that the run began with, which have the names that the clients' own apps use; None: it began
            with the model's own weights.

    Attributes:
        run_id: the id of the run, in every message.
        accepted: client → round of its last accepted upload in this control epoch.
        late: clients that were still at work when their round closed.
        traffic: what was sent in the last round.
    """

    run: Run
    definition: Definition
    options: Options
    roster: Roster
    monitor: Monitor
    resets: ControlResets
    initial: ArrayRecord | None

    def __post_init__(self) -> None:
        self.run_id = uuid.uuid4().hex
        self.accepted: dict[int, int] = {}
        self.late = LateReplies()
        self.traffic: Round | None = None
        self._server = self.run.server
        self._forget()

    def _forget(self) -> None:
        """Forget the open round."""
        self._plan: Plan | None = None
        self._questions = OpenQuestions()
        self._accepted_now: dict[int, int] = {}  # client → round, as in `accepted`

    # -- ask ----------------------------------------------------------------------------------------------------------

    def online(self, grid: Grid) -> Sequence[int]:
        """Wait for enough clients, and return those that can be asked.

        These are all that are connected and have answered their last task, or all that are connected if none has.

        Raises:
            UserError: fewer than `min_clients` are connected within `patience` seconds.
        """
        least = min(self.options.min_clients, self._server.clients)
        connected = self.roster.wait(grid, least, self.options.patience)
        self.late.drop_arrived(grid)
        busy = self.late.busy(self.roster.nodes)
        return [client for client in connected if client not in busy] or connected

    def ask(self, plan: Plan, settings: Settings) -> list[Message]:
        """Open a round, and return a message for each client of its cohort, with the model and the client's task."""
        self._forget()
        self._plan = plan
        asked = filter(self._server.expects, plan.tasks)
        self._questions = self.questions(asked, plan.broadcast, MessageType.TRAIN, settings)
        self.monitor.opened(plan.broadcast.round + 1, len(self._questions.messages))
        return self._questions.messages

    def questions(self, tasks: Iterable[Task], broadcast: Broadcast, kind: str, settings: Settings) -> OpenQuestions:
        """Return a message for each task.

        Args:
            tasks: who is asked what.
            broadcast: the model.
            kind: Flower's type of the messages: to train, or to evaluate.
            settings: for the clients' own training and evaluation.
        """
        questions = OpenQuestions()
        vectors, arrays = cache(lambda: wire.vectors(broadcast)), cache(self._app_arrays)
        definition = ConfigRecord({"definition": self.definition.packed})
        names, trains = self.options.record_names(), kind == MessageType.TRAIN
        for task in tasks:
            token, group = secrets.token_hex(16), str(task.round)
            how = self.roster.trains[task.client]
            if how != APP:
                content = RecordDict({wire.BROADCAST: vectors(), wire.MODEL: definition})
                if how == FUNCTION and trains:
                    content[wire.CONFIG] = ConfigRecord({**settings.train, plain.ROUND: task.round + 1})
                content[wire.TASK] = self._task(task, token)
            elif trains:
                content = names.content(arrays(), settings.train, task.round + 1, self._server.layout)
                content[wire.TASK] = self._task(task, token)
            else:
                # An app's own evaluation does not return our token, but Flower returns the group id of a message.
                content, group = names.content(arrays(), settings.evaluate, task.round), token
            message = Message(content, self.roster.nodes[task.client], kind, ttl=settings.timeout, group_id=group)
            questions.add(token, message, task)
        return questions

    def _task(self, task: Task, token: str) -> ConfigRecord:
        """Return the record that has all but the vectors: the request, our versions, and the token."""
        server, job = self._server, self.run.job
        request = wire.TaskRequest(
            task,
            server.epoch,
            self.accepted.get(task.client, -1),
            self.run_id,
            server.seed,
            server.layout.digest,
            job.channels_last,
            server.algorithm,
            job.objective.precision,
        )
        return ConfigRecord({**request.record(), **wire.versions(), wire.TOKEN: token})

    def _app_arrays(self) -> ArrayRecord:
        """Return the model under the names that the clients' own apps use."""
        ours = plain.arrays(self.run.state_dict())
        return ours if self.initial is None else ArrayRecord({n: ours.get(n, a) for n, a in self.initial.items()})

    # -- wait ---------------------------------------------------------------------------------------------------------

    def wait(self, grid: Grid, messages: Sequence[Message], timeout: float, timings: Timings) -> None:
        """Send the messages of the open round, and read replies until each block has enough uploads or the time is up.

        Clients that have not answered by then are reported as lost.
        """
        assert self._plan is not None
        quorum = Quorum((task.block for task in self._plan.tasks), close_at=self.options.close_at)
        replies = exchange(grid, messages, timeout, self.monitor.waiting, lambda: quorum.complete)
        while True:
            with timings.measure("waiting"):
                reply = next(replies, None)
            if reply is None:
                break
            with timings.measure("sums"):
                if (task := self.take(reply)) is not None:
                    quorum.answered(task.block, valid=task.client in self._accepted_now)
        self.give_up_missing(closed_early=quorum.complete)

    def take(self, reply: Message) -> Task | None:
        """Hand the upload in a reply to the server, or report the client as lost; raise nothing, whatever the reply is.

        Returns:
            The task; None if the reply belongs to no open question.
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
            self._give_up(task, shorten(why))
        return task

    def _take(self, reply: Message, task: Task, nbytes: int) -> str:
        """Hand an upload to the server; return why the client is lost, empty if it is not."""
        server = self._server
        if reply.has_error():
            return f"Flower reports: {shorten(reply.error.reason)}"
        failure = wire.read_failure(reply.content)
        if failure is not None:
            if failure.state_lost and self.resets.allow(task.client, task.round):
                server.forget_controls(f"client {task.client}: {failure.failed}")
            return failure.failed
        upload = wire.read_upload(reply.content, server.algorithm.lengths(server.layout, task.block))
        most = self.roster.limits["examples"].get(task.client, self.roster.max_examples)
        if most is not None and isinstance(upload.examples, int) and most < upload.examples <= MOST_STEPS:
            upload = replace(upload, examples=most)
        server.ledger.wire_bytes += nbytes
        if server.receive(upload, sender=task.client).accepted:
            self._accepted_now[task.client] = task.round
        return ""

    # -- close --------------------------------------------------------------------------------------------------------

    def give_up_missing(self, closed_early: bool = False) -> None:
        """Count all clients that have not answered as lost.

        Args:
            closed_early: whether the round closed because enough had answered.
        """
        seconds = self.monitor.elapsed
        for question in self._questions.close():
            if closed_early:
                self.late.add(question, seconds)
                self._give_up(question.task, f"late: enough uploads of each block were in after {seconds:.0f} s")
            else:
                self._give_up(question.task, f"no answer within {seconds:.0f} s")

    def _give_up(self, task: Task, why: str) -> None:
        """Count a client as lost for this round."""
        self.monitor.lost(task, why)
        self._server.lost(task, why)

    def committed(self) -> None:
        """Record which uploads of the round count; none does if the controls were reset in this round."""
        assert self._server.last is not None
        self.monitor.closed(self._server.last)
        if self._plan is not None:
            self.traffic = Round.of(self._server, self._plan.tasks, waited=0.0)
            same = self._server.epoch == self._plan.broadcast.epoch
            self.accepted = self.accepted | self._accepted_now if same else {}
        self._forget()
