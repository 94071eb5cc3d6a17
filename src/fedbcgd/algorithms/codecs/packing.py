"""Values in buckets, and unsigned integers of any number of bits, packed without gaps into bytes (lowest bit first)."""

import numpy as np
import torch
from torch import Tensor

_CHUNK = 1 << 20  # values spread into single bits at a time; a multiple of 8, so that chunks end on whole bytes


def in_buckets(values: Tensor, bucket: int) -> Tensor:
    """Return a row for each bucket of this size, the last one filled up with zeros; as float32 at least."""
    work = values if values.dtype == torch.float64 else values.float()
    rest = -len(values) % bucket
    return (torch.nn.functional.pad(work, (0, rest)) if rest else work).view(-1, bucket)


def packed_bytes(n: int, bits: int) -> int:
    """Return the length of n packed integers."""
    return (n * bits + 7) // 8


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack integers from 0 to 2^bits − 1 into bytes."""
    if bits == 8:
        return codes.to(torch.uint8)
    if bits < 8:
        return _pack_words(codes.to(torch.uint8), bits)
    values = codes.cpu().numpy().astype(np.int64)
    shifts = np.arange(bits, dtype=values.dtype)
    pieces = [
        np.packbits((values[at : at + _CHUNK, None] >> shifts & 1).astype(np.uint8), bitorder="little")
        for at in range(0, len(values), _CHUNK)
    ]
    return torch.from_numpy(np.concatenate([np.empty(0, np.uint8), *pieces])).to(codes.device)


def unpack(data: Tensor, n: int, bits: int) -> Tensor:
    """Return the n integers that were packed."""
    if bits == 8:
        return data[:n]
    if bits < 8:
        return _unpack_words(data, n, bits)
    raw = data.cpu().numpy()
    weights = (1 << np.arange(bits)).astype(np.int32)
    pieces = []
    for at in range(0, n, _CHUNK):
        count = min(_CHUNK, n - at)
        piece = raw[at * bits // 8 : at * bits // 8 + packed_bytes(count, bits)]
        pieces.append(np.unpackbits(piece, count=count * bits, bitorder="little").reshape(-1, bits) @ weights)
    return torch.from_numpy(np.concatenate([np.empty(0, np.int32), *pieces])).to(data.device)


# Eight codes of up to 8 bits are the bytes of one 64-bit word. Shifts close the gaps between neighbours, then between
# pairs, then between fours; the word's lowest `bits` bytes are then the eight codes without gaps. (The lowest byte is
# the first one in memory on every machine that PyTorch runs on.)


def _pack_words(codes: Tensor, bits: int) -> Tensor:
    n = codes.numel()
    if not n:
        return codes
    word = torch.nn.functional.pad(codes, (0, -n % 8)).view(torch.int64)
    for lane, low in _lanes():
        word = (word & low) | ((word >> lane & low) << lane * bits // 8)
    return word.view(torch.uint8).view(-1, 8)[:, :bits].reshape(-1)[: packed_bytes(n, bits)]


def _unpack_words(data: Tensor, n: int, bits: int) -> Tensor:
    if not n:
        return data[:0]
    words = -(-n // 8)
    rows = torch.zeros(words, 8, dtype=torch.uint8, device=data.device)
    rows[:, :bits] = torch.nn.functional.pad(data, (0, words * bits - data.numel())).view(words, bits)
    word = rows.view(-1).view(torch.int64)
    for lane, _ in reversed(_lanes()):
        low = (1 << lane * bits // 8) - 1
        low = sum(low << at for at in range(0, 64, 2 * lane))
        word = (word & low) | ((word >> lane * bits // 8 & low) << lane)
    return word.view(torch.uint8)[:n]


def _lanes() -> list[tuple[int, int]]:
    """Return, for each of the three steps, the width of a lane in bits and a mask of the lower lane of each pair."""
    return [(8, 0x00FF00FF00FF00FF), (16, 0x0000FFFF0000FFFF), (32, 0x00000000FFFFFFFF)]
