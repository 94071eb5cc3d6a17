"""Whether this machine computes in bfloat16, and how fast: measured in a fraction of a second."""

import copy
import logging
import time
from collections.abc import Callable
from pathlib import Path

import torch

from fedbcgd.core.objective import Objective
from fedbcgd.core.onednn import avoid_faulty_kernel
from fedbcgd.data.sources import as_source, to_device
from fedbcgd.engine.job import Job
from fedbcgd.engine.threads import threads
from fedbcgd.rng import stream

log = logging.getLogger("fedbcgd")

INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "bf16", "svebf16")  # of x86 and of ARM, as Linux names them
MATRIX_SIDE = 512  # rows and columns of the matrices that are multiplied
REPEATS = 3
ENOUGH_SECONDS = 0.3  # if the first calls take longer, they are not repeated
MAX_STEP_SECONDS = 0.5  # a step that takes longer is not tried
WARN_RATIO = 1.2  # a warning is logged if bfloat16 takes more than this many times as long; less may be chance


def native_bf16(device: torch.device, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the instructions with which a device computes in bfloat16, such as "avx512_bf16"; empty if there are none or
    they are unknown.

    Args:
        device: the device.
        cpuinfo: the file in which Linux describes the processor.
    """
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"sm_{major}{minor}" if torch.cuda.is_bf16_supported(including_emulation=False) else ""
    if device.type != "cpu":
        return ""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    flags = next((set(line.split()) for line in lines if line.lower().startswith(("flags", "features"))), set())
    return ", ".join(name for name in INSTRUCTIONS if name in flags)


def product_ratio(device: torch.device) -> float:
    """Return the time of a matrix product in bfloat16, as a multiple of that in float32."""
    a = torch.ones(MATRIX_SIDE, MATRIX_SIDE, device=device)
    b = a.to(torch.bfloat16)
    with threads(1):
        return _ratio(_seconds(lambda: a @ a, device), lambda: a @ a, lambda: b @ b, device)


def step_ratio(job: Job, fp32: Objective, product: float) -> float | None:
    """Return the time of one gradient in bfloat16, as a multiple of that in float32; None if it takes too long to try.

    Args:
        job: one whose objective computes in bfloat16.
        fp32: the same objective in float32.
        product: the ratio for matrix products, to estimate how long a trial takes.
    """
    data = as_source(job.clients[0], "client 0")
    module = copy.deepcopy(job.module)
    avoid_faulty_kernel(module)
    device = next(module.parameters()).device
    rows = torch.arange(min(job.algorithm.local.batch_size, len(data)))
    batch = to_device(data.gather(rows, stream(0, "probe")), device)
    parameters = [p for p in module.parameters() if p.requires_grad]

    def gradient(objective: Objective) -> Callable[[], object]:
        return lambda: torch.autograd.grad(objective.loss(module, batch), parameters, allow_unused=True)

    with torch.random.fork_rng([]), threads(1):
        first = _seconds(gradient(fp32), device)
        if first * max(1.0, product) > MAX_STEP_SECONDS:
            return None
        return _ratio(first, gradient(fp32), gradient(job.objective), device)


def warn_if_slower(job: Job, fp32: Objective) -> None:
    """Log one line if a step of the job takes longer in bfloat16 than in float32 on this machine.

    Args:
        job: one whose objective computes in bfloat16.
        fp32: the same objective in float32.
    """
    device, what = next(job.module.parameters()).device, "a step of this model"
    try:
        product = product_ratio(device)
        ratio = step_ratio(job, fp32, product)
    except Exception:
        return  # training will show and explain any error
    if ratio is None:
        ratio, what = product, "a matrix product"
    if ratio > WARN_RATIO:
        log.warning('precision: "bf16" is slower than "fp32" here: %s takes %.1f times as long', what, ratio)


def _ratio(first: float, fp32: Callable[[], object], bf16: Callable[[], object], device: torch.device) -> float:
    """Return the shortest time of bf16 as a multiple of that of fp32, whose first call took `first` seconds.

    First calls also prepare kernels, so they count only if they take so long that this does not matter.
    """
    second = _seconds(bf16, device)
    if first + second > ENOUGH_SECONDS:
        return second / first
    times = [(_seconds(fp32, device), _seconds(bf16, device)) for _ in range(REPEATS)]
    return min(b for _, b in times) / max(min(a for a, _ in times), 1e-9)


def _seconds(compute: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that a call takes; on the CPU those of this thread, so that other processes do not count."""
    clock = time.thread_time if device.type == "cpu" else time.perf_counter
    start = clock()
    compute()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - start
