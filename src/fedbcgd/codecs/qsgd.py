"""QSGD (Alistarh et al. 2017): stochastic rounding to a few levels of a scale kept per bucket, packed into bits.

A value v of a bucket with scale m becomes sign(v)·l/s·m, where l is |v|/m·s rounded up or down at random so that the
mean is v. On the wire: the scales of all buckets in the model's dtype, then sign(v)·l + s in ceil(log2(2s+1)) bits
each.

Any scale of at least max|v| keeps it unbiased. `max` takes just that, the finest grid; `l2` is the norm of the
theorem. Both obey its bound: E‖Q(v) − v‖² ≤ min(b/s², √b/s)·‖v‖² in a bucket of b values.
"""

from collections.abc import Iterator
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedbcgd.codecs.codec import Codec, room
from fedbcgd.codecs.packing import pack, packed_bytes, unpack
from fedbcgd.messages import Lend

_CACHED = 1 << 16  # values worked on at a time
_MANY = 1 << 19  # the same where each pass is one call


class QSGD(Codec):
    levels: int = Field(127, ge=1, le=32767, description="s: levels beside zero; 127 is 8 bits a value, 7 is 4, 1 is 2")
    bucket: int = Field(512, ge=1, description="values that share one scale")
    scale: Literal["max", "l2"] = Field("max", description="what a bucket is divided by")

    @property
    def bits(self) -> int:
        return (2 * self.levels).bit_length()

    def nbytes(self, n: int, dtype: torch.dtype) -> int:
        return self._buckets(n) * dtype.itemsize + packed_bytes(n, self.bits)

    def encode(self, values: Tensor, rng: np.random.Generator, lend: Lend | None = None) -> Tensor:
        n, dtype = values.numel(), values.dtype
        head = self._buckets(n) * dtype.itemsize
        out = room(self.nbytes(n, dtype), lend, values.device)
        quick = self.bits <= 8 and dtype != torch.float64
        done = self._encode_many(values, rng, out[:head].view(dtype), out[head:]) if quick else 0
        for piece, buckets, codes in self._pieces(n, dtype, head):
            if piece.start < done:
                continue
            scale, code = (self._round_quickly if quick else self._round)(values[piece], rng)
            out[buckets] = scale.view(torch.uint8)
            out[codes] = pack(code, self.bits)
        return out

    def decode(self, data: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        head = self._buckets(n) * dtype.itemsize
        out = torch.empty(n, dtype=dtype, device=data.device)
        work = dtype if dtype == torch.float64 else torch.float32
        for piece, buckets, codes in self._pieces(n, dtype, head):
            count = piece.stop - piece.start
            level = unpack(data[codes], count, self.bits).to(work).sub_(self.levels).div_(self.levels)
            rows = torch.nn.functional.pad(level, (0, -count % self.bucket)).view(-1, self.bucket)
            rows.mul_(data[buckets].clone().view(dtype).to(work)[:, None])
            out[piece] = rows.view(-1)[:count]
        return out

    @property
    def _piece(self) -> int:
        return self.bucket * 8 * max(1, _CACHED // (8 * self.bucket))

    def _pieces(self, n: int, dtype: torch.dtype, head: int) -> Iterator[tuple[slice, slice, slice]]:
        """Some whole buckets at a time, so that all that is touched stays in the cache: where their values, their
        scales and their codes are. A piece has a multiple of 8 buckets, so its codes end on a whole byte."""
        size = self._piece
        for start in range(0, n, size):
            stop = min(start + size, n)
            buckets = slice(start // self.bucket * dtype.itemsize, self._buckets(stop) * dtype.itemsize)
            yield (
                slice(start, stop),
                buckets,
                slice(head + start * self.bits // 8, head + packed_bytes(stop, self.bits)),
            )

    def _round(self, values: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Scale of each bucket, and each value's level with its sign, counted from 0."""
        n, dtype = values.numel(), values.dtype
        work = values if dtype == torch.float64 else values.float()
        rows = torch.nn.functional.pad(work, (0, -n % self.bucket)).view(-1, self.bucket)
        scale = self._scale(rows, dtype)
        # A bucket of zeros divides by 1; one that is not finite sends its scale, which tells, and zeros.
        finite = scale.isfinite()
        divisor = torch.where(finite & (scale > 0), scale, 1).to(work.dtype)
        level = rows.abs().div_(divisor[:, None]).mul_(self.levels)
        if not finite.all():
            level[~finite] = 0
        low = level.floor()
        draw = torch.from_numpy(rng.random(rows.shape, dtype=np.float32)).to(rows.device)
        low += draw < level.sub_(low)  # compared with the exact remainder: a value on the grid stays there
        code = low.clamp_(max=self.levels).copysign_(rows).add_(self.levels)
        return scale, code.view(-1)[:n].to(torch.uint8 if self.bits <= 8 else torch.int32)

    def _round_quickly(self, values: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """The same for up to 8 bits in fewer passes: ⌊v/m·s + s + u⌋ with u uniform in steps of 2⁻¹⁶, so unbiased to
        2⁻¹⁷ of a level."""
        n, dtype = values.numel(), values.dtype
        rows = torch.nn.functional.pad(values.float(), (0, -n % self.bucket)).view(-1, self.bucket)
        scale = self._scale(rows, dtype)
        finite = scale.isfinite()
        divisor = torch.where(finite & (scale > 0), scale, 1).float()
        factor = self.levels / divisor
        tiny = ~factor.isfinite()  # subnormal scales, whose reciprocal is infinite
        middle = torch.full((), self.levels + 0.5, device=rows.device)  # the draws below are around zero
        level = torch.addcmul(middle, rows, torch.where(tiny, 0, factor)[:, None])
        for bad, exact in ((tiny, rows[tiny] / divisor[tiny, None] * self.levels + middle), (~finite, middle)):
            if bad.any():
                level[bad] = exact
        raw: np.ndarray = rng.bit_generator.random_raw(-(-level.numel() // 4))
        draws = torch.from_numpy(raw.view(np.int16)[: level.numel()]).to(rows.device)
        level.view(-1).add_(draws, alpha=2.0**-16)
        return scale, level.view(-1)[:n].to(torch.uint8).clamp_(max=2 * self.levels)

    def _encode_many(self, values: Tensor, rng: np.random.Generator, scales: Tensor, codes: Tensor) -> int:
        """The same in as few passes as it takes, for long vectors in ordinary buckets; how many values it has done.

        The draws of a bucket are one row of random numbers plus an offset that is random for each bucket, modulo 1: each
        draw is uniform, and any two are independent (to a 256th), so that neither the mean nor the variance of a sum
        changes. That costs a copy instead of a generator.
        """
        bucket, bits = self.bucket, self.bits
        step = max(1, _MANY // bucket)
        rows = values[: values.numel() // self._piece * self._piece].view(-1, bucket)
        if len(rows) < 2 * step or not 64 <= bucket <= 4096 or bucket % 8 or values.device.type != "cpu":
            return 0
        turns = torch.from_numpy(rng.integers(0, 256, len(rows)))
        scratch, code = torch.empty(step, bucket), torch.empty(step, bucket, dtype=torch.uint8)
        known, factors, coded = scales[: len(rows)], torch.empty(len(rows)), codes[: len(rows) * bucket * bits // 8]
        least = self.levels / 3e38  # the smallest scale that can be divided by
        pieces = zip(*(t.split(step) for t in (rows, turns, known, factors, coded.view(len(rows), -1))), strict=True)
        with np.errstate(invalid="ignore"):  # what is no number is mended below
            for k, (some, turn, scale, factor, there) in enumerate(pieces):
                level, some = scratch[: len(some)], some.float()
                scale.copy_(self._scale(some, values.dtype))
                torch.clamp(scale.float(), min=least, out=factor).reciprocal_().mul_(self.levels)
                if k % 16 == 0:
                    table = self._draws(rng)
                torch.index_select(table, 0, turn, out=level)
                torch.addcmul(level, some, factor[:, None], out=level)
                target = there if bits == 8 else code[: len(some)]
                np.copyto(target.numpy(), level.numpy(), casting="unsafe")
                target.clamp_(max=2 * self.levels)
                if bits < 8:
                    there.copy_(pack(target.view(-1), bits).view(there.shape))
        odd = ~known.isfinite() | ((known > 0) & (known < least))
        for k in torch.nonzero(odd).flatten().tolist():
            coded.view(len(rows), -1)[k] = pack(self._round(rows[k], rng)[1], bits)
        return rows.numel()

    def _draws(self, rng: np.random.Generator) -> Tensor:
        """256 rows of draws around s + ½, each the first one turned on by another 256th."""
        first = torch.from_numpy(rng.bit_generator.random_raw(-(-self.bucket // 4)).view(np.int16)[: self.bucket])
        turned = first + (torch.arange(256, dtype=torch.int16) << 8)[:, None]  # wraps around, as it should
        return turned.float().mul_(2.0**-16).add_(self.levels + 0.5)

    def _buckets(self, n: int) -> int:
        return -(-n // self.bucket)

    def _scale(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        largest = torch.maximum(rows.amax(1), rows.amin(1).neg_()) if rows.numel() else rows.new_zeros(0)
        if self.scale == "max":
            return largest.to(dtype)
        # In units of the largest value nothing over- or underflows; the norm itself may, and is then cut to the largest
        # float, which is still at least max|v|. Rounding to dtype must not fall below max|v| either.
        unit = torch.where(largest > 0, largest, 1)
        norm = (rows / unit[:, None]).square_().sum(1).sqrt_().double() * unit.double()
        norm = torch.where(largest > 0, norm.clamp(max=torch.finfo(dtype).max), largest.double())
        return torch.maximum(norm.to(dtype), largest.to(dtype))
