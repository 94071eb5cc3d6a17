"""Injected faults: all from the seed, refused by the server, without effect on any client's state."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fedbcgd import Diverged, UserError, algorithm_names, make_algorithm, simulate
from fedbcgd.algorithms.codecs import CODECS
from fedbcgd.core.messages import Task
from fedbcgd.network import faults
from fedbcgd.network.faults import FaultInjector, damage_upload, draw_crash, draw_damage, draw_dropouts

FEDERATED = [name for name in algorithm_names() if name != "central"]


def state(result):
    return [t.clone() for t in result.module.state_dict().values()]


def same(a, b):
    return all(p.equal(q) for p, q in zip(state(a), state(b), strict=True))


def test_who_drops_out_depends_on_seed_round_and_client_alone():
    tasks = [Task(r, c, 0) for r in range(20) for c in range(50)]
    gone, when = draw_dropouts(tasks, 0.3, seed=0)
    assert 0.25 < gone.mean() < 0.35
    assert 0.45 < when[gone].mean() < 0.55
    assert [values[::-1].tolist() for values in draw_dropouts(tasks[::-1], 0.3, seed=0)] == [
        gone.tolist(),
        when.tolist(),
    ]
    assert draw_dropouts(tasks, 0.3, seed=1)[0].tolist() != gone.tolist()
    assert not draw_dropouts(tasks, 0.0, seed=0)[0].any()
    assert (draw_dropouts(tasks, 0.6, seed=0)[0] >= gone).all()  # who drops out at 0.3 does so at 0.6


@pytest.mark.parametrize("codec", list(CODECS))
def test_damaged_uploads_are_refused_whatever_the_codec(federation, net, toys, codec):
    """Both kinds of damage, in every round and at every client; neither the model nor any client's state changes."""
    algorithm = make_algorithm("scaffold", codec=codec, local_steps=1)
    kinds = set()

    def transport(upload):
        damaged = damage_upload(upload, 1.0, seed=0)
        kinds.add(damaged.nbytes < upload.nbytes)
        assert damaged.nbytes <= upload.nbytes
        assert upload.payload["dx"][0].numel()  # the original is unchanged
        return damaged

    f = federation(algorithm, net(), toys(), cohort=6, transport=transport)
    before = f.server.x.clone()
    for _ in range(2):
        f.round()
    assert kinds == {True, False}
    assert f.server.ledger.refused == 12
    assert f.server.x.equal(before)
    assert f.store.clients() == []


def test_damaged_uploads_with_buffers_are_refused(federation, toys):
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    f = federation(
        make_algorithm("fedavg", local_steps=1, batch_size=8), model, toys((8, 8, 8)), cohort=3,
        transport=lambda upload: damage_upload(upload, 1.0, seed=1),
    )  # fmt: skip
    assert len(f.round().refused) == 3


def test_damage_is_the_same_for_the_same_upload(federation, net, toys):
    f = federation(make_algorithm("fedavg", local_steps=1), net(), toys(), cohort=6)
    upload, _ = f.job.fit(f.server.plan().broadcast, f.server.plan().tasks[0], {})
    uploads = [dataclasses.replace(upload, client=c) for c in range(100)]
    hit = [damage_upload(u, 0.5, seed=0) is not u for u in uploads]
    assert hit == draw_damage(uploads, 0.5, seed=0).tolist()  # decided before training
    assert hit == [damage_upload(u, 0.5, seed=0) is not u for u in uploads]
    assert 30 < sum(hit) < 70


