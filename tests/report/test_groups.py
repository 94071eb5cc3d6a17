"""Runs put together for the page: groups of seeds, what they are called, how they look, and which task comes first."""

from fedbcgd.display import styles
from fedbcgd.report import page
from fedbcgd.report.groups import group
from tests.report.runfolders import add_to_run, collect, comparison, make, shown, write_rows


def test_seeds_are_grouped_and_algorithms_look_as_everywhere(tmp_path):
    data = shown(comparison(tmp_path))
    assert [g["name"] for g in data["groups"]] == ["fedavg", "fedbcgd", "fedpaq"]
    assert [len(g["runs"]) for g in data["groups"]] == [3, 3, 3]
    assert data["tasks"] == ["lenet5 on embedded"]
    for g in data["groups"]:
        own = styles.ALGORITHM_STYLES[g["name"]]
        assert (g["look"]["colour"], g["look"]["marker"], tuple(g["look"]["dash"])) == (
            own.colour,
            own.marker,
            own.dash,
        )
    assert data["problems"] == []


def test_what_sets_groups_of_one_algorithm_apart_is_in_their_names(tmp_path):
    make(tmp_path / "a", "fedbcgd", 0, momentum=0.5)
    make(tmp_path / "b", "fedbcgd", 1, momentum=0.5)
    make(tmp_path / "c", "fedbcgd", 0, momentum=0.8)
    make(tmp_path / "d", "fedavg", 0)
    groups = group(collect(tmp_path)[0]).groups
    assert [g.name for g in groups] == ["fedavg", "fedbcgd, momentum 0.5", "fedbcgd, momentum 0.8"]
    assert [g.runs for g in groups] == [(3,), (0, 1), (2,)]
    three, one, two = (g.style for g in groups)
    assert one == styles.ALGORITHM_STYLES["fedbcgd"]
    assert two.colour == styles._shaded(one, 1).colour
    assert (two.dash, two.marker) not in {(one.dash, one.marker), (three.dash, three.marker)}


def test_when_a_run_looks_and_stops_names_it_only_where_nothing_else_does(tmp_path):
    for k, (momentum, every) in enumerate([(0.5, 1), (0.8, 2), (0.9, 3), (0.9, 4)]):
        folder = make(tmp_path / f"b{k}", "fedbcgd", 0, momentum=momentum)
        add_to_run(folder, evaluate_every=every, rounds=10 * every, budget=5.0)
    for every in (1, 2):
        add_to_run(make(tmp_path / f"c{every}", "scaffold", 0), evaluate_every=every, checkpoint_every=every)
    assert [g.name for g in group(collect(tmp_path)[0]).groups] == [
        "fedbcgd, momentum 0.5",
        "fedbcgd, momentum 0.8",
        "fedbcgd, momentum 0.9, evaluate_every 3, rounds 30",
        "fedbcgd, momentum 0.9, evaluate_every 4, rounds 40",
        "scaffold, evaluate_every 1",
        "scaffold, evaluate_every 2",
    ]


def test_long_values_are_short_in_names(tmp_path):
    layers = [["conv1"], ["conv2"], ["fc1"], ["fc2"], ["fc3"]]
    make(tmp_path / "a", "fedbcgd", divider=layers)
    make(tmp_path / "b", "fedbcgd", divider=[*layers, ["fc4"]])
    make(tmp_path / "c", "fedbcgd", divider="paper")
    assert [g.name for g in group(collect(tmp_path)[0]).groups] == [
        "fedbcgd, divider [['conv1'], ['conv2']… (1)",
        "fedbcgd, divider [['conv1'], ['conv2']… (2)",
        "fedbcgd, divider paper",
    ]


def test_names_say_no_more_than_tells_groups_apart_and_stand_in_their_order(tmp_path):
    """Four numbers of blocks of which one comes with two momenta: the division says nothing that these do not."""
    for k, (n, momentum, divider) in enumerate(
        [(20, 0.5, "auto"), (4, 0.5, "paper"), (10, 0.5, "auto"), (4, 0.0, "paper")]
    ):
        make(tmp_path / f"a{k}", "fedbcgd", blocks=n, momentum=momentum, divider=divider)
    for k, derived in enumerate([True, False]):
        make(tmp_path / f"b{k}", "scaffold", derived=derived)
    assert [g.name for g in group(collect(tmp_path)[0]).groups] == [
        "fedbcgd, blocks 4, momentum 0",
        "fedbcgd, blocks 4, momentum 0.5",
        "fedbcgd, blocks 10, momentum 0.5",
        "fedbcgd, blocks 20, momentum 0.5",
        "scaffold",
        "scaffold, derived",
    ]


def test_searches_come_last_and_are_called_so(tmp_path):
    for k in range(3):
        make(tmp_path / f"a{k}", "fedavg", k, validation=0.1)
    make(tmp_path / "b", "fedavg", 0)
    assert shown(tmp_path)["tasks"] == ["lenet5 on embedded", "search: lenet5 on embedded"]


def test_it_opens_on_the_task_with_test_metrics_and_most_runs(tmp_path):
    for k in range(4):
        search = make(tmp_path / f"a{k}", "fedavg", k, data="searched")
        write_rows(search, [{"round": 1, "validation_accuracy": 0.5, "upload_d": 1.0}])
    make(tmp_path / "b", "fedavg", data="one")
    for k in range(2):
        make(tmp_path / f"c{k}", "fedavg", k, data="two")
    data = shown(tmp_path)
    assert data["tasks"] == ["lenet5 on two", "lenet5 on one", "lenet5 on searched"]
    assert [(g["task"], len(g["runs"])) for g in data["groups"]] == [(0, 2), (1, 1), (2, 4)]
    assert page.title(data) == "fedbcgd: lenet5 on two and 2 more"


def test_a_seed_that_comes_twice_is_no_seed_more(tmp_path):
    make(tmp_path / "a", "fedavg", 0)
    make(tmp_path / "b", "fedavg", 0)
    groups = group(collect(tmp_path)[0]).groups
    assert [(g.name, g.runs) for g in groups] == [("fedavg (1)", (0,)), ("fedavg (2)", (1,))]


def test_other_data_is_another_task(tmp_path):
    make(tmp_path / "a", "fedavg", 0)
    make(tmp_path / "b", "fedavg", 0, data="cifar10")
    data = shown(tmp_path)
    assert data["tasks"] == ["lenet5 on embedded", "lenet5 on cifar10"]
    assert [g["task"] for g in data["groups"]] == [0, 1]
    assert [g["name"] for g in data["groups"]] == ["fedavg", "fedavg"]
