import numpy as np

from fedbcgd.rng import stream, torch_seed


def test_a_draw_depends_on_its_place_alone():
    assert np.array_equal(stream(1, "batches", 3, 4).random(5), stream(1, "batches", 3, 4).random(5))
    places = [(1, "batches", 3, 4), (2, "batches", 3, 4), (1, "codec", 3, 4), (1, "batches", 4, 3), (1, "batches", 3)]
    assert len({stream(*place).random() for place in places}) == len(places)
    assert len({torch_seed(*place) for place in places}) == len(places)
    assert all(0 <= torch_seed(*place) < 2**63 for place in places)


def test_drawing_touches_no_global_generator():
    np.random.seed(0)  # noqa: NPY002
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    stream(0, "x").random(10)
    assert np.array_equal(before, np.random.get_state()[1])  # noqa: NPY002
