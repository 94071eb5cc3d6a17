"""The server: means and momentum by hand, and every way an upload can be wrong."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedbcgd import Diverged, UserError, make_algorithm
from fedbcgd.core.messages import Task, Upload
from fedbcgd.core.norms import norm
from fedbcgd.core.refusals import MAX_MOSTLY_REFUSED_ROUNDS
from fedbcgd.core.server import Server


class Five(nn.Module):
    """Five parameters: blocks (a1, a2), (b1, b2) and the shared s."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(2))
        self.b = nn.Parameter(torch.zeros(2))
        self.s = nn.Parameter(torch.zeros(1))


def server(cohort: int = 3, clients: int = 3, name: str = "fedbcgd", **options) -> Server:
    if name == "fedbcgd":
        options = {"blocks": 2, "divider": ["a", "b"], "shared": ["s"], "momentum": 0.5} | options
    algorithm = make_algorithm(name, **options)
    return Server(algorithm, algorithm.uplink.layout(Five()), torch.zeros(5), clients, cohort, seed=0)


def upload(task, *slices, examples=1, **changes) -> Upload:
    pieces = [torch.tensor(values, dtype=torch.float32).view(torch.uint8) for values in slices]
    made = Upload(task.round, task.client, task.block, {"dx": pieces}, examples, 1, 1, 0.5)
    return dataclasses.replace(made, **changes)


def test_means_and_momentum_by_hand():
    """Three clients: blocks a, b, a in round 1 (dealt in turn), λ = ½.

    Round 1. a: (2, 4) and (4, 0), mean (3, 2); b: (1, 1); s: 3, 6, 0, mean 3. v = Δ, x = v.
    Round 2, the turn goes on: blocks b, a, b. a: (1, 1); b: (2, 0) and (0, 2), mean (1, 1); s: 0, 0, 3, mean 1.
      v = ½v + Δ: a (2.5, 2), b (1.5, 1.5), s 2.5.  x = x + v: a (5.5, 4), b (2.5, 2.5), s 5.5.
    """
    s = server()
    one = s.plan().tasks
    assert [t.block for t in one] == [0, 1, 0]
    for task, values in zip(one, [([2, 4], [3]), ([1, 1], [6]), ([4, 0], [0])], strict=True):
        assert s.receive(upload(task, *values)).accepted
    s.commit()
    assert s.x.tolist() == [3, 2, 1, 1, 3]
    two = s.plan().tasks
    assert [t.block for t in two] == [1, 0, 1]
    for task, values in zip(two, [([2, 0], [0]), ([1, 1], [0]), ([0, 2], [3])], strict=True):
        assert s.receive(upload(task, *values)).accepted
    s.commit()
    assert s.x.tolist() == [5.5, 4, 2.5, 2.5, 5.5]
    assert s.state["v"].tolist() == [2.5, 2, 1.5, 1.5, 2.5]


def test_a_slice_without_uploads_keeps_value_and_momentum(caplog):
    """Round 1 moves everything to v = x = 1. In round 2 block b's only client is lost: b keeps x = 1 and v = 1."""
    s = server(cohort=2)
    for task in s.plan().tasks:
        s.receive(upload(task, [1, 1], [1]))
    s.commit()
    assert s.x.tolist() == [1] * 5
    for task in s.plan().tasks:
        if task.block == 0:
            s.receive(upload(task, [0, 0], [0]))
        else:
            s.lost(task, "test")
    report = s.commit()
    assert "no upload counts for these blocks, which keep their values: 2" in caplog.text
    assert len(report.lost) == 1
    assert s.x.tolist() == [1.5, 1.5, 1, 1, 1.5]
    assert s.state["v"].tolist() == [0.5, 0.5, 1, 1, 0.5]


def test_a_mean_is_over_what_arrived():
    s = server(name="fedavg")
    tasks = s.plan().tasks
    s.receive(upload(tasks[0], [1, 1, 1, 1, 1]))
    s.receive(upload(tasks[2], [3, 3, 3, 3, 3]))
    report = s.commit()
    assert s.x.tolist() == [2] * 5
    assert report.accepted == 2
    assert "no answer" in report.lost[0]


