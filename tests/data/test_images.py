"""Images: bytes to floats, augmentation from the client's stream, and the same augmentation twice where a rule needs it."""

import numpy as np
import pytest
import torch

from fedbcgd import simulate
from fedbcgd.data import Images, dirichlet, split
from fedbcgd.data.images import PAD, crop_and_flip
from fedbcgd.rng import stream


def pictures(n=6, channels=3, height=8, width=10, seed=0):
    g = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (n, channels, height, width), dtype=torch.uint8, generator=g)
    labels = torch.arange(n) % 3
    return Images(pixels, labels, torch.linspace(0.2, 0.6, channels), torch.linspace(0.5, 0.25, channels))


@pytest.mark.parametrize(("channels", "height", "width"), [(3, 8, 10), (1, 28, 28), (1, 3, 3), (2, 5, 7)])
def test_scaling_by_hand(channels, height, width):
    """(pixel/255 − mean)/std, also if the size of an image is no multiple of 8 bytes."""
    images = pictures(5, channels, height, width)
    x, y = images.gather(torch.tensor([3, 0, 3]), stream(0, "x"))
    raw = images.images[[3, 0, 3]].double() / 255
    wanted = (raw - images.mean.view(1, -1, 1, 1)) / images.std.view(1, -1, 1, 1)
    assert x.dtype == torch.float32
    assert torch.allclose(x.double(), wanted, atol=1e-5)
    assert y.tolist() == [0, 0, 0]
    assert images.shape == (channels, height, width) == tuple(x.shape[1:])


def test_batches_come_as_convolutions_like_them():
    x, _ = pictures().gather(torch.arange(4), stream(0, "x"))
    assert x.is_contiguous(memory_format=torch.channels_last)


def test_every_augmented_image_is_a_shifted_and_perhaps_mirrored_original():
    """Each is found among the 81 crops of its padded original and their mirror images; both kinds occur."""
    images = np.random.default_rng(0).integers(1, 256, (40, 6, 7, 3)).astype(np.uint8)
    out = crop_and_flip(images, stream(1, "x"))
    padded = np.pad(images, ((0, 0), (PAD, PAD), (PAD, PAD), (0, 0)))
    places = []
    for image, wanted in zip(padded, out, strict=True):
        found = [
            (top, left, mirrored)
            for top in range(2 * PAD + 1)
            for left in range(2 * PAD + 1)
            for mirrored in (False, True)
            if np.array_equal(image[top : top + 6, left : left + 7][:, :: -1 if mirrored else 1], wanted)
        ]
        assert found
        places.append(found[0])
    assert {mirrored for *_, mirrored in places} == {False, True}
    assert len({top for top, *_ in places}) > 5
    assert len({left for _, left, _ in places}) > 5


def test_shifts_and_mirrors_are_even_handed():
    image = np.zeros((1, 9, 9, 1), np.uint8)
    image[0, 4, 4] = 255  # its place tells the shift
    out = crop_and_flip(np.repeat(image, 8100, 0), stream(2, "x"))
    lit = np.argwhere(out[..., 0] == 255)
    assert len(lit) == 8100
    counts = np.histogram2d(lit[:, 1], lit[:, 2], bins=9)[0]
    assert counts.min() > 50
    assert counts.max() < 160  # 100 each, give or take
    image[0, 4, 3] = 128
    sides = crop_and_flip(np.repeat(image, 2000, 0), stream(3, "x"), pad=0)[:, 4, 5, 0] == 128
    assert 0.45 < sides.mean() < 0.55


def test_the_stream_decides():
    images = pictures(30).shown_as(augment=True)
    rows = torch.arange(30)
    one, same, other = (images.gather(rows, stream(s, "augmentation"))[0] for s in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    plain = images.shown_as(augment=False).gather(rows, stream(0, "augmentation"))[0]
    assert torch.equal(plain, pictures(30).gather(rows, stream(5, "x"))[0])


def test_resize_and_crop():
    images = pictures(3, 3, 8, 8).shown_as(resize=16, crop=12)
    assert images.shape == (3, 12, 12)
    x, _ = images.gather(torch.arange(3), stream(0, "x"))
    whole, _ = pictures(3, 3, 8, 8).shown_as(resize=16).gather(torch.arange(3), stream(0, "x"))
    assert torch.equal(x, whole[:, :, 2:14, 2:14])  # the middle
    random, _ = images.shown_as(True, 16, 12).gather(torch.arange(3), stream(0, "x"))
    assert random.shape == (3, 3, 12, 12)


def test_one_colour_stays_one_colour_when_scaled_up():
    flat = Images(
        torch.full((1, 1, 4, 4), 51, dtype=torch.uint8), torch.tensor([0]), torch.tensor([0.0]), torch.tensor([1.0])
    )
    x, _ = flat.shown_as(resize=224).gather(torch.tensor([0]), stream(0, "x"))
    assert x.shape == (1, 1, 224, 224)
    assert torch.allclose(x, torch.tensor(0.2))


def test_a_client_costs_no_more_than_its_rows():
    images = pictures(6)
    clients = split(images, [np.array([0]), np.array([1, 2])])
    assert all(client.resident is images.resident for client in clients)


def test_relabelling_leaves_the_original_alone():
    images = pictures(6)
    two = images.relabelled((images.labels == 1).long())
    assert two.labels.tolist() == [0, 1, 0, 0, 1, 0]
    assert images.labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert two.images.data_ptr() == images.images.data_ptr()


def federation(seed=0):
    images = pictures(60, 3, 16, 16, seed).shown_as(augment=True)
    clients = split(images, dirichlet(images.labels.numpy(), 6, 1.0, seed))
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        from fedbcgd.models import LeNet5

        return LeNet5(3, (3, 16, 16), width=0.05), clients


@pytest.mark.parametrize("algorithm", ["fedbcgd", "fedbcgd+"])
def test_augmented_training_is_the_same_on_both_carriers(algorithm):
    model, clients = federation()
    ends = [
        simulate(model, clients, algorithm, rounds=2, blocks=2, cohort=4, batch_size=4, workers=w, lr=0.05).module
        for w in (0, 2)
    ]
    assert all(torch.equal(a, b) for a, b in zip(ends[0].parameters(), ends[1].parameters(), strict=True))


def test_svrg_sees_the_very_same_augmented_minibatch_at_both_points(monkeypatch):
    """∇f(y; ζ) − ∇f(x; ζ) needs one ζ: with a learning rate of zero y stays x, so every correction cancels exactly and
    the direction is the full gradient, whatever was drawn. Were ζ drawn anew, it would be off by the draw."""
    from fedbcgd.core.work import Work

    model, clients = federation()
    seen = {}
    again = []
    plain = Work._parts

    def watched(self, batch):
        parts = plain(self, batch)
        g = torch.cat([part.flatten() for part in parts])
        key = (self, batch.draw)  # not its id, which the next one may have once it is gone
        if batch.draw is not None:
            again.append(key in seen)
            assert torch.equal(seen.setdefault(key, g), g)
        return parts

    monkeypatch.setattr(Work, "_parts", watched)
    simulate(
        model, clients, "fedbcgd+", rounds=1, blocks=2, cohort=3, batch_size=4, lr=1e-30, cache_mb=0, workers=0,
        local_epochs=2, fixed_batches=True,
    )  # fmt: skip
    assert len(seen) >= 3 * 3
    assert sum(again) >= 2 * len(seen)
