"""Floats until ε, measured beside the theorems; and the command around it."""

import csv
import json
import math

import pytest

from fedbcgd import UserError
from fedbcgd.paper import quadratics
from fedbcgd.paper.measurement_cache import MeasurementCache
from fedbcgd.paper.quadratics import Measurements, Size, StopAtEpsilon, compare, floats_to_epsilon, measure, verdicts
from fedbcgd.paper.theory import Setting
from tests.command import fedbcgd

EASY = Setting(beta=4, mu=1, sigma=0.5, G=0.5, clients=4, cohort=4, blocks=1, steps=2, epsilon=0.01)
SMALL = Size(EASY, (1, 2), dim=4, rates=(1.0, 0.5), seeds=1, rounds=100)


def test_the_problem_has_the_theorems_noise():
    """σ is of a minibatch: with minibatches of two, an example has √2 times that."""
    p = SMALL.problem()
    noise = [(a * (t - t.mean(0))).square().sum(1).mean() for a, t in p.clients]
    assert float(sum(noise) / len(noise)) == pytest.approx(2 * 0.5**2)
    assert [len(a) for a, _ in p.clients] == [4] * 4  # T = 2 steps of 2


def test_a_run_is_counted_until_epsilon_and_no_further():
    p = SMALL.problem()
    once = floats_to_epsilon(SMALL, p, "fedavg", 1, 0.125, 0, math.inf)
    assert once["stopped"] == "target"
    assert once["floats_d"] == once["rounds"]  # FedAvg: 1 d a round
    twice = floats_to_epsilon(SMALL, p, "scaffold", 1, 0.125, 0, math.inf)
    assert twice["floats_d"] == 2 * twice["rounds"]
    half = floats_to_epsilon(SMALL, p, "fedbcgd+", 2, 0.125, 0, math.inf)
    assert half["floats_d"] == pytest.approx(half["rounds"])  # 2d/N with N = 2
    short = floats_to_epsilon(SMALL, p, "fedavg", 1, 0.125, 0, once["floats_d"] - 1)
    assert (short["stopped"], short["floats_d"]) == ("rounds", math.inf)


class Info:
    """What the callback sees of a round."""

    def __init__(self, round_, gap):
        self.row = {"round": round_, "test_gap": gap}
        self.stopped = False

    def stop(self):
        self.stopped = True


def stopped(gaps):
    stop = StopAtEpsilon(1.0)
    for k, gap in enumerate(gaps):
        info = Info(k + 1, gap)
        stop(info)
        if info.stopped:
            break
    return stop.reached, k + 1


def test_one_lucky_round_does_not_count():
    assert stopped([5.0, 0.1, *[5.0] * 20])[0] is None
    # 3 + 9·0.5 is below 10 from the third row on: the window of ten ends with the twelfth
    reached, rounds = stopped([9.0, 9.0, 3.0, *[0.5] * 30])
    assert (reached["round"], rounds) == (3, 12)


def test_a_gap_that_no_longer_falls_ends_the_run():
    assert stopped([4.0] * 1000) == (None, 300)  # a hundred rounds on either side
    assert stopped([1000 * 0.99**k for k in range(1000)])[0]["round"] == 684  # 1000·0.99^683·(mean of 0.99^0…9) ≤ 1


def test_a_rate_that_is_too_high_reaches_nothing():
    tried = floats_to_epsilon(SMALL, SMALL.problem(), "fedavg", 1, 50.0, 0, math.inf)
    assert tried["floats_d"] == math.inf


def test_everything_is_measured_and_compared():
    lines = []
    measured = measure(SMALL, lines.append)
    rows = compare(SMALL, measured)
    assert [(row["algorithm"], row["blocks"]) for row in rows] == [
        ("fedbcgd+", 1),
        ("fedbcgd+", 2),
        ("fedbcgd", 1),
        ("fedbcgd", 2),
        ("fedavg", 1),
        ("scaffold", 1),
    ]
    assert len(lines) == 6
    assert all(row["measured_d"] < math.inf for row in rows)
    assert rows[0]["measured_ratio"] == rows[0]["theorem_ratio"] == 1
    # M/S + β/(μN) is 1 + 4 for one block and 1 + 2 for two
    assert rows[1]["theorem_ratio"] == pytest.approx(3 / 5)
    assert {run["seed"] for run in measured.runs} == {1}
    assert {run["seed"] for run in measured.search} == {0}


