"""What every codec must do, and what each promises."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedbcgd.algorithms.codecs import CODECS, QSGD, Half, Plain, TopK
from fedbcgd.algorithms.registry import make_algorithm
from fedbcgd.core.parts import build
from fedbcgd.errors import UserError
from fedbcgd.rng import stream

F32 = torch.finfo(torch.float32)
ALL = [
    Plain(),
    QSGD(),
    QSGD(levels=1, bucket=3),
    QSGD(levels=7, bucket=64, scale="l2"),
    QSGD(levels=3),
    QSGD(levels=999),
    Half(),
    Half(bucket=3),
    TopK(fraction=0.3),
    TopK(fraction=0.01),
    TopK(fraction=1),
]
GRIDS = [codec for codec in ALL if isinstance(codec, QSGD)]

special = st.sampled_from([0.0, -0.0, 1e-45, -1e-45, F32.tiny, F32.max, -F32.max, 1.0, -1.0])
values = st.lists(st.one_of(special, st.floats(width=32, allow_nan=False, allow_infinity=False)), max_size=40)


def through(codec, v, seed=0):
    data = codec.encode(v.clone(), stream(seed, "test"))
    assert data.dtype == torch.uint8
    assert codec.fits(data.numel(), v.numel(), v.dtype)
    assert data.numel() <= codec.nbytes(v.numel(), v.dtype)
    out = codec.decode(data, v.numel(), v.dtype)
    assert out.shape == v.shape
    assert out.dtype == v.dtype
    return out


@pytest.mark.parametrize("codec", ALL, ids=repr)
@given(values=values, dtype=st.sampled_from([torch.float32, torch.float64]), seed=st.integers(0, 5))
def test_decoded_values_are_finite_and_near(codec, values, dtype, seed):
    """Empty, single, denormal, huge, constant and negative-zero input among them."""
    v = torch.tensor(values, dtype=dtype)
    out = through(codec, v, seed)
    assert out.isfinite().all()
    if codec.lossless:
        assert torch.equal(out.view(torch.uint8), v.view(torch.uint8))
    elif isinstance(codec, TopK):
        check_topk(codec, v, out)
    elif isinstance(codec, Half):
        check_half(codec, v, out)
    else:
        check_grid(codec, v, out)


def check_topk(codec, v, out):
    """What is sent is exact, is k values, and none that is left out is larger."""
    sent = out != 0
    assert torch.equal(out[sent], v[sent])
    assert sent.sum() <= codec.count(len(v))
    left = v[~sent].float().abs()
    if left.numel() and left.max() > 0:
        assert sent.sum() == codec.count(len(v))
        assert left.max() <= v[sent].float().abs().min()


def check_half(codec, v, out):
    """Eleven bits of each value, or 2^-40 of the largest in its bucket."""
    for at in range(0, len(v), codec.bucket):
        piece, got = v[at : at + codec.bucket].double(), out[at : at + codec.bucket].double()
        assert ((got - piece).abs() <= piece.abs() * 2**-10 + piece.abs().max() * 2**-38 + 3e-45).all()


def check_grid(codec, v, out):
    for at in range(0, len(v), codec.bucket):
        piece, got = v[at : at + codec.bucket].double(), out[at : at + codec.bucket].double()
        largest = float(piece.abs().max())
        # the largest value for `max`, at most √b times as much for `l2`; the last term is a denormal's own grid
        scale = largest * (1 if codec.scale == "max" else math.sqrt(len(piece)))
        assert (got - piece).abs().max() <= scale / codec.levels * (1 + 1e-5) + 2e-45
        assert (got * piece >= 0).all()  # never the other sign


@pytest.mark.parametrize("codec", ALL, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_models(codec, dtype):
    """To one level of the grid, and exactly at its ends."""
    v = torch.tensor([0.5, -3.0, 0.0, 1000.0, -0.25], dtype=dtype)
    out = through(codec, v)
    if codec.lossless:
        assert torch.equal(out, v)
        return
    if not isinstance(codec, QSGD):
        assert out[3] == v[3]  # the largest
        return
    grid = 1001 / codec.levels
    assert (out[:3].float() - v[:3].float()).abs().max() <= grid + 4  # 4: bfloat16's own grid at 1000
    assert out[3] == v[3]


@pytest.mark.parametrize("codec", ALL, ids=repr)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so(codec, bad):
    """The server can only refuse what it can see."""
    assert not through(codec, torch.tensor([1.0, bad, 2.0])).isfinite().all()


@pytest.mark.parametrize("codec", GRIDS, ids=repr)
def test_values_on_the_grid_are_exact(codec):
    """±l/s of the scale for every level l, whatever is drawn."""
    # with l2 the norm is 2 and the only levels are 0 and s
    v = torch.tensor([0.0, 0.0, -2.0] if codec.scale == "l2" else [-2.0, 2.0, 0.0])
    for seed in range(20):
        assert torch.equal(through(codec, v, seed), v)


def test_the_same_draw_gives_the_same_bytes():
    v = torch.linspace(-1, 1, 1000)
    assert torch.equal(QSGD().encode(v, stream(1, "x")), QSGD().encode(v, stream(1, "x")))
    assert not torch.equal(QSGD().encode(v, stream(1, "x")), QSGD().encode(v, stream(2, "x")))


@pytest.mark.parametrize(("levels", "bits"), [(1, 2), (3, 3), (7, 4), (8, 5), (127, 8), (128, 9), (32767, 16)])
def test_bits_and_bytes(levels, bits):
    """1000 values in buckets of 512: two scales of 4 bytes, and 1000 codes."""
    codec = QSGD(levels=levels)
    assert codec.bits == bits
    assert codec.nbytes(1000, torch.float32) == 8 + math.ceil(1000 * bits / 8)


def test_qsgd_by_hand():
    """s = 2, one bucket (4, -1, 0), scale 4: |v|/4·2 = 2, 0.5, 0. The draws decide the second: 0 or −1 level, i.e. 0 or
    −2. Codes are level + 2 in 3 bits: 4, 2 or 1, 2."""
    codec = QSGD(levels=2, bucket=3)
    seen = set()
    for seed in range(30):
        data = codec.encode(torch.tensor([4.0, -1.0, 0.0]), stream(seed, "x"))
        assert data[:4].view(torch.float32).item() == 4.0
        code = int(data[4]) | int(data[5]) << 8
        assert code & 7 == 4
        assert code >> 6 == 2
        seen.add((code >> 3 & 7, *codec.decode(data, 3, torch.float32).tolist()))
    assert seen == {(2, 4.0, 0.0, 0.0), (1, 4.0, -2.0, 0.0)}


@pytest.mark.parametrize("scale", ["max", "l2"])
@pytest.mark.parametrize("levels", [1, 4, 127])
def test_qsgd_is_unbiased_and_within_its_variance_bound(scale, levels):
    """Over R draws the mean of every coordinate is within 5 standard errors (a false alarm: 1 in 30,000 for all 64),
    where the exact standard deviation comes from p(1−p) of the rounding; and the exact mean square error, which the
    sample must match, obeys E‖Q(v) − v‖² ≤ min(b/s², √b/s)·‖v‖²."""
    n, draws = 64, 4000
    v = torch.from_numpy(np.random.default_rng(3).normal(size=n).astype(np.float32))
    codec = QSGD(levels=levels, bucket=n, scale=scale)
    rng = stream(11, "unbiased")
    samples = torch.stack([codec.decode(codec.encode(v.clone(), rng), n, v.dtype) for _ in range(draws)]).double()
    unit = float(v.abs().max() if scale == "max" else v.norm()) / levels
    level = v.double().abs() / unit
    p = level - level.floor()
    variance = unit**2 * p * (1 - p)
    error = (samples.mean(0) - v.double()).abs()
    assert (error <= 5 * (variance / draws).sqrt() + 1e-6 * unit).all()
    mse = float((samples - v.double()).square().sum(1).mean())
    exact = float(variance.sum())
    spread = float((samples - v.double()).square().sum(1).std()) / math.sqrt(draws)
    assert abs(mse - exact) <= 5 * spread
    bound = min(n / levels**2, math.sqrt(n) / levels) * float(v.double().square().sum())
    assert exact <= bound


def test_l2_of_huge_values_does_not_overflow():
    v = torch.full((512,), F32.max)
    assert through(QSGD(scale="l2"), v).isfinite().all()


@pytest.mark.parametrize(
    ("options", "word"), [({"levels": 0}, "levels"), ({"bucket": 0}, "bucket"), ({"scale": "l1"}, "l2")]
)
def test_options_are_checked(options, word):
    with pytest.raises(UserError, match=word):
        build(QSGD, options)


def test_codecs_are_registered():
    assert {"plain", "qsgd"} <= set(CODECS)


def test_plain_decodes_a_misaligned_view():
    data = torch.cat([torch.zeros(1, dtype=torch.uint8), torch.tensor([1.5, 2.5]).view(torch.uint8)])[1:]
    assert Plain().decode(data, 2, torch.float32).tolist() == [1.5, 2.5]


@given(n=st.integers(1, 3000), share=st.sampled_from([0.001, 0.01, 0.1, 0.3, 0.9]), seed=st.integers(0, 2**31))
def test_topk_of_any_length_and_share(n, share, seed):
    codec = TopK(fraction=share)
    v = torch.randn(n, generator=torch.Generator().manual_seed(seed))
    check_topk(codec, v, through(codec, v))


def test_topk_places_cost_little():
    """1 % of a million values at random places: a place has log2(100) + log2(e) = 8.1 bits of entropy; Rice code is within
    4 % of it, where plain indices would take 32 and a bitmap 100 bits."""
    n = 1_000_000
    codec = TopK(fraction=0.01)
    data = codec.encode(torch.randn(n, generator=torch.Generator().manual_seed(0)), stream(0, "x"))
    places = data.numel() - 1 - 4 * 10_000
    assert 8 * places / 10_000 < 8.1 * 1.04


def test_topk_takes_a_bitmap_where_that_is_shorter():
    data = TopK(fraction=0.9).encode(torch.arange(1.0, 81.0), stream(0, "x"))
    assert data[0] == 255
    assert data.numel() == 1 + 72 * 4 + 10


@pytest.mark.parametrize(
    "spoil",
    [
        lambda d: d.__setitem__(0, 3),  # another parameter
        lambda d: d.__setitem__(0, 255),  # a bitmap that is none
        lambda d: d[-3:].fill_(0),  # too few places
        lambda d: d[-30:].fill_(255),  # too many
    ],
)
def test_bytes_that_no_encoder_wrote_are_refused(spoil):
    codec = TopK(fraction=0.02)
    data = codec.encode(torch.randn(5000, generator=torch.Generator().manual_seed(0)), stream(0, "x"))
    spoil(data)
    with pytest.raises(ValueError, match="indices: expected"):
        codec.decode(data, 5000, torch.float32)


LONG = [
    QSGD(),
    QSGD(levels=7),
    QSGD(levels=3, bucket=128),
    QSGD(levels=1, bucket=64),
    QSGD(scale="l2"),
    QSGD(bucket=4096),
]


@pytest.mark.parametrize("codec", LONG, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_vectors_are_near_and_unbiased(codec, dtype):
    """They take another way: same grid, same bytes; mean and variance of a sum are those of independent draws."""
    n = 600_001  # a tail of less than a bucket
    v = torch.randn(n, generator=torch.Generator().manual_seed(0)).to(dtype)
    v[1000:6000] = 0
    data = codec.encode(v.clone(), stream(0, "x"))
    assert data.numel() == codec.nbytes(n, dtype)
    out = codec.decode(data, n, dtype)
    rows = torch.nn.functional.pad(v.float(), (0, -n % codec.bucket)).view(-1, codec.bucket)
    scale = rows.abs().amax(1) if codec.scale == "max" else torch.linalg.vector_norm(rows, dim=1)
    grid = (scale / codec.levels).repeat_interleave(codec.bucket)[:n]
    slack = 1e-5 if dtype == torch.float32 else 0.02
    error = out.float() - v.float()
    assert (error.abs() <= grid * (1 + slack) + v.float().abs() * slack).all()
    assert (out[1000:6000] == 0).all()
    if dtype == torch.float32:
        # each error has mean 0 and at most a quarter of the grid squared as variance
        assert error.sum().abs() <= 5 * (grid.square().sum() / 4).sqrt()


def test_draws_of_long_vectors_do_not_lean():
    """All values the same, halfway between two levels: the count of those rounded up varies as if drawn one by one."""
    n, codec = 1 << 19, QSGD(levels=1, bucket=512)
    v = torch.full((n,), 0.5)
    v[::512] = 1.0  # the scale of each bucket
    ups = []
    for seed in range(60):
        out = codec.decode(codec.encode(v.clone(), stream(seed, "x")), n, torch.float32)
        ups.append(float((out == 1).sum()) - n / 512)
    count = n - n // 512
    assert abs(np.mean(ups) - count / 2) <= 5 * math.sqrt(count / 4 / 60)
    assert 0.4 <= np.var(ups) / (count / 4) <= 2.0


def test_odd_buckets_of_long_vectors():
    """NaN, infinity, denormals and zeros among ordinary values: told, exact, and nobody else's."""
    v = torch.randn(1 << 19, generator=torch.Generator().manual_seed(0))
    clean = QSGD().decode(QSGD().encode(v.clone(), stream(0, "x")), len(v), v.dtype)
    v[512 * 3] = math.nan
    v[512 * 5 + 1] = -math.inf
    v[512 * 7 : 512 * 8] = 0
    v[512 * 9 : 512 * 10] = 1e-44
    out = QSGD().decode(QSGD().encode(v.clone(), stream(0, "x")), len(v), v.dtype)
    rows, known = out.view(-1, 512), clean.view(-1, 512)
    assert not rows[3].isfinite().all()
    assert not rows[5].isfinite().all()
    assert (rows[7] == 0).all()
    assert (rows[9] == torch.tensor(1e-44)).all()
    others = [k for k in range(1024) if k not in (3, 5, 7, 9)]
    assert torch.equal(rows[others], known[others])


