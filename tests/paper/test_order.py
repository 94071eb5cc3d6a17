"""The order of runs, several processes in one folder, what is kept, and what is left."""

import shutil
import threading
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from fedbcgd.cli import app
from fedbcgd.cli import paper as _registered  # noqa: F401
from fedbcgd.engine.run_folder import exclusive_lock
from fedbcgd.files import make_folder
from fedbcgd.paper import command, costs, engine, order, packs, pages, plan
from fedbcgd.paper.items import ITEMS
from fedbcgd.paper.plan import Machine
from fedbcgd.paper.request import Request
from fedbcgd.paper.results import ENDED_EARLY, format_final
from fedbcgd.paper.spec import Contender, Halving
from tests.paper.invented import outcome, result
from tests.paper.small import Shown, item, small

AVG = Contender("fedavg", "FedAvg", {"name": "fedavg"})
BLOCKS = Contender("fedbcgd", "FedBCGD", {"name": "fedbcgd", "blocks": 5}, ("lr", "momentum"))
TWIN = Contender("twin", "Twin", {"name": "fedpaq"}, tuned_as="fedavg")


def halved(*contenders, seeds=1):
    panel = small(*(contenders or (AVG,)), rates=(0.003, 0.01, 0.03, 0.1), seeds=seeds)
    return replace(panel, budget=4.0, effort=replace(panel.effort, halving=Halving(8, candidates=4, rungs=2)))


@pytest.fixture
def only(monkeypatch):
    """Make a panel the only one of an item."""

    def use(panel):
        monkeypatch.setitem(ITEMS, "item", item(panel, "item"))
        return [ITEMS["item"]]

    return use


def work(items, out):
    """Do all that is left; return the labels of the runs that were begun, and the results after each that was kept."""
    begun, written = [], []

    def display(labels):
        begun.extend(labels)
        return Shown().display(labels)

    request = Request("smoke", out)
    engine.Engine(items, request).run(display, lambda line: None, lambda name, results: written.append(results))
    return begun, written


def test_who_decides_most_comes_first_and_no_run_comes_twice(tmp_path):
    names = command.item_names("all", "desk")
    steps = order.steps([ITEMS[name] for name in names], command.make_request("desk", tmp_path))
    first = [(step.panel.key, step.contender.key, step.seed) for step in steps]
    assert first[:7] == [("cifar10-lenet5", key, 1) for key in order.LEADERS]
    assert first.count(("cifar10-lenet5", "fedavg", 1)) == 1  # Table 3 has the runs of Table 6
    groups = list(dict.fromkeys(step.group for step in steps))
    assert groups == [group.title for group in order.GROUPS]
    everything = {
        (panel.key, contender.key)
        for name in names
        for panel in ITEMS[name].panels["desk"]
        for contender in panel.contenders
    }
    assert {(step.panel.key, step.contender.key) for step in steps} == everything  # no group forgets one


def test_a_search_goes_before_its_run_and_a_second_start_does_nothing(only, tmp_path):
    items = only(halved(AVG, BLOCKS, TWIN, seeds=2))
    begun, written = work(items, tmp_path)
    kinds = ["search" if label.startswith("search") else label.split("EMNIST, ")[1] for label in begun]
    assert kinds == [
        *["search"] * 6,
        "FedAvg, seed 1",
        *["search"] * 6,
        "FedBCGD, seed 1",
        "Twin, seed 1",  # tuned as FedAvg: no search of its own
        *[f"{name}, seed 2" for name in ("FedAvg", "FedBCGD", "Twin")],
    ]
    assert work(items, tmp_path)[0] == []
    (last,) = written[-1]
    assert {key: list(runs) for key, runs in last.outcomes.items()} == {
        key: [1, 2] for key in ("fedavg", "fedbcgd", "twin")
    }


def test_what_is_finished_is_packed_and_goes_on_from_the_pack(only, tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "KEEP_EVERY", 0.0)
    items = only(halved(seeds=2))
    request = Request("smoke", tmp_path)
    pack, kept = tmp_path / "item" / packs.NAME, []
    engine.Engine(items, request).run(
        Shown().display,
        lambda line: None,
        lambda item, results: kept.append(len(packs.read(pack)) if pack.exists() else 0),
    )
    assert kept == [0] * 5 + [4, 5, 6]  # a search is packed when it has ended, then each seed
    shutil.rmtree(tmp_path / "runs")
    assert engine.Engine(items, request).steps == []
    assert len(list((tmp_path / "runs").iterdir())) == 6


