"""Rounds that close when enough of each block has arrived, on a grid in this process."""

import time

import pytest
import torch
from torch import nn

pytest.importorskip("flwr", reason="the extra flower is not installed")

import fedbcgd.flower
from fedbcgd import UserError
from fedbcgd.backends.flower import questions, rounds, wire

from .grids import LocalGrid

M = 6
LOCAL = {"batch_size": 4, "lr": 0.1}


def make_model():
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def load(client):
    g = torch.Generator().manual_seed(client)
    return torch.randn(12, 4, generator=g), torch.randint(3, (12,), generator=g)


class SlowGrid(LocalGrid):
    """Replies of the slow clients stay away until `arrive` is called."""

    def __init__(self, slow, clients=M):
        self.held, self.slow, self.asked = {}, slow, []
        super().__init__(fedbcgd.flower.client_app(make_model, load), clients, lose=self.hold)

    def hold(self, message, reply):
        if message.metadata.message_type != "train":
            return reply
        client = message.content[wire.TASK]["client"]
        self.asked.append((int(message.metadata.group_id), client))
        if client not in self.slow:
            return reply
        self.held[message.metadata.message_id] = reply
        return None

    def arrive(self):
        self._waiting |= self.held
        self.held = {}


def start(grid, rounds=1, timeout=60.0, name="fedavg", strategy=None, **options):
    strategy = strategy or fedbcgd.flower.strategy(name, make_model(), **LOCAL, **options)
    strategy.start(grid, num_rounds=rounds, timeout=timeout)
    return strategy


def test_one_slow_client_does_not_cost_the_timeout(caplog):
    begun = time.monotonic()
    federation = start(SlowGrid({2}), rounds=3, close_at=0.8)
    assert time.monotonic() - begun < 50  # of a timeout of 60 s
    assert federation.server.ledger.lost == 1  # it is still at work in rounds 2 and 3, and not asked
    assert "round 1: client 2 is lost: late: enough uploads of each block were in after" in caplog.text


def test_every_block_needs_its_share():
    """Two blocks of three clients: 0.6 of three is two. With two slow clients in one block that one is waited for."""
    probe = start(SlowGrid(set()), name="fedbcgd", blocks=2)
    probe.server.round = 0
    tasks = probe.server.next_tasks()
    ours = [task.client for task in tasks if task.block == 0]
    for slow, lost in (({ours[0]}, 1), ({ours[0], ours[1]}, 2)):
        begun = time.monotonic()
        federation = start(SlowGrid(slow), name="fedbcgd", blocks=2, close_at=0.6, timeout=2.0)
        assert federation.server.ledger.lost == lost
        assert (time.monotonic() - begun > 1.9) == (lost == 2)


def test_a_client_at_work_is_asked_again_once_it_has_answered():
    grid = SlowGrid({2})
    federation = start(grid, rounds=2, close_at=0.8)
    assert [round for round, client in grid.asked if client == 2] == [0]
    grid.arrive()
    grid.slow = set()
    start(grid, rounds=4, strategy=federation)
    assert [round for round, client in grid.asked if client == 2] == [0, 2, 3]
    assert federation.server.last.accepted == M


def test_or_once_its_time_is_over_or_as_another_node():
    for way in ("time", "node"):
        grid = SlowGrid({2})
        federation = start(grid, rounds=1, close_at=0.8, timeout=1.0 if way == "time" else 60.0)
        if way == "time":
            time.sleep(1.0)
        else:
            grid.join(2, M)
        grid.slow = set()
        start(grid, rounds=2, strategy=federation)
        assert [round for round, client in grid.asked if client == 2] == [0, 1], way


def test_a_late_upload_is_dropped_unread(monkeypatch, caplog):
    """Its bytes are never decoded, nothing of it counts, and the client's pending state is dropped."""
    read = []
    monkeypatch.setattr(
        rounds.wire,
        "read_upload",
        lambda content, lengths, f=wire.read_upload: read.append(1) or f(content, lengths),
    )
    caplog.set_level("INFO")
    grid = SlowGrid({2})
    federation = start(grid, name="scaffold", close_at=0.8)
    assert len(read) == M - 1
    grid.arrive()
    before = federation.server.x.clone(), len(grid.asked)
    federation.rounds.late.drop_arrived(grid)
    assert len(read) == M - 1
    assert torch.equal(federation.server.x, before[0])
    assert "client 2 answered after round 1 had closed: dropped" in caplog.text
    grid.slow = set()
    start(grid, rounds=3, strategy=federation)
    assert federation.server.epoch == 0  # client 2 knew that its state of round 1 does not hold
    assert federation.server.last.accepted == M


def test_oversampling_asks_more_than_the_cohort():
    grid = SlowGrid(set())
    federation = start(grid, cohort=4, oversample=1.25, close_at=0.8, clients=M)
    assert len(grid.asked) == 5
    assert federation.server.last.accepted == 5  # all were there at the first look


def test_where_all_are_at_work_they_are_asked_all_the_same():
    replies = questions.LateReplies()
    assert replies.busy({0: 1}) == set()
    grid = SlowGrid({0, 1, 2}, clients=4)
    federation = start(grid, rounds=1, close_at=0.25)
    grid.leave(3)
    assert federation.rounds.online(grid) == [0, 1, 2]


@pytest.mark.parametrize(("option", "value"), [("close_at", 0), ("close_at", 1.5), ("oversample", 0.5)])
def test_mistakes(option, value):
    with pytest.raises(UserError, match=f"{option}: expected"):
        fedbcgd.flower.strategy("fedavg", make_model(), **{option: value})
