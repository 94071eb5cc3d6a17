"""Memory, the cost of a checkpoint, and start-up time."""

import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import flower_peer
import pfl_peer
import psutil
from machinery import Federation, one_round
from peers import federation
from rich.console import Console
from workloads import WORKLOADS

from fedbcgd.engine.checkpoint import Checkpoints

CASES = {  # name: cohort, clients, d
    "10 of 100 clients, d = 1,000,000": (10, 100, 1_000_000),
    "100 of 100 clients, d = 1,000,000": (100, 100, 1_000_000),
    "10 of 100,000 clients, d = 1,000,000": (10, 100_000, 1_000_000),
    "10 of 100 clients, d = 86,000,000 (ViT-Base)": (10, 100, 86_000_000),
}


def memory(console: Console, repeats: int = 1) -> list[dict]:
    """Return the peak memory of server and workers above that of a federation of d = 1,000, in fresh processes."""
    console.print("memory high-water marks", highlight=False)
    rows, least = [], _high(10, 100, 1_000)
    for name, (cohort, clients, d) in CASES.items():
        server, worker = (high - low for high, low in zip(_high(cohort, clients, d), least, strict=True))
        vector = d * 4 / 2**20
        row = {"case": name, "server, MiB": server, "in d-vectors": server / vector}
        rows.append(row | {"a worker, MiB": worker, "in d-vectors ": worker / vector})
    return rows


def _high(cohort: int, clients: int, d: int) -> tuple[float, float]:
    command = [sys.executable, __file__, str(cohort), str(clients), str(d)]
    server, worker = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return float(server), float(worker)


def _one_case(cohort: int, clients: int, d: int) -> None:
    with Federation(cohort, clients, d) as loop:
        for _ in range(3):
            one_round(loop)
        worker = max(_peak(pid) for pid in loop.backend.pids())  # type: ignore[attr-defined]
        shared = _shared(os.getpid())
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - shared, worker)


def _peak(pid: int) -> float:
    """Return the peak memory of a process in MiB, without shared memory."""
    text = Path(f"/proc/{pid}/status").read_text()
    high = int(re.search(r"VmHWM:\s+(\d+)", text)[1]) / 1024  # type: ignore[index]
    return high - _shared(pid)


def _shared(pid: int) -> float:
    return int(re.search(r"RssShmem:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) / 1024  # type: ignore[index]


def resident(console: Console, repeats: int = 1) -> list[dict]:
    """Return the memory of all processes after some rounds of each workload, shared pages divided among them (PSS)."""
    console.print("resident memory of all processes", highlight=False)
    rows = []
    for name in ("logistic", "lenet5", "cnn"):
        for way in (
            "fedbcgd",
            *(["pfl"] if pfl_peer.installed() else []),
            *(["flower"] if flower_peer.installed() else []),
        ):
            out = subprocess.run(
                [sys.executable, __file__, "resident", name, way], capture_output=True, text=True, check=True
            )
            rows.append({"workload": name, "way": way} | json.loads(out.stdout.splitlines()[-1]))
    return rows


def _resident(name: str, way: str) -> dict[str, float | str]:
    """Train in this process and its children, and return their memory in MiB."""
    with ExitStack() as stack:
        if way == "fedbcgd":
            turn = stack.enter_context(federation(WORKLOADS[name]))
            workers = turn.loop.backend.pids()  # type: ignore[attr-defined]
        else:
            peer = flower_peer.Flower(name, 4) if way == "flower" else pfl_peer.Pfl(name)
            stack.callback(peer.close)
            turn, workers = peer.turn, []
        for _ in range(2):
            turn()
        own = [os.getpid()] if way == "fedbcgd" else []
        pids = own + [process.pid for process in psutil.Process().children(recursive=True)]
        pss = {pid: _mapped(pid, "Pss") for pid in pids}
        each = {
            "processes": len(pids),
            "all, MiB": sum(pss.values()),
            "shared in each": sum(_mapped(pid, "Rss") for pid in pids),
            "a worker": max(pss[pid] for pid in workers) if workers else "–",
            "of it its own": max(_mapped(pid, "Private_Dirty") for pid in workers) if workers else "–",
            "main process": pss[os.getpid()] if own else "–",
        }
    return each


def _mapped(pid: int, kind: str) -> float:
    """Return the memory of a process of one kind in MiB; 0 where it has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    found = re.search(rf"^{kind}:\s+(\d+)", text, re.MULTILINE)
    return int(found[1]) / 1024 if found else 0.0


def checkpoints(console: Console, repeats: int = 7) -> list[dict]:
    """Return how long a round waits for a checkpoint, and how long writing it and a round take."""
    console.print(f"checkpoints, {repeats} turns", highlight=False)
    rows = []
    for name, d in (("fedbcgd", 1_000_000), ("fedbcgd+", 1_000_000), ("fedbcgd", 11_173_962)):
        with tempfile.TemporaryDirectory() as folder, Federation(10, 100, d, 5, name, Path(folder) / "c.bin") as loop:
            points, waits, writes, rounds = Checkpoints(Path(folder), None), [], [], []
            for k in range(repeats + 1):
                start = time.perf_counter()
                one_round(loop)
                begun = time.perf_counter()
                points.begin(loop.server, loop.backend.store, {})
                waited = time.perf_counter()
                points.finish(loop.backend.store)
                if k:
                    rounds.append(begun - start)
                    waits.append(waited - begun)
                    writes.append(time.perf_counter() - begun)
        times = {"round, ms": rounds, "waited for, ms": waits, "written in, ms": writes}
        medians = {label: 1e3 * statistics.median(seconds) for label, seconds in times.items()}
        rows.append({"case": f"{name}, d = {d:,}", **medians})
    return rows


def start_up(console: Console, repeats: int = 5) -> list[dict]:
    """Return the seconds of commands, of a run's first round (one step of one client), and of the whole run."""
    console.print(f"start-up, {repeats} turns", highlight=False)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        toml = Path(folder) / "run.toml"
        toml.write_text("[algorithm]\nlocal_steps = 1\n[run]\nrounds = 1\ncohort = 1\n")
        commands = {
            "python -c pass": ["-c", "pass"],
            "import torch": ["-c", "import torch"],
            "fedbcgd --help": ["-m", "fedbcgd", "--help"],
        }
        for name, command in commands.items():
            rows.append({"command": name, "s": statistics.median(_first(command)[0] for _ in range(repeats))})
        run = ["-m", "fedbcgd", "run", str(toml), "--quiet", "--out"]
        times = [_first([*run, f"{folder}/{k}"], Path(folder) / str(k) / "traffic.jsonl") for k in range(repeats)]
        for name, taken in zip(
            ("first step and upload", "evaluation, all files"), zip(*times, strict=True), strict=True
        ):
            rows.append({"command": f"fedbcgd run: {name}", "s": statistics.median(taken)})
    return rows


def _first(command: list[str], trace: Path | None = None) -> tuple[float, float]:
    """Return the seconds until the file `trace` has content, or the process ends, and until it ends."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL)
    while process.poll() is None and (trace is None or not trace.exists() or not trace.stat().st_size):
        time.sleep(0.005)
    seen = time.perf_counter() - start
    if process.wait():
        raise subprocess.CalledProcessError(process.returncode, command)
    return seen, time.perf_counter() - start


if __name__ == "__main__":
    if sys.argv[1] == "resident":
        print(json.dumps(_resident(*sys.argv[2:])))
    else:
        _one_case(*map(int, sys.argv[1:]))
