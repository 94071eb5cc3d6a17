"""Evaluations of the model beside those on the server's test data: by the user's `evaluate_fn`, and on clients."""

from collections.abc import Iterable, Mapping
from typing import Any

from flwr.app import Message, MessageType

from fedbcgd.backends.flower import plain, wire
from fedbcgd.backends.flower.log import log
from fedbcgd.backends.flower.options import EvaluateFn, Options, Settings
from fedbcgd.backends.flower.questions import OpenQuestions
from fedbcgd.backends.flower.roster import Roster
from fedbcgd.backends.flower.rounds import Rounds
from fedbcgd.core.messages import Broadcast, Task
from fedbcgd.core.metric_means import means_over_clients
from fedbcgd.core.reading import APP, Evaluation, Malformed, shorten
from fedbcgd.engine.assemble import Run
from fedbcgd.rng import stream


class CentralEvaluation:
    """Calls the user's `evaluate_fn`, once in each round.

    Args:
        function: the function; None: there is none.
        run: the run.
    """

    def __init__(self, function: EvaluateFn | None, run: Run):
        self._function = function
        self._run = run
        self._round = -1  # after which it was called last
        self._values: Mapping[str, Any] = {}

    def values(self) -> Mapping[str, Any]:
        """Return the values for the current model; empty if there is no function."""
        now = self._run.server.round
        if self._function is not None and self._round != now:
            model = plain.arrays(self._run.state_dict())
            self._round, self._values = now, dict(self._function(now, model) or {})
        return self._values


class ClientEvaluation:
    """Has some of the connected clients evaluate the model on their own data.

    Args:
        run: the run.
        rounds: its rounds, which make the messages.
        options: the options of the strategy.
        roster: which node is which client.
    """

    def __init__(self, run: Run, rounds: Rounds, options: Options, roster: Roster):
        self._server = run.server
        self._rounds = rounds
        self._options = options
        self._roster = roster
        self._questions = OpenQuestions()

    def ask(self, settings: Settings) -> list[Message]:
        """Return the messages that ask clients for an evaluation; empty if none evaluates."""
        server = self._server
        connected = sorted(client for client in self._roster.nodes if client < server.clients)
        count = self._options.evaluating(len(connected))
        if not count:
            return []
        chosen = stream(server.seed, "evaluation", server.round).choice(connected, count, replace=False)
        tasks = [Task(server.round, int(client), 0) for client in sorted(chosen)]
        broadcast = Broadcast(server.round, server.epoch, server.x, {})
        self._questions = self._rounds.questions(tasks, broadcast, MessageType.EVALUATE, settings)
        return self._questions.messages

    def means(self, replies: Iterable[Message]) -> dict[str, float]:
        """Return the clients' metrics, averaged over examples, without those that at most half of the clients sent."""
        answers: dict[int, Evaluation] = {}
        for reply in replies:
            task = self._questions.answered(reply)
            if task is None:
                log.warning("an evaluation is ignored: it answers no open question")
                continue
            try:
                answers[task.client] = self._read(reply, task.client)
            except Exception as error:  # a client's message must never end the run
                log.warning("client %d did not evaluate: %s", task.client, shorten(str(error)))
        if left := self._questions.close():
            silent = ", ".join(str(question.task.client) for question in left[:20])
            log.warning("evaluation: no answer from %d clients: %s", len(left), silent)
        return dict(means_over_clients([(answer.examples, answer.metrics) for _, answer in sorted(answers.items())]))

    def _read(self, reply: Message, client: int) -> Evaluation:
        """Read a client's evaluation; its examples are limited to what it registered."""
        if reply.has_error():
            raise Malformed(f"Flower reports: {shorten(reply.error.reason)}")
        of_app = self._roster.trains[client] == APP
        failure = None if of_app else wire.read_failure(reply.content)
        if failure is not None:
            raise Malformed(failure.failed)
        if of_app:
            evaluation = plain.read_evaluation(reply.content, self._options.record_names().weighted_by)
            self._roster.limit("test_examples", client, evaluation.examples)  # an app of its own is not asked before
        else:
            evaluation = wire.read_evaluation(reply.content)
        most = self._roster.limits["test_examples"].get(client)
        if most is None:
            raise Malformed("it did not say how many test examples it has when it first came")
        return evaluation.model_copy(update={"examples": min(evaluation.examples, most)})
