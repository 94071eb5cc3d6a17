"""QSGD (Alistarh et al. 2017): stochastic rounding to a few levels of a scale kept per bucket, packed into bits.

A value v of a bucket with scale m becomes sign(v)·l/s·m, where l is |v|/m·s rounded up or down at random so that the
mean is v. On the wire: the scales of all buckets in the model's dtype, then sign(v)·l + s in ceil(log2(2s+1)) bits
each.

With any scale m ≥ max|v| the mean is v. `max` takes m = max|v|, the finest grid; `l2` takes the Euclidean norm, as the
theorem of the paper does. Both satisfy its bound: E‖Q(v) − v‖² ≤ min(b/s², √b/s)·‖v‖² in a bucket of b values.
"""

from collections.abc import Iterator
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedbcgd.algorithms.codecs._fast_qsgd import FastRounding
from fedbcgd.algorithms.codecs.packing import in_buckets, pack, packed_bytes, unpack
from fedbcgd.core.codec import Codec, allocate_bytes
from fedbcgd.core.messages import Allocator

_CACHED = 1 << 19  # values worked on at a time, so that they stay in the cache


class QSGD(Codec):
    """Stochastic quantisation to `levels` levels of either sign."""

    levels: int = Field(
        127, ge=1, le=32767, description="s: levels of either sign; 127: 8 bits per value, 7: 4 bits, 1: 2 bits"
    )
    bucket: int = Field(512, ge=1, description="values that share one scale")
    scale: Literal["max", "l2"] = Field(
        "max", description="scale of a bucket: its largest magnitude (max) or its Euclidean norm (l2)"
    )

    @property
    def bits(self) -> int:
        """Bits of a value on the wire."""
        return (2 * self.levels).bit_length()

    def nbytes(self, n: int, dtype: torch.dtype) -> int:
        return self._buckets(n) * dtype.itemsize + packed_bytes(n, self.bits)

    def encode(self, values: Tensor, rng: np.random.Generator, allocate: Allocator = allocate_bytes) -> Tensor:
        n, dtype = values.numel(), values.dtype
        head = self._buckets(n) * dtype.itemsize
        out = allocate(self.nbytes(n, dtype))
        fast = self.bits <= 8 and dtype != torch.float64
        rounding = FastRounding() if fast else round_to_levels
        for piece, buckets, codes in self._pieces(n, dtype, head):
            rows = in_buckets(values[piece], self.bucket)
            scale = self._scale(rows, dtype)
            code = rounding(rows, scale, self.levels, rng).view(-1)[: piece.stop - piece.start]
            out[buckets] = scale.view(torch.uint8)
            out[codes] = code if self.bits == 8 else pack(code, self.bits)
        return out

    def decode(self, data: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        head = self._buckets(n) * dtype.itemsize
        out = torch.empty(n, dtype=dtype, device=data.device)
        work = dtype if dtype == torch.float64 else torch.float32
        for piece, buckets, codes in self._pieces(n, dtype, head):
            count = piece.stop - piece.start
            level = unpack(data[codes], count, self.bits).to(work).sub_(self.levels).div_(self.levels)
            rows = in_buckets(level, self.bucket)
            rows.mul_(data[buckets].clone().view(dtype).to(work)[:, None])
            out[piece] = rows.view(-1)[:count]
        return out

    def _pieces(self, n: int, dtype: torch.dtype, head: int) -> Iterator[tuple[slice, slice, slice]]:
        """Yield where the values, scales and codes of some buckets are; few enough to stay in the cache.

        A piece has a multiple of 8 buckets, so its codes end on a whole byte.
        """
        size = self.bucket * 8 * max(1, _CACHED // (8 * self.bucket))
        for start in range(0, n, size):
            stop = min(start + size, n)
            buckets = slice(start // self.bucket * dtype.itemsize, self._buckets(stop) * dtype.itemsize)
            yield (
                slice(start, stop),
                buckets,
                slice(head + start * self.bits // 8, head + packed_bytes(stop, self.bits)),
            )

    def _buckets(self, n: int) -> int:
        return -(-n // self.bucket)

    def _scale(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        largest = torch.maximum(rows.amax(1), rows.amin(1).neg_()) if rows.numel() else rows.new_zeros(0)
        if self.scale == "max":
            return largest.to(dtype)
        # In units of the largest value no square over- or underflows. The norm itself may overflow: it is then the
        # largest float, which is still at least max|v|. Rounding to dtype must not give less than max|v| either.
        unit = torch.where(largest > 0, largest, 1)
        norm = (rows / unit[:, None]).square_().sum(1).sqrt_().double() * unit.double()
        norm = torch.where(largest > 0, norm.clamp(max=torch.finfo(dtype).max), largest.double())
        return torch.maximum(norm.to(dtype), largest.to(dtype))


def round_to_levels(rows: Tensor, scale: Tensor, levels: int, rng: np.random.Generator) -> Tensor:
    """Round every value of every bucket to one of its two neighbouring levels at random; this is the definition.

    Args:
        rows: the values, a row for each bucket.
        scale: m of each bucket. Where it is zero or not finite all levels are zero; the scale is sent as it is.
        levels: s.
        rng: for the draws, one of 53 bits for each value.

    Returns:
        sign(v)·l + s for each value, where l is ⌊|v|/m·s⌋, plus one with the probability of the remainder: the mean is
        v, and a value on a level stays there.
    """
    finite = scale.isfinite()
    unit = torch.where(finite & (scale > 0), scale, 1).to(rows.dtype)
    level = rows.abs() / unit[:, None] * levels
    level[~finite] = 0
    low = level.floor()
    draw = torch.from_numpy(rng.random(rows.shape)).to(rows.device)
    rounded = (low + (draw < level - low)).clamp_(max=levels)
    return rounded.copysign_(rows).add_(levels).to(torch.uint8 if levels <= 127 else torch.int32)
