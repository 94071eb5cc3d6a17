"""All that a process needs to do the clients' work. Backends send it to their workers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from fedbcgd.core.algorithm import Algorithm
from fedbcgd.core.client import Client
from fedbcgd.core.messages import Allocator, Broadcast, StateUpdate, Task, Upload
from fedbcgd.core.objective import Objective
from fedbcgd.core.own_training import Train
from fedbcgd.core.vector import Layout
from fedbcgd.data.sources import ClientSubsets, Source, as_source, examples_in, on_device
from fedbcgd.engine.evaluation import Batch, combine, evaluate_span, spans
from fedbcgd.errors import UserError


@dataclass
class Job:
    """Algorithm, model, loss, data and seed of a run."""

    algorithm: Algorithm
    layout: Layout
    module: nn.Module
    objective: Objective
    seed: int
    clients: Sequence[Any]
    test: Source | None = None
    channels_last: bool = False  # whether the module computes in that memory format
    batch_clients: int | None = None  # clients trained in one batch, at most; None: each by itself
    train: Train | None = None  # a user's own training function; the clients' data is then as the user gave it

    @cached_property
    def client(self) -> Client:
        """The client side of the algorithm, made when it is first needed."""
        return Client(self.algorithm, self.layout, self.module, self.objective, self.seed, self.train)

    def examples(self, client: int) -> int:
        """Return how many examples a client has; 0 if it is unknown, since the data would have to be loaded first."""
        if isinstance(self.clients, ClientSubsets):
            return self.clients.size(client)
        if not isinstance(self.clients, (list, tuple)):
            return 0
        return examples_in(self.clients[client]) or 0

    def units(self, tasks: Sequence[Task], wanted: Callable[[Task], bool]) -> list[tuple[int, ...]]:
        """Group the wanted tasks into units, each of which is trained in one batch.

        A unit has neighbours in the plan with equally many examples, or a single client if clients are not batched. The
        units follow from the plan alone, so they are the same for any number of workers.

        Args:
            tasks: all tasks of the plan.
            wanted: whether a task is to be done.

        Returns:
            For each unit the positions of its tasks in the plan.
        """
        positions = [k for k, task in enumerate(tasks) if wanted(task)]
        if self.batch_clients is None:
            return [(k,) for k in positions]
        units: list[tuple[int, ...]] = []
        sizes = [self.examples(task.client) or len(self._data(task)) for task in tasks]
        for k in positions:
            if units and len(units[-1]) < self.batch_clients and sizes[units[-1][0]] == sizes[k]:
                units[-1] = (*units[-1], k)
            else:
                units.append((k,))
        return units

    def fit_unit(
        self,
        broadcast: Broadcast,
        tasks: Sequence[Task],
        states: Sequence[Mapping[str, Tensor]],
        allocate: Sequence[Allocator | None] | None = None,
    ) -> list[tuple[Upload, StateUpdate]]:
        """Train the clients of one unit (see `units`), and return their uploads and state updates.

        Args:
            broadcast: the broadcast of the round.
            tasks: the tasks of the unit.
            states: the state of each client.
            allocate: for each client, where its upload is written; None: new memory.
        """
        allocate = allocate or [None] * len(tasks)
        if self.batch_clients is None:
            return [self.fit(broadcast, *one) for one in zip(tasks, states, allocate, strict=True)]
        data = [self._data(task) for task in tasks]
        return self.client.fit_batch(broadcast, tasks, data, states, allocate)

    def fit(
        self, broadcast: Broadcast, task: Task, state: Mapping[str, Tensor], allocate: Allocator | None = None
    ) -> tuple[Upload, StateUpdate]:
        """Do one task; an error says which client and round it came from."""
        try:
            return self.client.fit(broadcast, task, self._data(task), state, allocate)
        except Exception as error:
            if self.train is None and "Expected more than 1 value per channel" in str(error):
                size = self.algorithm.local.batch_size
                raise UserError(
                    "batch_size: expected one that leaves no minibatch of a single example, on which BatchNorm cannot "
                    f"train, got {size} with client {task.client}; choose another one, or GroupNorm"
                ) from error
            error.add_note(f"while client {task.client} trained in round {task.round + 1}")
            raise

    def _data(self, task: Task) -> Any:
        data = self.clients[task.client]
        return as_source(data, f"client {task.client}") if self.train is None else data

    def move_to(self, device: torch.device) -> None:
        """Move model and data to a device; data for a user's own training function stays where it is."""
        self.module.to(device)
        if self.train is None:
            self.clients = on_device(self.clients, device)
        if self.test is not None:
            self.test = on_device([self.test], device)[0]

    def state_dict(self, x: Tensor) -> dict[str, Tensor]:
        """Return the model x as an ordinary state_dict."""
        self.client.model.load(x)  # this also resets buffers that are not sent, such as a counter of batches
        return self.client.model.state_dict()

    def metrics(self, x: Tensor) -> dict[str, float]:
        """Return the metrics of the model x on the test data; {} if there is no test data."""
        if self.test is None:
            return {}
        return combine([self.evaluate(x, *span) for span in spans(len(self.test))])

    def evaluate(self, x: Tensor, start: int, stop: int) -> Batch:
        """Return the sums of the metrics of the model x over the test examples from `start` to `stop`."""
        assert self.test is not None
        self.client.model.load(x)
        return evaluate_span(self.client.model.module, self.objective, self.test, start, stop)
