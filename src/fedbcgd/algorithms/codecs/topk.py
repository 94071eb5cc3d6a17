"""Top-k: send the k values of largest magnitude and their indices. The client keeps the rest and adds it to its next
upload (error feedback).

On the wire: a byte that names the encoding of the indices, the k values in the model's dtype, and the encoded indices
(`indices.py`).
"""

from typing import ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedbcgd.algorithms.codecs._fast_topk import fast_largest
from fedbcgd.algorithms.codecs.indices import decode_indices, encode_indices, max_index_bytes
from fedbcgd.core.codec import Codec, allocate_bytes
from fedbcgd.core.messages import Allocator


class TopK(Codec):
    """Send the largest values with their indices (Aji and Heafield 2017)."""

    residual: ClassVar[bool] = True

    fraction: float = Field(0.05, gt=0, le=1, description="share of the values that is sent: k = ceil(fraction·n)")

    def count(self, n: int) -> int:
        """Return k, the number of values sent of a slice of n."""
        return min(n, int(np.ceil(self.fraction * n)))

    def floats(self, n: int) -> int:
        return self.count(n)

    def nbytes(self, n: int, dtype: torch.dtype) -> int:
        return self._head(n, dtype) + max_index_bytes(n)

    def fits(self, nbytes: int, n: int, dtype: torch.dtype) -> bool:
        return self._head(n, dtype) <= nbytes <= self.nbytes(n, dtype)

    def encode(self, values: Tensor, rng: np.random.Generator, allocate: Allocator = allocate_bytes) -> Tensor:
        n = values.numel()
        indices = fast_largest(values, self.count(n))  # the same indices as `largest`
        encoding, index_bytes = encode_indices(indices, n)
        sent = values.index_select(0, torch.from_numpy(indices).to(values.device)).view(torch.uint8)
        head = 1 + len(sent)
        out = allocate(head + len(index_bytes))
        out[0] = encoding
        out[1:head] = sent
        out[head:] = torch.from_numpy(index_bytes)
        return out

    def decode(self, data: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        raw, head = data.cpu(), self._head(n, dtype)
        indices = decode_indices(int(raw[0]), raw[head:].numpy(), n, self.count(n))
        out = torch.zeros(n, dtype=dtype)
        out[torch.from_numpy(indices)] = raw[1:head].clone().view(dtype)
        return out.to(data.device)

    def _head(self, n: int, dtype: torch.dtype) -> int:
        """Return the bytes before the encoded indices."""
        return 1 + self.count(n) * dtype.itemsize


def largest(values: Tensor, k: int) -> np.ndarray:
    """Return the indices of the k values of largest magnitude, in ascending order; this is the definition.

    Magnitudes are compared as float32. Of equal ones those with the lower index come first. NaN is larger than infinity:
    it is always sent, so that the server can refuse it.
    """
    bits = values.cpu().float().numpy().view(np.int32)
    magnitude = bits & 0x7FFFFFFF  # without the sign bit floats have the order of their bits, with NaN at the end
    return np.sort(np.argsort(-magnitude, kind="stable")[:k])
