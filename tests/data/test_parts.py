"""Clients that share a data set, and data that stays on a device."""

import io

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Subset, TensorDataset

from fedbcgd import UserError, make_algorithm, simulate
from fedbcgd.backends.workers.shared import _MemoryPickler
from fedbcgd.core.objective import objective
from fedbcgd.core.vector import FlatModel
from fedbcgd.core.work import GradientMemory, Minibatch, Work
from fedbcgd.data import sources
from fedbcgd.data.images import Images, crop_and_flip, crop_and_flip_on_device
from fedbcgd.data.sources import (
    ClientSubsets,
    Items,
    Pooled,
    Tensors,
    as_source,
    batch_in_channels_last,
    in_channels_last,
    on_device,
    pooled,
    split,
)
from fedbcgd.engine.assemble import make_job
from fedbcgd.engine.evaluation import evaluate_span
from fedbcgd.models import LeNet5, Logistic
from fedbcgd.rng import stream

META = torch.device("meta")  # has shapes and no values: whoever looks at one on the host fails


def images(count=50, channels=1, side=8, **options):
    draw = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (count, channels, side, side), generator=draw, dtype=torch.uint8)
    labels = torch.randint(0, 10, (count,), generator=draw)
    return Images(pixels, labels, torch.full((channels,), 0.4), torch.full((channels,), 0.3), **options)


@given(st.lists(st.lists(st.integers(0, 49), min_size=1, max_size=6), min_size=1, max_size=8))
def test_parts_are_the_subsets_one_by_one(rows):
    whole = images()
    parts = split(whole, [np.array(r) for r in rows])
    assert len(parts) == len(rows)
    assert [parts.size(k) for k in range(len(rows))] == [len(r) for r in rows]
    for k, r in enumerate(rows):
        assert parts[k].rows.tolist() == r
        assert len(parts[k]) == len(r)
    assert parts[-1].rows.tolist() == rows[-1]
    assert [p.rows.tolist() for p in parts[:2]] == rows[:2]
    assert [p.rows.tolist() for p in parts] == rows
    with pytest.raises(IndexError):
        parts[len(rows)]


def test_a_client_without_examples_is_named():
    with pytest.raises(UserError, match="client 1: expected at least one example, got none"):
        split(images(), [np.array([1]), np.array([], int), np.array([2])])


def frozen_bytes(job):
    text = io.BytesIO()
    pickler = _MemoryPickler(text)
    pickler.dump(job)
    return pickler.size + len(text.getvalue())


def test_a_hundred_thousand_clients_cost_their_indices():
    """Only row numbers and the end of each client's rows are pickled for a worker."""
    whole, sizes = images(1000), {}
    for clients in (100, 100_000):
        rows = np.arange(clients * 3) % 1000
        job = make_job(
            Logistic(10, (1, 8, 8)), split(whole, np.split(rows, clients)), make_algorithm("fedavg"), None, 0
        )
        sizes[clients] = frozen_bytes(job)
    indices = (100_000 - 100) * (3 + 1) * 8
    assert sizes[100_000] - sizes[100] <= indices + 1000


def test_a_hundred_thousand_clients_train():
    whole = images(1000)
    parts = split(whole, np.split(np.arange(200_000) % 1000, 100_000))
    result = simulate(
        Logistic(10, (1, 8, 8)), parts, "fedbcgd+", rounds=2, cohort=10, workers=0, batch_size=2, test=whole
    )
    assert result.rounds == 2
    assert result.ledger.lost == result.ledger.refused == 0


@given(st.integers(1, 9), st.integers(3, 9), st.integers(1, 4), st.integers(0, 2**31))
def test_augmentation_on_a_device_is_augmentation(count, side, channels, seed):
    draw = np.random.default_rng(seed)
    pixels = draw.integers(0, 256, (count, side, side + 1, channels), dtype=np.uint8)
    here = crop_and_flip(pixels.copy(), stream(seed, "a"))
    there = crop_and_flip_on_device(torch.from_numpy(pixels), stream(seed, "a"))
    assert np.array_equal(here, there.numpy())


@pytest.mark.parametrize("options", [{}, {"augment": True}, {"resize": 12}, {"resize": 12, "crop": 10}])
def test_images_on_a_device_are_gathered_there(options):
    """A batch is gathered without copying pixels to the host."""
    there = split(images(channels=3, **options), [np.arange(20), np.arange(20, 50)]).to(META)
    x, y = there[1].gather(torch.arange(7).to(META), stream(0, "a"))
    assert x.device == y.device == META
    assert x.shape == (7, *there[1].shape)


