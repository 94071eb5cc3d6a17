"""Clients trained a second: fedbcgd beside raw PyTorch with the same tricks, and beside the usual loop."""

import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from interleave import interleaved, ratios
from raw import Pair, naive
from rich.console import Console
from workloads import DECAY, LR, WORKLOADS, Workload

from fedbcgd import make_algorithm
from fedbcgd.carriers.where import Where
from fedbcgd.loop import Loop, Stop
from fedbcgd.simulation import make_carrier, make_job, make_server
from fedbcgd.state import StateStore


@contextmanager
def federation(
    workload: Workload, algorithm: str = "fedavg", together: int | None = None, **options
) -> Iterator[Callable[[], None]]:
    """A call that runs the rounds of one turn, on a federation that stays alive."""
    common = {"lr": LR, "lr_decay": 1.0, "weight_decay": DECAY, "batch_size": workload.batch, "local_epochs": 1}
    made = make_algorithm(algorithm, **(common | options))
    job = make_job(workload.module(), workload.sources(), made, None, 0, together=together)
    server = make_server(job, workload.cohort, Stop(rounds=1))
    with ExitStack() as stack:
        store = StateStore(made.state_names, job.layout.dim, job.layout.dtype)
        stack.callback(store.close)
        carrier = make_carrier(job, store, workload.cohort, Where())
        stack.callback(carrier.close)
        loop = Loop(server, carrier, Stop())

        def turn() -> None:
            loop.stop = Stop(rounds=server.round + workload.rounds)
            loop.run()

        turn()  # workers start, memory is touched
        turn.loop = loop  # type: ignore[attr-defined]
        yield turn


def measure(console: Console, repeats: int = 5, names: tuple[str, ...] = tuple(WORKLOADS)) -> list[dict]:
    rows = []
    for name in names:
        w = WORKLOADS[name]
        console.print(f"{name}: {w.cohort * w.rounds} clients a turn, {repeats} turns", highlight=False)
        clients = range(w.cohort * w.rounds)
        few = range(max(2, len(clients) // (20 if name == "logistic" else 2)))  # the slow way does fewer, and is scaled
        with ExitStack() as stack:
            pair = Pair(name)
            stack.callback(pair.close)
            slow = naive(w)
            ways = {
                "naive, DataLoader": lambda slow=slow, few=few: slow(few),
                "raw, two processes": lambda pair=pair, clients=clients: pair.turn(clients),
                "fedavg": stack.enter_context(federation(w)),
                "fedbcgd": stack.enter_context(federation(w, "fedbcgd")),
            }
            seconds = interleaved(ways, repeats)
        seconds["naive, DataLoader"] = [s * len(clients) / len(few) for s in seconds["naive, DataLoader"]]
        of_raw, of_naive = ratios(seconds, "raw, two processes"), ratios(seconds, "naive, DataLoader")
        rows += [
            {
                "workload": name,
                "way": way,
                "clients a second": len(clients) / statistics.median(times),
                "of raw": of_raw[way],
                "times naive": of_naive[way],
            }
            for way, times in seconds.items()
        ]
    return rows
