"""What this machine has, and what would be used."""

import os
import platform
import shutil
import sys
import tempfile
from importlib import metadata, util

import torch

from fedbcgd.carriers.workers import ENVIRONMENT, cores
from fedbcgd.version import __version__

EXTRAS = {"flower": "flwr", "ray": "ray", "hf": "transformers", "tensorboard": "tensorboard"}


def look() -> tuple[dict[str, str], list[str]]:
    """Facts by name, and warnings about what costs speed or will fail."""
    usable, present = cores(), os.cpu_count() or 1
    memory = _memory()
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
        "memory": f"{memory / 2**30:.1f} GiB" if memory else "unknown",
        "temporary space": f"{free / 2**30:.1f} GiB free in {tempfile.gettempdir()}",
        "devices": ", ".join(_devices()),
        "a run would use": f"{usable} worker process{'es' if usable > 1 else ''} of one thread each, device cpu",
        "workers' settings": " ".join(f"{k}={v}" for k, v in ENVIRONMENT.items()),
    }
    warnings = []
    if usable < present:
        warnings.append(f"this process may use {usable} of {present} cores (affinity or a container's limit)")
    if os.name != "posix":
        warnings.append("no worker processes on this system: clients are computed one after the other (workers = 0)")
    if platform.libc_ver()[0] != "glibc" and sys.platform == "linux":
        warnings.append("the C library is not glibc: the allocator settings of the workers have no effect")
    if free < 2**30:
        warnings.append("less than 1 GiB of temporary space: client state of SCAFFOLD and the like may not fit")
    return facts, warnings


def _devices() -> list[str]:
    found = ["cpu"]
    found += [f"cuda:{k} ({torch.cuda.get_device_name(k)})" for k in range(torch.cuda.device_count())]
    return found + (["mps"] if torch.backends.mps.is_available() else [])


def _memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0
