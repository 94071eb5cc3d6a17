"""run, compare, sweep, blocks, doctor and init; as real processes where one is killed, or starts others."""

import csv
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from fedbcgd.runs import config as configuration
from tests.command import COMMAND, fedbcgd, process

QUICK = """
[model]
name = "logistic"

[algorithm]
local_steps = 1
batch_size = 4

[run]
rounds = 2
cohort = 3
workers = 0
evaluate_every = 100
"""


@pytest.fixture
def place(tmp_path):
    (tmp_path / "run.toml").write_text(QUICK)
    return tmp_path


def test_init_run_resume_extend(tmp_path):
    fedbcgd("init", "first.toml", cwd=tmp_path)
    assert configuration.load(tmp_path / "first.toml").run.rounds == 100
    fedbcgd("init", "first.toml", cwd=tmp_path, check=2)
    sets = [
        "--set",
        "run.rounds=2",
        "--set",
        "algorithm.local_steps=1",
        "--set",
        "run.cohort=2",
        "--set",
        "run.workers=1",
    ]
    done = process("run", "first.toml", "--out", "out", *sets, cwd=tmp_path)
    assert "stopped by rounds" in done.stdout
    assert "fedbcgd: started" in done.stderr
    refused = fedbcgd("run", "first.toml", "--out", "out", *sets, cwd=tmp_path, check=2)
    assert "--resume" in refused.stderr
    sets[1] = "run.rounds=3"
    longer = fedbcgd("run", "first.toml", "--out", "out", "--resume", "--quiet", *sets, cwd=tmp_path)
    assert longer.stderr == ""
    assert len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) == 3


def test_json(place):
    """A line for each evaluation, also for those that come in with the next round."""
    sets = ["--set", "run.evaluate_every=1", "--set", "run.workers=2"]
    done = fedbcgd("run", "run.toml", "--out", "out", "--json", *sets, cwd=place)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line.get("round") for line in lines] == [1, 2, None]
    assert lines[-1]["stopped"] == "rounds"
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["run", "absent.toml", "--out", "x"], "expected a configuration file, got none; `fedbcgd init absent.toml`"),
        (["run", "run.toml"], "--out"),
        (["run", "run.toml", "--out", "x", "--set", "run.roundz=3"], "Did you mean 'rounds'"),
        (
            ["run", "run.toml", "--out", "x", "--set", "algorithm.lr=0"],
            "run.toml: algorithm.lr: expected a number greater than 0, got 0",
        ),
        (["run", "run.toml", "--out", "x", "--set", "run.budget=0.01"], "budget: expected at least 0.333 d"),
        (["run", "run.toml", "--out", "/proc/nowhere"], "/proc/nowhere could not be created"),
        (
            ["run", "run.toml", "--out", "x", "--set", "algorithm.blocks=1000000"],
            "got 1000000",
        ),
        (["compare", "run.toml", "--algorithms", "fedavg,fedagv", "--out", "x"], "'fedagv'"),
        (["compare", "run.toml", "--algorithms", "fedavg,fedavg", "--out", "x"], "expected each name once"),
        (["compare", "run.toml", "--algorithms", ",", "--out", "x"], "expected at least one name, got none"),
        (["sweep", "run.toml", "--grid", "lr", "--out", "x"], "--grid: expected option=value,value"),
        (["sweep", "run.toml", "--grid", "lr=0.1,-1", "--out", "x"], "greater than 0"),
        (["sweep", "run.toml", "--grid", "blocks=2", "--grid", "blocks=3", "--out", "x"], "expected each option once"),
        (["blocks", "lenet"], "Did you mean 'lenet5'"),
        (["blocks", "lenet5", "--blocks", "0"], "an integer ≥ 1"),
        (
            ["blocks", "lenet5", "--divider", "1,2", "--blocks", "3"],
            "expected 3 sizes, as many as blocks, got 2",
        ),
        (["blocks", "lenet5", "--divider", "evn"], "Did you mean 'even'"),
        (["blocks", "lenet5", "--shape", "32"], "channels,height,width"),
    ],
)
def test_mistakes(place, args, words):
    done = fedbcgd(*args, cwd=place, check=2)
    assert words in " ".join(done.stderr.split())
    assert not (place / "x").exists() or not (place / "x" / "summary.json").exists()


