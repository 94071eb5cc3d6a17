"""What a codec is: floats to bytes and back. Both ends know all lengths from the layout: nothing repeats them."""

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedbcgd.core.messages import Allocator
from fedbcgd.core.parts import Part


class Codec(Part):
    lossless: ClassVar[bool] = False
    in_place: ClassVar[bool] = False  # whether what is encoded is the memory of the values itself
    residual: ClassVar[bool] = False  # whether a client keeps what was not sent and adds it next time

    def nbytes(self, n: int, dtype: torch.dtype) -> int:
        """The length of `n` encoded values; the largest possible, where it varies."""
        raise NotImplementedError

    def floats(self, n: int) -> int:
        """How many of `n` values are sent."""
        return n

    def fits(self, nbytes: int, n: int, dtype: torch.dtype) -> bool:
        """Whether `n` values can have been encoded in so many bytes."""
        return nbytes == self.nbytes(n, dtype)

    def encode(self, values: Tensor, rng: np.random.Generator, allocate: Allocator | None = None) -> Tensor:
        """The values as a uint8 tensor: in memory that was lent, if any was. May reuse the memory of `values`."""
        raise NotImplementedError

    def decode(self, data: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        """The `n` values in `data`, whose length was checked. What is not finite shows as NaN or infinity; what cannot
        have been encoded is a ValueError."""
        raise NotImplementedError


def room(nbytes: int, allocate: Allocator | None, device: torch.device) -> Tensor:
    """Where to write so many bytes."""
    return allocate(nbytes) if allocate else torch.empty(nbytes, dtype=torch.uint8, device=device)