@pytest.mark.parametrize("fraction", [0.001, 0.05, 0.5, 0.99])
@pytest.mark.parametrize("kind", ["normal", "equal", "sorted", "sparse", "nan"])
def test_long_vectors_have_their_largest_values_found(fraction, kind):
    """By way of a sample, where the sample is good, bad or misleading."""
    n = 200_000
    v = torch.randn(n, generator=torch.Generator().manual_seed(1))
    if kind == "equal":
        v = torch.ones(n)
    elif kind == "sorted":
        v = v.sort().values
    elif kind == "sparse":
        v *= torch.rand(n, generator=torch.Generator().manual_seed(2)) < 0.01
    elif kind == "nan":
        v[[5, 77]] = math.nan
    codec = TopK(fraction=fraction)
    out = through(codec, v)
    if kind == "nan":
        assert out[[5, 77]].isnan().all()
        return
    check_topk(codec, v, out)
    if kind in ("normal", "sorted", "equal"):
        assert (out != 0).sum() == codec.count(n)


@pytest.mark.parametrize("name", ["fedbcgd", "scaffold"])
def test_the_ledger_counts_the_values_that_top_k_sends(federation, net, toys, name):
    """A tenth of each slice and channel, rounded up; and with any other codec all of them."""
    for codec, share in ((TopK(fraction=0.1), 0.1), (QSGD(), 1.0)):
        f = federation(make_algorithm(name, codec=codec, local_steps=1), net(), toys(), cohort=6)
        tasks = f.server.plan().tasks
        f.round()
        slices = [s for task in tasks for s in f.layout.slices(task.block)]
        sent = sum(math.ceil(share * (s.stop - s.start)) for s in slices)
        assert f.server.ledger.upload_floats == sent * len(f.server.algorithm.local.channels)
