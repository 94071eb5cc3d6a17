"""Models and data as people have them."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import fedbcgd
from fedbcgd import UserError, simulate
from fedbcgd.algorithms.codecs import CODECS
from fedbcgd.algorithms.local_rules import LOCALS
from fedbcgd.algorithms.server_rules import SERVERS
from fedbcgd.core.messages import Broadcast, Task
from fedbcgd.data.images import Images
from fedbcgd.data.sources import as_source
from fedbcgd.engine.assemble import make_job


def images(n=6, clients=3, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [(torch.randn(n, 1, 8, 8, generator=g), torch.randint(3, (n,), generator=g)) for _ in range(clients)]


class Tutorial(nn.Module):
    """`.view` after a pool, as in most tutorials: it cannot compute in channels_last."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.fc = nn.Linear(4 * 9, 3)

    def forward(self, x):
        return self.fc(F.max_pool2d(F.relu(self.conv(x)), 2).view(-1, 4 * 9))


def test_view_after_a_convolution_works():
    result = simulate(Tutorial(), images(), rounds=2, blocks=2, workers=0)
    assert result.rounds == 2


def test_channels_last_is_used_where_it_can_be():
    seen = []

    class Flat(Tutorial):
        def forward(self, x):
            seen.append(self.conv.weight.stride())
            return self.fc(F.max_pool2d(F.relu(self.conv(x)), 2).flatten(1))

    simulate(Flat(), images(), rounds=1, blocks=2, workers=0)
    assert seen[-1] == (9, 1, 3, 1)


def in_colour(n=6, clients=3):
    g = torch.Generator().manual_seed(0)
    return [(torch.randn(n, 3, 8, 8, generator=g), torch.randint(3, (n,), generator=g)) for _ in range(clients)]


class Colours(Tutorial):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return self.fc(F.max_pool2d(F.relu(self.conv(x)), 2).flatten(1))


def plain_loss(model, batch):
    """Looks at the images by `.view`, as an autoencoder's would."""
    return F.cross_entropy(model(batch[0]), batch[1]) + 0 * batch[0].view(len(batch[0]), -1).mean()


def plain_metrics(model, batch):
    return {"brightness": batch[0].view(len(batch[0]), -1).mean()}


@pytest.mark.parametrize("goal", [{}, {"loss": plain_loss}, {"metrics": plain_metrics}])
@pytest.mark.parametrize("given", [None, True])
def test_images_lie_in_channels_last_only_where_loss_and_metrics_take_them(goal, given):
    """The weights do all the same."""
    clients = in_colour()
    test = clients[0]
    job = make_job(Colours(), clients, fedbcgd.make_algorithm("fedavg"), test, 0, channels_last=given, **goal)
    assert job.module.conv.weight.is_contiguous(memory_format=torch.channels_last)
    held = [as_source(data, "client").tensors[0] for data in (*job.clients, job.test)]
    assert [x.is_contiguous() for x in held] == [bool(goal)] * 4
    result = simulate(Colours(), clients, "fedavg", rounds=2, workers=0, test=test, channels_last=given, **goal)
    assert result.rounds == 2


def test_metrics_count_only_where_there_is_something_to_measure():
    job = make_job(Colours(), in_colour(), fedbcgd.make_algorithm("fedavg"), None, 0, metrics=plain_metrics)
    assert not job.clients[0].tensors[0].is_contiguous()


def test_trying_channels_last_out_leaves_no_trace():
    """Neither in the model that is trained nor among the draws of whoever calls."""

    class Normed(Colours):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm2d(3)

        def forward(self, x):
            return super().forward(F.dropout(self.norm(x)))

    torch.manual_seed(0)
    model = Normed()
    draws = torch.get_rng_state()
    job = make_job(model, in_colour(), fedbcgd.make_algorithm("fedavg"), in_colour()[0], 0)
    assert torch.equal(torch.get_rng_state(), draws)
    assert job.module.norm.running_mean.abs().max() == 0
    assert job.module.training
    assert all(p.grad is None for p in job.module.parameters())


class Narrow(nn.Module):
    """With a shortcut of a few channels, whose backward pass in channels_last damages memory on some machines."""

    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(1, channels, 3, padding=1)
        self.shortcut = nn.Conv2d(channels, 16, 1, 2)
        self.fc = nn.Linear(16, 3)

    def forward(self, x):
        return self.fc(self.shortcut(self.conv(x)).mean((2, 3)))