def test_weighting_by_examples():
    """(1·10 + 3·2)/4 = 4."""
    s = server(name="fedavg", cohort=2, weighting="examples")
    tasks = s.plan().tasks
    s.receive(upload(tasks[0], [10] * 5, examples=1))
    s.receive(upload(tasks[1], [2] * 5, examples=3))
    s.commit()
    assert s.x.tolist() == [4] * 5


WRONG = {
    "late": (
        lambda u, s: dataclasses.replace(u, round=s.round - 1),
        "round: expected a number greater than or equal to 0, got -1",
    ),
    "early": (lambda u, s: dataclasses.replace(u, round=s.round + 1), "round: expected 1, got 2"),
    "not asked": (lambda u, s: dataclasses.replace(u, client=17), "expected one of this round's cohort, got 17"),
    "wrong block": (lambda u, s: dataclasses.replace(u, block=1 - u.block), "block: expected 1, got 2"),
    "no such block": (lambda u, s: dataclasses.replace(u, block=9), "block: expected 1, got 10"),
    "short": (lambda u, s: upload(u, [1], [1]), "expected slices of [8, 4] bytes, got [4, 4]"),
    "long": (lambda u, s: upload(u, [1, 1, 1], [1]), "expected slices of [8, 4] bytes, got [12, 4]"),
    "a slice missing": (lambda u, s: upload(u, [1, 1]), "expected slices of [8, 4] bytes, got [8]"),
    "not bytes": (lambda u, s: dataclasses.replace(u, payload={"dx": [torch.ones(8), torch.ones(4)]}), "uint8"),
    "not flat": (
        lambda u, s: dataclasses.replace(u, payload={"dx": [u.payload["dx"][0].view(2, 4), u.payload["dx"][1]]}),
        "uint8",
    ),
    "not tensors": (lambda u, s: dataclasses.replace(u, payload={"dx": [p.numpy() for p in u.payload["dx"]]}), "uint8"),
    "other channels": (
        lambda u, s: dataclasses.replace(u, payload={"dc": u.payload["dx"]}),
        "channels: expected ['dx'], got [\"'dc'\"]",
    ),
    "more channels": (
        lambda u, s: dataclasses.replace(u, payload={**u.payload, "dc": []}),
        "channels: expected ['dx'], got [\"'dc'\", \"'dx'\"]",
    ),
    "NaN": (lambda u, s: upload(u, [1, math.nan], [1]), "NaN or infinity"),
    "infinity": (lambda u, s: upload(u, [1, 1], [-math.inf]), "NaN or infinity"),
    "no steps": (
        lambda u, s: dataclasses.replace(u, steps=0),
        "steps: expected a number greater than or equal to 1, got 0",
    ),
    "no examples": (
        lambda u, s: dataclasses.replace(u, examples=0),
        "examples: expected a number greater than or equal to 1, got 0",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_upload_is_refused_with_a_reason_and_the_run_goes_on(kind):
    spoil, words = WRONG[kind]
    s = server(cohort=2)
    tasks = s.plan().tasks
    x = s.x.clone()
    receipt = s.receive(spoil(upload(tasks[0], [9, 9], [9]), s))
    assert not receipt.accepted
    assert words in receipt.reason
    assert torch.equal(s.x, x)
    assert s.receive(upload(tasks[1], [1, 1], [1])).accepted
    report = s.commit()
    assert s.x.tolist() == [0, 0, 1, 1, 1]  # as if the wrong one had never been
    assert len(report.refused) == 1
    assert s.ledger.refused == 1
    assert s.ledger.upload_bytes > 12  # and yet it was sent
    assert s.plan().tasks  # the next round opens


def test_answers_are_expected_in_the_open_round_only():
    s = server(cohort=2)
    later = Task(1, 0, 0)
    assert not s.expects(Task(0, 0, 0))  # no round is open
    task = s.plan().tasks[0]
    assert s.expects(task)
    assert not s.expects(dataclasses.replace(task, round=1))
    s.receive(upload(task, [2, 2], [2]))
    assert not s.expects(task)
    s.commit()
    assert not s.expects(task)
    assert not s.expects(later)  # its round is not planned yet


def test_who_diverges_is_told_the_rate_of_the_round():
    s = server(lr=0.5, lr_decay=0.5)
    with pytest.raises(Diverged, match=r"too high \(0.125 in this round, lr = 0.5\), or NaN in the data"):
        for _ in range(MAX_MOSTLY_REFUSED_ROUNDS):
            for task in s.plan().tasks:
                s.receive(upload(task, [math.nan, 0], [0]))
            s.commit()


def test_an_upload_sent_twice_counts_once():
    s = server(cohort=2)
    tasks = s.plan().tasks
    assert s.receive(upload(tasks[0], [2, 2], [2])).accepted
    second = s.receive(upload(tasks[0], [2, 2], [2]))
    assert not second.accepted
    assert "expected one that has still to answer, got" in second.reason
    s.commit()
    assert s.x.tolist() == [2, 2, 0, 0, 2]
    assert s.ledger.upload_max_bytes == 24
    # sent twice, but broadcast and computed once; the other client never answered
    assert s.ledger.download_bytes == 2 * 5 * 4
    assert s.ledger.gradient_evaluations == 1
    assert s.ledger.lost == 1


def test_an_upload_after_its_task_was_given_up_is_refused():
    s = server(cohort=2)
    tasks = s.plan().tasks
    s.lost(tasks[0], "timeout")
    assert not s.receive(upload(tasks[0], [2, 2], [2])).accepted


def test_settled_follows_the_order_of_the_plan():
    s = server()
    tasks = s.plan().tasks
    s.receive(upload(tasks[2], [1, 1], [1]))
    assert s.settled == 0
    s.receive(upload(tasks[0], [1, 1], [1]))
    assert s.settled == 1
    s.lost(tasks[1], "test")
    assert s.settled == 3


def test_training_stops_when_every_upload_is_refused_for_rounds():
    s = server(cohort=2)
    with pytest.raises(Diverged, match=r"learning rate.*lr = 0\.1"):
        for _ in range(MAX_MOSTLY_REFUSED_ROUNDS):
            for task in s.plan().tasks:
                s.receive(upload(task, [math.nan] * 2, [1]))
            s.commit()
    assert s.x.tolist() == [0] * 5


def test_one_good_round_starts_the_count_anew():
    s = server(cohort=2)
    for good in (False, False, True, False, False, True):
        for task in s.plan().tasks:
            s.receive(upload(task, [1, 1], [0.0 if good else math.nan]))
        s.commit()
    assert s.round == 6


def test_finite_uploads_that_add_up_to_infinity_leave_the_model():
    s = server(name="fedavg", cohort=2)
    for task in s.plan().tasks:
        assert s.receive(upload(task, [3e38, 1, 1, 1, 1])).accepted
    s.commit()
    assert s.x.tolist() == [0] * 5
    for task in s.plan().tasks:
        s.receive(upload(task, [1] * 5))
    s.commit()
    assert s.x.tolist() == [1] * 5


def test_half_precision_is_summed_in_single():
    """The mean of 1000 ones is 1; in bfloat16 a sum of ones stops growing at 256."""
    algorithm = make_algorithm("fedavg")
    model = Five().to(torch.bfloat16)
    s = Server(algorithm, algorithm.uplink.layout(model), torch.zeros(5, dtype=torch.bfloat16), 1000, 1000, seed=0)
    one = torch.ones(5, dtype=torch.bfloat16).view(torch.uint8)
    for task in s.plan().tasks:
        s.receive(Upload(task.round, task.client, 0, {"dx": [one]}, 1, 1, 1, 0.0))
    s.commit()
    assert s.x.tolist() == [1] * 5


def test_an_abandoned_round_leaves_no_trace():
    s = server(cohort=2)
    before = s.ledger.totals()
    s.receive(upload(s.plan().tasks[0], [9, 9], [9]))
    s.abandon()
    assert s.ledger.totals() == before
    s.receive(upload(s.plan().tasks[0], [7, 7], [7]))  # and a plan abandons what was open
    for task in s.plan().tasks:
        s.receive(upload(task, [1, 1], [1]))
    s.commit()
    assert s.x.tolist() == [1] * 5
    assert s.ledger.upload_bytes == 24


def test_a_late_notice_of_loss_does_not_close_a_place_in_another_round():
    s = server(cohort=3)
    old = s.plan().tasks[0]
    s.commit()
    new = {t.client: t for t in s.plan().tasks}
    s.lost(old, "late")
    assert s.receive(upload(new[old.client], [1, 1], [1])).accepted
    s.lost(dataclasses.replace(old, client=99, round=s.round), "unknown")
    assert s.settled == 1 or s.settled == 0


def test_the_next_upload_is_known_before_the_round():
    """Unequal blocks, one client a round: what the next round costs depends on whose turn it is."""
    s = server(cohort=1, divider=["a", ["b", "s"]], shared=None)
    costs = []
    for _ in range(4):
        expected = s.next_upload_d()
        before = s.ledger.upload_d
        task = s.plan().tasks[0]
        assert s.receive(upload(task, [1.0] * (2 if task.block == 0 else 3))).accepted
        s.commit()
        assert s.ledger.upload_d - before == pytest.approx(expected)
        costs.append(round(expected, 3))
    assert costs == [0.4, 0.6, 0.4, 0.6]


def test_lost_uploads_alone_do_not_stop_training():
    s = server(cohort=2)
    for _ in range(MAX_MOSTLY_REFUSED_ROUNDS + 2):
        s.plan()
        s.commit()
    assert s.round == MAX_MOSTLY_REFUSED_ROUNDS + 2
    assert s.ledger.upload_d == 0


@given(st.integers(1, 9), st.integers(1, 5), st.integers(0, 100))
def test_plans_ask_distinct_clients(cohort, blocks, seed):
    algorithm = make_algorithm("fedbcgd", blocks=blocks, shared=None)
    s = Server(algorithm, algorithm.uplink.layout(Five()), torch.zeros(5), 9, cohort, seed)
    tasks = s.plan().tasks
    assert len({t.client for t in tasks}) == cohort
    assert all(0 <= t.client < 9 and 0 <= t.block < blocks for t in tasks)


@pytest.mark.parametrize("cohort", [0, 4])
def test_an_impossible_cohort_is_refused(cohort):
    with pytest.raises(UserError, match=f"cohort: expected 1 to 3, the number of clients, got {cohort}"):
        server(cohort=cohort)


def test_the_ledger_says_what_was_encoded(federation, net, toys):
    for name, options in [
        ("fedavg", {}),
        ("fedbcgd", {"blocks": 3}),
        ("fedpaq", {"levels": 7, "bucket": 10}),
        ("scaffold", {}),
    ]:
        sizes = []
        algorithm = make_algorithm(name, **options)
        f = federation(algorithm, net(), toys(), 5, transport=lambda u, to=sizes: to.append(u.nbytes) or u)
        f.round()
        assert f.server.ledger.upload_bytes == sum(sizes)
        assert [e.upload_bytes for e in f.server.ledger.entries] == sizes
        assert f.server.ledger.upload_max_bytes == max(sizes)
        assert f.server.ledger.upload_d == pytest.approx(sum(sizes) / 5 / (4 * f.layout.dim))


def test_restore_continues_to_the_same_bits(federation, net, toys):
    algorithm = make_algorithm("fedbcgd", blocks=2, codec="qsgd", batch_size=3)
    whole = federation(algorithm, net(), toys(), cohort=4)
    for _ in range(3):
        whole.round()
    tensors, values = whole.server.snapshot()
    for _ in range(3):
        whole.round()
    other = federation(algorithm, net(), toys(), cohort=4)
    other.server.restore(tensors, values)
    for _ in range(3):
        other.round()
    assert torch.equal(whole.server.x, other.server.x)
    assert whole.server.ledger.totals() == other.server.ledger.totals()


def test_restore_brings_back_control_variates(federation, net, toys):
    algorithm = make_algorithm("scaffold", batch_size=3)
    f = federation(algorithm, net(), toys(), cohort=4)
    f.round()
    tensors, values = f.server.snapshot()
    expected = f.server.controls["c"].clone()
    assert expected.abs().sum() > 0
    other = federation(algorithm, net(), toys(), cohort=4)
    other.server.restore(tensors, values)
    assert torch.equal(other.server.controls["c"], expected)


def test_buffers_are_averaged_over_clients_and_by_weight(federation):
    """Two clients with means 2 and 6: running_mean = 0.1·4 = 0.4; weighted 1 : 3 by examples, 0.1·5 = 0.5."""
    clients = [(torch.full((2, 1), 2.0), torch.zeros(2).long()), (torch.full((6, 1), 6.0), torch.zeros(6).long())]
    for weighting, expected in (("uniform", 0.4), ("examples", 0.5)):
        model = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 2))
        algorithm = make_algorithm("fedavg", batch_size=50, local_steps=1, weighting=weighting)
        f = federation(algorithm, model, clients, cohort=2)
        f.round()
        assert f.layout.views(f.server.x)["0.running_mean"].item() == pytest.approx(expected)


