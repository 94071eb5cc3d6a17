"""Client state at the actors: what the driver believes they keep is what they keep, and it is what the store has."""

import random
import warnings

import numpy as np
import pytest
import torch

from fedbcgd.backends.ray import state_cache
from fedbcgd.backends.ray.protocol import AFTER, BEFORE, SENT, ZERO, InitialState, as_bytes, as_tensor
from fedbcgd.backends.ray.state_cache import CacheIndex, StateCache
from fedbcgd.core.messages import StateUpdate
from fedbcgd.engine.client_state import StateStore

DIM = 5


class Driver:
    """A store, the index, and caches without actors."""

    def __init__(self, actors=2, capacity=100):
        self.store = StateStore(("c",), DIM, torch.float32)
        self.index = CacheIndex(self.store, capacity)
        self.caches = [self.cache() for _ in range(actors)]
        self.sources = []

    def cache(self):
        return StateCache(("c",), DIM, torch.float32, torch.device("cpu"))

    def task(self, actor, client, epoch=0, accept=True, value=1.0, answer=True):
        """The client's task at an actor: begins with what the store has, adds `value` to two coordinates."""
        truth = self.store.load(client, epoch).get("c", torch.zeros(DIM))
        initial = self.index.assign(actor, client, epoch)
        self.sources.append(initial.source)
        state = self.caches[actor].load(client, initial)
        assert torch.equal(state.get("c", torch.zeros(DIM)), truth)
        s = slice(client % 3, client % 3 + 2)
        update = StateUpdate(client, epoch, {"c": [(s, truth[s] + value)]})
        self.caches[actor].add(update)
        if not answer:  # the round was cut off
            return
        if accept:
            slot = self.store.reserve()
            self.store.file.write(slot, self.store.slot(client, epoch), update)
            self.store.accept(client, slot, epoch)
            self.index.accepted(actor, client, slot)

    def lose(self, actor):
        self.index.lost(actor)
        self.caches[actor] = self.cache()


def test_state_is_sent_only_where_it_is_not_kept():
    driver = Driver()
    driver.task(0, 4)
    driver.store.commit()
    driver.task(0, 4)
    driver.store.commit()
    driver.task(1, 4)  # another helps: it gets the state
    driver.store.commit()
    driver.task(0, 4)  # and the first one's is out of date
    assert driver.sources == [ZERO, AFTER, SENT, SENT]


def test_what_was_refused_abandoned_or_cut_off_does_not_hold():
    driver = Driver()
    driver.task(0, 4)
    driver.store.commit()
    driver.task(0, 4, accept=False)
    driver.store.commit()
    driver.task(0, 4)
    driver.store.abandon()
    driver.task(0, 4, answer=False)
    driver.store.abandon()
    driver.task(0, 4)
    assert driver.sources == [ZERO, AFTER, BEFORE, BEFORE, BEFORE]


def test_a_new_control_epoch_begins_from_zero():
    driver = Driver()
    driver.task(0, 4)
    driver.store.commit()
    driver.task(0, 4, epoch=1)
    driver.store.commit()
    driver.task(0, 4, epoch=1)
    assert driver.sources == [ZERO, ZERO, AFTER]


def test_a_lost_actor_loses_nothing():
    driver = Driver()
    driver.task(0, 4)
    driver.store.commit()
    driver.lose(0)
    driver.task(0, 4)
    assert driver.sources == [ZERO, SENT]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_tasks_begin_with_what_the_store_has(seed):
    rng = random.Random(seed)
    driver = Driver(actors=3, capacity=rng.choice([1, 2, 100]))
    epoch = 0
    for _ in range(60):
        for client in rng.sample(range(8), 4):
            actor = client % 3 if rng.random() < 0.7 else rng.randrange(3)
            driver.task(actor, client, epoch, rng.random() < 0.8, rng.random(), rng.random() < 0.95)
            if rng.random() < 0.05:
                driver.lose(rng.randrange(3))
        driver.store.commit() if rng.random() < 0.8 else driver.store.abandon()
        epoch += rng.random() < 0.05
    assert {SENT, AFTER, BEFORE, ZERO} == set(driver.sources)


def test_an_actor_keeps_no_more_than_it_has_room_for(monkeypatch):
    monkeypatch.setattr(state_cache, "MAX_CACHE_BYTES", 3 * StateStore(("c",), DIM, torch.float32).file.slot_bytes)
    driver = Driver(actors=1, capacity=None)
    for client in range(8):
        driver.task(0, client)
        driver.store.commit()
    assert driver.caches[0].clients == [5, 6, 7]
    driver.task(0, 5)
    driver.task(0, 0)
    assert driver.sources[-2:] == [AFTER, SENT]


def test_rules_without_state_send_and_keep_nothing():
    store = StateStore((), DIM, torch.float32)
    assert CacheIndex(store).assign(0, 3, 0) == InitialState(ZERO)
    cache = StateCache((), DIM, torch.float32, torch.device("cpu"))
    assert cache.load(3, InitialState(ZERO)) == {}
    cache.add(StateUpdate(3, 0, {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_vectors_of_any_type_over_the_same_memory_without_a_warning(dtype):
    vector = torch.randn(7).to(dtype)
    array = as_bytes(vector)
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = as_tensor(array, dtype)
    assert torch.equal(again, vector)
    assert again.data_ptr() == vector.data_ptr()
    assert as_tensor(np.empty(0, np.uint8), dtype).numel() == 0


def test_the_memory_lives_as_long_as_a_tensor_uses_it():
    import gc
    import weakref

    class Memory(np.ndarray):
        pass

    array = np.arange(8, dtype=np.uint8).view(Memory)
    alive = weakref.ref(array)
    tensor = as_tensor(array)
    view = tensor[2:]
    del array, tensor
    gc.collect()
    assert alive() is not None
    assert view.tolist() == [2, 3, 4, 5, 6, 7]
    del view
    gc.collect()
    assert alive() is None