def test_a_step_on_a_device_stays_there():
    """Data, model and gradients on a device without values: a step that asked for one would fail."""
    module = LeNet5(10, (1, 28, 28))
    algorithm = make_algorithm("fedbcgd", batch_size=4)
    layout = algorithm.uplink.layout(module)
    model = FlatModel(module.to(META), layout)
    data = split(images(20, side=28, augment=True), [np.arange(20)]).to(META)[0]
    x = torch.empty(layout.size, device=META)
    rule = algorithm.local
    work = Work(
        *(
            rule,
            model,
            objective(),
            x,
            {},
            {},
            data,
            0,
            layout.slices(0),
            stream(0, "b"),
            None,
            GradientMemory(model.vector[: layout.dim], layout),
            None,
        )
    )
    rule.train(work)
    assert work.steps == 25
    assert all(batch.rows.device == META for batch in work._epoch(9))
    assert work.gradient(Minibatch(torch.arange(3))).device == META


def test_clients_of_one_data_set_share_it_on_a_device_too():
    whole = images()
    x = torch.randn(6, 2)
    moved = on_device([whole.subset(torch.arange(3)), whole.subset(torch.arange(5)), (x, x), [1, 2]], META)
    assert moved[0].resident is moved[1].resident
    assert moved[0].resident.images.device == META
    assert moved[2].tensors[0].device == META
    assert len(moved[3]) == 2
    lazy = Lazy()
    assert on_device(lazy, META) is lazy


class Lazy:
    def __len__(self):
        return 1

    def __getitem__(self, k):
        return torch.zeros(2, 1), torch.zeros(2)


def test_moving_to_where_it_is_changes_nothing():
    cpu = torch.device("cpu")
    whole = images(augment=True)
    rows = torch.arange(10)
    for source in (
        whole,
        Tensors((torch.randn(20, 2), torch.arange(20))),
        Tensors({"a": torch.randn(20)}, torch.arange(15)),
    ):
        a, b = (s.gather(rows, stream(0, "a")) for s in (source, source.to(cpu)))
        pairs = zip(a.values(), b.values(), strict=True) if isinstance(a, dict) else zip(a, b, strict=True)
        assert all(torch.equal(p, q) for p, q in pairs)


def test_metrics_of_parts_are_those_of_a_list():
    whole = images()
    parts = split(whole, [np.arange(25), np.arange(25, 50)])
    assert isinstance(parts, ClientSubsets)
    model = Logistic(10, (1, 8, 8))
    for k in range(2):
        listed = as_source(list(parts)[k], "client")
        assert evaluate_span(model, objective(), parts[k], 0, 25) == evaluate_span(model, objective(), listed, 0, 25)


def test_images_of_users_are_gathered_in_channels_last():
    """Images are converted once, clients that share a data set still do, and other tensors do not change."""
    x, y = torch.randn(9, 3, 4, 5), torch.arange(9)
    whole = TensorDataset(x, y)
    given = [Subset(whole, [3, 1]), Subset(whole, [0, 8]), {"pixels": x, "other": torch.randn(9, 7)}, Items([1, 2])]
    one, two, mapped, items = in_channels_last(given)
    assert one.like(two)
    for source, rows in ((one, [1, 0]), (two, [1, 1, 0])):
        at = source.rows[torch.tensor(rows)]
        images, labels = source.gather(torch.tensor(rows), stream(0, "a"))
        assert torch.equal(images, x[at])
        assert torch.equal(labels, y[at])
        assert images.is_contiguous(memory_format=torch.channels_last)
    assert mapped.gather(torch.arange(2), stream(0, "a"))["pixels"].is_contiguous(memory_format=torch.channels_last)
    assert mapped.tensors["other"] is given[2]["other"]
    assert items is given[3]
    bytes_ = torch.zeros(2, 3, 4, 5, dtype=torch.uint8)
    assert in_channels_last([(bytes_, y[:2])])[0].tensors[0].stride() == bytes_.stride()


def last(t):
    return t.is_contiguous(memory_format=torch.channels_last) and not t.is_contiguous()


