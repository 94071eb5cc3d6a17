"""Rounds on two Ray actors, compared with two worker processes on the same cores.

LeNet-5 on the embedded images: 100 clients with 100 images each, 10 a round, batch 10, one epoch; FedBCGD, and FedBCGD+
with its client state. The ways take turns, a few rounds at a time, on federations that stay alive. No evaluation.
"""

import statistics
from importlib.util import find_spec

import torch
from interleave import interleaved, ratios
from rich.console import Console

from fedbcgd import make_algorithm
from fedbcgd.backends.placement import Placement
from fedbcgd.backends.registry import make_backend
from fedbcgd.data import dirichlet, fashion_mnist, split
from fedbcgd.engine.assemble import make_job, make_server
from fedbcgd.engine.client_state import StateStore
from fedbcgd.engine.loop import Loop, Stop
from fedbcgd.models import LeNet5

ROUNDS = 5
PARTS = ("local", "codec", "sums", "waiting")


def measure(console: Console, repeats: int = 7) -> list[dict]:
    if find_spec("ray") is None:
        console.print("ray: skipped, the extra is not installed (pip install 'fedbcgd[ray]')", highlight=False)
        return []
    console.print(f"{ROUNDS} rounds on two cores, {repeats} turns", highlight=False)
    return [row for name in ("fedbcgd", "fedbcgd+") for row in _one(name, repeats)]


def _one(name: str, repeats: int) -> list[dict]:
    train, _ = fashion_mnist()
    clients = split(train, dirichlet(train.labels.numpy(), 100, 0.6))
    torch.manual_seed(0)
    model = LeNet5(10, (1, 28, 28))
    loops = {}
    try:
        for backend in ("workers", "ray"):
            algorithm = make_algorithm(name, batch_size=10, local_epochs=1, lr=0.02, lr_decay=1.0)
            job = make_job(model, clients, algorithm, None, 0)
            server = make_server(job, 10, Stop(rounds=1))
            store = StateStore(algorithm.state_names, job.layout.dim, job.layout.dtype)
            loops[backend] = Loop(server, make_backend(job, store, 10, Placement(backend, workers=2)), Stop())

        def go(loop: Loop):
            def way() -> None:
                loop.stop = Stop(rounds=loop.server.round + ROUNDS)
                loop.run()

            return way

        for loop in loops.values():
            go(loop)()  # starts the actors and touches the memory
            loop.backend.timings.clear()
        seconds = interleaved({way: go(loop) for way, loop in loops.items()}, repeats)
        return [
            {
                "way": f"{name}, {'2 actors of Ray' if way == 'ray' else '2 workers'}",
                "s a round": statistics.median(seconds[way]) / ROUNDS,
                "times the workers": 1 / ratios(seconds, "workers")[way],
            }
            | {part: loop.backend.timings.get(part, 0.0) / (repeats + 1) / ROUNDS for part in PARTS}
            for way, loop in loops.items()
        ]
    finally:
        for loop in loops.values():
            loop.backend.close()
