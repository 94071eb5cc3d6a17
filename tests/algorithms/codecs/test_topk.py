"""Top-k: the definition by hand, and the fast selection and the encoding of indices held to the same bytes."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbcgd.algorithms.codecs import TopK, topk
from fedbcgd.algorithms.codecs._fast_topk import fast_largest
from fedbcgd.algorithms.codecs.indices import BITMAP, decode_indices, encode_indices, rice_parameter
from fedbcgd.algorithms.codecs.topk import largest
from fedbcgd.rng import stream

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
special = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 1e-45, -1e-45, 1e300, math.inf, -math.inf, math.nan, -math.nan])
values = st.lists(st.one_of(special, st.floats(width=32)), max_size=60)


def encode_by_definition(codec, v):
    """The bytes of `encode` with the selection of the definition."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topk, "fast_largest", largest)
        return codec.encode(v, stream(0, "x"))


def check_same(codec, v):
    k = codec.count(len(v))
    assert fast_largest(v, k).tolist() == largest(v, k).tolist()
    assert torch.equal(codec.encode(v, stream(0, "x")), encode_by_definition(codec, v))


@given(values=values, dtype=st.sampled_from(DTYPES), fraction=st.sampled_from([0.01, 0.1, 0.3, 0.5, 0.9, 1.0]))
def test_the_fast_selection_gives_the_bytes_of_the_definition(values, dtype, fraction):
    """Empty vectors, ties, both zeros, NaN, infinities and values beyond float32 among them; 1.0 is k = n."""
    check_same(TopK(fraction=fraction), torch.tensor(values, dtype=torch.float64).to(dtype))


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    length=st.integers(1 << 17, 300_000),
    fraction=st.sampled_from([1e-5, 0.001, 0.05, 0.5, 0.99, 1.0]),
    kind=st.sampled_from(["normal", "few values", "equal", "sorted", "sparse", "not finite", "misleading sample"]),
    dtype=st.sampled_from(DTYPES),
)
def test_long_vectors_give_the_bytes_of_the_definition(seed, length, fraction, kind, dtype):
    """They are bounded by a sample first; it may be good, bad or misleading."""
    rng = np.random.default_rng(seed)
    v = rng.normal(size=length)
    if kind == "few values":
        v = rng.integers(-3, 4, length).astype(float)
    elif kind == "equal":
        v[:] = -0.5
    elif kind == "sorted":
        v.sort()
    elif kind == "sparse":
        v *= rng.random(length) < 0.01
    elif kind == "not finite":
        v[rng.integers(0, length, 50)] = rng.choice([math.nan, math.inf, -math.inf], 50)
    elif kind == "misleading sample":
        v[::8] = 1000  # the sample is every eighth value
    check_same(TopK(fraction=fraction), torch.from_numpy(v).to(dtype))


def test_the_definition_by_hand():
    """Of magnitudes 1, 3, 3, 0, 3, 2 the three largest are the 3s; of four, the first 2 joins; of two, the first two 3s."""
    v = torch.tensor([1.0, -3.0, 3.0, 0.0, -3.0, 2.0])
    assert largest(v, 3).tolist() == [1, 2, 4]
    assert largest(v, 4).tolist() == [1, 2, 4, 5]
    assert largest(v, 2).tolist() == [1, 2]
    assert largest(v, 0).tolist() == []
    assert largest(v, 6).tolist() == [0, 1, 2, 3, 4, 5]
    assert largest(torch.tensor([math.inf, 5.0, math.nan]), 1).tolist() == [2]
    assert largest(torch.tensor([1e300, 1e301], dtype=torch.float64), 1).tolist() == [0]  # both infinity in float32


def rice_by_definition(gaps, b):
    """The b low bits of each gap, lowest first, filled up to a byte; then each high part as zeros and a one."""
    low = [gap >> bit & 1 for gap in gaps for bit in range(b)]
    unary = [bit for gap in gaps for bit in [0] * (gap >> b) + [1]]
    return np.concatenate([np.packbits(np.array(bits, np.uint8), bitorder="little") for bits in (low, unary)])


@given(n=st.integers(0, 400), share=st.floats(0, 1), seed=st.integers(0, 2**31))
def test_indices_are_written_as_rice_code_or_a_bitmap(n, share, seed):
    rng = np.random.default_rng(seed)
    indices = np.flatnonzero(rng.random(n) < share)
    bitmap = np.zeros(n, np.uint8)
    bitmap[indices] = 1
    b = rice_parameter(n, len(indices))
    rice = rice_by_definition([int(gap) for gap in np.diff(indices, prepend=-1) - 1], b)
    bitmap_bytes = np.packbits(bitmap, bitorder="little")
    encoding, data = encode_indices(indices, n)
    shorter = len(indices) > 0 and len(rice) < len(bitmap_bytes)
    assert (encoding, data.tolist()) == ((b, rice.tolist()) if shorter else (BITMAP, bitmap_bytes.tolist()))
    assert decode_indices(encoding, data, n, len(indices)).tolist() == indices.tolist()


def test_bytes_by_hand():
    """20 values of which 2 are sent: −7 at 2 and 5 at 17. Gaps 2 and 14; b = floor(log2(ln 2·10)) = 2. Low bits 2 and 2
    (01 01, lowest first: 0b1010), high parts 0 and 3: 1 0001, lowest first 0b10001. A bitmap would take 3 bytes, not 2."""
    v = torch.zeros(20)
    v[2], v[17] = -7, 5
    data = TopK(fraction=0.1).encode(v, stream(0, "x"))
    assert data.tolist() == [2, *torch.tensor([-7.0, 5.0]).view(torch.uint8).tolist(), 0b1010, 0b10001]
