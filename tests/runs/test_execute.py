"""Runs in folders: their files, and resuming to the same bits."""

import errno
import json
import os
import random
import signal

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file

from fedbcgd import UserError, algorithm_names
from fedbcgd.engine import checkpoint
from fedbcgd.engine.run_folder import RunFolder
from fedbcgd.files import add_checksum
from fedbcgd.runs import config as configuration
from fedbcgd.runs.execute import execute

QUICK = {"local_steps": 1, "batch_size": 4}
ALGORITHMS = ["fedavg", "fedavgm", "fedbcgd", "scaffold", "fedpaq"]


def make(name="scaffold", model="logistic", **run):
    settings = {"rounds": 4, "cohort": 3, "evaluate_every": 100, "workers": 0} | run
    raw = {"model": {"name": model}, "algorithm": {"name": name, **QUICK}, "run": settings}
    return configuration.check(raw, "test")


def model_of(path):
    return (path / "model.safetensors").read_bytes()


def rows_of(path):
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in ("seconds", "crc")} for row in rows]


def stop_after(rounds):
    def callback(info):
        if info.server.round >= rounds:
            raise KeyboardInterrupt

    return callback


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_same_file_in_process_and_on_one_two_and_three_workers(tmp_path, name):
    check_same_file(tmp_path, name)


@pytest.mark.parametrize("name", ["fedbcgd", "fedbcgd+"])
def test_the_same_file_in_bf16_and_another_than_in_fp32(tmp_path, name):
    """LeNet-5 in channels_last: convolutions too."""
    check_same_file(tmp_path, name, precision="bf16")
    execute(make(name, "lenet5", rounds=2, cohort=4), tmp_path / "fp32")
    models = [load_file(tmp_path / name / "model.safetensors")["fc3.weight"] for name in ("fp32", "0")]
    assert not torch.equal(*models)


def check_same_file(tmp_path, name, **run):
    files = set()
    for workers in (0, 1, 2, 3):
        path = tmp_path / str(workers)
        execute(make(name, "lenet5", rounds=2, workers=workers, cohort=4, **run), path)
        files.add(model_of(path))
    assert len(files) == 1


def test_what_a_folder_holds(tmp_path, figures):
    outcome = execute(make("fedbcgd", "lenet5", evaluate_every=2), tmp_path)
    names = {p.name for p in tmp_path.iterdir()} - {".lock"}
    assert names == {
        "config.toml",
        "metrics.jsonl",
        "traffic.jsonl",
        "summary.json",
        "model.safetensors",
        "checkpoint",
        "curve.png",
        "curve.svg",
        "label_counts.json",
        "label_counts.png",
        "label_counts.svg",
    }
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [2, 4]
    assert set(rows[0]) == {
        "round",
        "test_accuracy",
        "test_loss",
        "train_loss",
        "upload_d",
        "upload_bytes",
        "upload_max_bytes",
        "upload_wait_bytes",
        "download_bytes",
        "gradient_evaluations",
        "seconds",
        "crc",
    }
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert {"versions", "seed", "machine", "time", "final", "ledger", "config", "command"} <= set(summary)
    assert {"local", "codec", "sums", "evaluation", "checkpoint"} <= set(summary["time"])
    assert summary["stopped"] == outcome.stopped == "rounds"
    assert load_file(tmp_path / "model.safetensors")["fc3.bias"].shape == (10,)
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    again = RunFolder(tmp_path).outcome()
    assert again.rows == outcome.rows
    assert again.ledger.totals() == outcome.ledger.totals()


def test_problems_with_known_answers_are_ordinary_runs(tmp_path):
    raw = {
        "data": {"name": "quadratics", "clients": 16},
        "model": {"name": "point"},
        "quadratics": {"sigma": 5.0, "G": 10.0},
        "algorithm": {
            "name": "fedbcgd+",
            "blocks": 4,
            "momentum": 0.0,
            "lr": 0.02,
            "lr_decay": 1.0,
            "weight_decay": 0.0,
        },
        "run": {"rounds": 150, "cohort": 8, "workers": 0, "evaluate_every": 50},
    }
    raw["algorithm"] |= {"batch_size": 5, "local_epochs": 1}
    outcome = execute(configuration.check(raw, "test"), tmp_path)
    gaps = [row["test_gap"] for row in outcome.rows]
    assert gaps[2] < 1e-6 < gaps[0]
    assert gaps[2] < gaps[1] < gaps[0]
    execute(configuration.load(tmp_path / "config.toml"), tmp_path, resume=True)


def test_logistic_regression_runs(tmp_path):
    execute(make("fedbcgd", rounds=2), tmp_path)
    assert load_file(tmp_path / "model.safetensors")["fc.weight"].shape == (10, 784)


