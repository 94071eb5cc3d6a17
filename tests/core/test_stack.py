"""Clients trained in one batch: the values of one by one, up to rounding, and the same bits on any number of workers."""

import numpy as np
import pytest
import torch
from torch import nn

from fedbcgd import UserError, algorithm_names, make_algorithm, simulate
from fedbcgd.core.messages import Task
from fedbcgd.core.stack import Stack, StackMemory, stacked_step_of
from fedbcgd.data.images import Images
from fedbcgd.data.sources import Tensors
from fedbcgd.engine.assemble import make_job
from fedbcgd.models import BinaryLogistic, BinarySigmoid, Logistic

MODELS = {"logistic": Logistic, "binary-logistic": BinaryLogistic, "binary-sigmoid": BinarySigmoid}
BATCHABLE = [name for name in algorithm_names() if name != "fedbcgd-frozen"]


def clients(count=6, sizes=(7,), classes=2, dtype=torch.float64, seed=0):
    draw = torch.Generator().manual_seed(seed)
    out = []
    for k in range(count):
        n = sizes[k % len(sizes)]
        x = torch.randn(n, 1, 3, 4, generator=draw, dtype=dtype)
        out.append((x, torch.randint(0, classes, (n,), generator=draw)))
    return out


def go(model="logistic", name="fedavg", dtype=torch.float64, data=None, **options):
    chosen = MODELS[model]
    module = chosen(2, (1, 3, 4)).to(dtype)
    own = {"loss": chosen.own_loss} if hasattr(chosen, "own_loss") else {}
    settings = {"rounds": 3, "cohort": 5, "batch_size": 3, "local_epochs": 2, "workers": 0, "lr": 0.05} | own | options
    if name == "central":
        settings["cohort"] = 1
    if name == "fedbcgd-matched":
        settings["network"] = "4g"
    return simulate(module, data or clients(dtype=dtype), name, **settings)


def values(result):
    return torch.cat([p.detach().flatten() for p in result.module.parameters()])


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", BATCHABLE)
def test_equal_to_one_by_one_for_every_algorithm(model, name):
    """In double precision, so that what differs would be a mistake and not rounding; quantisers are compared in scale."""
    one_by_one, batched = go(model, name), go(model, name, batch_clients=3)
    coarse = make_algorithm(name).codec.lossless is False
    moved = values(one_by_one).abs().max()
    assert moved > 1e-3
    bound = 0.02 if coarse else 1e-12
    assert (values(batched) - values(one_by_one)).abs().max() <= bound * moved
    counted = ("upload_floats", "download_bytes", "gradient_evaluations", "refused", "lost")
    if name != "topk":  # whose length depends on where its values are
        counted += ("upload_bytes", "block_bytes")
    for what in counted:
        assert getattr(batched.ledger, what) == getattr(one_by_one.ledger, what)
    assert batched.rounds == one_by_one.rounds


@pytest.mark.parametrize(
    "options",
    [
        {"clip_norm": 0.05},
        {"client_momentum": 0.5},
        {"weight_decay": 0.3},
        {"local_steps": 4},
        {"batch_size": 50},
        {"cohort": 1},
        {"batch_clients": 100},
    ],
)
def test_equal_with_every_option_of_the_steps(options):
    assert torch.allclose(
        values(go(**({"batch_clients": 2} | options))), values(go(**options | {"batch_clients": None})), rtol=1e-11
    )


def test_the_stated_tolerance_in_single_precision():
    """docs/speed.md: 1e-5 of the largest value, after a few rounds."""
    draw = torch.Generator().manual_seed(1)
    data = [
        (torch.randn(60, 784, generator=draw).view(60, 1, 28, 28), torch.randint(0, 10, (60,), generator=draw))
        for _ in range(12)
    ]
    options = {"rounds": 5, "cohort": 8, "batch_size": 10, "local_epochs": 1, "workers": 0, "lr": 0.05}
    one_by_one, batched = (
        values(simulate(Logistic(10, (1, 28, 28)), data, "fedbcgd", batch_clients=k, **options)) for k in (None, 4)
    )
    assert 0 < (batched - one_by_one).abs().max() <= 1e-5 * one_by_one.abs().max()


@pytest.mark.parametrize("model", MODELS)
def test_an_offered_step_is_the_gradient_and_a_step(model):
    chosen, draw = MODELS[model], torch.Generator().manual_seed(3)
    start = {
        name: torch.randn(4, *p.shape, generator=draw, dtype=torch.float64)
        for name, p in chosen(2, (1, 3, 4)).named_parameters()
    }
    x = torch.randn(4, 5, 1, 3, 4, generator=draw, dtype=torch.float64)
    y = torch.randint(0, 2, (4, 5), generator=draw)
    eta, decay = 0.3, 0.2
    gradients = {name: torch.empty_like(v) for name, v in start.items()}
    losses = chosen.stacked_gradient(start, x, y, gradients)
    stepped = {name: v.clone() for name, v in start.items()}
    assert torch.allclose(chosen.stacked_step(stepped, x, y, eta, decay), losses)
    for name, v in start.items():
        assert torch.allclose(stepped[name], v - eta * (gradients[name] + decay * v), rtol=1e-12)


