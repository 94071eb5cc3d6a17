"""Clients trained a second, compared in turns with raw PyTorch with the same tricks, the usual loop, the simulations of
Flower and pfl-research, and the cores' peak; rounds of each algorithm compared with FedAvg's."""

import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache

import flower_peer
import pfl_peer
import torch
import torch.nn.functional as F
from interleave import MORE, interleaved, ratios
from raw import Children
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode
from workloads import DECAY, LR, WORKLOADS, Workload

from fedbcgd import make_algorithm
from fedbcgd.backends.placement import Placement
from fedbcgd.backends.registry import make_backend
from fedbcgd.backends.workers.processes import cores
from fedbcgd.core.objective import Precision
from fedbcgd.engine.assemble import make_job, make_server
from fedbcgd.engine.client_state import StateStore
from fedbcgd.engine.loop import Loop, Stop
from fedbcgd.engine.precision import native_bf16
from fedbcgd.engine.threads import threads

NAIVE, RAW, OURS = "naive, DataLoader", "raw, two processes", "fedbcgd: fedavg"
BATCHED, BF16 = "fedbcgd: fedavg, batch_clients", "fedbcgd: fedavg, bf16"
FLOWER, PFL, PFL_BF16 = "flower's simulation, two actors", "pfl, two processes", "pfl, two processes, bf16"
PEERS = (FLOWER, PFL)
COMPARED = ("logistic", "lenet5", "cnn")  # with Flower and pfl, which are slow to start
ENOUGH = 45.0  # seconds for a workload: a fast machine makes more turns


@contextmanager
def federation(
    workload: Workload,
    algorithm: str = "fedavg",
    batch_clients: int | None = None,
    where: Placement | None = None,
    precision: Precision = "fp32",
    **options,
) -> Iterator[Callable[[], None]]:
    """Yield a function that runs the rounds of one turn on a federation that stays alive."""
    common = {"lr": LR, "lr_decay": 1.0, "weight_decay": DECAY, "batch_size": workload.batch, "local_epochs": 1}
    configured = make_algorithm(algorithm, **(common | options))
    data = workload.sources()
    job = make_job(workload.module(), data, configured, None, 0, batch_clients=batch_clients, precision=precision)
    server = make_server(job, workload.cohort, Stop(rounds=1))
    with ExitStack() as stack:
        store = StateStore(configured.state_names, job.layout.dim, job.layout.dtype)
        stack.callback(store.close)
        backend = make_backend(job, store, workload.cohort, where or Placement())
        stack.callback(backend.close)
        loop = Loop(server, backend, Stop())

        def turn() -> None:
            loop.stop = Stop(rounds=server.round + workload.rounds)
            loop.run()

        turn()  # starts the workers and touches the memory
        turn.loop = loop  # type: ignore[attr-defined]
        yield turn


def work_of(workload: Workload) -> float:
    """Return the floating-point operations of a client: forward and backward of its images."""
    module, (x, y) = workload.module(), workload.floats()
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(module(x[: workload.batch]), y[: workload.batch]).backward()
    return counter.get_total_flops() * workload.images / workload.batch


@cache
def matrices() -> list[torch.Tensor]:
    return [torch.randn(2048, 2048) for _ in range(3)]


def multiply() -> None:
    """Multiply matrices on all cores, to measure the peak."""
    a, b, out = matrices()
    with threads(cores()):
        for _ in range(4):
            torch.mm(a, b, out=out)


