"""The clock by hand; watching changes no bit; who is late is the same for every backend."""

import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from fedbcgd import UserError, algorithm_names, make_algorithm, simulate
from fedbcgd.core.messages import Upload
from fedbcgd.engine.assemble import make_job, make_server
from fedbcgd.engine.loop import Stop
from fedbcgd.engine.run_folder import RunFolder
from fedbcgd.network.settings import Network
from fedbcgd.network.simulator import NetworkSimulator
from fedbcgd.runs import config as configuration
from fedbcgd.runs.execute import execute
from fedbcgd.runs.folder import finished
from fedbcgd.runs.retiming import bias

LINKS = """client,uplink_mbit,downlink_mbit,latency_ms,gradient_ms
0,0.000128,0.000256,500,250
1,0.000256,0.000128,0,1000
"""
ACTING = {"profile": "4g", "oversample": 1.5, "dropout": 0.3, "corrupt": 0.2, "deadline": 2.0, "availability": 0.9}
ACTING["absences"] = True


def rows(result):
    return [{k: v for k, v in row.items() if k != "seconds"} for row in result.rows]


def same(a, b):
    pairs = zip(a.module.state_dict().values(), b.module.state_dict().values(), strict=True)
    return all(torch.equal(p, q) for p, q in pairs)


def two_points(point, pull_loss, at_point, tmp_path, **network):
    """x has 4 doubles, 32 bytes; two local steps. Client 0: 32 B/32 B/s down, 2·0.25 s, 32 B/16 B/s up, 2·0.5 s latency:
    4.5 s. Client 1: 2 s down, 2 s of computing, 1 s up: 5 s."""
    (tmp_path / "links.csv").write_text(LINKS)
    clients = [at_point(1, 1, 1, 1), at_point(3, 3, 3, 3)]
    return simulate(
        point(0, 0, 0, 0), clients, "fedavg", loss=pull_loss, rounds=3, workers=0, local_steps=2, cohort=2,
        weight_decay=0, lr=0.5, lr_decay=1, network={"csv": str(tmp_path / "links.csv"), **network},
    )  # fmt: skip


def test_the_slowest_decides(point, pull_loss, at_point, tmp_path):
    result = two_points(point, pull_loss, at_point, tmp_path)
    assert [row["hours"] * 3600 for row in result.rows] == pytest.approx([5, 10, 15])


def test_a_deadline_discards_what_is_late(point, pull_loss, at_point, tmp_path):
    """At 4.75 s client 1 is late in every round and x moves to client 0's point: 1 − ¼^3 = 63/64 after three rounds."""
    result = two_points(point, pull_loss, at_point, tmp_path, deadline=4.75)
    assert [row["hours"] * 3600 for row in result.rows] == pytest.approx([4.75, 9.5, 14.25])
    assert result.module.w.tolist() == [63 / 64] * 4
    assert (result.ledger.lost, result.ledger.upload_bytes, result.ledger.gradient_evaluations) == (3, 96, 6)


def test_the_round_closes_when_it_has_enough(point, pull_loss, at_point, tmp_path):
    result = two_points(point, pull_loss, at_point, tmp_path, minimum=1)
    assert [row["hours"] * 3600 for row in result.rows] == pytest.approx([4.5, 9, 13.5])
    assert result.module.w.tolist() == [63 / 64] * 4


def test_a_deadline_that_nobody_can_meet_is_refused(point, pull_loss, at_point, tmp_path):
    with pytest.raises(UserError, match=r"network\.deadline: expected at least 4\.5 s, .*, got 1 s"):
        two_points(point, pull_loss, at_point, tmp_path, deadline=1.0)


def unchanged(alone, watched):
    assert same(alone, watched)
    assert alone.ledger.totals() == watched.ledger.totals()
    assert [{k: v for k, v in row.items() if k != "hours"} for row in rows(watched)] == rows(alone)
    assert all("hours" in row for row in watched.rows)


PLAIN = [name for name in algorithm_names() if name != "fedbcgd-matched"]
LINK = st.floats(0.01, 1000) | st.builds(
    lambda m, s: {"median": m, "spread": s}, st.floats(0.1, 100), st.floats(1, 100)
)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(PLAIN),
    st.sampled_from(["4g", "broadband", "datacentre", "mix"]),
    st.fixed_dictionaries({}, optional={"uplink_mbit": LINK, "gradient_ms": LINK, "compute": st.floats(0.1, 100)}),
    st.integers(0, 99),
)
def test_watching_changes_no_bit(net, toys, name, profile, own, seed):
    common = {"rounds": 2, "cohort": 4, "batch_size": 3, "workers": 0, "seed": seed, "test": toys((20,))[0]}
    alone = simulate(net(), toys(), name, **common)
    unchanged(alone, simulate(net(), toys(), name, network={"profile": profile, **own}, **common))


