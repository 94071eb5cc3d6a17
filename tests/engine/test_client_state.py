"""Client state in slots: copy-on-write, transactional, only for those who took part."""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbcgd import UserError
from fedbcgd.core.messages import StateUpdate
from fedbcgd.engine.client_state import StateStore

DIM = 6


def put(store, client, value, s=slice(0, DIM), epoch=0):
    """What a backend does with an accepted upload."""
    slot = store.reserve()
    values = torch.full((s.stop - s.start,), float(value))
    store.file.write(slot, store.slot(client, epoch), StateUpdate(client, epoch, {"c": [(s, values)]}))
    store.accept(client, slot, epoch)


def test_an_update_changes_its_slice_and_keeps_the_rest():
    store = StateStore(("c",), DIM, torch.float32)
    put(store, 7, 1)
    store.commit()
    put(store, 7, 2, slice(2, 4))
    assert store.load(7, 0)["c"].tolist() == [1] * 6  # not before the round is committed
    store.commit()
    assert store.load(7, 0)["c"].tolist() == [1, 1, 2, 2, 1, 1]
    assert store.clients() == [7]
    assert not store.load(8, 0)


def test_an_abandoned_round_gives_its_slots_back():
    store = StateStore(("c",), DIM, torch.float32)
    put(store, 1, 1)
    store.commit()
    for _ in range(50):
        put(store, 1, 5)
        put(store, 2, 5)
        store.abandon()
    assert store.load(1, 0)["c"].tolist() == [1] * 6
    assert store.clients() == [1]
    assert store._slots <= 4


def test_state_of_an_older_epoch_is_not_given_out():
    store = StateStore(("c",), DIM, torch.float32)
    put(store, 1, 1, epoch=0)
    store.commit()
    assert store.slot(1, 1) is None
    put(store, 1, 3, slice(0, 2), epoch=1)
    store.commit()
    assert store.load(1, 1)["c"].tolist() == [3, 3, 0, 0, 0, 0]


def test_several_vectors_and_another_dtype():
    store = StateStore(("c", "h"), DIM, torch.float64)
    slot = store.reserve()
    pieces = {"c": [(slice(0, 6), torch.arange(6.0).double())], "h": [(slice(1, 2), torch.tensor([9.0]).double())]}
    store.file.write(slot, None, StateUpdate(0, 0, pieces))
    store.accept(0, slot, 0)
    store.commit()
    state = store.load(0, 0)
    assert state["c"].tolist() == [0, 1, 2, 3, 4, 5]
    assert state["h"].tolist() == [0, 9, 0, 0, 0, 0]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.sampled_from(["round", "lost round", "begin", "durable", "crash", "crash back"]), min_size=10, max_size=30
    ),
    st.integers(0, 2**31),
)
def test_a_crash_at_any_moment_comes_back_to_the_last_checkpoint(tmp_path_factory, events, seed):
    """Whatever happens between two checkpoints, and while one is written beside the work, the slots that the last two
    durable ones name still hold what they meant."""
    path = tmp_path_factory.mktemp("state") / "clients.bin"
    draw = torch.Generator().manual_seed(seed)
    store = StateStore(("c",), DIM, torch.float32, path)
    now: dict[int, list[float]] = {}
    kept = [({}, {}), ({}, {})]  # the last checkpoint and the one before it: their tables, and what they meant
    writing = None
    counter = 0
    for event in [*events, "crash"]:
        if event in ("round", "lost round"):
            changed = dict(now)
            for client in torch.randperm(5, generator=draw)[:3].tolist():
                counter += 1
                at = int(torch.randint(DIM, (), generator=draw))
                vector = list(changed.get(client, [0.0] * DIM))
                vector[at:] = [float(counter)] * (DIM - at)
                changed[client] = vector
                put(store, client, counter, slice(at, DIM))
            if event == "round":
                store.commit()
                now = changed
            else:
                store.abandon()
        elif event == "begin":
            if writing is not None:  # one at a time
                kept = [writing, kept[0]]
                store.checkpoint_is_durable()
            writing = store.snapshot(), {k: list(v) for k, v in now.items()}
            store.seal(writing[0])
        elif event == "durable":
            if writing is not None:
                kept = [writing, kept[0]]
                store.checkpoint_is_durable()
                writing = None
        else:
            writing = None
            if seed % 2:
                put(store, 0, -1)  # a round was open
            store.close()
            store = StateStore(("c",), DIM, torch.float32, path)
            if event == "crash":
                store.restore(kept[0][0], kept[1][0])
            else:  # and the newest is damaged
                store.restore(kept[1][0])
                kept = [kept[1], ({}, {})]
            now = {k: list(v) for k, v in kept[0][1].items()}
        assert store.clients() == sorted(now)
        for client, vector in now.items():
            assert store.load(client, 0)["c"].tolist() == vector
        for table, _ in kept:
            store.check(table)
    assert store._slots <= 40  # five clients, four times, and what was reserved ahead
    store.close()


