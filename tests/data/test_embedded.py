import numpy as np
import torch

from fedbcgd.data import as_source, fashion_mnist, split
from fedbcgd.rng import stream


def test_counts_and_values():
    train, test = fashion_mnist()
    assert train.images.shape == (10_000, 1, 28, 28)
    assert test.images.shape == (2_000, 1, 28, 28)
    assert train.images.dtype == torch.uint8
    assert torch.bincount(train.labels).tolist() == [1000] * 10
    assert torch.bincount(test.labels).tolist() == [200] * 10
    x, y = train.gather(torch.arange(len(train)), stream(0, "x"))
    assert abs(float(x.mean())) < 0.02  # scaled by the statistics of the full set, of which this is a sixth
    assert abs(float(x.std()) - 1) < 0.02
    assert y.dtype == torch.int64


def test_train_and_test_are_disjoint():
    train, test = fashion_mnist()
    seen = {image.numpy().tobytes() for image in train.images}
    assert len(seen) > 9_990  # Fashion-MNIST has a few doubles of its own
    assert sum(image.numpy().tobytes() in seen for image in test.images) == 0


def test_the_licence_is_shipped():
    from importlib.resources import files

    text = files("fedbcgd.data").joinpath("LICENSE.fashion-mnist").read_text(encoding="utf-8")
    assert "MIT License" in text
    assert "Zalando SE" in text


def test_clients_share_the_images():
    train, _ = fashion_mnist()
    clients = split(train, [np.array([3, 5]), np.array([7])])
    assert [len(c) for c in clients] == [2, 1]
    assert clients[0].images.data_ptr() == train.images.data_ptr()
    x, y = clients[0].gather(torch.tensor([1]), stream(0, "x"))
    assert torch.equal(x, train.gather(torch.tensor([5]), stream(0, "x"))[0])
    assert y.item() == train.labels[5]
    first = clients[0]
    assert as_source(first, "client 0") is first
    again = clients[0].subset(torch.tensor([1]))
    assert torch.equal(again.gather(torch.tensor([0]), stream(0, "x"))[0], x)