def test_nor_does_it_on_workers(net, toys):
    common = {"rounds": 2, "cohort": 4, "batch_size": 3, "seed": 3, "test": toys((20,))[0]}
    alone = simulate(net(), toys(), "fedbcgd+", blocks=2, workers=0, **common)
    unchanged(alone, simulate(net(), toys(), "fedbcgd+", blocks=2, workers=2, network="4g", **common))


def test_nor_do_the_links_change_what_matched_blocks_learn_but_by_who_serves_them(net, toys):
    """Of a single block, matched or not, there is nothing to choose; without haste nothing is chosen."""
    common = {
        "rounds": 2,
        "cohort": 4,
        "batch_size": 3,
        "workers": 0,
        "seed": 3,
        "test": toys((20,))[0],
        "divider": "even",
    }
    for own in ({"blocks": 1, "haste": 1.0}, {"blocks": 3, "haste": 0.0}):
        blocks = {"blocks": own["blocks"]}
        alone = simulate(net(), toys(), "fedbcgd", **blocks, **common)
        unchanged(alone, simulate(net(), toys(), "fedbcgd-matched", network="4g", **own, **common))


SVRG = [{"cache": k, "fixed_batches": fixed} for k in (0, 1, 2) for fixed in (True, False)]
COUNTED = [(name, {}) for name in algorithm_names() if name not in ("central", "fedbcgd-matched")]  # no links there
COUNTED += [(name, options) for name in ("fedbcgd+", "fedbcgd+derived") for options in SVRG]
COUNTED += [("fedbcgd+", {"printed": True, **options}) for options in SVRG]


@pytest.mark.parametrize(("name", "options"), COUNTED, ids=str)
def test_what_is_planned_is_what_is_counted(federation, net, toys, name, options):
    """Minibatches of 4 from 1, 4, 7 and 11 examples, memory for none, one or two gradients at the anchor."""
    nbytes = sum(p.numel() for p in net().parameters()) * 4
    own = {k: v for k, v in options.items() if k != "cache"}
    if "cache" in options:
        own["cache_mb"] = options["cache"] * nbytes / 2**20
    for work in ({"local_epochs": 1}, {"local_epochs": 3}, {"local_steps": 1}, {"local_steps": 5}):
        algorithm = make_algorithm(name, batch_size=4, lr=0.01, **work, **own)
        f = federation(algorithm, net(), toys((1, 4, 7, 11)), cohort=4)
        f.round()
        planned = {c: algorithm.local.evaluations(f.job.examples(c), nbytes) for c in range(len(f.job.clients))}
        assert {e.client: e.gradient_evaluations for e in f.server.ledger.entries} == planned


def test_clients_of_unknown_size_cannot_be_late(net, toys):
    class Lazy:
        def __len__(self):
            return 6

        def __getitem__(self, k):
            return toys()[k]

    common = {"rounds": 1, "cohort": 3, "workers": 0, "batch_size": 3}
    with pytest.raises(UserError, match=r"client 0, which is loaded lazily.*local_steps"):
        simulate(net(), Lazy(), "fedavg", network={"deadline": 9.0}, **common)
    simulate(net(), Lazy(), "fedavg", network={"deadline": 9.0}, local_steps=2, **common)
    simulate(net(), Lazy(), "fedavg", network="4g", **common)


def quick(network, seed):
    """Seconds on the clock after each of five rounds; uploads are handed in without anybody training."""
    clients = [(torch.ones(5, 2), torch.zeros(5, dtype=torch.long))] * 12
    job = make_job(nn.Linear(2, 2), clients, make_algorithm("fedbcgd", blocks=2), None, seed)
    watch = NetworkSimulator(job, network)
    server = make_server(job, 6, Stop(rounds=5), watch)
    times = []
    for _ in range(5):
        plan = watch.plan(server)
        for task in filter(server.expects, plan.tasks):
            sizes = algorithm_lengths(server, task.block)
            payload = {"dx": [torch.zeros(n, dtype=torch.uint8) for n in sizes]}
            assert server.receive(Upload(task.round, task.client, task.block, payload, 5, 1, 5, 0.0)).accepted
        server.commit()
        watch.committed(server)
        times.append(watch.seconds)
    return times


