"""A client that lies: whatever it sends, the server answers, keeps finite numbers and goes on."""

import dataclasses
import math
import time
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from fedbcgd import Diverged, UserError, make_algorithm
from fedbcgd.core.messages import Upload
from fedbcgd.core.norms import FLOOR, LOOSE, WARM_UP, NormLimit, norm
from fedbcgd.core.refusals import MAX_BLAMED_STEPS, MAX_MOSTLY_REFUSED_ROUNDS
from fedbcgd.core.server import Server


def model() -> nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 5), nn.Linear(5, 3))


def make_server(name: str, clients: int = 6, cohort: int = 6, **options) -> Server:
    module = model()
    algorithm = make_algorithm(name, **options)
    layout = algorithm.uplink.layout(module)
    return Server(algorithm, layout, layout.vector(module.state_dict()), clients, cohort, seed=0)


def honest(server: Server, task, scale: float = 0.01) -> Upload:
    """What an honest client might send: changes of a given size in each coordinate."""
    rng = np.random.default_rng((task.round, task.client))
    payload = {}
    for channel in server.algorithm.local.channels:
        parts = []
        for s in server.layout.slices(task.block):
            values = torch.from_numpy(rng.normal(0, scale, s.stop - s.start)).to(server.layout.dtype)
            parts.append(server.algorithm.codec.encode(values, rng))
        payload[channel] = parts
    buffers = server.x[server.layout.buffer_slice]
    if len(buffers):
        payload["buffers"] = [buffers.clone().view(torch.uint8)]
    return Upload(task.round, task.client, task.block, payload, 10, 2, 2, 0.5)


def constant(server: Server, task, value: float) -> Upload:
    """Every coordinate changes by the same value."""
    sizes = [s.stop - s.start for s in server.layout.slices(task.block)]
    dx = [torch.full((n,), value).view(torch.uint8) for n in sizes]
    return dataclasses.replace(honest(server, task), payload={**honest(server, task).payload, "dx": dx})


def is_finite(server: Server) -> bool:
    vectors = [server.x, *server.state.values(), *server.controls.values()]
    return all(bool(v.isfinite().all()) for v in vectors)


ODD = [
    None, True, -1, 0, 2**31, 2**63, 10**400, 1e300, 1.5, math.inf, -math.inf, math.nan, "", "3", "x" * 100_000, b"1", [3],
    {}, {"a": 1}, (1, 2), object(), 1j, torch.tensor(1), torch.tensor([1.0, 2.0]), np.float64("inf"), np.int64(2), int,
]  # fmt: skip
FIELDS = [f.name for f in dataclasses.fields(Upload) if f.name != "payload"]


def mutate(upload: Upload, rng: np.random.Generator) -> Upload:
    """Change the upload somewhere: its values, its structure or its bytes."""
    kind = rng.integers(5)
    if kind == 0:
        changed = {
            str(name): ODD[rng.integers(len(ODD))] for name in rng.choice(FIELDS, rng.integers(1, 4), replace=False)
        }
        return dataclasses.replace(upload, **changed)
    if kind == 1:
        return dataclasses.replace(upload, payload=ODD[rng.integers(len(ODD))])
    payload = {channel: list(pieces) for channel, pieces in upload.payload.items()}
    channel = str(rng.choice(list(payload)))
    k = int(rng.integers(len(payload[channel])))
    piece = payload[channel][k].clone()
    if kind == 2:
        odd = [
            *ODD, piece[:-1], torch.cat([piece, piece]), piece.float(), piece.view(1, -1), piece[::2], piece.to("meta"),
            piece.to_sparse(), torch.empty(0, dtype=torch.uint8), piece.numpy(),
        ]  # fmt: skip
        payload[channel][k] = odd[rng.integers(len(odd))]
    elif kind == 3:
        structure = [
            lambda: payload.pop(channel), lambda: payload.update({"more": [piece]}), lambda: payload.update({7: [piece]}),
            lambda: payload.update({channel: ODD[rng.integers(len(ODD))]}), lambda: payload[channel].append(piece),
            lambda: payload[channel].clear(), lambda: payload.update({f"c{n}": [] for n in range(1000)}),
            lambda: payload.update({channel: [piece] * 10_000}),
        ]  # fmt: skip
        structure[rng.integers(len(structure))]()
    elif len(piece):
        places = rng.integers(0, len(piece), rng.integers(1, 9))
        piece[torch.from_numpy(places)] = torch.from_numpy(rng.integers(0, 256, len(places), dtype=np.uint8))
        if rng.random() < 0.2:
            piece[:] = int(rng.choice([0, 127, 255]))
        payload[channel][k] = piece
    return dataclasses.replace(upload, payload=payload)


