"""Everything a process needs to do clients' work: what a carrier sends to a worker, or uses itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from fedbcgd.algorithm import Algorithm
from fedbcgd.client import Client
from fedbcgd.data.sources import Source, as_source
from fedbcgd.errors import UserError
from fedbcgd.evaluation import Batch, evaluate_batch
from fedbcgd.flat import Layout
from fedbcgd.messages import Broadcast, StateUpdate, Task, Upload
from fedbcgd.objective import Objective


@dataclass
class Job:
    algorithm: Algorithm
    layout: Layout
    module: nn.Module
    objective: Objective
    seed: int
    clients: Sequence[Any]
    test: Source | None = None

    @cached_property
    def client(self) -> Client:
        return Client(self.algorithm, self.layout, self.module, self.objective, self.seed)

    def examples(self, client: int) -> int:
        """How many this client has, where that is known without loading anything; 0 otherwise."""
        if not isinstance(self.clients, (list, tuple)):
            return 0
        return len(as_source(self.clients[client], f"client {client}"))

    def fit(self, broadcast: Broadcast, task: Task, state: Mapping[str, Tensor]) -> tuple[Upload, StateUpdate]:
        try:
            data = as_source(self.clients[task.client], f"client {task.client}")
            return self.client.fit(broadcast, task, data, state)
        except Exception as error:
            if "Expected more than 1 value per channel" in str(error):
                size = self.algorithm.local.batch_size
                raise UserError(
                    f"client {task.client} has a minibatch of one example (batch_size = {size}), and BatchNorm cannot "
                    "train on one: choose a batch_size that leaves no rest of one, or GroupNorm"
                ) from error
            error.add_note(f"while client {task.client} trained in round {task.round}")
            raise

    def evaluate(self, x: Tensor, start: int, stop: int) -> Batch:
        """Metrics of the model x on the test examples from `start` to `stop`."""
        assert self.test is not None
        self.client.model.load(x)
        return evaluate_batch(self.client.model.module, self.objective, self.test, start, stop)