def algorithm_lengths(server, block):
    return server.algorithm.lengths(server.layout, block)["dx"]


@settings(max_examples=25)
@given(
    st.sampled_from(["4g", "broadband", "datacentre", "mix"]),
    st.integers(0, 5),
    st.floats(0, 0.9),
    st.none() | st.floats(0.5, 5),
    st.sampled_from([1.0, 1.7]),
)
def test_the_clock_never_runs_backwards_and_is_the_same_for_the_same_seed(profile, seed, dropout, deadline, oversample):
    network = Network(
        profile=profile, dropout=dropout, deadline=deadline, oversample=oversample, absences=seed % 2 == 0
    )
    times = quick(network, seed)
    assert times == quick(network, seed)
    assert times == sorted(times)
    assert times[0] >= 0
    if deadline is not None:
        assert all(b - a <= deadline * (1 + 1e-9) for a, b in zip([0.0, *times], times, strict=False))


@given(st.integers(1, 8), st.integers(1, 4), st.floats(1, 3), st.integers(0, 20), st.booleans(), st.booleans())
@settings(max_examples=40)
def test_every_block_gets_its_k_whenever_the_cohort_allows(cohort, blocks, oversample, seed, absences, matched):
    """Through watch and server: as many are asked as are there, up to the number wanted, and each block gets S/N of them,
    rounded up or down; of those, with over-sampling, the first S/N, rounded up, are waited for, and S arrive at least if
    so many are there."""
    clients = [(torch.ones(5, 2), torch.zeros(5, dtype=torch.long))] * 12
    own = {"uplink": "matched", "divider": [1, 2, 3, 4][:blocks], "haste": 0.5} if matched else {}
    algorithm = make_algorithm("fedbcgd", blocks=blocks, shared="none", **own)
    job = make_job(nn.Linear(3, 2), clients, algorithm, None, seed)
    network = Network(profile="4g", oversample=oversample, absences=absences, availability=0.6 if absences else None)
    watch = NetworkSimulator(job, network)
    server = make_server(job, cohort, Stop(rounds=5), watch)
    for _ in range(4):
        available = server.available()
        there = 12 if available is None else len(available)
        plan = watch.plan(server)
        assert len(plan.tasks) == min(there, network.sampled(cohort, 12))
        asked = [sum(task.block == j for task in plan.tasks) for j in range(blocks)]
        assert max(asked) - min(asked) <= 1
        coming = [sum(task.block == j for task in filter(server.expects, plan.tasks)) for j in range(blocks)]
        assert all(n >= min(m, cohort // blocks) for n, m in zip(coming, asked, strict=True))
        assert sum(coming) >= min(cohort, there)
        server.round += 1
        server.abandon()


def test_over_sampling_lowers_no_number_of_arrivals():
    """S = 7 and N = 5 deal 2, 2, 1, 1, 1. Of 14 asked (3, 3, 3, 3, 2) two of each are waited for, not one: 10 arrive."""
    clients = [(torch.ones(5, 2), torch.zeros(5, dtype=torch.long))] * 20
    job = make_job(nn.Linear(3, 2), clients, make_algorithm("fedbcgd", blocks=5, shared="none"), None, 0)
    watch = NetworkSimulator(job, Network(profile="4g", oversample=2.0))
    server = make_server(job, 7, Stop(rounds=5), watch)
    plan = watch.plan(server)
    coming = [sum(task.block == j for task in filter(server.expects, plan.tasks)) for j in range(5)]
    assert min(coming) >= 2


@pytest.mark.parametrize("seed", range(4))
def test_a_budget_is_never_exceeded(net, toys, seed):
    """Blocks of very unequal size, and most clients vanish: what a round will upload is known before it begins."""
    common = {"blocks": 3, "divider": [1, 1, 30], "budget": 3.0, "cohort": 6, "workers": 0, "local_steps": 1}
    network = {"profile": "4g", "dropout": 0.6}
    result = simulate(net(), toys((4,) * 20), "fedbcgd", seed=seed, network=network, **common)
    assert 1.5 < result.ledger.upload_d <= 3
    assert result.stopped == "budget"


@pytest.mark.parametrize("seed", range(4))
def test_nor_is_it_where_losses_cannot_be_foreseen(net, toys, seed):
    """Then the largest upload of a round is reckoned with."""
    common = {"blocks": 3, "divider": [1, 1, 30], "budget": 3.0, "cohort": 6, "local_steps": 1}
    lost = iter(range(10**6))
    result = simulate(
        net(), toys((4,) * 20), "fedbcgd", seed=seed, transport=lambda u: None if next(lost) % 5 < 3 else u, **common
    )
    assert 1.5 < result.ledger.upload_d <= 3
    assert result.stopped == "budget"


def test_a_deadline_lengthens_no_round_and_no_round_takes_no_time(net, toys):
    """Nine of ten vanish: a connection that breaks is noticed when it breaks, with a deadline and without one."""
    common = {"rounds": 20, "cohort": 2, "workers": 0, "local_steps": 1}
    times = []
    for own in ({}, {"deadline": 600.0}, {"deadline": 0.5}):
        result = simulate(net(), toys(), "fedavg", network={"profile": "4g", "dropout": 0.9, **own}, **common)
        times.append([row["hours"] for row in result.rows])
    assert all(b > a for a, b in zip([0.0, *times[0]], times[0], strict=False))
    assert times[0] == times[1]
    assert all(c <= a for a, c in zip(times[0], times[2], strict=True))


@pytest.mark.parametrize("name", ["fedbcgd", "scaffold"])
def test_who_is_late_or_gone_is_the_same_on_any_number_of_workers(net, toys, name):
    """30 of 40 clients are asked and up to half of them lost before the round begins; one worker has four upload slots."""
    common = {"rounds": 4, "cohort": 20, "batch_size": 3, "seed": 1, "test": toys((50,))[0], "network": ACTING}
    clients = toys(tuple(range(1, 41)))
    alone = simulate(net(), clients, name, workers=0, **common)
    assert alone.ledger.lost > 20
    assert alone.ledger.refused > 3
    for workers in (1, 2):
        spread = simulate(net(), clients, name, workers=workers, **common)
        assert same(alone, spread)
        assert rows(alone) == rows(spread)


def test_absences(net, toys):
    """Availability ½: about half of the clients can be asked in a round; somebody always can."""
    asked = []

    def callback(info):
        asked.append(info.report.accepted)

    network = {"availability": 0.5, "absences": True}
    simulate(net(), toys((3,) * 20), "fedavg", rounds=20, cohort=20, workers=0, network=network, callbacks=[callback])
    assert 6 < sum(asked) / 20 < 14
    asked.clear()
    network = {"availability": 0.01, "absences": True}
    simulate(net(), toys((3,) * 3), "fedavg", budget=5, cohort=3, workers=0, network=network, callbacks=[callback])
    assert min(asked) == 1


def make(**network):
    raw = {
        "data": {"clients": 20},
        "model": {"name": "logistic"},
        "algorithm": {"name": "fedbcgd+", "local_steps": 1, "batch_size": 4, "blocks": 2},
        "run": {"rounds": 6, "cohort": 4, "workers": 0, "evaluate_every": 2},
        "network": network if "csv" in network else {"profile": "4g", **network},
    }
    return configuration.check(raw, "test")


def test_a_resumed_run_has_the_same_clock_and_the_same_traffic(tmp_path):
    def stop(info):
        if info.server.round == 3:
            raise KeyboardInterrupt

    config = make(**{k: v for k, v in ACTING.items() if k != "profile"})
    whole = execute(config, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        execute(config, tmp_path / "cut", callbacks=[stop])
    with (tmp_path / "cut" / "traffic.jsonl").open("a") as file:
        file.write('{"what": "a killed process wrote after its last checkpoint"}\n')
    resumed = execute(config, tmp_path / "cut", resume=True)
    assert rows(whole) == rows(resumed)
    texts = [(tmp_path / name / "traffic.jsonl").read_text() for name in ("whole", "cut")]
    assert texts[0] == texts[1]
    assert [json.loads(line)["round"] for line in texts[0].splitlines()] == [1, 2, 3, 4, 5, 6]
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "cut")]
    assert models[0] == models[1]


def test_an_evaluation_cut_off_does_not_lose_the_round(tmp_path, monkeypatch):
    """Ctrl-C between the commit of a round and its evaluation: what was sent in it is recorded all the same."""
    from fedbcgd.backends.inprocess import InProcess

    original, calls = InProcess.evaluate, []

    def evaluate(self, x):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(self, x)

    monkeypatch.setattr(InProcess, "evaluate", evaluate)
    with pytest.raises(KeyboardInterrupt):
        execute(make(), tmp_path / "cut")
    resumed = execute(make(), tmp_path / "cut", resume=True)
    assert rows(resumed) == rows(execute(make(), tmp_path / "whole"))
    assert (tmp_path / "cut" / "traffic.jsonl").read_text() == (tmp_path / "whole" / "traffic.jsonl").read_text()


def test_measurements_are_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "links.csv").write_text("uplink_mbit,downlink_mbit,latency_ms,gradient_ms\n1,1,1,1\n")
    execute(make(csv="links.csv"), tmp_path / "run")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert bias(tmp_path / "run")[0].uploads > 0