def test_the_kept_configuration_reproduces_the_run(tmp_path):
    execute(make("fedpaq"), tmp_path / "a")
    execute(configuration.load(tmp_path / "a" / "config.toml"), tmp_path / "b")
    assert model_of(tmp_path / "a") == model_of(tmp_path / "b")


OTHERS = [name for name in algorithm_names() if name not in (*ALGORITHMS, "fedbcgd-matched")]  # no network here


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_the_same_file_for_the_other_algorithms(tmp_path, name):
    check_same_file(tmp_path, name)


STATEFUL = ["fedbcgd+", "feddc", "topk", "fedadam"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in OTHERS if name not in STATEFUL])
def test_resume_for_the_other_algorithms(tmp_path, name):
    check_resume(tmp_path, name)


@pytest.mark.parametrize("name", [*ALGORITHMS, *STATEFUL])
def test_ctrl_c_and_resume_give_the_undisturbed_model(tmp_path, name):
    check_resume(tmp_path, name)


def check_resume(tmp_path, name):
    execute(make(name, rounds=6, evaluate_every=2), tmp_path / "whole")
    for stop in (1, 4):
        with pytest.raises(KeyboardInterrupt, match=f"after round {stop}; --resume"):
            execute(make(name, rounds=6, evaluate_every=2), tmp_path / "cut", resume=True, callbacks=[stop_after(stop)])
    execute(make(name, rounds=6, evaluate_every=2), tmp_path / "cut", resume=True)
    assert model_of(tmp_path / "cut") == model_of(tmp_path / "whole")
    assert rows_of(tmp_path / "cut") == rows_of(tmp_path / "whole")


@pytest.mark.parametrize("seed", range(3))
def test_an_interrupt_in_the_middle_of_a_round_loses_only_that_round(tmp_path, monkeypatch, seed):
    """Ctrl-C after half of the uploads of a round: ledger, controls and client state are those of the last whole round."""
    from fedbcgd.core.server import Server

    execute(make(rounds=5), tmp_path / "whole")
    moment = random.Random(seed).randrange(4, 14)
    original = Server.receive
    count = 0

    def receive(self, upload, sender):
        nonlocal count
        count += 1
        if count == moment:
            raise KeyboardInterrupt
        return original(self, upload, sender)

    monkeypatch.setattr(Server, "receive", receive)
    with pytest.raises(KeyboardInterrupt):
        execute(make(rounds=5), tmp_path / "cut")
    monkeypatch.undo()
    execute(make(rounds=5), tmp_path / "cut", resume=True)
    assert model_of(tmp_path / "cut") == model_of(tmp_path / "whole")
    assert rows_of(tmp_path / "cut") == rows_of(tmp_path / "whole")


def test_an_interrupt_while_metrics_come_in_beside_the_next_round(tmp_path, monkeypatch):
    """The row of round 3 came in with round 4, in whose commit Ctrl-C was pressed: it is not lost."""
    from fedbcgd.core.server import Server

    execute(make(rounds=6, workers=1, evaluate_every=1), tmp_path / "whole")
    original = Server.commit

    def commit(self):
        if self.round == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return original(self)

    monkeypatch.setattr(Server, "commit", commit)
    with pytest.raises(KeyboardInterrupt):
        execute(make(rounds=6, workers=1, evaluate_every=1), tmp_path / "cut")
    monkeypatch.undo()
    execute(make(rounds=6, workers=1, evaluate_every=1), tmp_path / "cut", resume=True)
    assert [row["round"] for row in rows_of(tmp_path / "cut")] == [1, 2, 3, 4, 5, 6]
    assert rows_of(tmp_path / "cut") == rows_of(tmp_path / "whole")
    assert model_of(tmp_path / "cut") == model_of(tmp_path / "whole")


def test_extending_a_finished_run(tmp_path):
    execute(make(rounds=6), tmp_path / "whole")
    execute(make(rounds=3), tmp_path / "longer")
    execute(make(rounds=6), tmp_path / "longer", resume=True)
    assert model_of(tmp_path / "longer") == model_of(tmp_path / "whole")
    before = (tmp_path / "longer" / "metrics.jsonl").read_text()
    outcome = execute(make(rounds=6), tmp_path / "longer", resume=True)  # nothing is left to do
    assert outcome.rounds == 6
    assert (tmp_path / "longer" / "metrics.jsonl").read_text() == before