SERVERS = [
    ("fedavg", {}), ("fedbcgd", {"blocks": 2}), ("fedadam", {}), ("fedyogi", {"max_norm": 5.0}), ("topk", {"fraction": 0.2}),
    ("fedpaq", {"weighting": "examples"}), ("scaffold", {"weighting": "examples", "max_norm": "20x"}),
    ("scaffold", {"derived": True}), ("feddc", {}), ("fedbcgd", {"blocks": 3, "codec": "float16", "max_norm": "3x"}),
    ("fedavgm", {"max_norm": 1.0, "over_norm": "scale"}), ("fedbcgd+", {"blocks": 2, "codec": "qsgd"}),
]  # fmt: skip


def bombard(name: str, options: dict, tries: int, known: bool) -> float:
    """Send mutated uploads round after round; honest ones beside them still count where senders are known.

    Returns the seconds that the slowest one took.
    """
    slowest = 0.0
    rng = np.random.default_rng(len(name))
    server = make_server(name, **options)
    sent = 0
    while sent < tries:
        for task in server.plan().tasks:
            if rng.random() < 0.3:
                receipt = server.receive(honest(server, task), task.client)
                assert receipt.accepted or not known or "the norm is" in receipt.reason
                continue
            for _ in range(8):
                upload, start = mutate(honest(server, task), rng), time.perf_counter()
                receipt = server.receive(upload, task.client if known else None)
                slowest = max(slowest, time.perf_counter() - start)
                assert receipt.accepted or receipt.reason
                assert len(receipt.reason) < 2000
                sent += 1
        try:
            server.commit()
        except Diverged:
            server = make_server(name, **options)
        assert is_finite(server)
        assert "max_norm" not in options or norm(server.x) < 1e6
    return slowest


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(("name", "options"), SERVERS, ids=str)
def test_mutated_uploads_are_answered(name, options, known):
    bombard(name, options, 100, known)


