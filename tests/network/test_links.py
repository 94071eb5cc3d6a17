"""Links: times by hand, profiles and distributions, and every mistake in a file of measurements."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbcgd import UserError
from fedbcgd.network.links import COLUMNS, Links, read_csv
from fedbcgd.network.profiles import PROFILES, Distribution, draw
from fedbcgd.network.settings import Network, as_network

HEADER = "uplink_mbit,downlink_mbit,latency_ms,gradient_ms\n"


def same(a, b):
    return a.digest() == b.digest()


def test_seconds_of_a_task_by_hand():
    """16 bytes up at 8 B/s: 2 s; 32 bytes down at 32 B/s: 1 s; 3 gradients of 0.5 s; latency 0.25 s both ways: 5 s."""
    links = Links(*(np.array([v]) for v in (8.0, 32.0, 0.25, 0.5, 1.0)))
    assert links.seconds(np.array([0]), download=32, evaluations=3, upload=16).tolist() == [5.0]


def test_a_row_for_each_client(tmp_path):
    """8 Mbit/s is a megabyte a second. Rows may be in any order; those of clients that do not exist are not used."""
    path = tmp_path / "links.csv"
    path.write_text("client,availability," + HEADER + "1,0.5,8,80,10,100\n0,1,16,8,0,0\n7,1,1,1,1,1\n\n")
    links = read_csv(path, 2, seed=0)
    assert links.uplink.tolist() == [2e6, 1e6]
    assert links.downlink.tolist() == [1e6, 1e7]
    assert links.latency.tolist() == [0, 0.01]
    assert links.gradient.tolist() == [0, 0.1]
    assert links.availability.tolist() == [1, 0.5]


def test_other_columns_are_ignored_with_a_warning(tmp_path, caplog):
    """A blank line before the header, and unrelated columns."""
    path = tmp_path / "links.csv"
    path.write_text("\nhost,city," + HEADER + "a,Paris,8,8,0,0\n")
    assert read_csv(path, 1, seed=0).uplink.tolist() == [1e6]
    assert "the columns host, city are ignored; known are uplink_mbit" in caplog.text


def test_rows_without_clients_are_given_out_from_the_seed(tmp_path):
    path = tmp_path / "links.csv"
    path.write_text(HEADER + "".join(f"{k},1,1,1\n" for k in range(1, 9)))
    one, again, other = (read_csv(path, 50, seed) for seed in (0, 0, 1))
    assert same(one, again)
    assert not same(one, other)
    assert set(one.uplink * 8 / 1e6) <= set(range(1, 9))
    assert len(set(one.uplink)) > 4


BROKEN = {
    "absent": (None, ["does not exist", "uplink_mbit"]),
    "a folder": (..., ["got a folder"]),
    "not text": (b"\xff\xfe\x00", ["expected UTF-8 text"]),
    "empty": ("", ["got an empty file", "uplink_mbit, downlink_mbit"]),
    "no rows": (HEADER, ["got only a header"]),
    "unknown column": ("uplink_mbits" + HEADER[11:] + "1,1,1,1\n", ["line 1", "Did you mean 'uplink_mbit'"]),
    "missing column": ("uplink_mbit,downlink_mbit\n1,1\n", ["line 1", "got none named 'latency_ms'"]),
    "column twice": ("uplink_mbit," + HEADER + "1,1,1,1,1\n", ["got 'uplink_mbit' twice"]),
    "too few values": (HEADER + "1,1,1\n", ["line 2", "expected 4 values", "got 3"]),
    "not a number": (HEADER + "1,1,1,1\n1,fast,1,1\n", ["line 3", "downlink_mbit", "'fast'"]),
    "no uplink": (HEADER + "0,1,1,1\n", ["line 2", "uplink_mbit: expected a number > 0, got '0'"]),
    "infinite": (HEADER + "inf,1,1,1\n", ["uplink_mbit: expected a number > 0, got 'inf'"]),
    "NaN": (HEADER + "1,nan,1,1\n", ["downlink_mbit: expected a number > 0, got 'nan'"]),
    "negative latency": (HEADER + "1,1,-1,1\n", ["latency_ms: expected a number ≥ 0"]),
    "never available": ("availability," + HEADER + "0,1,1,1,1\n", ["availability: expected a share > 0 and ≤ 1"]),
    "half a client": ("client," + HEADER + "0.5,1,1,1,1\n", ["client: expected an integer ≥ 0"]),
    "a client twice": (
        "client," + HEADER + "0,1,1,1,1\n0,1,1,1,1\n",
        ["line 3", "client 0", "a second one for client 0, after that in line 2"],
    ),
    "a client missing": (
        "client," + HEADER + "0,1,1,1,1\n2,1,1,1,1\n",
        ["each of 3 clients", "got none for client 1 (1 are missing)"],
    ),
    "a number as Python writes it": (HEADER + "1_0,1,1,1\n", ["line 2", "uplink_mbit", "'1_0'"]),
    "mistakes after a blank line": ("\n" + HEADER + "1,1,1\n", ["line 3", "expected 4 values", "got 3"]),
    "quote left open": (HEADER + '"1,1,1,1\n', ["expected CSV, got"]),
}


@pytest.mark.parametrize("case", BROKEN)
def test_mistakes_in_measurements_are_named(case, tmp_path):
    content, parts = BROKEN[case]
    path = tmp_path / "links.csv"
    if content is ...:
        path.mkdir()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        path.write_text(content)
    with pytest.raises(UserError) as error:
        read_csv(path, 3, seed=0)
    for part in [*parts, "links.csv"]:
        assert part in str(error.value)


@pytest.mark.parametrize("profile", PROFILES)
def test_links_depend_on_the_seed_and_the_clients_number_alone(profile):
    few, many = draw(profile, 10, seed=3), draw(profile, 200, seed=3)
    for name in ("uplink", "downlink", "latency", "gradient", "availability"):
        assert getattr(few, name).tolist() == getattr(many, name)[:10].tolist()
        assert (getattr(many, name) > 0).all()
    assert not same(few, draw(profile, 10, seed=4))


def test_profiles_are_ordered_as_their_names_say():
    slow, medium, fast = (np.median(draw(name, 400, 0).uplink) for name in ("4g", "broadband", "datacentre"))
    assert slow < medium < fast
    mixed = draw("mix", 1000, 0)
    assert [np.mean(mixed.availability == share) for share in (0.7, 0.9, 1.0)] == [0.6, 0.3, 0.1]


@given(st.integers(1, 60), st.integers(0, 30))
def test_a_small_federation_has_its_shares_of_the_mix_too(clients, seed):
    """60, 30 and 10 %, to one client; ten clients are 6, 3 and 1."""
    availability = draw("mix", clients, seed).availability
    for kind, share in ((0.7, 0.6), (0.9, 0.3), (1.0, 0.1)):
        assert abs(np.sum(availability == kind) - share * clients) <= (0 if clients % 10 == 0 else 1) + 1e-9


def test_the_seed_says_who_is_of_which_kind():
    assert len({tuple(draw("mix", 10, seed).availability) for seed in range(40)}) > 5


def test_availability_from_a_distribution():
    """Loguniform, median 0.6 and spread 4: from 0.3 to 1.2, cut off at 1."""
    network = as_network({"availability": {"median": 0.6, "spread": 4.0, "shape": "loguniform"}})
    availability = network.links(400, seed=0).availability
    assert 0.3 <= availability.min() < 0.32
    assert availability.max() == 1.0
    assert 0.05 < np.mean(availability == 1.0) < 0.25
    assert network.links(10, seed=0).availability.tolist() == availability[:10].tolist()


def test_latency_and_computing_time_may_be_zero():
    links = as_network({"latency_ms": 0, "gradient_ms": 0.0}).links(5, seed=0)
    assert links.latency.tolist() == links.gradient.tolist() == [0] * 5


def test_a_loguniform_spread_is_exact_and_a_lognormal_one_between_percentiles():
    """Loguniform, median 5 and spread 100: from 0.5 to 50. Lognormal: the 95th percentile is `spread` times the 5th, after
    a hundredth is cut off at each end."""
    wide = Distribution(median=5.0, spread=100.0, shape="loguniform")
    assert wide.at(np.array([0.0, 0.5, 1.0])) == pytest.approx([0.5, 5.0, 50.0])
    bell = Distribution(median=5.0, spread=100.0)
    low, middle, high = bell.at((np.array([0.05, 0.5, 0.95]) - 0.01) / 0.98)
    assert middle == pytest.approx(5.0)
    assert high / low == pytest.approx(100)
    assert Distribution(median=5.0).at(np.array([0.1, 0.9])).tolist() == [5, 5]


def test_settings_that_replace_those_of_a_profile():
    """`gradient_ms` of 4 and compute 2.5 are 10 ms; a number is a distribution without spread."""
    network = as_network({"profile": "4g", "uplink_mbit": 8, "gradient_ms": 4.0, "compute": 2.5, "availability": 0.5})
    links = network.links(20, seed=0)
    assert set(links.uplink) == {1e6}
    assert links.gradient == pytest.approx(np.full(20, 0.01))
    assert set(links.availability) == {0.5}
    assert links.downlink.tolist() == draw("4g", 20, 0).downlink.tolist()


@given(st.integers(1, 50), st.floats(1, 4), st.integers(1, 60))
def test_how_many_clients_are_sampled(cohort, oversample, clients):
    sampled = Network(oversample=oversample).sampled(cohort, clients)
    assert sampled <= clients
    assert sampled == min(clients, int(np.ceil(round(cohort * oversample, 6))))


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ("5g", ["network.profile", "'5g'", "Did you mean '4g'", "broadband"]),
        ({"deadlin": 3.0}, ["network.deadlin", "Did you mean 'deadline'"]),
        ({"uplink_mbit": {"medain": 3.0}}, ["network.uplink_mbit"]),
        ({"uplink_mbit": 0}, ["network.uplink_mbit", "expected a number > 0"]),
        ({"uplink_mbit": {"median": 0.0}}, ["network.uplink_mbit", "expected a number > 0"]),
        ({"uplink_mbit": "fast"}, ["network.uplink_mbit: ", "'fast'", "expected a number or { median"]),
        ({"uplink_mbit": True}, ["network.uplink_mbit: ", "True", "expected a number"]),
        ({"latency_ms": -1}, ["network.latency_ms.median", "greater than or equal to 0"]),
        ({"availability": 1.5}, ["network.availability", "expected a share > 0 and ≤ 1"]),
        ({"availability": 0}, ["network.availability", "expected a share > 0 and ≤ 1"]),
        ({"csv": "x.csv", "profile": "4g"}, ["network.profile", "csv"]),
        ({1: 2}, ["network.1", "keys should be strings"]),
        ({"uplink_mbit": {"median": 1.0, "shape": "normal"}}, ["uplink_mbit.shape", "'lognormal'"]),
        ({"dropout": 1.0}, ["network.dropout", "less than 1"]),
        ({"csv": "x.csv", "uplink_mbit": 3}, ["network.uplink_mbit", "csv"]),
        (7, ["profile", "dictionary", "7"]),
    ],
)
def test_mistakes_in_settings_are_named(settings, parts):
    with pytest.raises(UserError) as error:
        as_network(settings)
    for part in parts:
        assert part in str(error.value)


def test_the_columns_are_the_settings():
    assert set(COLUMNS) <= set(Network.model_fields)