def test_batchnorm_statistics_reach_the_server(federation, toys):
    """One client, one batch: running_mean goes from 0 to 0.1·mean, averaged plainly, never by momentum."""
    clients = [(x, y) for x, y in toys()][:1]
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
    algorithm = make_algorithm("fedbcgd", blocks=1, momentum=0.9, batch_size=50, local_steps=1, weight_decay=0.5)
    f = federation(algorithm, model, clients, cohort=1)
    mean = clients[0][0].mean(0)
    expected = torch.zeros(4)
    for _ in range(3):
        f.round()
        expected = 0.9 * expected + 0.1 * mean
        running = f.layout.views(f.server.x)["0.running_mean"]
        torch.testing.assert_close(running, expected)
    extra = 8 * 4
    assert f.server.ledger.upload_bytes == 3 * (4 * f.layout.dim + extra)


def test_a_checkpoint_is_written_beside_the_work(federation, point, pull_loss, at_point, tmp_path, monkeypatch):
    """What it holds is the state at its beginning; an error of its writing is told when it is waited for."""
    import threading

    from fedbcgd.engine import checkpoint

    f = federation(
        make_algorithm("scaffold", lr=0.1), point(2), [at_point(1.0, 1.0), at_point(3.0, 2.0)], 2, loss=pull_loss
    )
    f.round()
    go_on, written = threading.Event(), checkpoint.write_tensors

    def slowly(*args):
        assert go_on.wait(60)
        written(*args)

    monkeypatch.setattr(checkpoint, "write_tensors", slowly)
    points = checkpoint.Checkpoints(tmp_path, None)
    at_first = f.server.x.clone()
    points.begin(f.server, f.store, {"note": 7})
    assert not points.due(f.server)
    assert points.load() is None
    f.round()  # while it is being written
    assert not torch.equal(f.server.x, at_first)
    go_on.set()
    points.finish(f.store)
    tensors, values = points.load()
    assert torch.equal(tensors["x"], at_first)
    assert (values["round"], values["note"]) == (1, 7)

    def fails(*args):
        raise UserError("no room")

    monkeypatch.setattr(checkpoint, "write_tensors", fails)
    points.begin(f.server, f.store, {})
    with pytest.raises(UserError, match="no room"):
        points.finish(f.store)
    assert points.load()[1]["round"] == 1


@pytest.mark.parametrize("n", [0, 1, 5000, (1 << 18) - 1, 1 << 18, (1 << 18) + 77])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_finite_is_found_out_in_any_length(n, dtype):
    values = torch.full((n,), 1e38, dtype=dtype)  # whose sum overflows in single precision
    assert norm(values) == pytest.approx(1e38 * math.sqrt(n), rel=0.01)
    for place in {0, n // 2, n - 1} if n else ():
        for bad in (math.nan, math.inf, -math.inf):
            kept = values[place].item()
            values[place] = bad
            assert not math.isfinite(norm(values))
            values[place] = kept
