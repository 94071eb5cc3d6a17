"""Objects in shared memory without a name."""

import os

import numpy as np
import torch
from torch import nn

from fedbcgd.backends.workers.shared import pickle_to_memory, unpickle_from_memory


def through(obj):
    fd, size, length = pickle_to_memory(obj)
    out = unpickle_from_memory(fd, size, length)
    os.close(fd)
    return out, size


def test_tensors_arrays_and_code_come_back():
    k = 3
    obj = {
        "f": lambda v: v * k,
        "t": torch.arange(6.0).view(2, 3).t(),
        "b": torch.tensor([True, False]),
        "half": torch.tensor([1.5], dtype=torch.bfloat16),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(4),
        "n": np.arange(5),
        "odd": np.arange(10)[::2],
        "grad": torch.ones(2, requires_grad=True),
    }
    out, _ = through(obj)
    assert out["f"](2) == 6
    for key in ("t", "b", "half", "empty", "scalar"):
        assert torch.equal(out[key], obj[key])
        assert out[key].stride() == obj[key].stride()
        assert out[key].dtype == obj[key].dtype
    assert np.array_equal(out["n"], obj["n"])
    assert np.array_equal(out["odd"], obj["odd"])
    assert out["grad"].requires_grad


def test_a_storage_is_kept_once_however_many_views_it_has():
    whole = torch.zeros(1000, 100)
    clients = [whole[k * 10 : (k + 1) * 10] for k in range(100)]
    out, size = through(clients)
    assert size == whole.numel() * 4
    assert torch.equal(out[3], clients[3])
    assert out[0].untyped_storage().data_ptr() == out[1].untyped_storage().data_ptr()


def test_two_storages_at_one_address_are_two():
    """A view of an array and the array itself, both made by from_numpy: one begins where the other does and ends later."""
    array = np.arange(1000.0)
    short, long = torch.from_numpy(array[:10]), torch.from_numpy(array)
    for order in ([short, long], [long, short]):
        out, _ = through([*order, torch.full((500,), -1.0)])
        for a, b in zip(out, order, strict=False):
            assert torch.equal(a, b)


def test_one_object_stays_one_object():
    t = torch.ones(3)
    out, _ = through([t, t, torch.ones(3)])
    assert out[0] is out[1]
    assert out[0] is not out[2]


def test_a_module_keeps_its_ties_and_buffers():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    out, _ = through(model)
    assert out[2].weight is out[0].weight
    for key, value in model.state_dict().items():
        assert torch.equal(out.state_dict()[key], value)


def test_writing_to_one_copy_is_not_seen_in_another():
    fd, size, length = pickle_to_memory([torch.zeros(4), np.zeros(4)])
    one, two = unpickle_from_memory(fd, size, length), unpickle_from_memory(fd, size, length)
    one[0].fill_(1)
    one[1][:] = 1
    assert two[0].sum() == 0
    assert two[1].sum() == 0
    os.close(fd)