def test_a_run_that_is_no_table(place):
    (place / "run.toml").write_text("run = 3")
    done = fedbcgd("run", "run.toml", "--out", "x", cwd=place, check=2)
    assert "run.toml: run: expected a table, got 3" in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("text", "sets", "early"),
    [
        ("", [], True),
        ("[run]\nworkers = 2", [], True),
        ("[run]\nworkers = 2", ["run.workers=0"], False),
        ("[run]\nworkers = 0", None, False),
        ("[run]\nworkers = 0", ["run.workers = 1"], True),
        ("[run]\nbackend = 'ray'", None, False),
        ("[run]\ndevice = 'cuda'", None, False),
        ("run = 3", None, False),
        ("[[run]]\nworkers = 2", None, False),
        ("no toml", None, False),
    ],
)
def test_workers_are_prepared_where_a_file_looks_as_if_it_had_some(tmp_path, monkeypatch, text, sets, early):
    """Whatever is wrong with the file is said by others."""
    from fedbcgd.backends.workers import processes
    from fedbcgd.cli.common import start_workers_early

    started = []
    monkeypatch.setattr(processes, "start_early", lambda: started.append(True))
    (tmp_path / "run.toml").write_text(text)
    start_workers_early(tmp_path / "run.toml", sets)
    assert started == [True] * early
    start_workers_early(tmp_path / "absent.toml", sets)
    assert len(started) == early


def test_compare_keeps_what_is_finished(place):
    (place / "run.toml").write_text(QUICK + "[compare.fedavg]\nlr = 0.05\n")
    args = [
        "compare",
        "run.toml",
        "--algorithms",
        "fedavg,fedbcgd",
        "--seeds",
        "2",
        "--out",
        "out",
        "--set",
        "run.rounds=2",
    ]
    done = fedbcgd(*args, cwd=place)
    assert "±" in done.stdout
    out = place / "out"
    rows = list(csv.DictReader((out / "compare.csv").open()))
    assert [(row["algorithm"], row["seed"]) for row in rows] == [
        ("fedavg", "0"),
        ("fedavg", "1"),
        ("fedbcgd", "0"),
        ("fedbcgd", "1"),
    ]
    assert (out / "compare.png").read_bytes().startswith(b"\x89PNG")
    config = configuration.load(out / "fedavg" / "seed-1" / "config.toml")
    assert config.algorithm["lr"] == 0.05
    assert config.algorithm["batch_size"] == 4
    assert config.run.seed == 1
    times = {p: p.stat().st_mtime_ns for p in out.rglob("model.safetensors")}
    assert len(times) == 4
    # a finished one is deleted, a new one is asked for: only those two run
    victim = out / "fedbcgd" / "seed-0" / "summary.json"
    victim.unlink()
    args[3] = "fedavg,fedbcgd,fedavgm"
    again = fedbcgd(*args, cwd=place)
    assert again.stderr.count("finished before") == 3
    unchanged = [p for p, t in times.items() if p.stat().st_mtime_ns == t]
    assert len(unchanged) == 3


def test_an_extension_that_was_killed_is_not_taken_for_finished(place):
    args = ["compare", "run.toml", "--algorithms", "fedavg", "--out", "out", "--quiet"]
    fedbcgd(*args, "--budget", "2", cwd=place)
    long = subprocess.Popen([*COMMAND, *args, "--budget", "3000"], cwd=place, start_new_session=True)
    deadline = time.monotonic() + 60
    while (place / "out" / "fedavg" / "seed-0" / "summary.json").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1)
    os.killpg(long.pid, signal.SIGKILL)
    long.wait()
    refused = fedbcgd(*args, "--budget", "2", cwd=place, check=None)  # it may have gone past 2 d, or not
    assert refused.returncode in (0, 2)
    if refused.returncode:
        assert "run.rounds, run.budget: expected at least round" in refused.stderr
    assert "finished before" not in refused.stderr


def test_a_diverging_run_is_recorded_and_the_others_go_on(place):
    grid = ["--grid", "lr=0.1,1e30"]
    done = fedbcgd("sweep", "run.toml", *grid, "--out", "out", "--set", "run.rounds=5", cwd=place)
    assert "best on held-out data: lr 0.1" in done.stdout
    assert "diverged" in done.stdout
    rows = list(csv.DictReader((place / "out" / "sweep.csv").open()))
    assert len(rows) == 2
    again = fedbcgd("sweep", "run.toml", *grid, "--out", "out", "--set", "run.rounds=5", cwd=place)
    assert again.stderr.count("finished before") == 2


