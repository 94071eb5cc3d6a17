"""Where the time goes, part by part: one thread, one process.

A part that calls another includes its time. The package's functions are wrapped in clocks, so parts of a few microseconds
appear slightly too long.
"""

import functools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from peers import federation
from raw import Naive, Tricks
from rich.console import Console
from torch.profiler import ProfilerActivity, profile
from workloads import WORKLOADS

from fedbcgd.algorithms.codecs import QSGD, TopK, _fast_qsgd, _fast_topk, qsgd, topk
from fedbcgd.backends.placement import Placement
from fedbcgd.core.client import Client
from fedbcgd.core.server import Server
from fedbcgd.core.stack import Stack
from fedbcgd.core.work import Work
from fedbcgd.engine.client_state import SlotFile
from fedbcgd.engine.threads import threads
from fedbcgd.models import Logistic, logistic
from fedbcgd.rng import stream

os.environ.setdefault("KINETO_LOG_LEVEL", "5")
N = 11_173_962  # ResNet-18

Parts = dict[str, tuple[Any, str]]  # shown name → owner and attribute


def measure(console: Console) -> list[dict]:
    rows = []
    with threads(1):
        for part in (_logistic, _plus, _qsgd, _topk, _layers):
            rows += part(console)
    return rows


@contextmanager
def clocks(parts: Parts) -> Iterator[dict[str, float]]:
    """Measure the seconds in each part while the context lasts."""
    seconds = dict.fromkeys(parts, 0.0)

    def timed(name: str, call: Callable) -> Callable:
        @functools.wraps(call)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                seconds[name] += time.perf_counter() - start

        return wrapped

    with ExitStack() as stack:
        for name, (owner, attribute) in parts.items():
            original = vars(owner)[attribute]
            bare = original.__func__ if isinstance(original, staticmethod) else original
            wrapped = timed(name, bare)
            setattr(owner, attribute, staticmethod(wrapped) if isinstance(original, staticmethod) else wrapped)
            stack.callback(setattr, owner, attribute, original)
        yield seconds


def _rows(what: str, whole: float, seconds: dict[str, float], per: float, unit: str) -> list[dict]:
    parts = {"in all": whole} | seconds
    return [{"of": what, "part": name, unit: s / per, "share": s / whole} for name, s in parts.items()]


def _logistic(console: Console) -> list[dict]:
    """Time a round of ten clients trained in one batch, in one process, without messages to workers."""
    console.print("parts of a round of logistic regression", highlight=False)
    parts = {
        "plan": (Server, "plan"),
        "train and encode": (Client, "fit_batch"),
        "— orders and images": (Stack, "_epoch"),
        "— steps": (Logistic, "stacked_step"),
        "— — what is multiplied and softmax": (logistic, "_errors"),
        "— uploads": (Client, "_result"),
        "check and sum": (Server, "receive"),
        "commit": (Server, "commit"),
    }
    workload = replace(WORKLOADS["logistic"], rounds=100)
    with (
        federation(workload, batch_clients=workload.cohort, where=Placement(workers=0)) as turn,
        clocks(parts) as seconds,
    ):
        start = time.perf_counter()
        turn()
        whole = time.perf_counter() - start
    return _rows(
        "logistic, ms a round", whole * 1e3, {k: s * 1e3 for k, s in seconds.items()}, workload.rounds, "value"
    )


def _plus(console: Console) -> list[dict]:
    """Time rounds of the CNN: FedBCGD+ computes two gradients where FedAvg computes one, and what else it does."""
    rows = []
    for name in ("fedavg", "fedbcgd+"):
        console.print(f"parts of a round of the CNN, {name}", highlight=False)
        parts = {
            "gradients": (Work, "_parts"),
            "into one vector": (Work, "_flat"),
            "corrections of steps": (Work, "add"),
            "encode": (Client, "_encode"),
            "state": (SlotFile, "write"),
            "check and sum": (Server, "receive"),
        }
        workload = replace(WORKLOADS["cnn"], cohort=10, rounds=3)
        with federation(workload, name, where=Placement(workers=0)) as turn, clocks(parts) as seconds:
            start = time.perf_counter()
            turn()
            whole = time.perf_counter() - start
        clients = workload.cohort * workload.rounds / 1e3
        rows += _rows(f"CNN, {name}, ms a client", whole, seconds, clients, "value")
    return rows


