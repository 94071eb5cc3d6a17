"""SCAFFOLD against numbers worked by hand, and its invariant."""

import pytest
import torch

from fedbcgd import make_algorithm, simulate
from fedbcgd.rng import stream

HAND = {"lr": 0.5, "lr_decay": 1, "weight_decay": 0, "local_steps": 2, "batch_size": 1}


@pytest.mark.parametrize("derived", [False, True])
def test_two_clients_two_steps_by_hand(federation, point, pull_loss, at_point, derived):
    """f_i(w) = ½(w − a_i)², a = (0, 6), x = 2, η = ½, T = 2, so Tη = 1.

    Round 1, all controls 0:
      client 1: g = 2, y = 1; g = 1, y = ½.     y − x = −1.5, Δc = (x − y)/(Tη) = 1.5
      client 2: g = −4, y = 4; g = −2, y = 5.   y − x = 3,    Δc = −3
      x = 2 + (−1.5 + 3)/2 = 2.75;  c = (1.5 − 3)/2 = −0.75;  c_1 = 1.5, c_2 = −3
    Round 2, x = 2.75:
      client 1, c − c_1 = −2.25: g = 2.75, step ½, y = 2.5; g = 2.5, step ¼, y = 2.375.
        y − x = −0.375; Δc = −c + 0.375 = 1.125; c_1 = 2.625
      client 2, c − c_2 = 2.25: g = −3.25, step −1, y = 3.25; g = −2.75, step −½, y = 3.5.
        y − x = 0.75; Δc = 0.75 − 0.75 = 0; c_2 = −3
      x = 2.75 + (−0.375 + 0.75)/2 = 2.9375;  c = −0.75 + 1.125/2 = −0.1875
    With the sign of the correction the wrong way round, or the correction applied to a copy, client 1 of round 2
    would end elsewhere (at 0.6875 without it).
    """
    algorithm = make_algorithm("scaffold", derived=derived, **HAND)
    f = federation(algorithm, point(2.0), [at_point(0.0), at_point(6.0)], cohort=2, loss=pull_loss)
    f.round()
    assert f.server.x.tolist() == [2.75]
    assert f.server.controls["c"].tolist() == [-0.75]
    assert f.controls().flatten().tolist() == [1.5, -3.0]
    f.round()
    assert f.server.x.tolist() == [2.9375]
    assert f.server.controls["c"].tolist() == [-0.1875]
    assert f.controls().flatten().tolist() == [2.625, -3.0]


def test_it_reaches_the_optimum_where_fedavg_stays_off(federation, point, pull_loss):
    """f_1 = ½·4·(w − 0)², f_2 = ½(w − 6)² have their optimum at 6/5; FedAvg with several local steps ends elsewhere."""

    def loss(model, batch):
        x, curvature = batch
        return 0.5 * (curvature[:, None] * model(x).square()).sum(1).mean()

    def client(a, curvature):
        return torch.tensor([[a]], dtype=torch.float64), torch.tensor([curvature], dtype=torch.float64)

    ends = {}
    for name in ("fedavg", "scaffold"):
        algorithm = make_algorithm(name, lr=0.1, lr_decay=1, weight_decay=0, local_steps=5)
        f = federation(algorithm, point(3.0), [client(0.0, 4.0), client(6.0, 1.0)], cohort=2, loss=loss)
        for _ in range(400):
            f.round()
        ends[name] = f.server.x.item()
    assert ends["scaffold"] == pytest.approx(1.2, abs=1e-9)
    assert abs(ends["fedavg"] - 1.2) > 0.1


@pytest.mark.parametrize("uplink", ["whole", "blocks"])
@pytest.mark.parametrize("codec", ["plain", "qsgd"])
@pytest.mark.parametrize("derived", [False, True])
def test_c_is_the_mean_of_all_c_i_also_when_uploads_are_lost(federation, net, toys, uplink, codec, derived):
    draw = stream(3, "lost")
    algorithm = make_algorithm("scaffold", uplink=uplink, codec=codec, derived=derived, batch_size=3, lr=0.05)
    f = federation(
        algorithm, net().double(), doubles(toys), cohort=4, transport=lambda u: None if draw.random() < 1 / 3 else u
    )
    lost = 0
    for _ in range(25):
        lost += len(f.round().lost)
        torch.testing.assert_close(f.server.controls["c"], f.controls().mean(0), rtol=1e-12, atol=1e-13)
    assert lost > 15
    assert f.controls().abs().sum(1).min() > 0  # every client took part and has a control of its own


def doubles(toys):
    return [(x.double(), y) for x, y in toys()]


def test_on_blocks_only_the_uploaded_coordinates_of_c_i_change(federation, net, toys):
    f = federation(make_algorithm("scaffold", uplink="blocks", blocks=2, batch_size=3), net(), toys(), cohort=2)
    before = f.controls()
    plan = f.server.plan()
    f.backend.run_round(f.server, plan)
    f.server.commit()
    f.store.commit()
    changed = f.controls() != before
    for task in plan.tasks:
        outside = torch.ones(f.layout.dim, dtype=torch.bool)
        for s in f.layout.slices(task.block):
            assert changed[task.client, s].any()
            outside[s] = False
        assert not changed[task.client, outside].any()


def test_derived_equals_published_to_rounding(net, toys):
    clients = doubles(toys)
    finals = []
    for derived in (False, True):
        result = simulate(
            net().double(),
            clients,
            "scaffold",
            derived=derived,
            rounds=20,
            cohort=4,
            lr=0.1,
            batch_size=3,
            workers=0,
        )
        finals.append(torch.cat([p.flatten() for p in result.module.parameters()]))
        assert result.ledger.upload_d == pytest.approx(20 if derived else 40)
    torch.testing.assert_close(finals[0], finals[1], rtol=1e-10, atol=1e-12)


def test_a_refused_upload_leaves_the_state_of_its_client(federation, net, toys):
    import dataclasses

    def spoil(upload):
        bad = [piece.clone().fill_(255) for piece in upload.payload["dc"]]  # 0xffffffff is a NaN
        return dataclasses.replace(upload, payload={**upload.payload, "dc": bad}) if upload.client == 1 else upload

    f = federation(make_algorithm("scaffold", batch_size=3), net(), toys(), cohort=6, transport=spoil)
    report = f.round()
    assert len(report.refused) == 1
    assert f.store.clients() == [0, 2, 3, 4, 5]
    torch.testing.assert_close(f.server.controls["c"], f.controls().mean(0))


def test_state_of_an_older_control_epoch_counts_as_zero(federation, net, toys):
    f = federation(make_algorithm("scaffold", batch_size=3), net(), toys(), cohort=6)
    f.round()
    assert f.store.load(0, epoch=0)
    assert not f.store.load(0, epoch=1)
    f.server.epoch = 1
    f.server.controls["c"].zero_()
    f.round()
    torch.testing.assert_close(f.server.controls["c"], f.controls().mean(0))
