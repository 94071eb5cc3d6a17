"""Describes this machine: what it has, what a run would use of it, and what slows a run down."""

import contextlib
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path

import psutil
import torch

from fedbcgd.backends.workers.processes import ENVIRONMENT, cores
from fedbcgd.core.torch_private import has_fused_step
from fedbcgd.engine.precision import WARN_RATIO, native_bf16, product_ratio
from fedbcgd.version import __version__

EXTRAS = {"flower": "flwr", "ray": "ray", "hf": "transformers", "tensorboard": "tensorboard"}


def inspect_machine() -> tuple[dict[str, str], list[str]]:
    """Return facts about this machine by name, and warnings about what slows a run down or will fail."""
    usable, present = cores(), psutil.cpu_count() or 1
    free = shutil.disk_usage(tempfile.gettempdir()).free
    facts = {
        "fedbcgd": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "packages": ", ".join(
            f"{name} {metadata.version(name)}" for name in ("torch", "numpy", "safetensors", "pydantic")
        ),
        "extras": ", ".join(f"{e}: {'yes' if util.find_spec(m) else 'no'}" for e, m in EXTRAS.items()),
        "system": platform.platform(),
        "cores": f"{usable} usable of {present}",
        "vector unit": torch.backends.cpu.get_cpu_capability(),
        "memory": f"{_memory() / 2**30:.1f} GiB",
        "temporary space": f"{free / 2**30:.1f} GiB free in {tempfile.gettempdir()}",
        "devices": ", ".join(_devices()),
        "bfloat16": "; ".join(map(_bf16, _torch_devices())),
        "a run would use": f"{usable} worker process{'es' if usable > 1 else ''} of one thread each, device cpu",
        "convolutions": f"channels_last, {'oneDNN' if torch.backends.mkldnn.is_available() else 'without oneDNN'}",
        "workers' settings": " ".join(f"{k}={v}" for k, v in ENVIRONMENT.items()),
    }
    warnings = list(_causes(usable, present))
    if free < 2**30:
        warnings.append("less than 1 GiB of temporary space: client state, such as SCAFFOLD's, may not fit")
    return facts, warnings


def _causes(usable: int, present: int) -> Iterator[str]:
    """Yield a text about each cause that slows a run down."""
    quota = _quota()
    busy = psutil.getloadavg()[0]  # of the last minute
    pc = platform.machine() in ("x86_64", "AMD64")
    preloaded = os.environ.get("LD_PRELOAD", "")
    changed = {k: os.environ[k] for k, v in ENVIRONMENT.items() if k.startswith("MALLOC") and os.environ.get(k, v) != v}
    if usable < present:
        yield f"this process may use {usable} of {present} cores (affinity or a container's limit)"
    if quota is not None and quota < usable:
        yield f"a container's limit allows {quota:g} cores of time, less than the {usable} workers: set run.workers"
    if busy > usable / 2:
        yield (
            f"{busy:.1f} processes were busy over the last minute, on {usable} cores: a run gets only what they leave, and "
            "its timings mean nothing"
        )
    if os.name != "posix":
        yield "no worker processes on this system: set workers = 0, and clients are computed one after the other"
    if os.environ.get("OMP_PROC_BIND", "false").lower() not in ("false", "0"):
        yield "OMP_PROC_BIND binds this process to one core, so that only one core is counted: unset it"
    if torch.cuda.device_count() > 0:
        yield 'there is a GPU, but a run computes on the CPU unless device = "cuda" is set'
    if platform.libc_ver()[0] != "glibc" and sys.platform == "linux":
        yield "the C library is not glibc: the allocator settings of the workers have no effect"
    for name, value in changed.items():
        yield f"{name}={value} is set here; workers use {ENVIRONMENT[name]} anyway"
    if "malloc" in preloaded:
        yield f"LD_PRELOAD={preloaded} replaces the allocator: the settings of the workers have no effect"
    if pc and not torch.backends.mkldnn.is_available():
        yield "this PyTorch has no oneDNN: convolutions are several times slower than they could be"
    if pc and not torch.backends.mkl.is_available():
        yield "this PyTorch has no MKL: products of matrices are slower than they could be"
    if pc and torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "NO AVX"):
        yield "AVX2 is not used, because of this processor or ATEN_CPU_CAPABILITY: everything is slower"
    if not has_fused_step("cpu", torch.float32):
        yield "this PyTorch has no fused SGD step that fedbcgd knows: small models train slower, to the same bits"
    if psutil.swap_memory().used > psutil.virtual_memory().total / 10:
        yield "this machine is swapping: its programs need more memory than it has"
    if sys.flags.dev_mode or bool(os.environ.get("PYTHONTRACEMALLOC")):
        yield "Python's development mode or tracemalloc is on, which slows every call"


def _control_groups(root: Path, membership: Path) -> Iterator[Path]:
    """Yield the control groups of this process, from its own up to the root; psutil does not read their limits."""
    with contextlib.suppress(OSError, StopIteration):
        own = next(line[3:] for line in membership.read_text().splitlines() if line.startswith("0::"))
        group = root / own.lstrip("/")
        while group != root and root in group.parents:
            yield group
            group = group.parent
    yield root


def _quota(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> float | None:
    """Return how many cores the container's limit allows; None without a limit."""
    limits = []
    for group in _control_groups(root, membership):
        with contextlib.suppress(OSError, ValueError):
            limit, period = (group / "cpu.max").read_text().split()
            limits += [] if limit == "max" else [int(limit) / int(period)]
    with contextlib.suppress(OSError, ValueError):
        limit, period = ((root / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        limits += [int(limit) / int(period)] if int(limit) > 0 else []
    return min(limits, default=None)


def _bf16(device: torch.device) -> str:
    """Say whether a device computes in bfloat16, and how fast."""
    try:
        native, ratio = native_bf16(device), product_ratio(device)
    except (RuntimeError, AssertionError) as error:
        return f"{device}: failed ({str(error).splitlines()[0]})"
    measured = (
        f"a matrix product takes {ratio:.1f} times as long as in float32"
        if ratio > 1
        else f"a matrix product is {1 / ratio:.1f} times as fast as in float32"
    )
    advice = ', so precision = "bf16" is slower here' if ratio > WARN_RATIO else ""
    return f"{device}: {native or 'not native'}; {measured}{advice}"


def _torch_devices() -> list[torch.device]:
    return [torch.device("cpu"), *(torch.device("cuda", k) for k in range(torch.cuda.device_count()))]


def _devices() -> list[str]:
    devices = ["cpu"]
    devices += [f"cuda:{k} ({torch.cuda.get_device_name(k)})" for k in range(torch.cuda.device_count())]
    return devices + (["mps"] if torch.backends.mps.is_available() else [])


def _memory(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int:
    """Return the bytes this process may use: the machine's memory, or a container's limit."""
    limits = [psutil.virtual_memory().total]
    for group in _control_groups(root, membership):
        with contextlib.suppress(OSError, ValueError):  # "max" is no number
            limits.append(int((group / "memory.max").read_text()))
    return min(limits)
