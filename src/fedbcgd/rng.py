"""Random draws: each from (seed, purpose, round, client), never from a global generator.

Whoever asks for the same draw gets the same numbers, in whatever process and order: this is why one seed gives one
model on every backend, and why two algorithms with one seed see the same cohorts and the same minibatches.
"""

from zlib import crc32

import numpy as np


def _sequence(seed: int, purpose: str, *at: int) -> np.random.SeedSequence:
    return np.random.SeedSequence([seed, crc32(purpose.encode()), *at])


def stream(seed: int, purpose: str, *at: int) -> np.random.Generator:
    """The generator for one purpose at one place, usually `(round, client)`."""
    return np.random.Generator(np.random.SFC64(_sequence(seed, purpose, *at)))  # SFC64: numpy's fastest


def torch_seed(seed: int, purpose: str, *at: int) -> int:
    """A seed for torch's own generator, for what a user's model draws itself (dropout)."""
    return int(_sequence(seed, purpose, *at).generate_state(1, np.uint64)[0] >> np.uint64(1))