def _qsgd(console: Console) -> list[dict]:
    """Time the passes of `encode` over one chunk of values, and the whole."""
    console.print("parts of QSGD", highlight=False)
    codec, v = QSGD(), torch.randn(N)
    count, rng = qsgd._CACHED // codec.bucket, stream(0, "parts")
    some, level, factor = torch.randn(count, codec.bucket), torch.empty(count, codec.bucket), torch.rand(count, 1)
    fixed, draw = (torch.empty(count, codec.bucket, dtype=torch.int32) for _ in range(2))
    code = torch.empty(count, codec.bucket, dtype=torch.uint8)
    target = torch.empty(N)
    passes = {
        "a copy": (lambda: target.copy_(v), N),
        "in all": (lambda: codec.encode(v, rng), N),
        "largest and smallest of a bucket": (lambda: codec._scale(some, torch.float32), some.numel()),
        "scaling": (lambda: torch.mul(some, factor, out=level), some.numel()),
        "to fixed point": (lambda: fixed.copy_(level), some.numel()),
        "draws": (lambda: _fast_qsgd._draws(rng, codec.levels, draw), some.numel()),
        "adding": (lambda: fixed.add_(draw), some.numel()),
        "rounding": (lambda: fixed.bitwise_right_shift_(24), some.numel()),
        "to bytes": (lambda: code.copy_(fixed), some.numel()),
    }
    times = {name: _median(call) / n * 1e9 for name, (call, n) in passes.items()}
    return [{"of": "QSGD, ns a value", "part": k, "value": t, "share": t / times["in all"]} for k, t in times.items()]


def _topk(console: Console) -> list[dict]:
    rows = []
    v = torch.randn(N)
    for fraction in (0.01, 0.1):
        console.print(f"parts of top-k at {fraction:.0%}", highlight=False)
        codec = TopK(fraction=fraction)
        parts = {
            "which are the largest": (topk, "fast_largest"),
            "— candidates by a bound": (_fast_topk, "_candidates"),
            "indices to bytes": (topk, "encode_indices"),
        }
        codec.encode(v, stream(0, "parts"))
        with clocks(parts) as seconds:
            whole = _median(lambda codec=codec: codec.encode(v, stream(0, "parts")), repeats := 7)
        seconds = {name: s / (repeats + 1) for name, s in seconds.items()}
        rows += _rows(f"top {fraction:.0%}, ns a value", whole, seconds, N / 1e9, "value")
    return rows


def _layers(console: Console) -> list[dict]:
    """Time the operations of raw PyTorch, with the tricks and in the usual form."""
    rows = []
    for name in ("lenet5", "cnn"):
        for way in (Tricks, Naive):
            console.print(f"operations of {name}, {way.__name__.lower()}", highlight=False)
            work = way(WORKLOADS[name], **({"threads": 1} if way is Naive else {}))
            work.client(0)
            with profile(activities=[ProfilerActivity.CPU]) as profiled:
                work.client(1)
            events = sorted(profiled.key_averages(), key=lambda e: -e.self_cpu_time_total)
            whole = sum(e.self_cpu_time_total for e in events)
            rows += [
                {
                    "of": f"{name}, {way.__name__.lower()}, ms a client",
                    "part": e.key[:40],
                    "value": e.self_cpu_time_total / 1e3,
                    "share": e.self_cpu_time_total / whole,
                }
                for e in events[:7]
            ]
    return rows


def _median(call: Callable[[], Any], repeats: int = 7) -> float:
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return sorted(times)[repeats // 2]
