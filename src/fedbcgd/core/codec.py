"""What a codec does: it writes floats as bytes, and reads them back. Both ends know all lengths from the layout."""

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedbcgd.core.messages import Allocator
from fedbcgd.core.parts import Part


def allocate_bytes(nbytes: int) -> Tensor:
    """Return new memory of this size: for uploads that no backend has memory for."""
    return torch.empty(nbytes, dtype=torch.uint8)


class Codec(Part):
    """Base of codecs. The fields of a subclass are its options."""

    lossless: ClassVar[bool] = False  # whether decoded values have the bits of those that were encoded; for tests
    in_place: ClassVar[bool] = False  # whether encoding copies nothing: the bytes are the values' own memory
    residual: ClassVar[bool] = False  # whether a client keeps what was not sent and adds it to its next upload

    def nbytes(self, n: int, dtype: torch.dtype) -> int:
        """Return how many bytes `n` encoded values take; the most possible if that varies."""
        raise NotImplementedError

    def floats(self, n: int) -> int:
        """Return how many of `n` values are sent."""
        return n

    def fits(self, nbytes: int, n: int, dtype: torch.dtype) -> bool:
        """Return whether `n` values can have been encoded in this many bytes."""
        return nbytes == self.nbytes(n, dtype)

    def encode(self, values: Tensor, rng: np.random.Generator, allocate: Allocator = allocate_bytes) -> Tensor:
        """Write the values as bytes.

        Args:
            values: a flat tensor. Its memory may be reused.
            rng: for codecs that draw at random.
            allocate: returns memory for the result, as a uint8 tensor of the size it is called with.

        Returns:
            A uint8 tensor.
        """
        raise NotImplementedError

    def decode(self, data: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        """Read the values back.

        Args:
            data: a uint8 tensor of a length that `fits`.
            n: the number of values.
            dtype: their type.

        Returns:
            The values. One that was NaN or infinite when it was encoded must not become finite: the server refuses it.

        Raises:
            ValueError: no encoder writes these bytes.
        """
        raise NotImplementedError
