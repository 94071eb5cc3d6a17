"""Faults on purpose: all from the seed, refused by the server, without effect on anybody's state."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fedbcgd import Diverged, UserError, algorithm_names, make_algorithm, simulate
from fedbcgd.algorithms.codecs import CODECS
from fedbcgd.core.messages import Task
from fedbcgd.network import faults
from fedbcgd.network.faults import FaultInjector, crashes, damaged, dropped, spoilt

FEDERATED = [name for name in algorithm_names() if name != "central"]


def state(result):
    return [t.clone() for t in result.module.state_dict().values()]


def same(a, b):
    return all(p.equal(q) for p, q in zip(state(a), state(b), strict=True))


def test_who_drops_out_depends_on_seed_round_and_client_alone():
    tasks = [Task(r, c, 0) for r in range(20) for c in range(50)]
    gone, when = dropped(tasks, 0.3, seed=0)
    assert 0.25 < gone.mean() < 0.35
    assert 0.45 < when[gone].mean() < 0.55
    assert [values[::-1].tolist() for values in dropped(tasks[::-1], 0.3, seed=0)] == [gone.tolist(), when.tolist()]
    assert dropped(tasks, 0.3, seed=1)[0].tolist() != gone.tolist()
    assert not dropped(tasks, 0.0, seed=0)[0].any()
    assert (dropped(tasks, 0.6, seed=0)[0] >= gone).all()  # who drops out at 0.3 does so at 0.6


@pytest.mark.parametrize("codec", list(CODECS))
def test_damaged_uploads_are_refused_whatever_the_codec(federation, net, toys, codec):
    """Both kinds of damage, in every round and at every client; nothing moves, and no client's state does."""
    algorithm = make_algorithm("scaffold", codec=codec, local_steps=1)
    kinds = set()

    def transport(upload):
        bad = damaged(upload, 1.0, seed=0)
        kinds.add(bad.nbytes < upload.nbytes)
        assert bad.nbytes <= upload.nbytes
        assert upload.payload["dx"][0].numel()  # the original is whole
        return bad

    f = federation(algorithm, net(), toys(), cohort=6, transport=transport)
    before = f.server.x.clone()
    for _ in range(2):
        f.round()
    assert kinds == {True, False}
    assert f.server.ledger.refused == 12
    assert f.server.x.equal(before)
    assert f.store.clients() == []


def test_with_buffers_too(federation, toys):
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    f = federation(
        make_algorithm("fedavg", local_steps=1, batch_size=8), model, toys((8, 8, 8)), cohort=3,
        transport=lambda upload: damaged(upload, 1.0, seed=1),
    )  # fmt: skip
    assert len(f.round().refused) == 3


def test_damage_is_the_same_for_the_same_upload(federation, net, toys):
    f = federation(make_algorithm("fedavg", local_steps=1), net(), toys(), cohort=6)
    upload, _ = f.job.fit(f.server.plan().broadcast, f.server.plan().tasks[0], {})
    some = [dataclasses.replace(upload, client=c) for c in range(100)]
    hit = [damaged(u, 0.5, seed=0) is not u for u in some]
    assert hit == spoilt(some, 0.5, seed=0).tolist()  # known before anybody has trained
    assert hit == [damaged(u, 0.5, seed=0) is not u for u in some]
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
    watch = NetworkSimulator(f.job, as_network({"profile": "4g", "dropout": 0.5}))
    f.server.conditions = watch.conditions(8, 8, f.layout)
    arrived = lost = 0
    losses = []
    for _ in range(30):
        f.backend.carry(f.server, watch.plan(f.server))
        report = f.server.commit()
        f.store.commit()
        watch.committed(f.server)
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
    """16 are asked for 8, and 3 of 10 uploads arrive damaged: in all but about one round of ten (where fewer than 4 of the
    8 uploads of a block are whole) each block has its 4 whole uploads. Were damaged ones counted, few rounds had them."""
    enough = []
    network = {"profile": "4g", "oversample": 2.0, "corrupt": 0.3}

    def callback(info):
        whole = [e.block for e in info.ledger.entries if e.accepted]
        enough.append(min(whole.count(0), whole.count(1)) >= 4)

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


def test_a_victim_that_is_gone_already_changes_nothing(federation, net, toys, monkeypatch):
    f = federation(make_algorithm("fedavg", local_steps=1), net(), toys(), cohort=6)
    plan = f.server.plan()
    upload, _ = f.job.fit(plan.broadcast, plan.tasks[0], {})
    killed = []

    def kill(pid, number):
        killed.append(pid)
        raise ProcessLookupError

    monkeypatch.setattr(faults.os, "kill", kill)
    backend = SimpleNamespace(pids=lambda: [11, 12])
    injector = FaultInjector(f.server, backend, 0.0, 0, crashes(1.0, 0, seed=0))
    assert injector.receive(upload).accepted
    assert len(killed) == 1
    injector.receive(upload)
    assert len(killed) == 1, "one in a round"


def test_crashes_come_from_the_seed():
    rounds = [r for r in range(200) if crashes(0.25, r, seed=0) is not None]
    assert rounds == [r for r in range(200) if crashes(0.25, r, seed=0) is not None]
    assert 30 < len(rounds) < 70
    assert crashes(0.0, 0, seed=0) is None


@pytest.mark.parametrize("where", [{"workers": 0}, {"backend": "ray"}])
def test_crashes_need_workers(net, toys, where):
    with pytest.raises(UserError, match=r"network\.crash"):
        simulate(net(), toys(), "fedavg", rounds=1, network={"crash": 0.5}, **where)