def test_a_minimum_that_cannot_be_had_is_refused(net, toys):
    with pytest.raises(UserError, match=r"network\.minimum: expected at most 3, .*, got 4"):
        simulate(net(), toys(), "fedavg", rounds=1, cohort=3, workers=0, network={"minimum": 4})
    simulate(net(), toys(), "fedavg", rounds=1, cohort=3, workers=0, network={"minimum": 4, "oversample": 2.0})


@pytest.mark.parametrize("cohort", ["x", 0, 99, 2.5])
def test_a_cohort_that_is_no_number_is_said(net, toys, cohort):
    with pytest.raises(UserError, match="cohort"):
        simulate(net(), toys(), "fedbcgd", uplink="matched", rounds=1, cohort=cohort, workers=0, network="4g")


def test_measurements_that_changed_are_refused(tmp_path):
    text = "uplink_mbit,downlink_mbit,latency_ms,gradient_ms\n1,1,1,1\n"
    (tmp_path / "links.csv").write_text(text)
    config = make(csv=str(tmp_path / "links.csv"))
    execute(config, tmp_path / "run")
    longer = config.model_copy(update={"run": config.run.model_copy(update={"rounds": 7})})
    (tmp_path / "links.csv").write_text(text + "2,2,2,2\n")
    assert finished(RunFolder(tmp_path / "run"), configuration.complete(config)) is None
    with pytest.raises(UserError, match="links as when the run was begun"):
        execute(longer, tmp_path / "run", resume=True)
    assert RunFolder(tmp_path / "run").summary.exists()  # refused before anything was touched
    (tmp_path / "links.csv").write_text(text)
    assert finished(RunFolder(tmp_path / "run"), configuration.complete(config)) is not None
    assert execute(longer, tmp_path / "run", resume=True).rounds == 7


