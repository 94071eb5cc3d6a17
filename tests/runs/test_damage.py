"""Damaged files are found, and not used for training."""

import json
import os
import random
import shutil

import numpy as np
import pytest
from safetensors.torch import save_file
from typer.testing import CliRunner

from fedbcgd import UserError
from fedbcgd.cli import app
from fedbcgd.cli import check as _check  # noqa: F401
from fedbcgd.cli import data as _data  # noqa: F401
from fedbcgd.data import store
from fedbcgd.engine import checkpoint
from fedbcgd.engine.checkpoint import Checkpoints
from fedbcgd.engine.run_folder import JsonlFile, RunFolder
from fedbcgd.files import read_tensors
from fedbcgd.report import page
from fedbcgd.runs import check as checks
from fedbcgd.runs import config as configuration
from fedbcgd.runs.execute import execute
from fedbcgd.runs.folder import finished, read_configuration

WITH_CHECKSUM = (
    "config.toml",
    "summary.json",
    "label_counts.json",
    "metrics.jsonl",
    "traffic.jsonl",
    "model.safetensors",
)
CHECKPOINTS = ("checkpoint/server.safetensors", "checkpoint/previous.safetensors")


def make(rounds, **run):
    return configuration.check(
        {
            "data": {"name": "mine", "clients": 4},
            "model": {"name": "logistic"},
            "algorithm": {"name": "scaffold", "local_steps": 1, "batch_size": 4},
            "run": {"rounds": rounds, "cohort": 2, "workers": 0, "checkpoint_every": 1, "evaluate_every": 1} | run,
        },
        "test",
    )


