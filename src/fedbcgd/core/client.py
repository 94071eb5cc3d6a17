"""A client's side of a round, without I/O: train, encode, and say what its state becomes."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from fedbcgd.core.algorithm import RESIDUAL, Algorithm
from fedbcgd.core.codec import room
from fedbcgd.core.messages import BUFFERS, Allocator, Broadcast, StateUpdate, Task, Upload
from fedbcgd.core.objective import Objective
from fedbcgd.core.onednn import keep_within_bounds
from fedbcgd.core.stack import Rows, Stack
from fedbcgd.core.vector import FlatModel, Layout
from fedbcgd.core.work import Gradients, Progress, Work
from fedbcgd.data.sources import Source
from fedbcgd.rng import stream, torch_seed

_UNUSED = np.random.default_rng(0)  # for codecs that draw nothing: a stream costs as much as a small upload


class Client:
    """Does the work of any client: one module and a few vectors serve all clients of a process in turn."""

    def __init__(self, algorithm: Algorithm, layout: Layout, module: nn.Module, objective: Objective, seed: int):
        algorithm.check(module)
        keep_within_bounds(module)
        self.algorithm = algorithm
        self.layout = layout
        self.objective = objective
        self.seed = seed
        self.model = FlatModel(module, layout)
        self.seconds: dict[str, float] = {}  # where the time of the last `fit` went
        self._gradients = Gradients(self.model.vector[: layout.dim], layout)
        self._rows: Rows | None = None  # for clients computed together
        # Parts that a user keeps in evaluation mode (a frozen BatchNorm) stay so, unless the whole model came that way.
        self._evaluating = [m for m in module.modules() if not m.training] if module.training else []

    def fit(
        self,
        broadcast: Broadcast,
        task: Task,
        data: Source,
        state: Mapping[str, Tensor],
        allocate: Allocator | None = None,
    ) -> tuple[Upload, StateUpdate]:
        """Train from the broadcast; `state` is what this client has kept (nothing at first).

        The second value is the state once the server has accepted the upload; if it does not, the old state stands.
        `lend` gives memory that the upload may be written into at once.
        """
        rule, at = self.algorithm.local, (task.round, task.client)
        start = time.perf_counter()
        slices = self.layout.slices(task.block)
        self.model.load(broadcast.x)
        device = self.model.vector.device
        mine = {n: state[n].to(device) if n in state else self._zeros() for n in self.algorithm.state_names}
        rng = stream(self.seed, "batches", *at)

        def draws(k: int) -> np.random.Generator:
            _seed(torch_seed(self.seed, "draw", *at, k), self.model.vector.device)
            return stream(self.seed, "augmentation", *at, k)

        work = Work(
            rule,
            self.model,
            self.objective,
            broadcast.x,
            broadcast.controls,
            mine,
            data,
            task.round,
            slices,
            rng,
            draws,
            self._gradients,
            self._allocator(allocate),
        )
        self._training_mode()
        with _seeded(torch_seed(self.seed, "model", *at), self.model.vector.device):  # dropout and the like
            rule.train(work)
        self.model.gather_buffers()
        trained = time.perf_counter()
        made = self._made(work, broadcast, task, len(data), allocate)
        self.seconds = {"local": trained - start, "codec": time.perf_counter() - trained}
        return made

    def fit_together(
        self,
        broadcast: Broadcast,
        tasks: Sequence[Task],
        data: Sequence[Source],
        states: Sequence[Mapping[str, Tensor]],
        allocate: Sequence[Allocator | None],
    ) -> list[tuple[Upload, StateUpdate]]:
        """`fit` for several clients of equal size at once, with a model that offers it."""
        rule, start = self.algorithm.local, time.perf_counter()
        if self._rows is None or len(self._rows.y) != len(tasks):
            self._rows = Rows(self.layout, len(tasks), self.model.vector.device)
        mine = {
            n: torch.stack([state[n].to(broadcast.x.device) if n in state else self._zeros() for state in states])
            for n in self.algorithm.state_names
        }
        rngs = [stream(self.seed, "batches", task.round, task.client) for task in tasks]
        x, controls, round = broadcast.x, broadcast.controls, broadcast.round
        stack = Stack(rule, self.layout, self.model.module, x, controls, mine, data, round, rngs, self._rows)
        rule.train(stack)
        stack.sum_up()
        trained = time.perf_counter()
        made = []
        for k, task in enumerate(tasks):
            one = stack.client(k, self.layout.slices(task.block), self._allocator(allocate[k]))
            made.append(self._made(one, broadcast, task, stack.examples, allocate[k]))
        self.seconds = {"local": trained - start, "codec": time.perf_counter() - trained}
        return made

    def _allocator(self, allocate: Allocator | None) -> Allocator | None:
        """Where the changes themselves are what is sent, they are made where they will be."""
        return allocate if self.algorithm.codec.in_place else None

    def _made(
        self, work: Progress, broadcast: Broadcast, task: Task, examples: int, allocate: Allocator | None
    ) -> tuple[Upload, StateUpdate]:
        payload, values = self._encode(work, broadcast, task, allocate)
        upload = Upload(
            task.round, task.client, task.block, payload, examples, work.steps, work.evaluations, work.mean_loss
        )
        return upload, StateUpdate(task.client, broadcast.epoch, values)

    def _training_mode(self) -> None:
        self.model.module.train()
        for part in self._evaluating:
            part.training = False

    def _zeros(self) -> Tensor:
        return torch.zeros_like(self.model.vector[: self.layout.dim])

    def _encode(
        self, work: Progress, broadcast: Broadcast, task: Task, allocate: Allocator | None
    ) -> tuple[dict[str, list[Tensor]], dict[str, list[tuple[slice, Tensor]]]]:
        """The payload, and the new state on the uploaded coordinates: what the server will add is added here too."""
        rule, codec, dtype = self.algorithm.local, self.algorithm.codec, self.layout.dtype
        rng = _UNUSED if codec.in_place else stream(self.seed, "codec", task.round, task.client)
        payload: dict[str, list[Tensor]] = {channel: [] for channel in rule.channels}
        parts: list[tuple[slice, dict[str, Tensor]]] = []
        residual: list[tuple[slice, Tensor]] = []
        for s in work.slices:
            sent = {}
            for channel, change in rule.changes(work, s).items():
                # Error feedback: what an earlier upload left out is added, what this one leaves out is kept.
                owed = change.add_(work.mine[RESIDUAL][s]).clone() if codec.residual and channel == "dx" else None
                data = codec.encode(change, rng, allocate)
                payload[channel].append(data)
                if self.algorithm.state_names:
                    sent[channel] = codec.decode(data, s.stop - s.start, dtype)
                if owed is not None:
                    residual.append((s, owed.sub_(sent[channel])))
            if rule.controls:
                known = {n: c[s] for n, c in broadcast.controls.items()}
                parts.append((s, rule.complete(sent, known, work.eta, work.steps)))
        values = rule.keep(work, parts)
        if codec.residual:
            values[RESIDUAL] = residual
        if self.layout.size > self.layout.dim:
            buffers = self.model.vector[self.layout.buffer_slice].view(torch.uint8)
            payload[BUFFERS] = [room(len(buffers), allocate, buffers.device).copy_(buffers)]
        return payload, values


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """torch's own generators seeded within, and as they were afterwards."""
    before = torch.default_generator.get_state()
    there = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        _seed(seed, device)
        yield
    finally:
        torch.default_generator.set_state(before)
        if there is not None:
            torch.cuda.set_rng_state(there, device)


def _seed(seed: int, device: torch.device) -> None:
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