def test_the_state_of_the_last_two_checkpoints_is_kept(tmp_path):
    store = StateStore(("c",), DIM, torch.float32, tmp_path / "clients.bin")
    tables = [{}, {}]
    for value in range(12):
        for other in range(10, 18):  # a round that never was takes every free slot
            put(store, other, -1)
        store.abandon()
        put(store, 1, value)
        store.commit()
        for table in tables[-2:]:
            store.check(table)
        tables.append(store.snapshot())
        store.seal(tables[-1])
        store.checkpoint_is_durable()
        if value % 3 == 2:  # the run goes on from here
            store.close()
            store = StateStore(("c",), DIM, torch.float32, tmp_path / "clients.bin")
            store.restore(tables[-1], tables[-2])
            assert store.clients() == [1]
            assert store.load(1, 0)["c"].tolist() == [value] * DIM


def test_only_clients_that_took_part_take_space(tmp_path):
    dim = 100_000
    store = StateStore(("c",), dim, torch.float32, tmp_path / "clients.bin")
    for client in range(0, 20_000, 1_000):
        slot = store.reserve()
        store.file.write(slot, None, StateUpdate(client, 0, {"c": []}))
        store.accept(client, slot, 0)
    store.commit()
    assert len(store.clients()) == 20
    assert os.path.getsize(tmp_path / "clients.bin") <= 30 * 4 * (dim + 2048)


def test_a_file_that_was_cut_is_refused(tmp_path):
    path = tmp_path / "clients.bin"
    store = StateStore(("c",), DIM, torch.float32, path)
    put(store, 1, 1)
    store.commit()
    table = store.snapshot()
    store.close()
    os.truncate(path, 0)
    again = StateStore(("c",), DIM, torch.float32, path)
    with pytest.raises(UserError, match=r"expected slot \d+, which its checkpoint names"):
        again.restore(table)


def test_a_damaged_slot_is_noticed(tmp_path):
    path = tmp_path / "clients.bin"
    store = StateStore(("c",), DIM, torch.float32, path)
    for client in (3, 5):
        put(store, client, client)
    store.commit()
    table = store.snapshot()
    store.seal(table)
    store.check(table)
    store.file.open(table["5"][0])["c"][2] = 5.5
    with pytest.raises(UserError, match="state of client 5 is not what was written"):
        store.check(table)
    put(store, 3, 4)
    store.commit()
    fresh = store.snapshot()
    store.seal(fresh)
    assert fresh["3"][2] != table["3"][2]


def test_a_full_disk_is_said_before_anything_is_written(monkeypatch):
    store = StateStore(("c",), DIM, torch.float32)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UserError, match="No space left"):
        store.reserve()


def test_a_rule_without_state_needs_no_file():
    store = StateStore((), DIM, torch.float32)
    assert store.file is None
    assert store.reserve() is None
    store.accept(1, None, 0)
    store.commit()
    assert store.load(1, 0) == {}
