"""An upload is written once: what a client makes lies in the memory that it was lent, whatever the algorithm."""

import dataclasses
import mmap

import pytest
import torch
from torch import nn

from fedbcgd import algorithm_names, make_algorithm
from fedbcgd.backends.workers.memory import RoundMemory, Slot
from fedbcgd.core.messages import Broadcast, Task
from fedbcgd.engine.assemble import make_job


class Net(nn.Module):
    """With buffers that travel, where the rule can bear them."""

    def __init__(self, norm: bool):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30) if norm else nn.Identity(), nn.ReLU())
        self.head = nn.Linear(30, 3)

    def forward(self, x):
        return self.head(self.body(x))


def fitted(name: str, options: dict, norm: bool):
    links = {"divider": "even"} if name == "fedbcgd-matched" else {}  # sizes that follow links need a network
    algorithm = make_algorithm(name, batch_size=5, **links, **options)
    data = [(torch.randn(10, 40), torch.randint(3, (10,)))]
    job = make_job(Net(norm), data, algorithm, None, 0)
    x = job.layout.vector(job.module.state_dict())
    controls = {c: torch.randn(job.layout.dim) for c in algorithm.local.broadcasts}
    state = {n: torch.randn(job.layout.dim) for n in algorithm.state_names}
    return job, Broadcast(0, 0, x, controls), Task(0, 0, job.layout.blocks - 1), state


CASES = [
    (name, options, norm)
    for name, options in [
        *((name, {}) for name in algorithm_names()),
        *(("fedbcgd+", {"codec": codec}) for codec in ("float16", "qsgd", "topk")),
    ]
    for norm in (False, True)
    if not make_algorithm(name, **options).local.refuses(Net(norm))
]


@pytest.mark.parametrize(("name", "options", "norm"), CASES)
def test_nothing_is_copied_into_a_slot(name, options, norm):
    job, broadcast, task, state = fitted(name, options, norm)
    size = RoundMemory.size(job.algorithm, job.layout, 2)
    memory = mmap.mmap(-1, size)
    room = RoundMemory(memory, job.algorithm, job.layout)
    slot = room.slot(1)
    upload, _ = job.fit(broadcast, task, state, slot.allocate)
    expected, _ = job.fit(broadcast, task, state)
    memory_before = bytes(memory)
    stored = slot.put(upload)
    assert bytes(memory) == memory_before, "putting an upload into its slot wrote nothing: it was there already"
    assert upload.payload.keys() == expected.payload.keys()
    got = room.get(stored)
    assert dataclasses.replace(got, payload={}) == dataclasses.replace(upload, payload={})
    for channel, pieces in expected.payload.items():
        assert all(torch.equal(a, b) for a, b in zip(got.payload[channel], pieces, strict=True))
    assert all(at + n <= size for pieces in stored["payload"].values() for at, n in pieces)


def test_what_was_made_elsewhere_is_copied():
    """A codec of one's own need not know about lent memory."""
    memory = mmap.mmap(-1, 4096)
    slot = Slot(memory, 64)
    lent = slot.allocate(5).copy_(torch.arange(5, dtype=torch.uint8))
    elsewhere = torch.arange(7, dtype=torch.uint8) + 100
    assert [slot._put(piece) for piece in (elsewhere, lent, lent[:0])] == [(128, 7), (64, 5), (192, 0)]
    assert memory[128:135] == bytes(range(100, 107))