def run_of(name, n, floats):
    return {"algorithm": name, "blocks": n, "floats_d": floats}


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (6.0, "agree within a factor of 2; the worst is N = 2, where the measured ratio to N = 1 is 1.00 times"),
        (
            13.0,
            "do not agree within a factor of 2; the worst is N = 2, where the measured ratio to N = 1 is 2.17 times",
        ),
        (math.inf, "not comparable: ε was not reached at N = 2"),
    ],
)
def test_verdicts_by_hand(second, words):
    """At N = 1 ten floats were measured; the theorem's ratio at N = 2 is 3/5."""
    both = [run_of("fedbcgd+", 1, 10.0), run_of("fedbcgd+", 2, second)]
    others = [run_of("fedbcgd", n, 1.0) for n in (1, 2)] + [run_of(n, 1, 1.0) for n in ("fedavg", "scaffold")]
    assert words in verdicts(compare(SMALL, Measurements([], both + others)))["fedbcgd+"]


@pytest.mark.parametrize(
    ("blocks", "words"), [((2, 4), "expected increasing numbers from 1"), ((1, 8), "expected at most 4")]
)
def test_blocks_that_cannot_be_compared(blocks, words):
    with pytest.raises(UserError, match=words):
        Size(EASY, blocks, dim=8)


def theory(*args, cwd, check=0):
    return fedbcgd("theory", *args, cwd=cwd, check=check)


def test_the_command(tmp_path):
    done = theory(
        "--beta", "4", "--sigma", "0.5", "--G", "0.5", "--clients", "4", "--cohort", "4", "--steps", "2",
        "--epsilon", "0.3", "--blocks", "2", "--measure", "--up-to", "2", "--seeds", "1", "--out", "out", cwd=tmp_path,
    )  # fmt: skip
    for words in ("strongly convex", "non-convex", "Theorem 2, with", "constant taken as 1", "measured and theorem"):
        assert words in done.stdout
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "measured.csv",
        "measured.json",
        "measured.png",
        "measured.svg",
        "points",
        "runs.csv",
        "search.csv",
        "theory.csv",
        "theory.png",
        "theory.svg",
    ]
    rows = list(csv.DictReader((tmp_path / "out" / "theory.csv").open()))
    assert {row["axis"] for row in rows} == {"blocks", "G"}
    assert len({row["algorithm"] for row in rows}) == 8
    about = json.loads((tmp_path / "out" / "measured.json").read_text())
    assert about["size"]["setting"]["clients"] == 4
    assert set(about["verdicts"]) == set(quadratics.BLOCKED)
    assert about["commits"]
    assert about["hours"] >= 0


def test_what_was_measured_is_kept_point_by_point(tmp_path):
    """Interrupted at the third point, the first two are there; what is damaged is measured again."""
    ran = []

    def measure(k):
        if len(ran) == 2 and k == 2:
            raise KeyboardInterrupt
        ran.append(k)
        return {"floats_d": math.inf if k == 1 else float(k)}

    def three(cache):
        return [cache.get({"k": k, "budget": math.inf}, lambda k=k: measure(k)) for k in range(3)]

    with pytest.raises(KeyboardInterrupt):
        three(MeasurementCache(tmp_path, "abc"))
    assert ran == [0, 1]
    ran.append("resumed")
    again = MeasurementCache(tmp_path, "def")
    assert [result["floats_d"] for result in three(again)] == [0.0, math.inf, 2.0]
    assert ran == [0, 1, "resumed", 2]
    assert again.commits == {"abc", "def"}
    for path in tmp_path.iterdir():
        path.write_text(path.read_text()[:-20])
    three(MeasurementCache(tmp_path, "ghi"))
    assert ran == [0, 1, "resumed", 2, 0, 1, 2]


def test_what_is_kept_is_what_is_measured(tmp_path):
    """The same rows with and without a folder, and again from it without a run."""
    size = Size(EASY, (1, 2), dim=8, rates=(1.0,), seeds=1, rounds=60)
    free = quadratics.measure(size, lambda line: None)
    first = quadratics.measure(size, lambda line: None, MeasurementCache(tmp_path))
    stamps = {p: p.stat().st_mtime_ns for p in tmp_path.iterdir()}
    second = quadratics.measure(size, lambda line: None, MeasurementCache(tmp_path))
    assert free == first == second
    assert {p: p.stat().st_mtime_ns for p in tmp_path.iterdir()} == stamps
    assert len(stamps) == len(free.search) + len(free.runs)


def test_more_blocks_than_clients_are_noted(tmp_path):
    done = theory("--blocks", "20", "--cohort", "10", cwd=tmp_path)
    assert "K = S/N = 0.5" in done.stdout
    assert "K = S/N" not in theory("--blocks", "10", cwd=tmp_path).stdout


def test_the_command_as_json_and_a_mistake(tmp_path):
    done = theory("--json", cwd=tmp_path)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 12
    assert rows[0]["algorithm"] == "FedAvg"
    wrong = theory("--mu", "200", cwd=tmp_path, check=2)
    assert wrong.stderr.startswith("fedbcgd: mu: expected at most beta = 100")
