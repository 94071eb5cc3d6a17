"""k ascending indices below n, as bytes: a bitmap of n bits, or the gaps between them in Rice code, whichever is shorter.

A gap g is the number of indices left out before one that is sent. Rice code with parameter b writes it as g >> b in unary
(so many zeros, then a one) and its b low bits as they are. First come the low bits of all gaps, then all unary parts.
"""

import numpy as np
import torch

from fedbcgd.algorithms.codecs.packing import pack, packed_bytes, unpack

BITMAP = 255  # the encoding is this number, or b of the Rice code


def max_index_bytes(n: int) -> int:
    """Return the length of the longest encoding: that of the bitmap."""
    return packed_bytes(n, 1)


def encode_indices(indices: np.ndarray, n: int) -> tuple[int, np.ndarray]:
    """Return the encoding (`BITMAP` or b) and the bytes."""
    b = rice_parameter(n, len(indices))
    rice = _rice(np.diff(indices, prepend=-1) - 1, b)
    if len(indices) and len(rice) < max_index_bytes(n):
        return b, rice
    bitmap = np.zeros(n, np.uint8)
    bitmap[indices] = 1
    return BITMAP, np.packbits(bitmap, bitorder="little")


def decode_indices(encoding: int, data: np.ndarray, n: int, k: int) -> np.ndarray:
    """Return the indices.

    Raises:
        ValueError: no encoder writes these bytes.
    """
    if encoding == BITMAP:
        indices = np.flatnonzero(np.unpackbits(data, count=min(n, 8 * len(data)), bitorder="little"))
    elif encoding == rice_parameter(n, k):
        indices = np.cumsum(_gaps(data, k, encoding) + 1) - 1
    else:
        raise ValueError(f"indices: expected encoding {BITMAP} or {rice_parameter(n, k)}, got {encoding}")
    if len(indices) != k:
        raise ValueError(f"indices: expected {k} of them, got {len(indices)}")
    if k and not 0 <= indices[0] <= indices[-1] < n:
        raise ValueError(f"indices: expected them from 0 to {n - 1}, got {indices[0]} to {indices[-1]}")
    return indices


def rice_parameter(n: int, k: int) -> int:
    """Return the b that suits gaps of mean n/k: about log2 of ln 2 times the mean."""
    return max(0, int(np.floor(np.log2(max(1.0, np.log(2) * n / max(1, k))))))


def _rice(gaps: np.ndarray, b: int) -> np.ndarray:
    high = gaps >> b
    unary = np.zeros(int(high.sum()) + len(gaps), np.uint8)
    unary[np.cumsum(high + 1) - 1] = 1
    low = pack(torch.from_numpy((gaps & ((1 << b) - 1)).astype(np.int32)), b).numpy() if b else np.empty(0, np.uint8)
    return np.concatenate([low, np.packbits(unary, bitorder="little")])


def _gaps(data: np.ndarray, k: int, b: int) -> np.ndarray:
    split = packed_bytes(k, b)
    ones = np.flatnonzero(np.unpackbits(data[split:], bitorder="little"))
    if len(ones) != k:
        raise ValueError(f"indices: expected {k}, got {len(ones)}")
    high = np.diff(ones, prepend=-1) - 1
    low = unpack(torch.from_numpy(data[:split]), k, b).numpy().astype(np.int64) if b else 0
    return (high << b) + low