def measure(console: Console, repeats: int = 5, names: tuple[str, ...] = tuple(WORKLOADS)) -> list[dict]:
    rows = []
    peers = {FLOWER: flower_peer.installed(), PFL: pfl_peer.installed()}
    for peer, there in peers.items():
        if not there:
            console.print(f"without {peer}: pip install 'fedbcgd[bench]'", highlight=False)
    bf16 = native_bf16(torch.device("cpu"))
    if not bf16:
        console.print("bf16: untested here, this CPU does not compute in bfloat16", highlight=False)
    for name in names:
        w = WORKLOADS[name]
        console.print(f"{name}: {w.cohort * w.rounds} clients a turn, {repeats} turns or more", highlight=False)
        clients = range(w.cohort * w.rounds)
        few = range(max(2, len(clients) // (10 if name == "logistic" else 2)))  # the slow ways do fewer, and are scaled
        share = {NAIVE: len(few) / len(clients)}
        with ExitStack() as stack:
            slow, raw = Children(name, "naive", 1), Children(name, "tricks", 2)
            stack.callback(slow.close)
            stack.callback(raw.close)
            ways = {
                NAIVE: lambda slow=slow, few=few: slow.turn(few),
                RAW: lambda raw=raw, clients=clients: raw.turn(clients),
                OURS: stack.enter_context(federation(w)),
                "fedbcgd: fedbcgd": stack.enter_context(federation(w, "fedbcgd")),
            }
            if name == "logistic":
                ways[BATCHED] = stack.enter_context(federation(w, batch_clients=w.cohort // 2))
                one_process = federation(w, batch_clients=w.cohort, where=Placement(workers=0))
                ways["fedbcgd: the same, one process"] = stack.enter_context(one_process)
            if bf16:
                ways[BF16] = stack.enter_context(federation(w, precision="bf16"))
            if peers[FLOWER] and name in COMPARED:
                flower = flower_peer.Flower(name, MORE * repeats + 1)
                stack.callback(flower.close)
                ways[FLOWER] = flower.turn
                share[FLOWER] = 1 / w.rounds
            if peers[PFL] and name in COMPARED:
                for way, precision in ((PFL, "fp32"), *([(PFL_BF16, "bf16")] if bf16 else [])):
                    pfl = pfl_peer.Pfl(name, precision)
                    stack.callback(pfl.close)
                    ways[way] = pfl.turn
            seconds = interleaved(ways | {"sgemm": multiply}, repeats, ENOUGH)
        peak = [4 * 2 * 2048**3 / s for s in seconds.pop("sgemm")]
        seconds = {way: [s / share.get(way, 1) for s in times] for way, times in seconds.items()}
        medians = {way: statistics.median(times) for way, times in seconds.items()}
        best = min((way for way in PEERS if way in medians), key=medians.__getitem__, default=None)  # in fp32
        of_raw, of_naive = ratios(seconds, RAW), ratios(seconds, NAIVE)
        of_best = ratios(seconds, best) if best else {}
        work = work_of(w) * len(clients)
        rows += [
            {
                "workload": name,
                "way": way,
                "clients a second": len(clients) / medians[way],
                "of raw": of_raw[way],
                "times naive": of_naive[way],
                "of the best peer": of_best.get(way, "–"),
                "of peak": statistics.median(work / s / p for s, p in zip(times, peak, strict=True)),
            }
            for way, times in seconds.items()
        ]
    console.print(overview(rows), markup=False, highlight=False, soft_wrap=True)
    return rows


def overview(rows: list[dict]) -> str:
    """Return the table at the top of README.md."""
    columns = {
        "raw": RAW,
        "Flower": FLOWER,
        "pfl": PFL,
        "pfl, bf16": PFL_BF16,
        "ours": OURS,
        "ours, clients batched": BATCHED,
        "ours, bf16": BF16,
    }
    lines = [f"| workload | {' | '.join(columns)} | ours / best peer | ours / raw |", "|---" * (len(columns) + 3) + "|"]
    for name in dict.fromkeys(row["workload"] for row in rows):
        ways = {row["way"]: row for row in rows if row["workload"] == name}
        cells = [f"{ways[way]['clients a second']:.3g}" if way in ways else "–" for way in columns.values()]
        for base in ("of the best peer", "of raw"):
            found = [ways[way][base] for way in (OURS, BATCHED, BF16) if way in ways]
            cells.append("; ".join(value if isinstance(value, str) else f"{value:.2f}" for value in found))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


ROUNDS = {("lenet5", 1): 4, ("cnn", 1): 10, ("lenet5", 5): 2}  # cohort by workload and epochs


def measure_rounds(console: Console, repeats: int = 5) -> list[dict]:
    """Time a round of each algorithm and one of FedAvg with the same cohort; FedBCGD+ also with five epochs."""
    rows = []
    for name, epochs, others in (
        ("lenet5", 1, ("fedbcgd", "scaffold", "fedbcgd+")),
        ("cnn", 1, ("fedbcgd", "fedpaq", "topk", "fedbcgd+")),
        ("lenet5", 5, ("fedbcgd", "fedbcgd+")),
    ):
        w = replace(WORKLOADS[name], cohort=ROUNDS[name, epochs])
        console.print(f"rounds of {name}, E = {epochs}: {repeats} turns or more", highlight=False)
        with ExitStack() as stack:
            ways = {a: stack.enter_context(federation(w, a, local_epochs=epochs)) for a in ("fedavg", *others)}
            seconds = interleaved(ways, repeats, ENOUGH)
        speed = ratios(seconds, "fedavg")
        rows += [
            {
                "workload": f"{name}, E = {epochs}",
                "algorithm": a,
                "s a round": statistics.median(times),
                "times fedavg": 1 / speed[a],
            }
            for a, times in seconds.items()
        ]
    return rows
