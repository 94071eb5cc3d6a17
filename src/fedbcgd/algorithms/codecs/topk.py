"""Top-k: the k largest values and where they are; the client keeps the rest and adds it next time (error feedback).

On the wire: a byte that says how the places are written, the k values in the model's dtype, and the places: a bitmap of n
bits, or the gaps between them in Rice code with parameter b (the gap's high part in unary, its low b bits as they are),
whichever is shorter.
"""

from typing import ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedbcgd.algorithms.codecs.packing import pack, packed_bytes, unpack
from fedbcgd.core.codec import Codec, room
from fedbcgd.core.messages import Allocator

_BITMAP = 255
_UNSIGNED = np.int32(0x7FFFFFFF)  # all bits of a float but its sign
_SAMPLED = 1 << 17  # vectors of this length and more have their largest values found by way of a sample
_SAMPLE = 1 << 16  # of so many values, or a few more
_CACHED = 1 << 18  # values worked on at a time


class TopK(Codec):
    residual: ClassVar[bool] = True

    fraction: float = Field(0.05, gt=0, le=1, description="share of the values that is sent: k = ceil(fraction·n)")

    def count(self, n: int) -> int:
        return min(n, int(np.ceil(self.fraction * n)))

    def floats(self, n: int) -> int:
        return self.count(n)

    def nbytes(self, n: int, dtype: torch.dtype) -> int:
        return 1 + self.count(n) * dtype.itemsize + packed_bytes(n, 1)

    def fits(self, nbytes: int, n: int, dtype: torch.dtype) -> bool:
        return 1 + self.count(n) * dtype.itemsize <= nbytes <= self.nbytes(n, dtype)

    def encode(self, values: Tensor, rng: np.random.Generator, allocate: Allocator | None = None) -> Tensor:
        n, k = values.numel(), self.count(values.numel())
        places = _largest(values.cpu().float().numpy(), k)
        kind, coded = _write_places(places, n)
        kept = values.index_select(0, torch.from_numpy(places).to(values.device)).view(torch.uint8)
        out = room(1 + len(kept) + len(coded), allocate, values.device)
        out[0] = kind
        out[1 : 1 + len(kept)] = kept
        out[1 + len(kept) :] = torch.from_numpy(coded)
        return out

    def decode(self, data: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        k = self.count(n)
        raw = data.cpu()
        head = 1 + k * dtype.itemsize
        places = _read_places(int(raw[0]), raw[head:].numpy(), n, k)
        out = torch.zeros(n, dtype=dtype)
        out[torch.from_numpy(places)] = raw[1:head].clone().view(dtype)
        return out.to(data.device)


def _largest(values: np.ndarray, k: int) -> np.ndarray:
    """Where the k largest magnitudes are, in order; of equal ones the first. What is not a number is larger than any.

    Magnitudes are compared as whole numbers: their bits without the sign are in the same order, NaN above infinity.
    """
    bits = values.view(np.int32)
    near = _candidates(bits, k)
    size = bits[near] & _UNSIGNED
    if k and len(near) > k:
        least = np.partition(size, len(size) - k)[len(size) - k]  # the smallest that is sent
        sent = size > least
        sent[np.flatnonzero(size == least)[: k - np.count_nonzero(sent)]] = True
        near = near[sent]
    return near


def _candidates(bits: np.ndarray, k: int) -> np.ndarray:
    """All places of magnitudes above a bound that a sample says is a little low; without a good bound, all places."""
    n = len(bits)
    if not 0 < k < n:
        return np.arange(n if k else 0)
    if n >= _SAMPLED:
        sample = bits[:: max(8, n // _SAMPLE)] & _UNSIGNED
        rank = int(len(sample) * (1 - k / n)) - 3 * int(np.sqrt(len(sample) * k / n) + 1)  # three deviations low
        if rank > 0:
            bound = np.partition(sample, rank)[rank]
            large, size = np.empty(n, np.bool_), np.empty(_CACHED, np.int32)
            for at in range(0, n, _CACHED):
                piece = bits[at : at + _CACHED]
                np.bitwise_and(piece, _UNSIGNED, out=size[: len(piece)])
                np.greater_equal(size[: len(piece)], bound, out=large[at : at + _CACHED])
            places = np.flatnonzero(large)
            if len(places) >= k:
                return places
    return np.arange(n)


def _write_places(places: np.ndarray, n: int) -> tuple[int, np.ndarray]:
    k = len(places)
    if k:
        gaps = np.diff(places, prepend=-1) - 1
        b = _parameter(n, k)
        high = gaps >> b
        unary = np.zeros(int(high.sum()) + k, np.uint8)  # `high` zeros and a one, for each gap
        unary[np.cumsum(high + 1) - 1] = 1
        if packed_bytes(len(unary), 1) + packed_bytes(k, b) < packed_bytes(n, 1):
            low = (
                pack(torch.from_numpy((gaps & ((1 << b) - 1)).astype(np.int32)), b).numpy()
                if b
                else np.empty(0, np.uint8)
            )
            return b, np.concatenate([low, np.packbits(unary, bitorder="little")])
    bitmap = np.zeros(n, np.uint8)
    bitmap[places] = 1
    return _BITMAP, np.packbits(bitmap, bitorder="little")


def _read_places(kind: int, coded: np.ndarray, n: int, k: int) -> np.ndarray:
    """The k places; a ValueError for bytes that no encoder wrote."""
    if kind == _BITMAP:
        places = np.flatnonzero(np.unpackbits(coded, count=min(n, 8 * len(coded)), bitorder="little"))
    else:
        if kind != _parameter(n, k):
            raise ValueError(f"the places are written in an unknown way ({kind})")
        split = packed_bytes(k, kind)
        ends = np.flatnonzero(np.unpackbits(coded[split:], bitorder="little"))
        if len(ends) != k:
            raise ValueError(f"{len(ends)} places are given, {k} are wanted")
        high = np.diff(ends, prepend=-1) - 1
        low = unpack(torch.from_numpy(coded[:split]), k, kind).numpy().astype(np.int64) if kind else 0
        places = np.cumsum((high << kind) + low + 1) - 1
    if len(places) != k or (k and not 0 <= places[0] <= places[-1] < n):
        raise ValueError(f"the places are not {k} of {n}")
    return places


def _parameter(n: int, k: int) -> int:
    """Rice's b for gaps of mean n/k: about log2 of ln 2 times the mean."""
    return max(0, int(np.floor(np.log2(max(1.0, np.log(2) * n / max(1, k))))))
