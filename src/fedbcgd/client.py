"""A client's side of a round, without I/O: train, encode, and say what its state becomes."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fedbcgd.algorithm import Algorithm
from fedbcgd.data.sources import Source
from fedbcgd.flat import FlatModel, Layout
from fedbcgd.local.work import Work
from fedbcgd.messages import BUFFERS, Broadcast, StateUpdate, Task, Upload
from fedbcgd.objective import Objective
from fedbcgd.streams import stream, torch_seed


class Client:
    """Does the work of any client: one module and a few vectors serve all clients of a process in turn."""

    def __init__(self, algorithm: Algorithm, layout: Layout, module: nn.Module, objective: Objective, seed: int):
        self.algorithm = algorithm
        self.layout = layout
        self.objective = objective
        self.seed = seed
        self.model = FlatModel(module, layout)
        self.seconds: dict[str, float] = {}  # where the time of the last `fit` went
        self._gradient = torch.empty_like(self.model.vector[: layout.dim])
        # Parts that a user keeps in evaluation mode (a frozen BatchNorm) stay so, unless the whole model came that way.
        self._evaluating = [m for m in module.modules() if not m.training] if module.training else []

    def fit(
        self, broadcast: Broadcast, task: Task, data: Source, state: Mapping[str, Tensor]
    ) -> tuple[Upload, StateUpdate]:
        """Train from the broadcast; `state` is what this client has kept (nothing at first).

        The second value is the state once the server has accepted the upload; if it does not, the old state stands.
        """
        rule, at = self.algorithm.local, (task.round, task.client)
        start = time.perf_counter()
        slices = self.layout.slices(task.block)
        self.model.load(broadcast.x)
        mine = {n: state[n] if n in state else torch.zeros_like(c) for n, c in broadcast.controls.items()}
        rng = stream(self.seed, "batches", *at)
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
            self._gradient,
        )
        self._training_mode()
        with _seeded(torch_seed(self.seed, "model", *at), self.model.vector.device):  # dropout and the like
            rule.train(work)
        self.model.gather_buffers()
        trained = time.perf_counter()
        payload, values = self._encode(work, broadcast, mine, slices, task)
        self.seconds = {"local": trained - start, "codec": time.perf_counter() - trained}
        upload = Upload(
            task.round, task.client, task.block, payload, len(data), work.steps, work.evaluations, work.mean_loss
        )
        return upload, StateUpdate(task.client, broadcast.epoch, values)

    def _training_mode(self) -> None:
        self.model.module.train()
        for part in self._evaluating:
            part.training = False

    def _encode(
        self,
        work: Work,
        broadcast: Broadcast,
        mine: Mapping[str, Tensor],
        slices: tuple[slice, ...],
        task: Task,
    ) -> tuple[dict[str, list[Tensor]], dict[str, list[tuple[slice, Tensor]]]]:
        """The payload, and the new state on the uploaded coordinates: what the server will add is added here too."""
        rule, codec, dtype = self.algorithm.local, self.algorithm.codec, self.layout.dtype
        rng = stream(self.seed, "codec", task.round, task.client)
        payload: dict[str, list[Tensor]] = {channel: [] for channel in rule.channels}
        values: dict[str, list[tuple[slice, Tensor]]] = {name: [] for name in rule.controls}
        for s in slices:
            sent = {}
            for channel, change in rule.changes(work, s).items():
                data = codec.encode(change, rng)
                payload[channel].append(data)
                if rule.controls:
                    sent[channel] = codec.decode(data, s.stop - s.start, dtype)
            if rule.controls:
                known = {n: c[s] for n, c in broadcast.controls.items()}
                sent = rule.complete(sent, known, work.eta, work.steps)
                for name in rule.controls:
                    values[name].append((s, mine[name][s] + sent[f"d{name}"]))
        if self.layout.size > self.layout.dim:
            payload[BUFFERS] = [self.model.vector[self.layout.buffer_slice].clone().view(torch.uint8)]
        return payload, values


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """torch's own generators seeded within, and as they were afterwards."""
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng([device] if on_gpu else []):
        torch.default_generator.manual_seed(seed)
        if on_gpu:
            torch.cuda.manual_seed(seed)
        yield