def test_what_looks_into_the_same_tensors():
    x, y = torch.randn(4, 2), torch.arange(4)
    pair = Tensors((x, y))
    assert pair.like(Tensors((x, y), torch.arange(2)))
    assert not pair.like(Tensors((y, x)))
    assert not pair.like(Tensors((x, y.clone())))
    assert not pair.like(Tensors((x,)))
    named = Tensors({"x": x, "y": y})
    assert named.like(Tensors({"x": x, "y": y}, torch.arange(2)))
    assert not named.like(pair)
    assert not pair.like(named)
    assert not named.like(Tensors({"x": x, "z": y}))
    assert not named.like(Tensors({"x": y, "y": x}))


def shared_by_clients():
    """Tuples, data sets and tensors of their own over the same memory."""
    x, y = torch.randn(9, 3, 4, 5), torch.arange(9)
    array = x.numpy(), y.numpy()
    return x, [(x, y), TensorDataset(x, y), array, array, Subset(TensorDataset(x, y), [2, -1]), {"x": x, "y": y}]


@pytest.mark.parametrize("change", [in_channels_last, lambda clients: on_device(clients, META)])
def test_what_clients_share_by_memory_stays_shared(change):
    x, clients = shared_by_clients()
    other = x.clone()
    *same, alone, part = change([*clients, (other, other), (x[:5], x[:5])])
    columns = [[*source.columns()] for source in same]
    assert {id(c[0]) for c in columns} == {id(columns[0][0])}
    assert {id(c[1]) for c in columns} == {id(columns[0][1])}
    assert all(s.like(same[0]) for s in same[:-1])
    assert alone.tensors[0] is alone.tensors[1]
    assert len({id(s.tensors[0]) for s in (same[0], alone, part)}) == 3


def test_images_are_laid_out_unless_that_takes_too_much(monkeypatch):
    """What clients share counts once."""
    x, clients = shared_by_clients()
    parts = split(Tensors((x, torch.arange(9))), [np.arange(4), np.arange(4, 9)])
    monkeypatch.setattr(sources, "MAX_LAID_OUT", x.nbytes)
    assert all(last(next(iter(source.columns()))) for source in in_channels_last(clients))
    assert last(in_channels_last(parts).data.tensors[0])
    monkeypatch.setattr(sources, "MAX_LAID_OUT", x.nbytes - 1)
    assert in_channels_last(clients) is clients
    assert in_channels_last(parts).data.tensors[0] is x
    other = [(x.to(torch.uint8), x[:, 0]), Items([1, 2])]
    assert in_channels_last([*other, clients[0]])[0] is other[0]
    assert in_channels_last(other)[0].tensors[1] is other[0][1], "these are no images"


class Halved(Tensors):
    def gather(self, rows, rng):
        x, y = super().gather(rows, rng)
        return x / 2, y


class Inverted(Images):
    def gather(self, rows, rng):
        x, y = super().gather(rows, rng)
        return -x, y


def test_subclasses_say_what_they_give():
    """Subclasses may do more in `gather` than select from their tensors, so they are left as they are."""
    x, y = torch.randn(6, 3, 4, 5), torch.arange(6)
    halved, whole = Halved((x, y)), images(6, 3)
    inverted = Inverted(whole.images, whole.labels, whole.mean, whole.std)
    inverted.resident = whole.resident
    rows, rng, cpu = torch.arange(6), stream(0, "a"), torch.device("cpu")
    pixels = whole.gather(rows, rng)[0]
    for source, expected in ((halved, x / 2), (inverted, -pixels)):
        for other in (*in_channels_last([source]), *on_device([source], cpu)):
            assert torch.equal(other.gather(rows, rng)[0], expected)
    for clients, expected in (
        ((halved, halved), (x / 2, x / 2)),
        ((Tensors((x, y)), halved), (x, x / 2)),
        ((whole, inverted), (pixels, -pixels)),
    ):
        one = pooled(clients)
        for both in (one, *in_channels_last([one]), *on_device([one], cpu)):
            assert type(both) is Pooled, "each is asked, for every batch"
            assert torch.equal(both.gather(torch.arange(12), rng)[0], torch.cat(expected))


def test_a_subset_may_count_from_the_end():
    x = torch.arange(10.0)
    subset = Subset(TensorDataset(x, -x), [-1, 3, -10, 0])
    source = as_source(subset, "client 0")
    got, _ = source.gather(torch.arange(4), stream(0, "a"))
    assert got.tolist() == [float(subset[k][0]) for k in range(4)] == [9, 3, 0, 0]
    assert pooled([subset, subset]).gather(torch.tensor([4]), stream(0, "a"))[0].tolist() == [9]