def rows_of(path):
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in ("seconds", "crc")} for row in rows]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A data set of 40 images, a run of six rounds on it, and one of four rounds that can be resumed."""
    place = tmp_path_factory.mktemp("damage")
    patch = pytest.MonkeyPatch()
    patch.setenv("FEDBCGD_DATA", str(place / "cache"))
    draw = np.random.default_rng(0)
    arrays = {"x_train": draw.integers(0, 256, (40, 4, 5, 3), np.uint8), "y_train": np.arange(40) % 3}
    arrays |= {"x_test": draw.integers(0, 256, (6, 4, 5, 3), np.uint8), "y_test": np.arange(6) % 3}
    np.savez(place / "mine.npz", **arrays)
    store.add("mine", place / "mine.npz")
    execute(make(6), place / "whole", figures=False)
    execute(make(4), place / "cut", figures=False)
    yield place
    patch.undo()


@pytest.fixture
def cut(place, tmp_path):
    """A copy of the run that can be resumed."""
    shutil.copytree(place / "cut", tmp_path / "cut")
    return tmp_path / "cut"


def state(path, name):
    return next(found.state for found in checks.check(path) if found.file == name)


def same(path, place):
    return (path / "model.safetensors").read_bytes() == (place / "whole" / "model.safetensors").read_bytes()


def damage(path, draw):
    """Flip a bit, cut the file, append to it, or zero a part of it; return whether it changed."""
    data = bytearray(path.read_bytes())
    before = bytes(data)
    kind = draw.choice(["flip", "flip", "flip", "cut", "append", "stretch"])
    at = draw.randrange(max(1, len(data)))
    if kind == "flip" and data:
        data[at] ^= 1 << draw.randrange(8)
    elif kind == "cut":
        del data[at:]
    elif kind == "append":
        data += draw.randbytes(draw.randrange(1, 20))
    else:
        data[at : at + 8] = bytes(len(data[at : at + 8]))
    path.write_bytes(data)
    return bytes(data) != before


def check_damages(place, tmp_path, count, seed):
    draw = random.Random(seed)
    files = [p.relative_to(place / "cut") for p in (place / "cut").rglob("*") if p.is_file() and p.name != ".lock"]
    data = store.path_of("mine")
    kept = data.read_bytes()
    seen = dict.fromkeys(("went on", "fell back", "refused"), 0)
    for trial in range(count):
        path = tmp_path / "cut"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(place / "cut", path)
        file = draw.choice([*files, None])
        changed = damage(data if file is None else path / file, draw)
        found = checks.check(path)
        if changed and file is not None and str(file) in (*WITH_CHECKSUM, *CHECKPOINTS):
            wrong = [f.file for f in found if f.bad]
            assert wrong == [str(file)], (trial, found)
        page.write([path], tmp_path / "report.html")
        back = any(f.bad for f in found if f.file in (CHECKPOINTS[0], "checkpoint/clients.bin"))
        try:
            execute(make(6), path, resume=True, figures=False)
        except UserError:
            assert file is None or file.name == "clients.bin", (trial, file)
            seen["refused"] += 1
        else:
            assert not (changed and file is None), trial  # the data are never trained on
            assert same(path, place), (trial, file)
            if file is None or file.name != "metrics.jsonl":
                assert rows_of(path) == rows_of(place / "whole"), (trial, file)
            assert not [f for f in checks.check(path) if f.bad]
            seen["fell back" if back else "went on"] += 1
        if file is None:
            data.write_bytes(kept)
    return seen


def flip(path, at=-1):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(place, cut, caplog):
    flip(cut / CHECKPOINTS[0])
    assert Checkpoints(cut / "checkpoint", None).load()[1]["round"] == 3
    execute(make(6), cut, resume=True, figures=False)
    assert caplog.messages == [
        f"{cut / CHECKPOINTS[0]} is damaged: its checksum does not match: the run resumes from the checkpoint before it, "
        "of round 3"
    ]
    assert same(cut, place)
    assert rows_of(cut) == rows_of(place / "whole")


def test_a_damaged_checkpoint_does_not_take_the_place_of_a_whole_one(cut):
    flip(cut / CHECKPOINTS[0])
    execute(make(4), cut, resume=True, figures=False)  # one round, one checkpoint
    assert checkpoint.read(cut / CHECKPOINTS[0])[1]["round"] == 4
    assert checkpoint.read(cut / CHECKPOINTS[1])[1]["round"] == 3


def test_killed_between_the_two_steps_of_a_checkpoint(place, cut):
    (cut / CHECKPOINTS[0]).unlink()
    execute(make(6), cut, resume=True, figures=False)
    assert same(cut, place)


def test_without_a_whole_checkpoint_nothing_goes_on(cut):
    for name in CHECKPOINTS:
        flip(cut / name)
    before = {p: p.read_bytes() for p in cut.rglob("*") if p.is_file()}
    with pytest.raises(
        UserError, match=r"server\.safetensors is damaged.*previous\.safetensors is damaged.*an undamaged"
    ):
        execute(make(6), cut, resume=True, figures=False)
    assert {p: p.read_bytes() for p in cut.rglob("*") if p.is_file()} == before
    (cut / CHECKPOINTS[1]).unlink()
    with pytest.raises(UserError, match="expected an undamaged checkpoint, got none"):
        execute(make(6), cut, resume=True, figures=False)


def slots_of(cut, name):
    values = checkpoint.read(cut / name)[1]
    return {entry[0] for entry in values["clients"].values()}, values["slot_bytes"]


def test_damaged_client_state(place, cut, caplog):
    """If the newest checkpoint alone is damaged, the one before it is used; if both are, the client is named."""
    newest, size = slots_of(cut, CHECKPOINTS[0])
    before, _ = slots_of(cut, CHECKPOINTS[1])
    assert newest - before
    assert newest & before
    flip(cut / "checkpoint/clients.bin", min(newest - before) * size + 7)
    assert state(cut, "checkpoint/clients.bin") == "damaged"
    again = cut.parent / "again"
    shutil.copytree(cut, again)
    execute(make(6), again, resume=True, figures=False)
    assert "clients.bin is damaged: the state of client" in caplog.text
    assert same(again, place)
    flip(cut / "checkpoint/clients.bin", min(newest & before) * size + 7)
    with pytest.raises(UserError, match=r"the state of client \d is not what was written.*expected an undamaged"):
        execute(make(6), cut, resume=True, figures=False)


def test_two_checkpoints_in_a_row_keep_their_client_state(place, tmp_path):
    """After every round of a run, both checkpoints are whole with all slots they name."""

    def look(info):
        assert not [f for f in checks.check(tmp_path / "run") if f.bad]
        if info.server.round > 3:
            rounds = [checkpoint.read(tmp_path / "run" / name)[1]["round"] for name in CHECKPOINTS]
            assert rounds in ([info.server.round - 1, info.server.round - 2], [info.server.round - 2] * 2)

    def settled(self, *args):
        begin(self, *args)
        self.wait()

    begin = Checkpoints.begin
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "begin", settled)
        execute(make(8), tmp_path / "run", callbacks=[look], figures=False)


@pytest.mark.parametrize("damage", ["removed", "emptied", "a line gone", "a line changed", "moved on"])
def test_lost_metrics_do_not_make_the_model_unusable(place, cut, caplog, damage):
    path = cut / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    if damage == "removed":
        path.unlink()
    elif damage == "emptied":
        path.write_bytes(b"")
    elif damage == "a line gone":
        path.write_bytes(b"".join(lines[1:]))
    elif damage == "a line changed":
        path.write_bytes(b"".join([lines[0].replace(b'"round": 1', b'"round": 7'), *lines[1:]]))
    else:  # rows of rounds after the checkpoint stand where those before it did
        path.write_bytes(
            b"".join(lines[1:]) + lines[3].replace(b'"round": 4', b'"round": 5').split(b', "crc"')[0] + b"}\n"
        )
    lost = 1 if "line" in damage or damage == "moved on" else 4
    page.write([cut], cut / "report.html")
    assert state(cut, "metrics.jsonl") in ("damaged", "missing")
    execute(make(6), cut, resume=True, figures=False)
    assert caplog.messages == [f"{path} is damaged: {lost} of 4 rows are lost, and the run continues without them"]
    assert same(cut, place)
    rows = rows_of(place / "whole")
    assert rows_of(cut) == (rows[1:] if lost == 1 else rows[3:])  # the last row is measured again
    assert RunFolder(cut).outcome().rounds == 6


def test_a_damaged_configuration_is_taken_from_the_checkpoint(place, cut, caplog):
    path = cut / "config.toml"
    before = path.read_text()
    path.write_text(before.replace("lr = 0.1", "lr = 0.3"))
    assert path.read_text() != before
    assert state(cut, "config.toml") == "damaged"
    execute(make(6), cut, resume=True, figures=False)
    assert caplog.messages == [
        f"{path}: expected it as it was written, got a changed file (its checksum does not match); the checkpoint's copy "
        "is used"
    ]
    assert same(cut, place)
    assert read_configuration(RunFolder(cut)).algorithm["lr"] == 0.1


def test_a_damaged_summary_is_not_taken_for_a_finished_run(cut):
    assert finished(RunFolder(cut), configuration.complete(make(4))).rounds == 4
    path = cut / "summary.json"
    path.write_text(path.read_text().replace('"rounds": 4', '"rounds": 5'))
    assert finished(RunFolder(cut), configuration.complete(make(4))) is None


# -- what is no file --------------------------------------------------------------------------------------------------

LINKS = [
    ".lock",
    "config.toml",
    "metrics.jsonl",
    "traffic.jsonl",
    *CHECKPOINTS[:1],
    "checkpoint/clients.bin",
    "checkpoint",
]


@pytest.mark.parametrize("name", LINKS)
@pytest.mark.parametrize("fresh", [False, True])
def test_planted_links_are_not_followed(cut, tmp_path, name, fresh):
    """Neither in a folder with a run nor in an empty one."""
    other = tmp_path / "other"
    if name == "checkpoint":
        other.mkdir()
        (other / "clients.bin").write_bytes(b"of somebody else")
    else:
        other.write_bytes(b"of somebody else")
    if fresh:
        shutil.rmtree(cut)
        cut.mkdir()
    place = cut / name
    place.parent.mkdir(exist_ok=True)
    shutil.rmtree(place) if place.is_dir() else place.unlink(missing_ok=True)
    place.symlink_to(other)
    if fresh and name == "config.toml":
        execute(make(6), cut, resume=True, figures=False)  # puts its own in the place of the link
    else:
        with pytest.raises(UserError, match=r"got a link|got parts of a run"):
            execute(make(6), cut, resume=True, figures=False)
    kept = other / "clients.bin" if name == "checkpoint" else other
    assert kept.read_bytes() == b"of somebody else"


@pytest.mark.parametrize("name", [*LINKS[:-1], "summary.json", "label_counts.json"])
def test_a_fifo_blocks_nothing(place, cut, name):
    (cut / name).unlink()
    os.mkfifo(cut / name)
    checks.check(cut)
    if name in ("summary.json", "label_counts.json"):  # these are only written
        execute(make(6), cut, resume=True, figures=False)
        assert same(cut, place)
    else:
        with pytest.raises(UserError, match="expected a regular file"):
            execute(make(6), cut, resume=True, figures=False)


def test_the_folder_itself_may_be_a_link(place, cut, tmp_path):
    (tmp_path / "link").symlink_to(cut)
    execute(make(6), tmp_path / "link", resume=True, figures=False)
    assert same(cut, place)


# -- in the middle of a run -------------------------------------------------------------------------------------------


def once(round, act):
    def callback(info):
        if info.server.round == round:
            act()

    return callback


@pytest.mark.parametrize("name", ["metrics.jsonl", "traffic.jsonl"])
@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_rows_removed_in_the_middle_of_a_run_are_put_back(place, tmp_path, caplog, name, how):
    def act():
        (tmp_path / name).unlink()
        if how == "replaced":
            (tmp_path / name).write_text("by somebody else")

    execute(make(6), tmp_path, callbacks=[once(3, act)], figures=False)
    assert caplog.messages == [f"{tmp_path / name} was removed or replaced during the run: it is written again"]
    assert rows_of(tmp_path) == rows_of(place / "whole")
    assert not [f for f in checks.check(tmp_path) if f.bad]


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_client_state_removed_in_the_middle_of_a_run_is_not_lost(place, tmp_path, how):
    path = tmp_path / "checkpoint" / "clients.bin"

    def act():
        path.unlink()
        if how == "replaced":
            path.write_text("by somebody else")

    with pytest.raises(
        UserError, match=r"clients\.bin: expected the file that .* continues from the checkpoint of round 3"
    ):
        execute(make(6), tmp_path, callbacks=[once(3, act)], figures=False)
    execute(make(6), tmp_path, resume=True, figures=False)
    assert same(tmp_path, place)
    assert rows_of(tmp_path) == rows_of(place / "whole")


def test_the_folder_is_durable_before_a_row_is_written(place, tmp_path, monkeypatch):
    """Otherwise a power failure may lose the name of metrics.jsonl, and rows that a checkpoint counts."""
    synced = []
    original = os.fsync

    def fsync(handle):
        found = os.fstat(handle)
        if os.path.samestat(found, os.stat(tmp_path)):
            synced.append((tmp_path / "metrics.jsonl").exists())
        original(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    with JsonlFile.resumed(tmp_path / "metrics.jsonl", None):
        assert synced == [True]


# -- folders of earlier versions ---------------------------------------------------------------------------------------


def age(path):
    """Make a folder as the first versions wrote it: without checksums, and with holdings.json."""
    for name in ("metrics.jsonl", "traffic.jsonl", "summary.json", "label_counts.json"):
        text = (path / name).read_text()
        old = [line.rpartition(', "crc": ')[0] + "}" if '"crc"' in line else line for line in text.splitlines()]
        (path / name).write_text("\n".join(old) + "\n")
    (path / "label_counts.json").rename(path / "holdings.json")
    (path / "config.toml").write_text((path / "config.toml").read_text().rpartition("# crc: ")[0])
    save_file(read_tensors(path / "model.safetensors")[0], path / "model.safetensors")
    (path / CHECKPOINTS[1]).unlink()
    tensors, values = checkpoint.read(path / CHECKPOINTS[0])
    values["clients"] = {client: entry[:2] for client, entry in values["clients"].items()}
    for key in ("format", "slot_bytes", "config", "metrics_rows", "traffic_rows"):
        del values[key]
    for name in ("metrics", "traffic"):
        values[name] = (path / f"{name}.jsonl").stat().st_size
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    save_file(tensors, path / CHECKPOINTS[0], {"fedbcgd": json.dumps(values)})


def test_a_folder_of_an_earlier_version_can_be_resumed(place, cut, caplog):
    age(cut)
    found = checks.check(cut)
    assert {f.state for f in found} == {"unverified"}
    assert len(found) == 8
    assert RunFolder(cut).outcome().rounds == 4
    page.write([cut], cut / "report.html")
    execute(make(6), cut, resume=True, figures=False)
    assert caplog.messages == [
        f"{cut / CHECKPOINTS[0]} was written by an earlier version, without checksums, so it is not checked"
    ]
    assert same(cut, place)
    assert rows_of(cut) == rows_of(place / "whole")
    assert {f.state for f in checks.check(cut)} == {"whole"}


# -- the command ------------------------------------------------------------------------------------------------------


def test_check_says_what_is_whole(cut):
    done = CliRunner().invoke(app, ["check", str(cut.parent)])
    assert done.exit_code == 0
    lines = [line.split(maxsplit=1) for line in done.output.splitlines()[1:]]
    assert {file for file, _ in lines} == {*WITH_CHECKSUM, *CHECKPOINTS, "checkpoint/clients.bin"}
    assert {state for _, state in lines} == {"whole"}
    flip(cut / "model.safetensors")
    (cut / CHECKPOINTS[0]).unlink()
    done = CliRunner().invoke(app, ["check", str(cut)])
    assert done.exit_code == 1
    assert "model.safetensors               damaged: its checksum does not match" in done.output
    assert "checkpoint/server.safetensors   missing" in done.output


@pytest.mark.parametrize("name", ["nowhere", "empty"])
def test_check_of_what_is_no_run(tmp_path, name, capsys):
    (tmp_path / "empty").mkdir()
    done = CliRunner().invoke(app, ["check", str(tmp_path / name)])
    assert done.exit_code == 2
    assert str(tmp_path / name) in done.output


def test_check_of_data_sets(place):
    assert CliRunner().invoke(app, ["data", "check"]).output == "mine: whole\n"
    kept = store.path_of("mine").read_bytes()
    flip(store.path_of("mine"))
    try:
        done = CliRunner().invoke(app, ["data", "check", "mine"])
        assert done.exit_code == 1
        assert "damaged: its checksum does not match; delete it and add the data set again" in done.output
    finally:
        store.path_of("mine").write_bytes(kept)
    assert CliRunner().invoke(app, ["data", "check", "other"]).exit_code == 2


# -- anywhere ---------------------------------------------------------------------------------------------------------


def test_damage_anywhere_is_noticed_and_not_trained_on(place, tmp_path):
    seen = check_damages(place, tmp_path, 80, seed=1)
    assert all(seen.values()), seen


@pytest.mark.slow
def test_a_thousand_damages(place, tmp_path):
    seen = check_damages(place, tmp_path, 1000, seed=2)
    assert all(seen.values()), seen