def test_a_model_may_offer_gradients_alone(monkeypatch):
    expected = values(go(batch_clients=3))
    monkeypatch.delattr(Logistic, "stacked_step")
    assert torch.allclose(values(go(batch_clients=3)), expected, rtol=1e-12)


class Doubled(Logistic):
    """Another gradient than that of the step it has from Logistic."""

    @staticmethod
    def stacked_gradient(values, x, y, out):
        losses = Logistic.stacked_gradient(values, x, y, out)
        for gradient in out.values():
            gradient.mul_(2)
        return losses


def test_a_step_counts_only_with_its_own_gradient():
    class Both(Doubled):
        stacked_step = staticmethod(lambda *given: None)

    class Further(Both):
        pass

    own = Logistic(2, (1, 3, 4))
    assert stacked_step_of(own) is Logistic.stacked_step
    assert stacked_step_of(Doubled(2, (1, 3, 4))) is None
    assert stacked_step_of(Both(2, (1, 3, 4))) is stacked_step_of(Further(2, (1, 3, 4))) is Both.stacked_step
    assert stacked_step_of(nn.Linear(1, 1)) is None
    own.stacked_gradient = Doubled.stacked_gradient
    assert stacked_step_of(own) is None
    own.stacked_step = Both.stacked_step
    assert stacked_step_of(own) is Both.stacked_step


def test_a_subclass_with_another_gradient_steps_by_it():
    options = {
        "rounds": 2,
        "cohort": 5,
        "batch_size": 3,
        "local_epochs": 1,
        "workers": 0,
        "batch_clients": 3,
        "lr_decay": 1,
    }
    options |= {"weight_decay": 0}
    doubled = simulate(Doubled(2, (1, 3, 4)).double(), clients(), "fedavg", lr=0.05, **options)
    faster = simulate(Logistic(2, (1, 3, 4)).double(), clients(), "fedavg", lr=0.1, **options)
    assert torch.allclose(values(doubled), values(faster), rtol=1e-11)


def test_rows_are_drawn_where_the_data_is():
    """Data that stays on the host, though the model is on a device, and data that does not say where it is."""
    meta, module = torch.device("meta"), Logistic(2, (1, 3, 4))
    algorithm = make_algorithm("fedavg", batch_size=3, local_epochs=1)
    layout = algorithm.uplink.layout(module)

    class Anywhere:
        def __len__(self):
            return 7

        def gather(self, rows, rng):
            return torch.zeros(len(rows.tolist()), 1, 3, 4), torch.zeros(len(rows), dtype=torch.int64)

    here = Tensors((torch.zeros(7, 1, 3, 4), torch.zeros(7, dtype=torch.int64)))
    for source in (here, Anywhere()):
        rngs = [np.random.default_rng(k) for k in range(2)]
        x = torch.empty(layout.size, device=meta)
        stack = Stack(algorithm.local, layout, module, x, {}, {}, [source] * 2, 0, rngs, StackMemory(layout, 2, meta))
        batches = stack._epoch(9)
        assert {batch.rows.device.type for batch in batches} == {"cpu"}
        assert {t.device for batch in batches for t in batch.inputs} == {meta}
        algorithm.local.train(stack)
        assert stack.steps == 3


@pytest.mark.parametrize("model", MODELS)
def test_a_batch_of_clients_stays_on_its_device(model):
    """On a device without values: whatever asked for one would fail."""
    meta, chosen = torch.device("meta"), MODELS[model]
    module = chosen(2, (1, 3, 4))
    algorithm = make_algorithm("fedbcgd", blocks=2, divider="even", batch_size=3, local_epochs=2)
    layout = algorithm.uplink.layout(module)
    pixels = torch.zeros(20, 3, 4, 1, dtype=torch.uint8).permute(0, 3, 1, 2)
    whole = Images(pixels, torch.zeros(20, dtype=torch.int64), torch.zeros(1), torch.ones(1)).to(meta)
    sources = [whole.subset(torch.arange(10, device=meta)) for _ in range(2)]
    rngs = [np.random.default_rng(k) for k in range(2)]
    x = torch.empty(layout.size, device=meta)
    stack = Stack(algorithm.local, layout, module, x, {}, {}, sources, 0, rngs, StackMemory(layout, 2, meta))
    algorithm.local.train(stack)
    stack.sum_losses()
    assert stack.steps == 8
    assert stack.losses.device == meta
    assert all(batch.rows.device == meta for batch in stack._epoch(9))


