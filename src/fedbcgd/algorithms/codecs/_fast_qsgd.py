"""QSGD's rounding for up to 8 bits a value in few passes over memory. `qsgd.round_to_levels` is the definition."""

import math

import numpy as np
import torch
from torch import Tensor

_FRACTION = 24  # fraction bits of the fixed-point numbers: with them 127 levels of either sign fill 32 bits
_GROUP = 32  # buckets that share one row of random numbers
_TINY, _LIFT = 1e-25, 2.0**100  # buckets with a scale up to _TINY are multiplied by _LIFT, against underflow


class FastRounding:
    """Round like the definition, in fixed point: add v/m·s and a draw, both with 24 fraction bits, and drop the fraction.

    The mean differs from v by at most 2⁻²⁴ of a level, besides float32's rounding of v/m·s. Any two draws are independent,
    so every sum of rounded values has the variance that it has by the definition.
    """

    def __init__(self) -> None:
        self._memory: tuple[Tensor, ...] = ()

    def __call__(self, rows: Tensor, scale: Tensor, levels: int, rng: np.random.Generator) -> Tensor:
        """Round some buckets, all of one size.

        Returns:
            An integer for each value, whose lowest byte is sign(v)·l + s. The next call overwrites it: memory is reused,
            since new pages cost more than the passes.
        """
        scale = scale.float()
        if not (float(scale.amin()) > _TINY and float(scale.amax()) < math.inf):  # also if one is NaN
            rows, scale = _within_range(rows, scale)
        if not self._memory or len(self._memory[0]) < len(rows):
            dtypes = (torch.float32, torch.int32, torch.int32)
            self._memory = tuple(torch.empty(rows.shape, dtype=dtype, device=rows.device) for dtype in dtypes)
        level, fixed, draw = (t[: len(rows)] for t in self._memory)
        last = levels * 2.0**_FRACTION
        torch.mul(rows, (last / scale)[:, None], out=level).clamp_(-last, last)  # the product may round beyond it
        return fixed.copy_(level).add_(_draws(rng, levels, draw)).bitwise_right_shift_(_FRACTION)


def _within_range(rows: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Scale up tiny buckets, and replace those whose scale is zero or not finite by zeros."""
    tiny = scale <= _TINY
    rows, scale = torch.where(tiny[:, None], rows * _LIFT, rows), torch.where(tiny, scale * _LIFT, scale)
    empty = (scale == 0) | ~scale.isfinite()
    return rows.masked_fill(empty[:, None], 0), scale.masked_fill(empty, 1)


def _draws(rng: np.random.Generator, levels: int, out: Tensor) -> Tensor:
    """Draw a uniform number of 24 bits for each value, with s in the bits above, which makes the sum positive.

    The draw for value i of bucket b is a_b xor r_i, where r is a row of random numbers for 32 buckets. Each is uniform.
    Two of one bucket are a_b xor r_i and a_b xor r_j, two at one position a_b xor r_i and a_c xor r_i: the numbers that
    they do not share make them independent. So a 32nd of the random numbers suffices.
    """
    buckets, size = out.shape
    groups = -(-buckets // _GROUP)
    raw = rng.bit_generator.random_raw(-(-(groups * size + buckets) // 2)).view(np.uint32)
    raw >>= np.uint32(32 - _FRACTION)
    raw[groups * size :] |= np.uint32(levels << _FRACTION)
    numbers = torch.from_numpy(raw.view(np.int32)).to(out.device)
    shared, own = numbers[: groups * size].view(groups, 1, size), numbers[groups * size :][:buckets, None]
    whole = buckets - buckets % _GROUP
    torch.bitwise_xor(
        shared[: whole // _GROUP], own[:whole].view(-1, _GROUP, 1), out=out[:whole].view(-1, _GROUP, size)
    )
    if whole < buckets:
        torch.bitwise_xor(shared[-1], own[whole:], out=out[whole:])
    return out
