import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedbcgd.algorithms.codecs import packing


@given(st.integers(1, 16), st.integers(0, 70), st.integers(0, 2**32 - 1))
def test_unpack_undoes_pack(bits, n, seed):
    codes = torch.from_numpy(np.random.default_rng(seed).integers(0, 2**bits, n, dtype=np.int32))
    packed = packing.pack(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.numel() == packing.packed_bytes(n, bits)
    assert torch.equal(packing.unpack(packed, n, bits).int(), codes)


def test_by_hand():
    """3-bit codes 1, 2, 7, lowest bit first: 100 010 111 → bits 0–7 are 1,0,0,0,1,0,1,1 = 0xD1; bit 8 is 1."""
    assert packing.pack(torch.tensor([1, 2, 7], dtype=torch.uint8), 3).tolist() == [0b11010001, 0b1]
    """4-bit codes 1, 2, 3: two to a byte, the first in the low half."""
    assert packing.pack(torch.tensor([1, 2, 3], dtype=torch.uint8), 4).tolist() == [0x21, 0x03]


@pytest.mark.parametrize("bits", [3, 5, 9])
def test_more_than_one_chunk(bits, monkeypatch):
    monkeypatch.setattr(packing, "_CHUNK", 16)
    codes = torch.arange(37, dtype=torch.int32) % (1 << bits)
    assert torch.equal(packing.unpack(packing.pack(codes, bits), 37, bits).int(), codes)
