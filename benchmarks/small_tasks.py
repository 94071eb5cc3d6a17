"""Where the processor time of a small task goes: logistic regression without `batch_clients`, against raw PyTorch.

Processor time is less disturbed by other work on the machine than time is. Each figure is a median over interleaved turns.
"""

import mmap
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack

import torch
from peers import RAW, federation
from raw import Children, Tricks
from rich.console import Console
from workloads import DECAY, LR, WORKLOADS

from fedbcgd import make_algorithm
from fedbcgd.backends.workers.memory import RoundMemory
from fedbcgd.core.work import Work
from fedbcgd.engine.assemble import make_job, make_server
from fedbcgd.engine.loop import Stop
from fedbcgd.engine.threads import threads

WORKLOAD = WORKLOADS["logistic"]
Seconds = dict[str, list[float]]  # of a client, by turn


def measure(console: Console, repeats: int = 15) -> list[dict]:
    console.print(f"processor time of a client, {repeats} turns", highlight=False)
    rows = []
    for where, seconds in (("processes", _processes(repeats)), ("parts, one process", _parts(10 * repeats))):
        for part, of_turns in seconds.items():
            share = statistics.median(s / raw for s, raw in zip(of_turns, seconds[RAW], strict=True))
            rows.append({"in": where, "part": part, "µs": 1e6 * statistics.median(of_turns), "of raw": share})
    return rows


def _processes(repeats: int) -> Seconds:
    """Measure the whole of raw PyTorch's processes, of our workers and of the main process."""
    clients = range(WORKLOAD.cohort * WORKLOAD.rounds)
    seconds: Seconds = {RAW: [], "workers": [], "main process": []}
    with ExitStack() as stack:
        raw = Children("logistic", "tricks", 2)
        stack.callback(raw.close)
        turn = stack.enter_context(federation(WORKLOAD))
        workers = turn.loop.backend.pids()  # type: ignore[attr-defined]
        for k in range(repeats + 1):
            used = {
                RAW: _used_by(raw.pids(), lambda: raw.turn(clients)),
                "workers": 0.0,
                "main process": -time.process_time(),
            }
            used["workers"] = _used_by(workers, turn)
            used["main process"] += time.process_time()
            for part, total in used.items() if k else ():
                seconds[part].append(total / len(clients))
    return seconds


def _used_by(pids: list[int], work: Callable[[], None]) -> float:
    """Return the processor time that these processes use while `work` goes on."""
    before = sum(map(_processor_time, pids))
    work()
    return sum(map(_processor_time, pids)) - before


def _processor_time(pid: int) -> float:
    with open(f"/proc/{pid}/schedstat") as file:
        return int(file.read().split()[0]) / 1e9


def _parts(repeats: int) -> Seconds:
    """Measure what client and server do in a round, in this process."""
    w, raw = WORKLOAD, Tricks(WORKLOAD)
    algorithm = make_algorithm("fedavg", lr=LR, lr_decay=1.0, weight_decay=DECAY, batch_size=w.batch, local_epochs=1)
    job = make_job(w.module(), w.sources(), algorithm, None, 0)
    server = make_server(job, w.cohort, Stop(rounds=1))
    shared = mmap.mmap(-1, RoundMemory.size(algorithm, job.layout, w.cohort))
    memory = RoundMemory(shared, algorithm, job.layout)
    used: dict[str, float] = defaultdict(float)
    seconds: Seconds = defaultdict(list)

    def timed(part: str, work: Callable) -> Callable:
        def measured(*args: object, **options: object) -> object:
            start = time.thread_time()
            result = work(*args, **options)
            used[part] += time.thread_time() - start
            return result

        return measured

    descend, epoch = Work.descend, Work._epoch
    Work.descend, Work._epoch = timed("gradients and steps", descend), timed("orders and minibatches", epoch)  # type: ignore
    try:
        with threads(1), torch.enable_grad():
            for k in range(repeats + 1):
                used.clear()
                timed(RAW, lambda: [raw.client(client) for client in range(w.cohort)])()
                plan = timed("plan and commit", server.plan)()
                memory.publish(plan.broadcast)
                uploads = []
                for place, task in enumerate(plan.tasks):
                    slot = memory.slot(place)
                    results = timed("a client in all", job.fit_unit)(plan.broadcast, [task], [{}], [slot.allocate])
                    uploads.append(slot.put(results[0][0]))
                for stored in uploads:
                    upload = memory.get(stored)
                    timed("checks and sums", server.receive)(upload, upload.client)
                timed("plan and commit", server.commit)()
                for part, total in used.items() if k else ():
                    seconds[part].append(total / w.cohort)
    finally:
        Work.descend, Work._epoch = descend, epoch  # type: ignore[method-assign]
    return {RAW: seconds.pop(RAW), **seconds}


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for row in measure(Console()):
        print(*row.values(), sep="  ")
