"""QSGD's rounding for up to 8 bits a value, in a few passes over memory. `qsgd.round_to_levels` is the definition."""

import numpy as np
import torch
from torch import Tensor

_FRACTION = 24  # bits behind the point: with them 127 levels of either sign fill 32 bits
_GROUP = 32  # buckets that share one row of random numbers
_TINY, _LIFT = 1e-25, 2.0**100  # scales up to this one are brought into float32's range by that factor


class FastRounding:
    """Rounds like the definition, in fixed point: v/m·s and a draw, both with 24 bits behind the point, are added.

    The mean is v to 2⁻²⁴ of a level and float32's rounding of v/m·s. Any two draws are independent, so every sum of
    rounded values has the variance that it has by the definition.
    """

    def __init__(self, scale: Tensor, levels: int):
        """Prepare the rounding of buckets with these scales."""
        scale = scale.float()
        odd = ~((scale > _TINY) & scale.isfinite())
        scale = torch.where(odd, scale * _LIFT, scale)
        self._odd = odd if odd.any() else None
        self._empty = (scale == 0) | ~scale.isfinite()  # buckets of zeros, and those whose scale alone tells
        scale = scale.masked_fill(self._empty, 1)
        last = levels * 2.0**_FRACTION
        factor = last / scale
        # Nothing may lie beyond the last level, not by a bit. This product is exact: both factors have 24 bits.
        beyond = factor.double() * scale > last
        self._factor = torch.where(beyond, factor.nextafter(torch.zeros_like(factor)), factor)[:, None]
        self._levels = levels
        self._memory: tuple[Tensor, ...] = ()

    def __call__(self, rows: Tensor, start: int, rng: np.random.Generator) -> Tensor:
        """Round some buckets, the first of which is number `start`.

        The lowest byte of each value returned is sign(v)·l + s. It is good until the next call: memory is kept, since new
        pages cost more than the passes.
        """
        some = slice(start, start + len(rows))
        if self._odd is not None:
            rows = torch.where(self._odd[some, None], rows * _LIFT, rows).masked_fill(self._empty[some, None], 0)
        if not self._memory or len(self._memory[0]) < len(rows):
            kinds = (torch.float32, torch.int32, torch.int32)
            self._memory = tuple(torch.empty(rows.shape, dtype=kind, device=rows.device) for kind in kinds)
        level, fixed, draw = (t[: len(rows)] for t in self._memory)
        fixed.copy_(torch.mul(rows, self._factor[some], out=level))
        return fixed.add_(_draws(rng, self._levels, draw)).bitwise_right_shift_(_FRACTION)


def _draws(rng: np.random.Generator, levels: int, out: Tensor) -> Tensor:
    """Draw a uniform number of 24 bits for each value; above it stands s, which makes the sum positive.

    The draw for value i of bucket b is a_b xor r_i, where r is a row of random numbers for 32 buckets. Each is uniform.
    Two of one bucket are a_b xor r_i and a_b xor r_j, two of one place a_b xor r_i and a_c xor r_i: in either case the
    numbers that they do not share make any two independent. It takes a 32nd of the random numbers.
    """
    buckets, size = out.shape
    groups = -(-buckets // _GROUP)
    words = rng.bit_generator.random_raw(-(-(groups * size + buckets) // 2)).view(np.uint32) >> np.uint32(
        32 - _FRACTION
    )
    words[groups * size :] |= np.uint32(levels << _FRACTION)
    numbers = torch.from_numpy(words.view(np.int32)).to(out.device)
    shared, own = numbers[: groups * size].view(groups, 1, size), numbers[groups * size :][:buckets, None]
    whole = buckets - buckets % _GROUP
    torch.bitwise_xor(
        shared[: whole // _GROUP], own[:whole].view(-1, _GROUP, 1), out=out[:whole].view(-1, _GROUP, size)
    )
    if whole < buckets:
        torch.bitwise_xor(shared[-1], own[whole:], out=out[whole:])
    return out