@pytest.mark.parametrize("name", FEDERATED)
def test_half_of_the_cohort_drops_out_in_every_round(federation, net, toys, name):
    """It trains, nothing hangs, the ledger counts what arrived, and c = mean(c_i) holds."""
    from fedbcgd.network.settings import as_network
    from fedbcgd.network.simulator import NetworkSimulator

    options = {"blocks": 2} if "fedbcgd" in name else {}
    if name == "fedbcgd-matched":
        options["divider"] = [1, 2]
    algorithm = make_algorithm(name, local_steps=2, batch_size=4, lr=0.02, **options)
    clients = toys((8,) * 12)
    f = federation(algorithm, net().double(), [(x.double(), y) for x, y in clients], cohort=8)
    simulator = NetworkSimulator(f.job, as_network({"profile": "4g", "dropout": 0.5}))
    f.server.conditions = simulator.conditions(8, 8, f.layout)
    arrived = lost = 0
    losses = []
    for _ in range(30):
        f.backend.run_round(f.server, simulator.plan(f.server))
        report = f.server.commit()
        f.store.commit()
        simulator.committed(f.server)
        assert report.accepted + len(report.lost) == 8
        assert len(f.server.ledger.entries) == report.accepted
        arrived, lost = arrived + report.accepted, lost + len(report.lost)
        losses.append(report.train_loss)
        for control in algorithm.local.controls:
            assert torch.allclose(f.server.controls[control], f.controls(control).mean(0), atol=1e-12)
    assert 80 < arrived < 160
    assert f.server.ledger.lost == lost == 240 - arrived
    known = [loss for loss in losses if loss == loss]
    assert sum(known[-5:]) < sum(known[:5])
    each = [sum(map(sum, algorithm.lengths(f.layout, j).values())) for j in range(f.layout.blocks)]
    assert min(each) * 0.3 * arrived < f.server.ledger.upload_bytes <= max(each) * arrived


def test_if_uploads_are_damaged_on_purpose_the_learning_rate_is_not_blamed(net, toys):
    with pytest.raises(Diverged, match=r"cause is network\.corrupt = 0\.99") as stopped:
        simulate(net(), toys(), "fedavg", rounds=30, cohort=2, workers=0, network={"corrupt": 0.99})
    assert "learning rate" not in str(stopped.value)


def test_damaged_uploads_do_not_close_a_round(net, toys):
    """16 clients are sampled for a cohort of 8, and 3 of 10 uploads arrive damaged: in about nine rounds of ten each block
    gets its 4 valid uploads. If damaged ones counted, few rounds would have them."""
    enough = []
    network = {"profile": "4g", "oversample": 2.0, "corrupt": 0.3}

    def callback(info):
        valid = [e.block for e in info.ledger.entries if e.accepted]
        enough.append(min(valid.count(0), valid.count(1)) >= 4)

    simulate(
        net(), toys((4,) * 40), "fedbcgd", blocks=2, rounds=30, cohort=8, workers=0, local_steps=1, network=network,
        callbacks=[callback],
    )  # fmt: skip
    assert sum(enough) >= 24


def test_a_crashed_worker_changes_nothing(net, toys, caplog):
    """A worker is killed in every round, while the others are at work."""
    common = {"rounds": 2, "cohort": 6, "batch_size": 3, "seed": 1}
    calm = simulate(net(), toys(), "scaffold", workers=0, **common)
    rough = simulate(net(), toys(), "scaffold", workers=2, network={"crash": 1.0}, **common)
    assert same(calm, rough)
    assert "killed by SIGKILL" in caplog.text
    assert rough.ledger.lost == rough.ledger.refused == 0


def test_a_worker_that_has_ended_already_cannot_be_killed(federation, net, toys, monkeypatch):
    f = federation(make_algorithm("fedavg", local_steps=1), net(), toys(), cohort=6)
    plan = f.server.plan()
    upload, _ = f.job.fit(plan.broadcast, plan.tasks[0], {})
    killed = []

    def kill(pid, number):
        killed.append(pid)
        raise ProcessLookupError

    monkeypatch.setattr(faults.os, "kill", kill)
    backend = SimpleNamespace(pids=lambda: [11, 12])
    injector = FaultInjector(f.server, backend, 0.0, 0, draw_crash(1.0, 0, seed=0))
    assert injector.receive(upload).accepted
    assert len(killed) == 1
    injector.receive(upload)
    assert len(killed) == 1, "one worker in a round"


def test_crashes_come_from_the_seed():
    rounds = [r for r in range(200) if draw_crash(0.25, r, seed=0) is not None]
    assert rounds == [r for r in range(200) if draw_crash(0.25, r, seed=0) is not None]
    assert 30 < len(rounds) < 70
    assert draw_crash(0.0, 0, seed=0) is None


@pytest.mark.parametrize("where", [{"workers": 0}, {"backend": "ray"}])
def test_crashes_need_workers(net, toys, where):
    with pytest.raises(UserError, match=r"network\.crash"):
        simulate(net(), toys(), "fedavg", rounds=1, network={"crash": 0.5}, **where)
