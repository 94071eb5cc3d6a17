"""float16 with a scale per bucket: the largest value of a bucket becomes 2^15, so nothing overflows and little is lost."""

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedbcgd.core.codec import Codec, allocate_bytes
from fedbcgd.core.messages import Allocator

_TOP = 2.0**15


class Half(Codec):
    bucket: int = Field(4096, ge=1, description="values that share one scale")

    def nbytes(self, n: int, dtype: torch.dtype) -> int:
        return self._buckets(n) * dtype.itemsize + 2 * n

    def encode(self, values: Tensor, rng: np.random.Generator, allocate: Allocator = allocate_bytes) -> Tensor:
        n, dtype = values.numel(), values.dtype
        out, head = allocate(self.nbytes(n, dtype)), self._buckets(n) * dtype.itemsize
        rows = self._rows(values)
        largest = rows.abs().amax(1) if rows.numel() else rows.new_zeros(0)
        divisor = torch.where(largest.isfinite() & (largest > 0), largest, 1)
        out[:head].view(dtype).copy_(largest)
        out[head:].view(torch.float16).copy_((rows / divisor[:, None]).mul_(_TOP).view(-1)[:n])
        return out

    def decode(self, data: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        head = self._buckets(n) * dtype.itemsize
        scale = data[:head].clone().view(dtype)
        work = dtype if dtype == torch.float64 else torch.float32
        rows = self._rows(data[head:].clone().view(torch.float16).to(work))
        return rows.div_(_TOP).mul_(scale.to(work)[:, None]).view(-1)[:n].to(dtype)

    def _rows(self, values: Tensor) -> Tensor:
        work = values if values.dtype == torch.float64 else values.float()
        return torch.nn.functional.pad(work, (0, -values.numel() % self.bucket)).view(-1, self.bucket)

    def _buckets(self, n: int) -> int:
        return -(-n // self.bucket)
