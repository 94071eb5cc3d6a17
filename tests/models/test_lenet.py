import pytest
import torch

from fedbcgd import UserError
from fedbcgd.models import LeNet5


def test_weights_are_as_the_paper_lists_them():
    counts = [layer.weight.numel() for layer in LeNet5().children()]
    assert counts == [4_800, 102_400, 614_400, 73_728, 1_920]


@pytest.mark.parametrize(("shape", "fc1"), [((3, 32, 32), 1600), ((1, 28, 28), 1024), ((1, 16, 20), 128)])
def test_shapes(shape, fc1):
    model = LeNet5(7, shape)
    assert model.fc1.in_features == fc1
    assert model(torch.zeros(2, *shape)).shape == (2, 7)


def test_too_small_an_image():
    with pytest.raises(UserError, match="16×16"):
        LeNet5(10, (1, 12, 12))