def test_train_loss_is_the_mean_over_steps():
    one_by_one, batched = go(), go(batch_clients=4)
    for a, b in zip(one_by_one.rows, batched.rows, strict=True):
        assert b["train_loss"] == pytest.approx(a["train_loss"], rel=1e-7)
        assert b["gradient_evaluations"] == a["gradient_evaluations"]


@pytest.mark.parametrize("name", ["fedbcgd", "fedbcgd+", "topk"])
def test_the_same_bits_on_any_number_of_workers(name):
    """What is trained in one batch follows from the plan."""
    data = clients(9, sizes=(7, 7, 4, 7))
    results = [values(go(name=name, data=data, cohort=8, batch_clients=3, workers=workers)) for workers in (0, 1, 2)]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_units_are_neighbours_of_equal_size():
    data = clients(8, sizes=(5, 5, 5, 2))
    job = make_job(Logistic(2, (1, 3, 4)).double(), data, make_algorithm("fedavg"), None, 0, batch_clients=2)
    tasks = [Task(0, k, 0) for k in range(8)]
    assert job.units(tasks, bool) == [(0, 1), (2,), (3,), (4, 5), (6,), (7,)]
    assert job.units(tasks, lambda task: task.client != 3) == [(0, 1), (2, 4), (5, 6), (7,)]
    job.batch_clients = None
    assert job.units(tasks, bool) == [(k,) for k in range(8)]


def test_unequal_clients_are_right_too():
    data = clients(7, sizes=(7, 3, 3, 8))
    assert torch.allclose(values(go(data=data, batch_clients=3)), values(go(data=data)), rtol=1e-11)


def test_resident_images_and_anything_else_give_the_same():
    """Images of one data set are gathered at once, others one by one: same minibatches."""
    draw = torch.Generator().manual_seed(3)
    pixels = torch.randint(0, 256, (40, 1, 8, 4), generator=draw, dtype=torch.uint8)
    whole = Images(pixels, torch.randint(0, 10, (40,), generator=draw), torch.tensor([0.4]), torch.tensor([0.3]))
    parts = [whole.subset(torch.arange(k * 8, k * 8 + 8)) for k in range(5)]
    pairs = [p.gather(torch.arange(8), np.random.default_rng(0)) for p in parts]
    options = {"rounds": 2, "cohort": 4, "batch_size": 3, "local_epochs": 1, "workers": 0, "batch_clients": 4}
    a, b = (values(simulate(Logistic(10, (1, 8, 4)), data, "fedavg", **options)) for data in (parts, pairs))
    assert torch.equal(a, b)


def test_large_epochs_are_gathered_step_by_step(monkeypatch):
    from fedbcgd.core import stack

    at_once = values(go(batch_clients=3))
    monkeypatch.setattr(stack, "GATHERED_AHEAD", 10)
    assert torch.equal(values(go(batch_clients=3)), at_once)


class Offers(nn.Module):
    """A user's own model can offer it too: y = w·x, squared error would be its own loss, cross entropy is ours."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, x):
        return self.fc(x)

    stacked_gradient = staticmethod(Logistic.stacked_gradient)


def test_a_users_own_model_may_offer_it():
    draw = torch.Generator().manual_seed(0)
    data = [(torch.randn(6, 4, generator=draw), torch.randint(0, 2, (6,), generator=draw)) for _ in range(4)]
    torch.manual_seed(0)
    model = Offers()
    options = {"rounds": 2, "cohort": 4, "batch_size": 4, "workers": 0}
    one_by_one, batched = (values(simulate(model, data, "fedavg", batch_clients=k, **options)) for k in (None, 4))
    assert torch.allclose(one_by_one, batched, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": nn.Linear(12, 2)}, "Linear has no method stacked_gradient"),
        ({"loss": lambda model, batch: model(batch[0]).sum()}, "another loss was given"),
        ({"name": "fedbcgd-frozen"}, "moves different coordinates for each client"),
        ({"name": "fedbcgd+", "damping": "adaptive"}, "adaptive damping"),
        ({"batch_clients": 0}, "batch_clients: expected an integer ≥ 1"),
        ({"batch_clients": "many"}, "batch_clients: expected an integer"),
        ({"backend": "ray"}, "backend = 'ray', got 3"),
    ],
)
def test_refused_with_a_reason(change, says):
    model = change.pop("model", Logistic(2, (1, 3, 4)).double())
    name = change.pop("name", "fedavg")
    with pytest.raises(UserError, match=says):
        simulate(model, clients(), name, rounds=1, **({"batch_clients": 3} | change))


def test_augmentation_is_refused():
    pixels = torch.zeros(10, 1, 8, 8, dtype=torch.uint8)
    whole = Images(pixels, torch.zeros(10, dtype=torch.long), torch.tensor([0.5]), torch.tensor([0.5]), augment=True)
    with pytest.raises(UserError, match="augmentation is drawn"):
        simulate(
            Logistic(2, (1, 8, 8)), [whole.subset(torch.arange(10))], "fedavg", rounds=1, cohort=1, batch_clients=2
        )
