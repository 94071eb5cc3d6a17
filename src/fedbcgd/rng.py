"""Random draws: each from (seed, purpose, round, client), never from a global generator.

The same arguments give the same numbers in any process and in any order. Therefore one seed gives one model on every
backend, and two algorithms with one seed see the same cohorts and the same minibatches.
"""

from zlib import crc32

import numpy as np


def stream(seed: int, purpose: str, *key: int) -> np.random.Generator:
    """Make the generator of one purpose.

    Args:
        seed: of the run.
        purpose: a name such as "batches"; different purposes draw independently.
        *key: usually the round and the client.

    Returns:
        A new generator; equal arguments give equal draws.
    """
    return np.random.Generator(np.random.SFC64(_sequence(seed, purpose, *key)))  # SFC64: numpy's fastest


def torch_seed(seed: int, purpose: str, *key: int) -> int:
    """Make a seed for torch's own generator, for what a user's model draws itself (dropout).

    Args:
        seed: of the run.
        purpose: as for `stream`.
        *key: as for `stream`.

    Returns:
        A number from 0 to 2⁶³ − 1.
    """
    return int(_sequence(seed, purpose, *key).generate_state(1, np.uint64)[0] >> np.uint64(1))


def _sequence(seed: int, purpose: str, *key: int) -> np.random.SeedSequence:
    words = [seed, crc32(purpose.encode()), *key]
    if max(words) < 1 << 32:
        return np.random.SeedSequence(np.array(words, np.uint32))  # the same as of the list, in half the time
    return np.random.SeedSequence(words)
