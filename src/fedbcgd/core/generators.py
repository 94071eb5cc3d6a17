"""The global generators of torch, numpy and random, which users' training functions draw from."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from fedbcgd.data.sources import first_loader


def seed_generators(seed: int, data: Any) -> None:
    """Seed the generators of torch, numpy and random, and the DataLoader's own generator if `data` has a loader with one."""
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002  (for users' code)
    random.seed(seed)
    loader = first_loader(data)
    for owner in (loader, getattr(loader, "sampler", None)):
        if isinstance(generator := getattr(owner, "generator", None), torch.Generator):
            generator.manual_seed(seed)


@contextmanager
def generators_restored() -> Iterator[None]:
    """Restore the states of all global generators after the block."""
    cpu, numbers, plain = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        np.random.set_state(numbers)  # noqa: NPY002
        random.setstate(plain)
        if gpus:
            torch.cuda.set_rng_state_all(gpus)
