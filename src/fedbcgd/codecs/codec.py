"""What a codec is: floats to bytes and back. Both ends know all lengths from the layout: nothing repeats them."""

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedbcgd.parts import Part


class Codec(Part):
    lossless: ClassVar[bool] = False

    def nbytes(self, n: int, dtype: torch.dtype) -> int:
        """The length of `n` encoded values."""
        raise NotImplementedError

    def encode(self, values: Tensor, rng: np.random.Generator) -> Tensor:
        """The values as a uint8 tensor. May reuse the memory of `values`."""
        raise NotImplementedError

    def decode(self, data: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        """The `n` values in `data`, whose length was checked. What is not finite shows as NaN or infinity."""
        raise NotImplementedError
