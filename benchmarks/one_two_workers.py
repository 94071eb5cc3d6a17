"""Rounds on one worker, on two, and in one process, and where the time went.

LeNet-5 on the embedded images: 100 clients with 100 images each, 10 a round, batch 10, one epoch, an evaluation of 2,000
images every 5 rounds. The ways take turns, a few rounds at a time, on federations that stay alive.
"""

import statistics

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


def measure(console: Console, repeats: int = 7) -> list[dict]:
    console.print(f"{ROUNDS} rounds and an evaluation, {repeats} turns", highlight=False)
    train, test = fashion_mnist()
    clients = split(train, dirichlet(train.labels.numpy(), 100, 0.6))
    torch.manual_seed(0)
    model = LeNet5(10, (1, 28, 28))
    loops = {}
    for name, workers in (("one process", 0), ("1 worker", 1), ("2 workers", 2)):
        algorithm = make_algorithm("fedbcgd", batch_size=10, local_epochs=1, lr_decay=1.0)
        job = make_job(model, clients, algorithm, test, 0)
        server = make_server(job, 10, Stop(rounds=1))
        store = StateStore(algorithm.state_names, job.layout.dim, job.layout.dtype)
        loops[name] = Loop(server, make_backend(job, store, 10, Placement(workers=workers)), Stop(), every=ROUNDS)

    def go(loop: Loop):
        def way() -> None:
            loop.stop = Stop(rounds=loop.server.round + ROUNDS)
            loop.run()

        return way

    try:
        for loop in loops.values():
            go(loop)()  # starts the workers and touches the memory
            loop.backend.timings.clear()
        seconds = interleaved({name: go(loop) for name, loop in loops.items()}, repeats)
    finally:
        for loop in loops.values():
            loop.backend.close()
    fast = ratios(seconds, "1 worker")
    rows = []
    for name, loop in loops.items():
        turns = repeats + 1
        row = {"way": name, "s a turn": statistics.median(seconds[name]), "times 1 worker": fast[name]}
        row |= {
            part: loop.backend.timings.get(part, 0.0) / turns
            for part in ("local", "codec", "sums", "evaluation", "waiting")
        }
        rows.append(row)
    return rows
