"""A federation whose clients do almost no work: its time is the overhead of the machinery.

One step of a loss that touches each parameter once; two examples a client.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fedbcgd import make_algorithm
from fedbcgd.backends.placement import Placement
from fedbcgd.backends.registry import make_backend
from fedbcgd.data.sources import Tensors, split
from fedbcgd.engine.assemble import make_job, make_server
from fedbcgd.engine.client_state import StateStore
from fedbcgd.engine.loop import Loop, Stop


class Vector(nn.Module):
    def __init__(self, d: int):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(d))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return torch.dot(model.w, model.w)


class Federation:
    """A context manager that yields the loop of the federation."""

    def __init__(self, cohort: int, clients: int, d: int, N: int = 5, name: str = "fedbcgd", path: Path | None = None):
        rows = np.arange(clients * 2) % 1000
        parts = split(Tensors((torch.zeros(1000, 1), torch.zeros(1000))), np.split(rows, clients))
        algorithm = make_algorithm(name, blocks=N, divider="even", shared="none", local_steps=1, batch_size=2)
        job = make_job(Vector(d), parts, algorithm, None, 0, loss=loss)
        server = make_server(job, cohort, Stop(rounds=1))
        self._store = StateStore(algorithm.state_names, job.layout.dim, job.layout.dtype, path)
        self._backend = make_backend(job, self._store, cohort, Placement())
        self._loop = Loop(server, self._backend, Stop())

    def __enter__(self) -> Loop:
        return self._loop

    def __exit__(self, *_: object) -> None:
        self._backend.close()
        self._store.close()


def one_round(loop: Loop) -> None:
    loop.stop = Stop(rounds=loop.server.round + 1)
    loop.run()
