"""Plain: the values as they are, in the model's own dtype."""

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedbcgd.core.codec import Codec, allocate_bytes
from fedbcgd.core.messages import Allocator


class Plain(Codec):
    """No compression: the bytes are the memory of the values."""

    lossless: ClassVar[bool] = True
    in_place: ClassVar[bool] = True

    def nbytes(self, n: int, dtype: torch.dtype) -> int:
        return n * dtype.itemsize

    def encode(self, values: Tensor, rng: np.random.Generator, allocate: Allocator = allocate_bytes) -> Tensor:
        return values.contiguous().view(torch.uint8)

    def decode(self, data: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        if data.storage_offset() % dtype.itemsize:
            data = data.clone()  # floats must be aligned
        return data.view(dtype)