def test_two_processes_share_a_folder(only, tmp_path, monkeypatch):
    """Another one is at work on a trial: the rest goes on, and the run that waits for it is done when it is released."""
    monkeypatch.setattr(engine, "WAIT", 0.05)
    items = only(halved(AVG, BLOCKS))
    request = Request("smoke", tmp_path)
    (taken, *_) = engine.Engine(items, request).due(order.steps(items, request)[0])
    release = threading.Event()

    def hold():
        with exclusive_lock(make_folder(request.runs / taken.folder)):
            held.set()
            release.wait(60)

    held = threading.Event()
    other = threading.Thread(target=hold)
    other.start()
    held.wait(60)
    begun = []

    def display(labels):
        begun.extend(labels)
        if "FedBCGD, seed 1" in labels[0]:
            release.set()
        return Shown().display(labels)

    engine.Engine(items, request).run(display, lambda line: None, lambda name, results: None)
    other.join()
    position = {label: k for k, label in enumerate(begun)}
    assert begun.count(taken.label) == 1
    (fedavg,) = [label for label in begun if label.endswith("FedAvg, seed 1")]
    (fedbcgd,) = [label for label in begun if label.endswith("FedBCGD, seed 1")]
    assert position[fedbcgd] < position[taken.label] < position[fedavg]


def test_a_run_to_the_target_can_be_extended_later():
    panel = ITEMS["table6"].panels["desk"][0]
    contender = panel.contender("qsgd+fedbcgd")
    chosen = {contender.key: {"lr": 0.1, "momentum": 0.5}}
    ((_, ended),) = plan.seed_runs(replace(panel, contenders=(contender,)), chosen, 1, Machine())
    whole = replace(panel, contenders=(replace(contender, until_target=False),))
    ((_, unlimited),) = plan.seed_runs(whole, chosen, 1, Machine())
    assert (ended.config.run.target, unlimited.config.run.target) == (0.7, None)
    assert ended.folder == unlimited.folder


def test_a_run_that_ended_at_the_target_has_no_final_value():
    r = result(a=[outcome(0.5, 0.8)], b=[outcome(0.5, 0.7, stopped="target")])
    assert format_final(r, "b") == ENDED_EARLY
    assert (r.has_final("a"), r.has_final("b")) == (True, False)
    from fedbcgd.paper.comparisons import ends_better, reaches_sooner

    assert "B" in ends_better("a", ["b"])({"p": r}).missing[0]
    assert reaches_sooner("a", ["b"])({"p": r}).missing == ()
    assert [row["accuracy"] for row in pages.scores([r])] == [pytest.approx(80.0), None]


def test_from_the_command_line_costs_come_first_and_the_page_says_what_is_missing(only, tmp_path):
    """What is printed before the first run, and the page after a start that was stopped."""
    panel = halved(seeds=2)
    only(panel)
    ran = CliRunner().invoke(
        app, ["reproduce", "item", "--scale", "desk", "--out", str(tmp_path), "--quiet", "--seeds", "1"]
    )
    assert ran.exit_code == 0, ran.output
    head, _, rest = ran.output.partition("search: ")
    assert "what is left; hours with" in head
    assert "hours, at most" in head
    assert "FedAvg, seed 1" in rest
    page = (tmp_path / "item" / "README.md").read_text()
    assert "Not there yet: FedAvg, seed 2." in page
    assert "1 rounds: " in page
    assert ". Then 3 rounds: " in page
    assert "η 0." in page


def test_what_is_left_is_reckoned_by_hand(only, tmp_path, monkeypatch):
    """One gradient step of 50 examples a client; 1 ms for an example, one worker. The search: 4 trials of 1 round and 2 of 2
    more, evaluated in each round on a tenth of the training set, a third of a step for each; its own run has 4 rounds."""
    monkeypatch.setattr(costs, "seconds_per_example", lambda panel, machine: 1e-3)
    monkeypatch.setattr(costs, "RUN_SECONDS", 0.0)
    items = only(halved())
    panel = ITEMS["item"].panels["smoke"][0]
    assert panel.local["local_steps"] == 1
    left = engine.Engine(items, Request("smoke", tmp_path)).costs()
    ((searches, runs),) = left.values()
    a_round = panel.run["cohort"] * panel.local["batch_size"] * 1e-3
    assert (searches.runs, runs.runs) == (4, 1)
    assert searches.hours * 3600 == pytest.approx(8 * (a_round + 1000 / 3 * 1e-3))
    assert runs.hours * 3600 == pytest.approx(4 * (a_round + 2000 / 3 * 1e-3))
    work(items, tmp_path)
    assert engine.Engine(items, Request("smoke", tmp_path)).costs() == {}


def test_a_timing_of_a_network_is_positive_and_made_once():
    panel = halved()
    seconds = costs.seconds_per_example(panel, Machine(0))
    assert 0 < seconds < 0.1
    assert costs.seconds_per_example(panel, Machine(0)) == seconds


def test_precision_at_the_desk_is_what_the_processor_has_and_stays_that_of_the_folder(only, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "native_bf16", lambda device: "avx512_bf16")
    assert command.make_request("desk", tmp_path).machine.precision == "bf16"
    assert command.make_request("cpu", tmp_path).machine.precision == "fp32"
    only(halved())
    monkeypatch.setattr(command, "native_bf16", lambda device: "")
    command.show("item", command.make_request("desk", tmp_path), command.Console(quiet=True))
    monkeypatch.setattr(command, "native_bf16", lambda device: "avx512_bf16")
    assert command.make_request("desk", tmp_path).machine.precision == "fp32"
    assert command.make_request("desk", tmp_path, precision="bf16").machine.precision == "bf16"
