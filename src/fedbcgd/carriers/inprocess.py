"""All clients in this process, one after the other: for debugging, and the reference for every other carrier."""

from collections.abc import Callable

from torch import Tensor

from fedbcgd.clock import Clock
from fedbcgd.evaluation import combine, spans
from fedbcgd.job import Job
from fedbcgd.messages import Plan, Upload
from fedbcgd.server import Server
from fedbcgd.state import StateStore
from fedbcgd.threads import one_thread

Transport = Callable[[Upload], Upload | None]


class InProcess:
    """`transport` stands for the network: it may lose an upload (None) or damage it."""

    def __init__(self, job: Job, store: StateStore, transport: Transport | None = None):
        self.job = job
        self.store = store
        self.transport = transport
        self.clock = Clock()

    def carry(self, server: Server, plan: Plan) -> None:
        epoch = plan.broadcast.epoch
        with one_thread():
            for task in filter(server.expects, plan.tasks):
                upload, update = self.job.fit(plan.broadcast, task, self.store.load(task.client, epoch))
                self.clock.add(self.job.client.seconds)
                arrived = self.transport(upload) if self.transport else upload
                with self.clock.timing("sums"):
                    if arrived is None:
                        server.lost(task, "the upload did not arrive")
                    elif server.receive(arrived).accepted:
                        slot = self.store.reserve()
                        if slot is not None and self.store.file is not None:
                            self.store.file.write(slot, self.store.slot(task.client, epoch), update)
                        self.store.accept(task.client, slot, epoch)

    def evaluate(self, x: Tensor) -> dict[str, float]:
        if self.job.test is None:
            return {}
        with one_thread():
            return combine([self.job.evaluate(x, *span) for span in spans(len(self.job.test))])

    def close(self) -> None:
        pass