@pytest.mark.parametrize("named", [False, True])
def test_pooled_tensors_are_one_set_on_a_device(named):
    """Pooled tensors are merged once, not with every batch."""
    x, y = torch.randn(9, 2), torch.arange(9)
    clients = [Tensors((x[:5], y[:5]), torch.tensor([4, 0, 2])), Tensors((x[5:], y[5:]))]
    if named:
        clients = [Tensors(dict(zip("xy", c.tensors, strict=True)), c.rows) for c in clients]
    one = pooled(clients)
    assert type(one) is Pooled
    moved = on_device([one], torch.device("cpu"))[0]
    assert type(moved) is Tensors
    assert len(moved) == len(one) == 7
    rows = torch.tensor([6, 0, 3, 2])
    a, b = (source.gather(rows, stream(0, "a")) for source in (one, moved))
    assert all(torch.equal(a[key], b[key]) for key in ("xy" if named else (0, 1)))
    there = on_device([one], META)[0].gather(rows.to(META), stream(0, "a"))
    assert {t.device for t in (there.values() if named else there)} == {META}


def test_pooled_tensors_that_do_not_fit_stay_apart():
    x, cpu = torch.randn(4, 2), torch.device("cpu")
    for clients in (
        [(x, x), (torch.randn(4, 3), x)],
        [(x, x), (x.clone(), x, x)],
        [{"a": x}, {"b": x}],
        [(x, x), [(row, row) for row in x]],
    ):
        one = on_device([pooled(clients)], cpu)[0]
        assert type(one) is Pooled
        assert len(one) == 8
        first = one.gather(torch.tensor([0, 3]), stream(0, "a"))
        assert torch.equal(first["a"] if isinstance(first, dict) else first[0], x[[0, 3]])


def test_a_batch_in_channels_last():
    x, y = torch.randn(2, 3, 4, 5), torch.arange(2)
    (first, label), named, word = batch_in_channels_last([(x, y), {"a": x, "b": x[0]}, "word"])
    assert last(first)
    assert last(named["a"])
    assert torch.equal(first, x)
    assert label is y
    assert named["b"].stride() == x[0].stride()
    assert word == "word"
    assert batch_in_channels_last(x.to(torch.uint8)).is_contiguous()


def pools():
    whole, tensors = images(30), (torch.randn(30, 4), torch.arange(30))
    rows = [np.arange(0, 7), np.arange(7, 20), np.arange(20, 30)]
    yield split(whole, rows)
    yield [whole.subset(torch.from_numpy(r)) for r in rows]
    yield [Subset(TensorDataset(*tensors), r.tolist()) for r in rows]  # data sets of their own over the same tensors
    yield [tuple(t[r] for t in tensors) for r in rows]
    shared = Tensors(tensors)
    yield [shared.subset(torch.from_numpy(r)) for r in rows]


@pytest.mark.parametrize("clients", list(pools()))
def test_all_data_in_one_place(clients):
    one = pooled(clients)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(0))
    got = one.gather(order, stream(0, "a"))
    each = [as_source(c, "c").gather(torch.arange(len(as_source(c, "c"))), stream(0, "a")) for c in clients]
    for column, parts in zip(got, zip(*each, strict=True), strict=True):
        assert torch.equal(column, torch.cat(parts)[order])


def test_data_of_one_set_is_pooled_without_visits_to_the_host():
    there = split(images(30, augment=True), [np.arange(10), np.arange(10, 30)]).to(META)
    for clients in (there, list(there)):
        x, y = pooled(clients).gather(torch.arange(5, device=META), stream(0, "a"))
        assert x.device == y.device == META


def test_sparse_tensors_of_users_are_left_as_they_are():
    x = torch.eye(4).to_sparse()
    given = [(x, torch.arange(4))]
    assert in_channels_last(given)[0].tensors[0] is x
    assert on_device(given, torch.device("cpu"))[0].tensors[0] is x


def test_clients_of_several_kinds_are_pooled_on_a_device():
    whole = Pooled([Tensors((torch.randn(3, 2), torch.arange(3))), Tensors({"x": torch.randn(3, 2)})])
    assert isinstance(on_device([whole], torch.device("cpu"))[0], Pooled)
