"""float16 with a scale per bucket: the largest magnitude of a bucket is scaled to 2^15, so that nothing overflows.

On the wire: the scales of all buckets in the model's dtype, then all values in float16.
"""

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedbcgd.algorithms.codecs.packing import in_buckets
from fedbcgd.core.codec import Codec, allocate_bytes
from fedbcgd.core.messages import Allocator

_TOP = 2.0**15


class Half(Codec):
    """Two bytes a value, and a scale for each bucket."""

    bucket: int = Field(4096, ge=1, description="values that share one scale")

    def nbytes(self, n: int, dtype: torch.dtype) -> int:
        return self._head(n, dtype) + 2 * n

    def encode(self, values: Tensor, rng: np.random.Generator, allocate: Allocator = allocate_bytes) -> Tensor:
        n, dtype = values.numel(), values.dtype
        out, head = allocate(self.nbytes(n, dtype)), self._head(n, dtype)
        rows = in_buckets(values, self.bucket)
        largest = rows.abs().amax(1) if rows.numel() else rows.new_zeros(0)
        divisor = torch.where(largest.isfinite() & (largest > 0), largest, 1)
        out[:head].view(dtype).copy_(largest)
        out[head:].view(torch.float16).copy_((rows / divisor[:, None]).mul_(_TOP).view(-1)[:n])
        return out

    def decode(self, data: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        head = self._head(n, dtype)
        scale = data[:head].clone().view(dtype)
        work = dtype if dtype == torch.float64 else torch.float32
        rows = in_buckets(data[head:].clone().view(torch.float16).to(work), self.bucket)
        return rows.div_(_TOP).mul_(scale.to(work)[:, None]).view(-1)[:n].to(dtype)

    def _head(self, n: int, dtype: torch.dtype) -> int:
        """Return the bytes of the scales."""
        return -(-n // self.bucket) * dtype.itemsize