def test_a_diverging_algorithm_is_one_row_of_a_comparison(place):
    (place / "run.toml").write_text(QUICK + "[compare.fedavg]\nlr = 1e30\n")
    sets = ["--set", "run.rounds=8", "--set", "run.evaluate_every=1"]
    for _ in range(2):  # the second time from what was kept
        done = fedbcgd("compare", "run.toml", "--algorithms", "fedavg,fedbcgd", "--out", "out", *sets, cwd=place)
        assert "fedbcgd" in done.stdout
        rows = list(csv.DictReader((place / "out" / "compare.csv").open()))
        assert [row["stopped"] for row in rows] == ["diverged", "rounds"]
        assert "1 of 1" in done.stdout  # of fedavg's seeds diverged
        reached = list(csv.DictReader((place / "out" / "reach.csv").open()))
        assert [row["rounds"] != "" for row in reached] == [False, True]  # what diverged has reached nothing


def test_what_is_wrong_with_any_run_is_said_before_the_first(place):
    args = ["--algorithms", "fedavg,scaffold", "--budget", "1.5", "--out", "out"]
    done = fedbcgd("compare", "run.toml", *args, cwd=place, check=2)
    assert "scaffold" in done.stderr
    assert not (place / "out").exists()
    args = ["--grid", "lr=0.1,0.2", "--out", "out", "--set", "run.metric=rmse"]
    done = fedbcgd("sweep", "run.toml", *args, cwd=place, check=2)
    assert "expected one of accuracy, loss, got 'rmse'" in done.stderr
    assert not (place / "out").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[compare.fedavg]\nname = 'fedbcgd'\n", "expected none, since the section is for fedavg"),
        ("[compare.fedavg]\ncodec = ['x']\n", "codec"),
    ],
)
def test_broken_comparisons(place, text, words):
    (place / "run.toml").write_text(QUICK + text)
    done = fedbcgd("compare", "run.toml", "--algorithms", "fedavg", "--out", "out", cwd=place, check=2)
    assert words in done.stderr


def test_a_part_for_all_is_refused_in_a_comparison(place):
    args = ["--algorithms", "fedavg,fedbcgd", "--out", "out", "--set", "algorithm.codec=qsgd"]
    assert "algorithm.codec" in fedbcgd("compare", "run.toml", *args, cwd=place, check=2).stderr


@pytest.mark.parametrize("damage", ["metrics", "cut", "config", "temporary"])
def test_damaged_folders(place, damage):
    fedbcgd("run", "run.toml", "--out", "out", "--quiet", cwd=place)
    out = place / "out"
    check = 0
    if damage == "metrics":
        (out / "metrics.jsonl").write_bytes(b"x" * (out / "metrics.jsonl").stat().st_size)
    elif damage == "cut":
        (out / "metrics.jsonl").write_text("")
    elif damage == "config":
        (out / "config.toml").unlink()
        check = 2
    else:
        (out / "checkpoint" / ".server-abc.safetensors").write_text("half")
    done = fedbcgd("run", "run.toml", "--out", "out", "--resume", "--set", "run.rounds=3", cwd=place, check=check)
    if damage == "temporary":
        assert not (out / "checkpoint" / ".server-abc.safetensors").exists()
    else:
        assert str(out.name) in done.stderr
    if damage in ("metrics", "cut"):
        assert "out/metrics.jsonl is damaged: 1 of 1 rows are lost, and the run continues without them" in done.stderr


def test_the_file_that_init_writes_works_for_every_algorithm(tmp_path):
    from fedbcgd import algorithm_names

    fedbcgd("init", "run.toml", cwd=tmp_path)
    for name in algorithm_names():
        assert configuration.load(tmp_path / "run.toml", [f"algorithm.name={name}"]).algorithm["name"] == name


INTERRUPTED = """
import os, random, signal, sys, threading, time
from pathlib import Path
from fedbcgd.runs import config as configuration
from fedbcgd.runs.execute import execute

run = {"rounds": 60, "cohort": 3, "evaluate_every": 7, "workers": 0, "checkpoint_every": 3}
algorithm = {"name": "scaffold", "local_steps": 1, "batch_size": 4}
config = configuration.check({"model": {"name": "logistic"}, "algorithm": algorithm, "run": run}, "test")
for name in ("first", "whole"):  # the first run also imports and loads what is needed
    began = time.monotonic()
    execute(config, Path(name), figures=False)
    seconds = time.monotonic() - began
draw = random.Random(int(sys.argv[1]))
count = 0
while count < 8:
    timer = threading.Timer((0.1 + 0.5 * draw.random()) * seconds, os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        execute(config, Path("cut"), resume=True, figures=False)
        timer.cancel()
        timer.join()
        break
    except KeyboardInterrupt:
        count += 1
execute(config, Path("cut"), resume=True, figures=False)
same = Path("cut/model.safetensors").read_bytes() == Path("whole/model.safetensors").read_bytes()
print(count, same)
"""