@pytest.mark.parametrize(
    ("network", "words"),
    [
        ({"deadlin": 1.0}, ["network.deadlin", "Did you mean 'deadline'"]),
        ({"profile": "5g"}, ["network.profile", "Did you mean '4g'"]),
        ({"uplink_mbit": {"median": -1.0}}, ["network.uplink_mbit.median", "-1"]),
        ({"uplink_mbit": {"medium": 1.0, "median": 1.0}}, ["uplink_mbit.medium", "Did you mean 'median'"]),
        ({"csv": "x", "latency_ms": 1.0}, ["network.latency_ms", "csv"]),
        ({"crash": 0.5}, ["network.crash", "workers"]),
    ],
)
def test_mistakes_in_the_section_are_named(network, words):
    with pytest.raises(UserError) as error:
        make(**network)
    for word in words:
        assert word in str(error.value)


def test_close_at_closes_as_the_share_says(net, toys):
    """FedAvg, four of six clients asked: with close_at = 0.5 two uploads of each round count, and the hours are fewer."""
    found = {}
    for close_at in (1.0, 0.5):
        network = {"profile": "mix", "close_at": close_at}
        result = simulate(net(), toys(), "fedavg", rounds=4, cohort=4, workers=0, network=network)
        found[close_at] = result
    assert (found[1.0].ledger.lost, found[0.5].ledger.lost) == (0, 8)
    assert found[0.5].final["hours"] < found[1.0].final["hours"]


def test_close_at_and_minimum_are_two_rules(net, toys):
    with pytest.raises(UserError, match="close_at: expected only without minimum"):
        simulate(net(), toys(), "fedavg", rounds=1, workers=0, network={"close_at": 0.5, "minimum": 2})