@pytest.mark.parametrize(("channels", "last"), [(4, False), (8, True)])
def test_channels_last_is_not_used_where_its_kernel_is_faulty(channels, last):
    """Neither by the model nor, where the images lie so, by that layer."""
    pixels, labels = torch.randint(256, (6, 1, 8, 8), dtype=torch.uint8), torch.arange(6) % 3
    source = Images(pixels, labels, torch.tensor([0.5]), torch.tensor([0.25]))
    formats = []

    class Watched(Narrow):
        def forward(self, x):
            self.shortcut.register_forward_hook(lambda layer, given, out: formats.append(given[0].is_contiguous()))
            return super().forward(x)

    job = make_job(Watched(channels), [source] * 3, fedbcgd.make_algorithm("fedavg", batch_size=2), None, 0)
    layouts = [e.order == (0, 2, 3, 1) for e in job.layout.parameters if len(e.shape) == 4]
    assert set(layouts) == {last}
    job.fit(Broadcast(0, 0, torch.zeros(job.layout.size), {}), Task(0, 0, 0), {})
    assert set(formats) == {not last}


def test_channels_last_is_refused_where_its_kernel_is_faulty():
    with pytest.raises(UserError, match="fewer than 8 input channels"):
        simulate(Narrow(4), images(), rounds=1, blocks=2, workers=0, channels_last=True)


def norm_net():
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))


def test_batchnorm_and_dropout_are_trained_in_one_mode_and_measured_in_the_other(toys):
    """The metrics are those of the returned module in evaluation mode; training used batch statistics and dropout."""
    modes = []

    def loss(model, batch):
        modes.append(model.training)
        return F.cross_entropy(model(batch[0]), batch[1])

    test = toys((40,))[0]
    clients = toys((6, 4))
    result = simulate(
        norm_net(), clients, "fedavg", rounds=2, test=test, batch_size=6, workers=0, loss=loss, metrics=metrics
    )
    assert modes[0] is True
    module = result.module.eval()
    with torch.no_grad():
        assert result.final["test_loss"] == pytest.approx(float(F.cross_entropy(module(test[0]), test[1])), rel=1e-5)
    assert not torch.equal(module[1].running_mean, torch.zeros(8))


def metrics(model, batch):
    assert not model.training
    return {"loss": F.cross_entropy(model(batch[0]), batch[1])}


def test_parts_kept_in_evaluation_mode_stay_so(toys):
    model = norm_net()
    model[1].eval()
    result = simulate(model, toys((6, 4)), "fedavg", rounds=2, workers=0)
    assert torch.equal(result.module[1].running_mean, torch.zeros(8))
    whole = simulate(norm_net().eval(), toys((6, 4)), "fedavg", rounds=2, workers=0)  # forgotten, not meant
    assert not torch.equal(whole.module[1].running_mean, torch.zeros(8))


def test_batchnorm_on_a_minibatch_of_one_is_explained(toys):
    with pytest.raises(UserError, match=r"batch_size: expected .*got 3 with client.*GroupNorm"):
        simulate(norm_net(), toys((4, 4)), "fedavg", rounds=1, batch_size=3, workers=0)


