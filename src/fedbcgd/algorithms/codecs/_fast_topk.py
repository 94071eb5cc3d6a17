"""Top-k's selection without sorting. `topk.largest` is the definition, and both give the same indices."""

import numpy as np
from torch import Tensor

_MAGNITUDE = np.int32(0x7FFFFFFF)  # all bits of a float32 but its sign: in the order of magnitude, with NaN at the end
_MIN_SAMPLED = 1 << 17  # from this length on a sample gives a bound that leaves few candidates
_SAMPLE_SIZE = 1 << 16  # values of the sample, at least
_CACHED = 1 << 18  # values compared at a time, so that they stay in the cache


def fast_largest(values: Tensor, k: int) -> np.ndarray:
    """Return the indices of the k values of largest magnitude, in ascending order."""
    bits = values.cpu().float().numpy().view(np.int32)
    if k == 0 or k == len(bits):
        return np.arange(k)
    candidates = _candidates(bits, k)
    magnitude = bits[candidates] & _MAGNITUDE
    smallest = np.partition(magnitude, len(magnitude) - k)[len(magnitude) - k]  # the smallest magnitude that is sent
    sent = magnitude > smallest
    sent[np.flatnonzero(magnitude == smallest)[: k - np.count_nonzero(sent)]] = True
    return candidates[sent]


def _candidates(bits: np.ndarray, k: int) -> np.ndarray:
    """Return the indices of at least k values that include the k largest; of few values if a sample gives a bound."""
    n = len(bits)
    if n >= _MIN_SAMPLED:
        sample = bits[:: max(8, n // _SAMPLE_SIZE)] & _MAGNITUDE
        # The bound is low by three standard deviations, so that rarely fewer than k values reach it.
        rank = int(len(sample) * (1 - k / n)) - 3 * int(np.sqrt(len(sample) * k / n) + 1)
        if rank > 0:
            candidates = _at_least(bits, np.partition(sample, rank)[rank])
            if len(candidates) >= k:
                return candidates
    return np.arange(n)


def _at_least(bits: np.ndarray, bound: np.int32) -> np.ndarray:
    """Return the indices of all values whose magnitude is at least `bound`."""
    large, magnitude = np.empty(len(bits), np.bool_), np.empty(_CACHED, np.int32)
    for start in range(0, len(bits), _CACHED):
        piece = bits[start : start + _CACHED]
        np.bitwise_and(piece, _MAGNITUDE, out=magnitude[: len(piece)])
        np.greater_equal(magnitude[: len(piece)], bound, out=large[start : start + _CACHED])
    return np.flatnonzero(large)