def test_a_folder_with_the_earlier_name_of_batch_clients_goes_on(tmp_path):
    def logistic(rounds):
        settings = {"rounds": rounds, "cohort": 3, "evaluate_every": 100, "workers": 0, "batch_clients": 3}
        raw = {"model": {"name": "logistic"}, "algorithm": {"name": "fedavg", **QUICK}, "run": settings}
        return configuration.check(raw, "test")

    execute(logistic(2), tmp_path)
    file = tmp_path / "config.toml"
    text = file.read_text().replace("batch_clients = 3", "together = 3").rpartition("# crc")[0]
    assert "together = 3" in text
    file.write_text(text)
    assert execute(logistic(3), tmp_path, resume=True).rows[-1]["round"] == 3


def test_a_run_cannot_be_shortened(tmp_path):
    execute(make(rounds=3), tmp_path)
    with pytest.raises(UserError, match=r"run\.rounds, run\.budget: expected at least round 3"):
        execute(make(rounds=2), tmp_path, resume=True)
    assert (tmp_path / "summary.json").exists()  # and what was there stays as it was
    assert configuration.load(tmp_path / "config.toml").run.rounds == 3


def test_a_configuration_that_fails_leaves_no_folder(tmp_path):
    config = make("fedbcgd", rounds=1)
    config = config.model_copy(update={"algorithm": {**config.algorithm, "blocks": 10**7}})
    with pytest.raises(UserError, match=r"blocks: expected at most \d+, the number of trainable values d"):
        execute(config, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_metrics_are_cut_back_to_the_checkpoint(tmp_path):
    """Rows after the checkpoint and half a line, as after a kill."""
    run = {"rounds": 6, "evaluate_every": 1}
    execute(make(**run), tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        execute(make(**run), tmp_path / "cut", callbacks=[stop_after(3)])
    with (tmp_path / "cut" / "metrics.jsonl").open("a") as file:
        file.write('{"round": 4}\n{"round": 5, "test_acc')
    execute(make(**run), tmp_path / "cut", resume=True)
    assert rows_of(tmp_path / "cut") == rows_of(tmp_path / "whole")


def test_killed_before_the_first_checkpoint_begins_anew(tmp_path):
    execute(make(), tmp_path / "whole")
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "config.toml").write_text(configuration.complete(make()).text())
    (tmp_path / "cut" / "metrics.jsonl").write_text('{"round": 1}\n')
    execute(make(), tmp_path / "cut", resume=True)
    assert model_of(tmp_path / "cut") == model_of(tmp_path / "whole")


def test_another_configuration_is_refused_and_the_difference_shown(tmp_path):
    execute(make("fedbcgd", rounds=1), tmp_path)
    changed = make("fedbcgd", rounds=1, seed=5)
    changed = changed.model_copy(update={"algorithm": {**changed.algorithm, "lr": 0.5}})
    with pytest.raises(UserError) as error:
        execute(changed, tmp_path, resume=True)
    assert "algorithm.lr: 0.1 → 0.5" in str(error.value)
    assert "run.seed: 0 → 5" in str(error.value)


def test_another_precision_is_refused_and_the_same_goes_on_to_the_same_bits(tmp_path):
    execute(make("fedbcgd+", rounds=3, precision="bf16"), tmp_path / "whole")
    cut = tmp_path / "cut"
    execute(make("fedbcgd+", rounds=1, precision="bf16"), cut)
    with pytest.raises(UserError, match=r'run\.precision: "bf16" → "fp32"'):
        execute(make("fedbcgd+", rounds=3), cut, resume=True)
    execute(make("fedbcgd+", rounds=3, precision="bf16"), cut, resume=True)
    assert model_of(cut) == model_of(tmp_path / "whole")
    assert json.loads((cut / "summary.json").read_text())["config"]["run"]["precision"] == "bf16"


def test_a_run_of_before_there_were_precisions_goes_on_in_fp32(tmp_path):
    execute(make("fedbcgd", rounds=2), tmp_path / "whole")
    execute(make("fedbcgd", rounds=1), tmp_path / "old")
    config = tmp_path / "old" / "config.toml"
    text = configuration.complete(make("fedbcgd", rounds=1)).text()
    assert 'precision = "fp32"\n' in text
    config.write_text(add_checksum(text.replace('precision = "fp32"\n', "")))
    execute(make("fedbcgd", rounds=2), tmp_path / "old", resume=True)
    assert model_of(tmp_path / "old") == model_of(tmp_path / "whole")


def test_a_folder_with_a_run_is_not_overwritten(tmp_path):
    execute(make(rounds=1), tmp_path)
    with pytest.raises(UserError, match="got one with a run; --resume"):
        execute(make(rounds=1), tmp_path)


def test_two_processes_do_not_share_a_folder(tmp_path):
    import fcntl

    with (tmp_path / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="no other process uses"):
            execute(make(rounds=1), tmp_path)


def test_a_disk_that_knows_no_locks(tmp_path, monkeypatch):
    import filelock

    def unknown(*_args, **_kwargs):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(filelock, "lock_descriptor", unknown)
    with pytest.raises(UserError, match="cannot be locked: Function not implemented; choose"):
        execute(make(rounds=1), tmp_path)


def full(*_args, **_kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    """The disk is full from the third checkpoint on: one message, and the second is whole."""
    execute(make(rounds=6), tmp_path / "whole")
    saves = []
    original = safetensors.torch.save_file

    def save(tensors, path, metadata):
        saves.append(path)
        if len(saves) >= 3:
            path.write_bytes(b"half a check")
            full()
        original(tensors, path, metadata)

    monkeypatch.setattr(safetensors.torch, "save_file", save)
    with pytest.raises(UserError, match=r"No space left on device; --resume continues from the checkpoint of round 2"):
        execute(make(rounds=6, checkpoint_every=1), tmp_path / "cut")
    monkeypatch.undo()
    assert [p.name for p in (tmp_path / "cut" / "checkpoint").glob("*server*")] == ["server.safetensors"]
    execute(make(rounds=6, checkpoint_every=1), tmp_path / "cut", resume=True)
    assert model_of(tmp_path / "cut") == model_of(tmp_path / "whole")


def test_a_full_disk_while_writing_metrics(tmp_path, monkeypatch):
    """/dev/full in the place of the file: every write to it fails as on a full disk."""
    from fedbcgd.engine.run_folder import JsonlFile

    original = JsonlFile.append

    def append(self, row):
        if self._path.name == "metrics.jsonl":
            self._file = open("/dev/full", "ab")  # noqa: SIM115
        original(self, row)

    monkeypatch.setattr(JsonlFile, "append", append)
    monkeypatch.setattr(JsonlFile, "__exit__", lambda *_: None)
    with pytest.raises(UserError, match=r"metrics\.jsonl could not be written: No space left.*no checkpoint"):
        execute(make(rounds=2, evaluate_every=1), tmp_path)


def test_a_damaged_checkpoint_is_refused(tmp_path):
    execute(make(rounds=1), tmp_path)
    (tmp_path / "checkpoint" / "server.safetensors").write_bytes(b"nonsense")
    with pytest.raises(UserError, match="damaged"):
        execute(make(rounds=2), tmp_path, resume=True)


def test_checkpoints_are_safetensors_and_json(tmp_path):
    execute(make(rounds=1), tmp_path)
    tensors = load_file(tmp_path / "checkpoint" / "server.safetensors")
    assert set(tensors) == {"x", "control.c"}
    assert {p.name for p in (tmp_path / "checkpoint").iterdir()} == {"server.safetensors", "clients.bin"}


def test_when_a_checkpoint_is_due(monkeypatch):
    """After at least a second, and 50 times what the last one cost: under 2 % of the time."""
    from pathlib import Path

    now = [0.0]
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: now[0])
    points = checkpoint.Checkpoints(Path("unused"), None)
    server = type("S", (), {"x": torch.zeros(10), "round": 3})()
    assert not points.due(server)
    now[0] = 1.1
    assert points.due(server)
    points._cost, points._last = 0.5, now[0]
    now[0] += 24
    assert not points.due(server)
    now[0] += 2
    assert points.due(server)
    assert checkpoint.Checkpoints(Path("unused"), 3).due(server)
    assert not checkpoint.Checkpoints(Path("unused"), 2).due(server)


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    execute(make(rounds=3, evaluate_every=1, tensorboard=True), tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    accuracy = events.Scalars("test_accuracy")
    assert [e.step for e in accuracy] == [1, 2, 3]
    assert accuracy[-1].value == pytest.approx(rows_of(tmp_path)[-1]["test_accuracy"])


def test_tensorboard_without_the_extra_says_which(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UserError, match=r"fedbcgd\[tensorboard\]"):
        execute(make(rounds=1, tensorboard=True), tmp_path)


def test_a_device_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match="cuda:7"):
        execute(make(rounds=1, device="cuda:7"), tmp_path)


def test_validation_is_held_out_of_training():
    from fedbcgd.runs.experiment import make_experiment

    config = make(rounds=1)
    config = config.model_copy(update={"data": config.data.model_copy(update={"validation": 0.2})})
    task = make_experiment(config)
    assert task.prefix == "validation"
    assert len(task.test) == 2000
    held = set(task.test.rows.tolist())
    trained = [row for client in task.clients for row in client.rows.tolist()]
    assert len(trained) == 8000
    assert not held & set(trained)
    assert task.test.images.data_ptr() == task.clients[0].images.data_ptr()  # of the training set, not the test set