class Renorm(nn.Module):
    """Replaces its weight's memory in forward, as some published networks do."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        self.fc.weight.data = torch.renorm(self.fc.weight.data, 2, 0, 0.5)
        return self.fc(x)


def test_a_parameter_replaced_in_forward_is_still_trained(toys):
    clients = toys((6,))
    model = Renorm()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(plain(clients[0][0]), clients[0][1]).backward()
        optimizer.step()
    options = {"lr": 0.5, "lr_decay": 1, "weight_decay": 0, "local_steps": 3}
    result = simulate(model, clients, "fedavg", rounds=1, workers=0, **options)
    torch.testing.assert_close(result.module.fc.weight, plain.fc.weight, rtol=1e-4, atol=1e-5)


def test_a_loss_that_does_not_reach_the_model_is_said_so(net, toys):
    outer = net()
    with pytest.raises(UserError, match="loss: expected one that depends on the trainable parameters"):
        simulate(net(), toys(), rounds=1, workers=0, loss=lambda m, b: F.cross_entropy(outer(b[0]), b[1]))
    with pytest.raises(UserError, match="loss: expected one that depends"):
        simulate(net(), toys(), rounds=1, workers=0, loss=lambda m, b: torch.zeros(()))


@pytest.mark.parametrize(("loss", "word"), [(lambda m, b: m(b[0]), "shape"), (lambda m, b: 1.0, "float")])
def test_a_loss_must_be_one_number(net, toys, loss, word):
    with pytest.raises(UserError, match=word):
        simulate(net(), toys(), rounds=1, workers=0, loss=loss)


def test_a_criterion_of_torch_may_be_given_as_it_is(net, toys):
    a = simulate(net(), toys(), rounds=2, blocks=2, workers=0, loss=F.cross_entropy).module.state_dict()
    b = simulate(net(), toys(), rounds=2, blocks=2, workers=0).module.state_dict()
    assert all(torch.equal(a[k], b[k]) for k in a)


def test_a_data_set_that_transforms_its_items_is_asked_for_them(net, toys):
    class Halved(TensorDataset):
        def __getitem__(self, i):
            x, y = super().__getitem__(i)
            return x / 2, y

    a = simulate(net(), [Halved(x, y) for x, y in toys()], rounds=2, blocks=2, workers=0).module.state_dict()
    b = simulate(net(), [(x / 2, y) for x, y in toys()], rounds=2, blocks=2, workers=0).module.state_dict()
    assert all(torch.equal(a[k], b[k]) for k in a)


def test_labels_may_be_a_list_or_small_integers(net, toys):
    b = simulate(net(), toys(), rounds=2, blocks=2, workers=0).module.state_dict()
    for clients in ([(x, y.tolist()) for x, y in toys()], [(x, y.numpy().astype(np.int32)) for x, y in toys()]):
        a = simulate(net(), clients, rounds=2, blocks=2, workers=0).module.state_dict()
        assert all(torch.equal(a[k], b[k]) for k in a)


def test_a_model_that_caches_while_it_is_measured_can_train_on(net, toys):
    class Caches(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()
            self.scale = None

        def forward(self, x):
            if self.scale is None:
                self.scale = torch.ones(3)
            return self.net(x) * self.scale

    result = simulate(Caches(), toys(), rounds=3, blocks=2, test=toys()[0], workers=0)
    assert result.rounds == 3


def test_extra_state_travels(net, toys):
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"version": 3}

        def set_extra_state(self, state):
            assert state == {"version": 3}

    assert simulate(Extra(4, 3), toys(), rounds=1, blocks=2, workers=0).rounds == 1


def test_a_stop_from_a_callback_is_measured(net, toys):
    result = simulate(net(), toys(), rounds=9, blocks=2, workers=0, evaluate_every=4, callbacks=[lambda i: i.stop()])
    assert (result.stopped, result.rounds) == ("callback", 1)
    assert result.final["round"] == 1


def test_budget_is_kept_with_unequal_blocks(net, toys):
    result = simulate(
        net(),
        toys(),
        divider=[["0.weight", "2", "4"], ["0.bias"]],
        blocks=2,
        shared=None,
        cohort=1,
        budget=1.2,
        workers=0,
    )
    assert result.ledger.upload_d <= 1.2


def test_half_precision_trains(net, toys):
    clients = [(x.bfloat16(), y) for x, y in toys()]
    for name in fedbcgd.algorithm_names():
        network = "4g" if name == "fedbcgd-matched" else None
        result = simulate(net().bfloat16(), clients, name, rounds=2, batch_size=3, workers=0, network=network)
        assert next(result.module.parameters()).dtype == torch.bfloat16
        assert result.ledger.refused == 0


def test_every_free_combination_trains(net, toys):
    settings = {"rounds": 2, "cohort": 3, "batch_size": 3, "local_epochs": 1, "workers": 0}
    for uplink in ("whole", "blocks", "central"):
        for local in LOCALS:
            for server in SERVERS:
                for codec in CODECS:
                    parts = {"uplink": uplink, "local": local, "server": server, "codec": codec}
                    result = simulate(net(), toys(), "fedavg", **settings, **parts)
                    assert result.ledger.refused == 0
                    assert result.rounds == 2


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"seed": -1}, ["seed", "-1"]),
        ({"seed": None}, ["seed", "None"]),
        ({"cohort": 2.5}, ["cohort", "2.5"]),
        ({"rounds": "3"}, ["rounds", "'3'"]),
        ({"rounds": 2.5}, ["rounds", "2.5"]),
        ({"budget": float("inf")}, ["budget", "inf"]),
        ({"budget": float("nan")}, ["budget", "nan"]),
        ({"device": "cuda:99"}, ["device", "cuda:99"]),
        ({"device": "gpu"}, ["device", "gpu"]),
        ({"callbacks": print}, ["callbacks", "list"]),
        ({"target": "high"}, ["target", "'high'"]),
        ({"weights": "model.pt"}, ["weights", "state_dict", "model.pt"]),
        ({"workers": -1}, ["workers", "-1"]),
        ({"divider": 5}, ["divider", "layers", "5"]),
        ({"shared": 5}, ["shared", "patterns", "5"]),
        ({"clients": {"a": (torch.zeros(2, 4), torch.zeros(2))}}, ["clients", "dictionary"]),
        ({"clients": iter([1])}, ["clients", "list"]),
        ({"clients": [{"x": torch.zeros(2, 4), "y": "ab"}]}, ["client 0", "'y'", "str"]),
        ({"clients": [{}]}, ["client 0", "empty"]),
        ({"model": nn.Linear}, ["model", "instance"]),
    ],
)
def test_mistakes_are_explained(net, toys, kwargs, words):
    settings = {"rounds": 1, "workers": 0, "blocks": 2} | kwargs
    with pytest.raises(UserError) as error:
        simulate(settings.pop("model", net()), settings.pop("clients", toys()), **settings)
    for word in words:
        assert word in str(error.value)


def test_divergence_keeps_what_there_was(net, toys):
    with pytest.raises(fedbcgd.Diverged) as error:
        simulate(net(), toys(), lr=1e30, rounds=50, blocks=2, workers=0)
    assert error.value.result.stopped == "diverged"
    assert all(p.isfinite().all() for p in error.value.result.module.parameters())
