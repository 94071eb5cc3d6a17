"""Trains all clients in this process, one after another: for debugging, and as the reference for all other backends."""

from collections.abc import Callable

from torch import Tensor

from fedbcgd.core.messages import Plan, StateUpdate, Task, Upload
from fedbcgd.engine.backend import Inbox, NewState, Timings
from fedbcgd.engine.client_state import StateStore
from fedbcgd.engine.job import Job
from fedbcgd.engine.threads import threads

Transport = Callable[[Upload], Upload | None]


class InProcess:
    """Train the clients in this process."""

    def __init__(self, job: Job, store: StateStore, transport: Transport | None = None):
        """Make the backend.

        Args:
            job: model, data and algorithm.
            store: the clients' state.
            transport: a function called with each upload; it returns the upload, a damaged one, or None to lose it.
        """
        self.job = job
        self.store = store
        self.transport = transport
        self.timings = Timings()

    def run_round(self, inbox: Inbox, plan: Plan) -> None:
        epoch = plan.broadcast.epoch
        with threads(1):
            for unit in self.job.units(plan.tasks, inbox.expects):
                tasks = [plan.tasks[k] for k in unit]
                states = [self.store.load(task.client, epoch) for task in tasks]
                results = self.job.fit_unit(plan.broadcast, tasks, states)
                self.timings.add(self.job.client.seconds)
                for task, result in zip(tasks, results, strict=True):
                    self._hand_in(inbox, task, epoch, *result)

    def _hand_in(self, inbox: Inbox, task: Task, epoch: int, upload: Upload, update: StateUpdate) -> None:
        arrived = self.transport(upload) if self.transport else upload
        with self.timings.measure("sums"):
            if arrived is None:
                inbox.lost(task, "the upload did not arrive")
            else:
                NewState(self.store, task.client, epoch).hand_in(inbox, arrived, update)

    def evaluate(self, x: Tensor) -> dict[str, float]:
        with threads(1):
            return self.job.metrics(x)

    def close(self) -> None:
        pass