@pytest.mark.slow
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(("name", "options"), SERVERS, ids=str)
def test_fifty_thousand_mutated_uploads_are_answered(name, options, known):
    assert bombard(name, options, 50_000 // len(SERVERS) // 2 + 1, known) < 1


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", ODD, ids=lambda v: f"{type(v).__name__} {str(v)[:20]}")
def test_a_value_of_another_type_or_range_is_refused(field, value):
    server = make_server("fedavg", weighting="examples")
    task = server.plan().tasks[0]
    right = getattr(honest(server, task), field)
    counts = field in ("examples", "steps", "gradient_evaluations")
    fits = type(value) is int and (value == right or (value == 2**31 and counts))
    fits |= type(value) is int and value == 0 and field == "gradient_evaluations"
    if field == "train_loss":  # any real number, or none
        real = isinstance(value, (int, float, np.number, torch.Tensor)) and value is not True
        fits = value is None or (real and np.ndim(value) == 0 and -1e301 < value < 1e301)
    if field == "metrics":
        fits = value in ({}, {"a": 1}) if isinstance(value, dict) else False
    receipt = server.receive(dataclasses.replace(honest(server, task), **{field: value}), task.client)
    assert receipt.accepted == fits, receipt.reason
    assert not server.expects(task)  # its sender is known and has answered


def test_what_is_no_upload_is_refused():
    server = make_server("fedavg")
    task = server.plan().tasks[0]
    for thing in (*ODD, task):
        assert "expected an upload, got" in server.receive(thing).reason


def test_a_large_message_is_refused_without_a_copy():
    server = make_server("fedavg")
    task = server.plan().tasks[0]
    large = torch.zeros(50_000_000, dtype=torch.uint8)
    tracemalloc.start()
    for payload in ({"dx": [large]}, {"dx": [large] * 1000}, {f"channel {k}": [] for k in range(100_000)}):
        assert not server.receive(dataclasses.replace(honest(server, task), payload=payload)).accepted
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50e6


def test_a_known_sender_cannot_answer_for_another():
    """Both were asked for the same block; without the check the first upload would take the second one's place."""
    server = make_server("fedavg")
    liar, victim = server.plan().tasks[:2]
    receipt = server.receive(honest(server, victim), sender=liar.client)
    assert f"client: expected {liar.client}, which sent it, got {victim.client}" in receipt.reason
    assert server.receive(honest(server, victim), sender=victim.client).accepted
    report = server.commit()
    assert (report.accepted, len(report.refused)) == (1, 1)
    assert len(report.lost) == len(server.refusals.strikes) + 4  # the liar is refused, not lost as well


def test_an_upload_for_another_round_is_counted_once():
    """It is refused; the client that sent it is not lost as well."""
    server = make_server("fedavg", clients=2, cohort=2)
    one, two = server.plan().tasks
    assert server.receive(honest(server, one)).accepted
    assert not server.receive(dataclasses.replace(honest(server, two), round=7)).accepted
    report = server.commit()
    assert (report.accepted, len(report.refused), len(report.lost)) == (1, 1, 0)
    assert (server.ledger.refused, server.ledger.lost) == (1, 0)
    assert server.ledger.download_bytes == 2 * 4 * server.layout.size


def test_a_long_text_of_a_client_is_cut():
    server = make_server("fedavg")
    server.lost(server.plan().tasks[0], "x" * 100_000_000)
    assert len(server.commit().lost[0]) < 1000


def test_a_weight_is_bounded_by_what_was_said_first():
    """Two clients with 10 examples each send 0 and 1; in the second round one claims 2**40."""
    server = make_server("fedavg", clients=2, cohort=2, weighting="examples")
    dim = server.layout.dim
    for claim in (10, 2**40):
        before = server.x.clone()
        for task, value in zip(sorted(server.plan().tasks, key=lambda t: t.client), (0.0, 1.0), strict=True):
            examples = claim if value else 10
            assert server.receive(dataclasses.replace(constant(server, task, value), examples=examples)).accepted
        server.commit()
        torch.testing.assert_close((server.x - before)[:dim], torch.full((dim,), 0.5))


# -- numbers stay finite ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fedavg", "fedavgm", "fedadam", "fedyogi"])
@pytest.mark.parametrize("value", [1e21, 1e30, 3e38, -3e38])
def test_huge_uploads_leave_finite_numbers(name, value):
    """One of six clients adds `value` everywhere, round after round; without a limit its steps are undone at least."""
    server = make_server(name, cohort=6)
    for _ in range(8):
        tasks = server.plan().tasks
        for task in tasks:
            server.receive(constant(server, task, value) if task.client == 0 else honest(server, task))
        server.commit()
        assert is_finite(server)


@pytest.mark.parametrize("name", ["fedadam", "fedyogi"])
def test_a_step_that_is_not_finite_is_undone(name):
    """1e21 squared is infinite in single precision: u would stay infinite, or become NaN."""
    server = make_server(name, clients=3, cohort=3)
    start = {"x": server.x.clone(), **{n: v.clone() for n, v in server.state.items()}}
    for round in range(MAX_BLAMED_STEPS):
        tasks = server.plan().tasks
        assert len(tasks) == 3
        for task in tasks:
            assert server.receive(constant(server, task, 1e21) if task.client == 1 else honest(server, task)).accepted
        report = server.commit()
        assert [r for r in report.refused if "client 1: the step did not end in finite numbers" in r]
        assert torch.equal(server.x[: server.layout.dim], start["x"][: server.layout.dim])
        assert all(torch.equal(v, start[n]) for n, v in server.state.items())
        assert server.refusals.strikes == {1: round + 1}
    tensors, values = server.snapshot()
    server = make_server(name, clients=3, cohort=3)
    server.restore(tensors, values)
    tasks = server.plan().tasks
    assert {task.client for task in tasks} == {0, 2}  # the third time was the last
    for task in tasks:
        server.receive(honest(server, task))
    server.commit()
    assert not torch.equal(server.x, start["x"])
    assert is_finite(server)


def test_controls_stay_finite():
    """3e38 in each round overflows c as a sum of many rounds: all controls begin again from zero."""
    server = make_server("scaffold", clients=1, cohort=1)
    for _ in range(6):
        (task,) = server.plan().tasks
        good = honest(server, task)
        dc = [torch.full((server.layout.dim,), 3e38).view(torch.uint8)]
        server.receive(dataclasses.replace(good, payload={**good.payload, "dc": dc}))
        server.commit()
        assert is_finite(server)
    assert server.epoch > 0


# -- rounds without progress ------------------------------------------------------------------------------------------


def bad(server, task):
    return constant(server, task, math.nan)


def test_an_accepted_upload_of_an_attacker_does_not_keep_a_dead_run_alive():
    server = make_server("fedavg", clients=3, cohort=3)
    with pytest.raises(Diverged, match="at least two thirds of the uploads were refused"):
        for _ in range(MAX_MOSTLY_REFUSED_ROUNDS):
            for task in server.plan().tasks:
                server.receive(honest(server, task) if task.client == 0 else bad(server, task))
            server.commit()


def test_one_client_cannot_stop_a_run():
    """The others do not answer; the one that does is refused in every round."""
    server = make_server("fedavg", clients=4, cohort=3)
    for _ in range(3 * MAX_MOSTLY_REFUSED_ROUNDS):
        for task in server.plan().tasks:
            if task.client == 0:
                for _ in range(9):
                    server.receive(bad(server, task))
        server.commit()
    assert server.round == 3 * MAX_MOSTLY_REFUSED_ROUNDS


def test_half_of_the_uploads_refused_is_no_reason_to_stop():
    server = make_server("fedavg", clients=6, cohort=6)
    for _ in range(3 * MAX_MOSTLY_REFUSED_ROUNDS):
        for task in server.plan().tasks:
            server.receive(honest(server, task) if task.client % 2 else bad(server, task))
        assert server.commit().accepted == 3
    assert server.round == 3 * MAX_MOSTLY_REFUSED_ROUNDS


def test_a_run_whose_every_step_is_undone_stops():
    server = make_server("fedadam", clients=3, cohort=3)
    with pytest.raises(Diverged):
        for _ in range(MAX_MOSTLY_REFUSED_ROUNDS):
            for task in server.plan().tasks:
                server.receive(constant(server, task, 1e21))
            server.commit()


# -- limits of norms --------------------------------------------------------------------------------------------------


def test_the_limit_is_a_multiple_of_the_median_by_hand():
    """Norms 1 … 9 have the median 5; three times that is 15. Before WARM_UP of them: 100 times max(√n, ‖x‖).

    As uploads get smaller the limit stays: a client that comes late has a larger one than the others.
    """
    limit = NormLimit("3x")
    x = torch.tensor([3.0, 4.0])
    assert limit.of_slice("dx", 0, x) == LOOSE * 5
    assert limit.of_slice("dx", 0, torch.zeros(4)) == LOOSE * 2
    limit.update_medians([{("dx", 0): float(k)} for k in range(1, WARM_UP + 2)])
    assert limit.of_slice("dx", 0, x) == 15
    assert limit.of_slice("dx", 1, x) == LOOSE * 5
    limit.update_medians([{("dx", 0): 0.001}] * 100)
    assert limit.of_slice("dx", 0, x) == 15
    limit.update_medians([{("dx", 0): 10.0}] * 100)
    assert limit.of_slice("dx", 0, x) == 30
    other = NormLimit("3x")
    other.restore(limit.snapshot())
    assert other.of_slice("dx", 0, x) == 30


@pytest.mark.parametrize("first", [0.0, 1e-9])
def test_a_block_that_hardly_moves_at_first_may_begin_to_move(first):
    """Before a layer of zeros the first gradients are zero, or weight decay alone: 20 times that is too little to train."""
    server = make_server("fedbcgd", blocks=2, clients=20, cohort=20, max_norm="20x")
    for scale in (first, 0.001, 0.003, 0.01):
        assert all(server.receive(honest(server, task, scale)).accepted for task in server.plan().tasks)
        server.commit()
    still = NormLimit("20x")
    still.update_medians([{("dx", 0): 0.0}] * WARM_UP)
    assert still.of_slice("dx", 0, torch.zeros(4)) == FLOOR * 2


@pytest.mark.parametrize("name", ["fedavg", "fedbcgd", "fedadam", "scaffold", "fedbcgd+"])
def test_an_upload_far_beyond_the_median_is_refused(name):
    server = make_server(name, max_norm="20x", cohort=6)
    for round in range(30):
        for task in server.plan().tasks:
            hostile = round > 15 and task.client == 2
            upload = honest(server, task, 1.0 if hostile else 0.01)
            receipt = server.receive(upload, task.client)
            assert receipt.accepted != hostile
            assert not hostile or "expected a norm ≤" in receipt.reason
        server.commit()
    assert norm(server.x) < 20


def test_in_the_first_rounds_a_limit_is_loose_but_there():
    server = make_server("fedavg", max_norm="20x")
    one, two = server.plan().tasks[:2]
    assert not server.receive(constant(server, one, 1e30)).accepted
    assert server.receive(constant(server, two, 1.0)).accepted


def test_the_limits_do_not_depend_on_who_is_faster():
    """In one round the same uploads are accepted in any order."""
    outcomes = []
    for order in (1, -1):
        server = make_server("fedavg", max_norm="2x")
        seen = []
        for round in range(8):
            tasks = server.plan().tasks
            taken = {
                t.client: server.receive(honest(server, t, 0.01 * (1 + t.client * (round % 2)))).accepted
                for t in tasks[::order]
            }
            seen.append(sorted(taken.items()))
            server.commit()
        outcomes.append((seen, server.snapshot()[1]["norms"]))
    assert outcomes[0] == outcomes[1]
    assert any(not accepted for round in outcomes[0][0] for _, accepted in round)


@pytest.mark.parametrize("over_norm", ["refuse", "scale"])
def test_a_fixed_limit_is_of_the_whole_change(over_norm):
    """Two slices; their norms together are above 1: refused, or scaled to a norm of 1 with the direction kept."""
    server = make_server("fedbcgd", blocks=2, momentum=0.0, max_norm=1.0, over_norm=over_norm, clients=2, cohort=2)
    one, two = server.plan().tasks
    before = server.x.clone()
    small = constant(server, two, 0.001)
    assert server.receive(small).accepted
    receipt = server.receive(constant(server, one, 1.0))
    assert receipt.accepted == (over_norm == "scale")
    server.commit()
    moved = (server.x - before)[server.layout.block(one.block)]
    n = sum(s.stop - s.start for s in server.layout.slices(one.block))
    expected = 1 / math.sqrt(n) if over_norm == "scale" else 0.0
    torch.testing.assert_close(moved, torch.full_like(moved, expected))


@pytest.mark.parametrize("value", [0, -1.0, math.inf, math.nan, "x", "0.5x", "20", "20 x", "1e3x", True, [1], "²x"])
def test_a_limit_that_is_none_is_refused(value):
    with pytest.raises(UserError, match="max_norm: expected a positive number, a multiple of the median"):
        make_algorithm("fedavg", max_norm=value)


def test_what_goes_with_client_state_cannot_be_scaled():
    with pytest.raises(UserError, match="over_norm: expected 'refuse' with scaffold, got 'scale'"):
        make_algorithm("scaffold", max_norm=1.0, over_norm="scale")


def test_a_limit_is_among_the_options_and_survives_a_restore():
    algorithm = make_algorithm("fedavg", max_norm="20x")
    assert make_algorithm(**algorithm.options()) == algorithm
    servers = [make_server("fedavg", max_norm="2x") for _ in range(2)]
    for round in range(6):
        for server in servers:
            for task in server.plan().tasks:
                server.receive(honest(server, task, 0.01 * (1 + (round > 3) * task.client)))
            server.commit()
        if round == 2:
            tensors, values = servers[0].snapshot()
            servers[1] = make_server("fedavg", max_norm="2x")
            servers[1].restore(tensors, values)
    assert all(torch.equal(a.x, b.x) for a, b in pairwise(servers))
    assert servers[0].ledger.refused == servers[1].ledger.refused > 0


def test_a_configuration_has_the_limit_too(tmp_path):
    """And one that no honest upload can meet stops the run with the reason."""
    from fedbcgd.runs import config as configuration
    from fedbcgd.runs.execute import execute

    def run(limit: str, out: str):
        path = tmp_path / "run.toml"
        path.write_text(
            f'[data]\nclients = 4\n[algorithm]\nname = "fedavg"\nlocal_steps = 1\nmax_norm = {limit}\n'
            "[run]\nrounds = 3\ncohort = 3\nworkers = 0\n"
        )
        return execute(configuration.load(path), tmp_path / out, figures=False)

    assert run('"20x"', "one").ledger.refused == 0
    with pytest.raises(Diverged, match=r"expected a norm ≤ 1e-09, got"):
        run("1e-9", "two")


@pytest.mark.parametrize("name", ["fedavg", "fedbcgd", "scaffold", "fedbcgd+"])
@pytest.mark.parametrize("value", [0.9, 50.0])
def test_in_the_first_rounds_uploads_are_compared_with_each_other(name, value):
    """One of six clients sends far more than the others, but less than the loose limit, from the first round on."""
    options = {"blocks": 2} if "fedbcgd" in name else {}
    server, alone = (make_server(name, max_norm="20x", **options) for _ in range(2))
    for _ in range(12):
        for one in (server, alone):
            for task in one.plan().tasks:
                hostile = task.client == 4
                if hostile and one is alone:
                    one.lost(task, "is not there")
                else:
                    one.receive(constant(one, task, value) if hostile else honest(one, task), task.client)
        report = server.commit()
        alone.commit()
        assert report.accepted == 5
        assert len(report.refused) == 1
        dim = server.layout.dim
        torch.testing.assert_close(server.x[:dim], alone.x[:dim], rtol=0, atol=0.1)
    assert server.ledger.refused == 12


def test_honest_clients_of_any_size_are_not_compared_away():
    """Blocks of very different sizes and changes, one client each: nothing to compare with in the same slice."""
    server = make_server("fedbcgd", blocks=3, clients=3, cohort=3, max_norm="20x")
    for _ in range(12):
        for task in server.plan().tasks:
            upload, wide = honest(server, task, 0.001), honest(server, task, 0.001 * 20**task.block)
            dx = [wide.payload["dx"][0], upload.payload["dx"][1]]  # the shared block is alike in all
            upload = dataclasses.replace(upload, payload={**upload.payload, "dx": dx})
            assert server.receive(upload, task.client).accepted
        assert server.commit().accepted == 3


def test_the_limit_follows_what_most_clients_do():
    """All changes become a hundred times as large: refused at first, then that is what is usual."""
    server = make_server("fedavg", max_norm="20x")
    accepted = []
    for round in range(30):
        for task in server.plan().tasks:
            server.receive(honest(server, task, 0.01 if round < 12 else 1.0), task.client)
        try:
            accepted.append(server.commit().accepted)
        except Diverged:
            accepted.append(0)
    assert accepted[:12] == [6] * 12
    assert 0 in accepted[12:16]
    assert accepted[-1] == 6


@pytest.mark.parametrize("name", ["fedavg", "fedbcgd"])
def test_a_client_that_comes_late_is_not_compared_with_those_who_have_converged(name):
    """Uploads are compared with each other only until there is a median, with a shared block or without one."""
    server = make_server(name, max_norm="20x", **({"blocks": 2} if name == "fedbcgd" else {}))
    for round in range(20):
        for task in server.plan().tasks:
            late = round >= 15 and task.client == 3
            server.receive(honest(server, task, 0.1 if round < 15 or late else 0.0001), task.client)
        assert server.commit().accepted == 6
