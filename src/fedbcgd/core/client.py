"""A client's side of a round, without I/O: train, encode the upload, and return the client's new state."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedbcgd.core.algorithm import Algorithm
from fedbcgd.core.encoding import encode
from fedbcgd.core.local_rule import LocalRule
from fedbcgd.core.messages import Allocator, Broadcast, StateUpdate, Task, Upload
from fedbcgd.core.objective import Objective
from fedbcgd.core.onednn import avoid_faulty_kernel
from fedbcgd.core.own_training import OwnTraining, Train, Trained
from fedbcgd.core.stack import Stack, StackMemory
from fedbcgd.core.vector import FlatModel, Layout
from fedbcgd.core.work import GradientMemory, Progress, Work
from fedbcgd.data.sources import Source
from fedbcgd.rng import stream, torch_seed

_NO_VALUES: Mapping[str, Any] = MappingProxyType({})


class Client:
    """Does the work of any client: one module and a few vectors serve all clients of a process in turn.

    Attributes:
        model: the module, with its parameters as views of one vector.
        seconds: how long the parts of the last `fit` took, by name.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        layout: Layout,
        module: nn.Module,
        objective: Objective,
        seed: int,
        train: Train | None = None,
    ):
        """Take over a module.

        Args:
            algorithm: how to train and what to send.
            layout: where each parameter lies in the vector.
            module: the model; its parameters become views of the vector, so pass a copy.
            objective: what is minimised.
            seed: the seed of the run.
            train: a user's own training function; None: the local rule's steps.

        Raises:
            UserError: the algorithm cannot train this model, or cannot be combined with the user's training function.
        """
        algorithm.check(module)
        avoid_faulty_kernel(module)
        self.algorithm = algorithm
        self.layout = layout
        self.objective = objective
        self.seed = seed
        self.model = FlatModel(module, layout)
        self._own = None if train is None else OwnTraining(train, algorithm, self.model, objective, seed)
        self.seconds: dict[str, float] = {}
        self._device = self.model.vector.device
        self._gradients = GradientMemory(self.model.vector[: layout.dim], layout)
        self._stack_memory: StackMemory | None = None
        # A submodule that the user put in evaluation mode (a frozen BatchNorm) stays in it. A model that is in evaluation
        # mode as a whole is trained as a whole.
        self._evaluating = [m for m in module.modules() if not m.training] if module.training else []

    def fit(
        self,
        broadcast: Broadcast,
        task: Task,
        data: Any,
        state: Mapping[str, Tensor],
        allocate: Allocator | None = None,
        values: Mapping[str, Any] = _NO_VALUES,
    ) -> tuple[Upload, StateUpdate]:
        """Train one client from the broadcast.

        Args:
            broadcast: the model, and the server's controls.
            task: which client, and which block it uploads.
            data: the client's examples, as a Source; for a user's own training function, whatever that function takes.
            state: vectors that the client has kept from earlier rounds; those that are missing are zero.
            allocate: returns memory to write the upload into; new memory by default.
            values: settings that were sent with the task (Flower's `train_config`), for a user's own training function.

        Returns:
            The upload, and the client's new state, which is valid only if the server accepts the upload. Otherwise the old
            state remains.
        """
        rule, key = self.algorithm.local, (task.round, task.client)
        start = time.perf_counter()
        self.model.load(broadcast.x)
        work = Work(
            rule,
            self.model,
            self.objective,
            broadcast.x,
            broadcast.controls,
            {name: self._state_vector(state, name) for name in self.algorithm.state_names},
            data,
            task.round,
            self.layout.slices(task.block),
            stream(self.seed, "batches", *key),
            partial(self._seed_draw, key),
            self._gradients,
            self._allocator_for_changes(allocate),
        )
        self._training_mode()
        if self._own is None:
            with _seeded(torch_seed(self.seed, "model", *key), self._device):  # for dropout and the like
                rule.train(work)
            self.model.gather_buffers()
            trained = Trained(len(data), work.mean_loss)
        else:
            trained = self._own.run(work, task, data, values)
        trained_at = time.perf_counter()
        result = self._result(work, broadcast, task, trained, allocate)
        self.seconds = {"local": trained_at - start, "codec": time.perf_counter() - trained_at}
        return result

    def fit_batch(
        self,
        broadcast: Broadcast,
        tasks: Sequence[Task],
        data: Sequence[Any],
        states: Sequence[Mapping[str, Tensor]],
        allocate: Sequence[Allocator | None],
    ) -> list[tuple[Upload, StateUpdate]]:
        """Train several clients at once that have equally many examples; see `stack.py`.

        Args:
            broadcast: as for `fit`.
            tasks: one for each client.
            data: the examples of each client.
            states: the vectors that each client has kept.
            allocate: for each client, what returns memory for its upload; None: new memory.

        Returns:
            For each client what `fit` returns.
        """
        rule, start = self.algorithm.local, time.perf_counter()
        if self._stack_memory is None or len(self._stack_memory.y) != len(tasks):
            self._stack_memory = StackMemory(self.layout, len(tasks), self._device)
        stack = Stack(
            rule,
            self.layout,
            self.model.module,
            broadcast.x,
            broadcast.controls,
            {
                name: torch.stack([self._state_vector(state, name) for state in states])
                for name in self.algorithm.state_names
            },
            data,
            broadcast.round,
            [stream(self.seed, "batches", task.round, task.client) for task in tasks],
            self._stack_memory,
        )
        rule.train(stack)
        stack.sum_losses()
        trained_at = time.perf_counter()
        results = []
        for k, task in enumerate(tasks):
            client = stack.client(k, self.layout.slices(task.block), self._allocator_for_changes(allocate[k]))
            summary = Trained(stack.examples, client.mean_loss)
            results.append(self._result(client, broadcast, task, summary, allocate[k]))
        self.seconds = {"local": trained_at - start, "codec": time.perf_counter() - trained_at}
        return results

    def adapt(self, x: Tensor, round: int, client: int, data: Source, rule: LocalRule) -> None:
        """Move the module from x by the steps of another rule, for an evaluation: nothing is sent or kept.

        Args:
            x: the model.
            round: the round whose learning rate is used.
            client: whose draws are used, which are not those of its training.
            data: the client's examples.
            rule: makes the steps; it must need no controls.
        """
        key = (round, client)
        self.model.load(x)
        rng, draw = stream(self.seed, "personal", *key), partial(self._seed_draw, key)
        work = Work(rule, self.model, self.objective, x, {}, {}, data, round, (), rng, draw, self._gradients, None)
        self._training_mode()
        with _seeded(torch_seed(self.seed, "personal", *key), self._device):
            rule.train(work)

    def _seed_draw(self, key: tuple[int, int], draw: int) -> np.random.Generator:
        """Seed torch for a draw of this round and client, and return the generator for augmentation."""
        _seed(torch_seed(self.seed, "draw", *key, draw), self._device)
        return stream(self.seed, "augmentation", *key, draw)

    def _state_vector(self, state: Mapping[str, Tensor], name: str) -> Tensor:
        if name in state:
            return state[name].to(self._device)
        return torch.zeros_like(self.model.vector[: self.layout.dim])

    def _allocator_for_changes(self, allocate: Allocator | None) -> Allocator | None:
        """Return the allocator if the codec sends changes as they are: they are then computed in the upload's memory."""
        return allocate if self.algorithm.codec.in_place else None

    def _training_mode(self) -> None:
        self.model.module.train()
        for part in self._evaluating:
            part.training = False

    def _result(
        self, work: Progress, broadcast: Broadcast, task: Task, trained: Trained, allocate: Allocator | None
    ) -> tuple[Upload, StateUpdate]:
        """Encode what changed; return the upload and the state update."""
        new_memory = partial(torch.empty, dtype=torch.uint8, device=self._device)
        buffers = self.model.vector[self.layout.buffer_slice]
        payload, values = encode(
            self.algorithm, self.layout, self.seed, work, broadcast, task, buffers, allocate or new_memory
        )
        upload = Upload(
            task.round,
            task.client,
            task.block,
            payload,
            trained.examples,
            work.steps,
            work.evaluations,
            trained.loss,
            trained.metrics,
        )
        return upload, StateUpdate(task.client, broadcast.epoch, values)


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's own generators, and restore their states afterwards."""
    cpu_state = torch.default_generator.get_state()
    gpu_state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        _seed(seed, device)
        yield
    finally:
        torch.default_generator.set_state(cpu_state)
        if gpu_state is not None:
            torch.cuda.set_rng_state(gpu_state, device)


def _seed(seed: int, device: torch.device) -> None:
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
