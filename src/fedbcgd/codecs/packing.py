"""Unsigned integers of any number of bits, packed without gaps into bytes (lowest bit first)."""

import numpy as np
import torch
from torch import Tensor

_CHUNK = 1 << 20  # values spread into single bits at a time; a multiple of 8, so that chunks end on whole bytes


def packed_bytes(n: int, bits: int) -> int:
    return (n * bits + 7) // 8


def pack(codes: Tensor, bits: int) -> Tensor:
    """`codes` (non-negative, below 2^bits) as bytes."""
    if bits == 8:
        return codes.to(torch.uint8)
    if bits in (1, 2, 4):  # several whole codes to a byte
        per = 8 // bits
        lanes = torch.nn.functional.pad(codes.to(torch.uint8), (0, -codes.numel() % per)).view(-1, per)
        out = lanes[:, 0].clone()
        for k in range(1, per):
            out |= lanes[:, k] << (k * bits)
        return out
    values = codes.cpu().numpy().astype(np.int64)
    shifts = np.arange(bits, dtype=values.dtype)
    pieces = [
        np.packbits((values[at : at + _CHUNK, None] >> shifts & 1).astype(np.uint8), bitorder="little")
        for at in range(0, len(values), _CHUNK)
    ]
    return torch.from_numpy(np.concatenate([np.empty(0, np.uint8), *pieces])).to(codes.device)


def unpack(data: Tensor, n: int, bits: int) -> Tensor:
    """The `n` codes in `data`."""
    if bits == 8:
        return data[:n]
    if bits in (1, 2, 4):
        lanes = [(data >> (k * bits)) & ((1 << bits) - 1) for k in range(8 // bits)]
        return torch.stack(lanes, 1).flatten()[:n]
    raw = data.cpu().numpy()
    weights = (1 << np.arange(bits)).astype(np.int32)
    pieces = []
    for at in range(0, n, _CHUNK):
        count = min(_CHUNK, n - at)
        piece = raw[at * bits // 8 : at * bits // 8 + packed_bytes(count, bits)]
        pieces.append(np.unpackbits(piece, count=count * bits, bitorder="little").reshape(-1, bits) @ weights)
    return torch.from_numpy(np.concatenate([np.empty(0, np.int32), *pieces])).to(data.device)