def test_real_interrupts_at_any_moment_change_no_bit(tmp_path):
    """SIGINT to the process at random moments, among them the middle of a commit."""
    (tmp_path / "script.py").write_text(INTERRUPTED)
    done = subprocess.run([sys.executable, "script.py", "3"], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    count, same = done.stdout.split()
    assert int(count) >= 2
    assert same == "True"


def test_compare_under_a_budget(place):
    sets = ["--set", "run.rounds=50", "--set", "model.name=lenet5", "--budget", "1"]
    done = fedbcgd(
        "compare", "run.toml", "--algorithms", "fedavg,fedbcgd,fedpaq", "--out", "out", "--json", *sets, cwd=place
    )
    rows = {row["algorithm"]: row for row in map(json.loads, done.stdout.splitlines()) if "algorithm" in row}
    assert {name: row["rounds"] for name, row in rows.items()} == {"fedavg": 1, "fedbcgd": 2, "fedpaq": 3}
    assert all(row["upload_d"] <= 1 for row in rows.values())


def test_hours_to_a_target_under_each_profile(place):
    sets = ["--set", "network.profile=4g"]
    done = fedbcgd("compare", "run.toml", "--algorithms", "fedavg,fedbcgd", "--out", "out", *sets, cwd=place)
    for word in ("to reach test accuracy", "broadband", "datacentre", "mix", "own network"):
        assert word in done.stdout
    rows = list(csv.DictReader((place / "out" / "reach.csv").open()))
    assert [row["algorithm"] for row in rows] == ["fedavg", "fedbcgd"]
    assert all(0 < float(row["hours_datacentre"]) < float(row["hours_4g"]) for row in rows)
    assert "reach.csv" in done.stdout
    done = fedbcgd("run", "run.toml", "--out", "one", "--quiet", *sets, cwd=place)
    assert " s on the clock of its network; everything is in one" in done.stdout
    run = "out/fedbcgd/seed-0"
    done = fedbcgd("hours", run, "--network", "own,datacentre", cwd=place)
    for word in ("own", "datacentre", "who served each block (the run's own network)", "fair 0.5", " s "):
        assert word in done.stdout
    done = fedbcgd("hours", run, "--json", cwd=place)
    *found, lean = map(json.loads, done.stdout.splitlines())
    assert [row["network"] for row in found] == ["own", "4g", "broadband", "datacentre", "mix"]
    assert lean["network"] == "own"
    assert sum(block["uploads"] for block in lean["bias"]) == 6
    (place / "links.csv").write_text("uplink_mbit,downlink_mbit,latency_ms,gradient_ms\n1,1,3600000,0\n")
    done = fedbcgd("hours", run, "--network", "4g", "--csv", "links.csv", "--target", "0.99", "--json", cwd=place)
    first, second, lean = map(json.loads, done.stdout.splitlines())
    assert second["hours_to_target"] is None
    assert 4 < first["hours"] < 4.01  # two rounds, an hour of latency each way
    assert lean["network"] == "links.csv"
    for wrong, word in {
        "--network=": "expected names separated by commas, of 4g",
        "--target=80": "an accuracy > 0 and ≤ 1",
    }.items():
        assert word in fedbcgd("hours", run, wrong, cwd=place, check=2).stderr
    assert "expected the folder of a run" in fedbcgd("hours", f"{run}/metrics.jsonl", cwd=place, check=2).stderr
    wrong = fedbcgd("hours", run, "--network", "5g", cwd=place, check=2)
    assert "Did you mean '4g'" in wrong.stderr
    several = fedbcgd("hours", "out", "--network", "4g", cwd=place).stdout
    assert "to test accuracy" in several
    assert "fedavg" in several
    found = [json.loads(line) for line in fedbcgd("hours", "out", "--json", cwd=place).stdout.splitlines()]
    assert {row["run"] for row in found} == {"fedavg/seed-0", "fedbcgd/seed-0"}
    (place / "empty").mkdir()
    assert "expected the folder of a run" in fedbcgd("hours", "empty", cwd=place, check=2).stderr


def test_sweep_never_looks_at_the_test_set(place):
    grid = ["--grid", "lr=0.01,0.2", "--grid", "momentum=0,0.5"]
    done = fedbcgd("sweep", "run.toml", *grid, "--out", "out", cwd=place)
    assert "best on held-out data" in done.stdout
    rows = list(csv.DictReader((place / "out" / "sweep.csv").open()))
    assert len(rows) == 4
    assert "validation_accuracy" in rows[0]
    assert not any(key.startswith("test_") for key in rows[0])
    best = configuration.load(place / "out" / "best.toml")
    assert best.data.validation == 0
    top = max(rows, key=lambda row: float(row["validation_accuracy"]))
    assert top["run"] == f"lr {best.algorithm['lr']}, momentum {best.algorithm['momentum']}"
    again = fedbcgd("sweep", "run.toml", *grid, "--out", "out", cwd=place)
    assert again.stderr.count("finished before") == 4


def test_blocks(tmp_path):
    text = fedbcgd(
        "blocks", "lenet5", "--blocks", "4", "--divider", "layers", "--shape", "3,32,32", cwd=tmp_path
    ).stdout
    for word in ("d = 797,962", "conv1", "614,784", "77.04%", "fc3", "1,930"):
        assert word in text
    text = fedbcgd("blocks", "lenet5", "--divider", "1,3", cwd=tmp_path).stdout
    assert "199,008" in text  # a quarter of the 796,032 outside fc3
    even = fedbcgd("blocks", "lenet5", "--codec", "qsgd", cwd=tmp_path).stdout
    assert "fc1 (part)" in even


def test_doctor(tmp_path):
    text = fedbcgd("doctor", cwd=tmp_path).stdout
    for word in ("cores", "memory", "torch", "devices", "worker process", "vector unit"):
        assert word in text


def test_sigterm_writes_a_checkpoint(place):
    args = ["run", "run.toml", "--out", "out", "--set", "run.rounds=100000", "--set", "run.checkpoint_every=100000"]
    process = subprocess.Popen(
        [*COMMAND, *args, "--set", "run.evaluate_every=1"], cwd=place, stderr=subprocess.PIPE, text=True
    )
    wait_for_rows(place / "out", 3)
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "--resume continues from there" in errors
    assert (place / "out" / "checkpoint" / "server.safetensors").exists()


def rows_in(out):
    try:
        return len((out / "metrics.jsonl").read_bytes().splitlines())
    except FileNotFoundError:
        return 0


def wait_for_rows(out, count, process=None):
    deadline = time.monotonic() + 90
    while rows_in(out) < count and time.monotonic() < deadline:
        if process is not None and process.poll() is not None:
            return
        time.sleep(0.01)
    assert rows_in(out) >= count or process is not None


WAITS = """
import time, torch

class Net(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(784, 10))

    def forward(self, x):
        time.sleep(0.005)
        return super().forward(x)
"""


def check_killed_and_resumed(place, kills, seed):
    """SCAFFOLD on two workers; the whole process group is killed at random moments and the run resumed each time.

    The model waits, so that on any machine a row takes 50 ms: twenty batches of an evaluation on two workers. At most
    three of the four rows per kill are there when it comes.
    """
    (place / "waits.py").write_text(WAITS)
    draw = random.Random(seed)
    rounds = 12 * (kills + 1)
    sets = [
        "model.name=waits.py:Net",
        "algorithm.name=scaffold",
        f"run.rounds={rounds}",
        "run.workers=2",
        "run.evaluate_every=3",
        "run.checkpoint_every=2",
    ]
    args = [word for item in sets for word in ("--set", item)]
    fedbcgd("run", "run.toml", "--out", "whole", "--quiet", *args, "--set", "run.workers=0", cwd=place)
    for k in range(kills):
        process = subprocess.Popen(
            [*COMMAND, "run", "run.toml", "--out", "cut", *(["--resume"] if k else []), "--quiet", *args],
            cwd=place,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        wait_for_rows(place / "cut", rows_in(place / "cut") + 1, process)
        time.sleep(draw.random() * 0.1)
        assert process.poll() is None, process.stderr.read()
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    fedbcgd("run", "run.toml", "--out", "cut", "--resume", "--quiet", *args, cwd=place)
    assert (place / "cut" / "model.safetensors").read_bytes() == (place / "whole" / "model.safetensors").read_bytes()

    def rows(name):
        lines = (place / name / "metrics.jsonl").read_text().splitlines()
        return [{k: v for k, v in json.loads(line).items() if k not in ("seconds", "crc")} for line in lines]

    assert rows("cut") == rows("whole")


def test_killed_twice_and_resumed(place):
    check_killed_and_resumed(place, 2, seed=1)


@pytest.mark.slow
def test_killed_ten_times_and_resumed(place):
    check_killed_and_resumed(place, 10, seed=2)
