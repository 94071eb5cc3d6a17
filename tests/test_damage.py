"""Damaged files: noticed, and never trained on."""

import json
import random
import shutil

import numpy as np
import pytest

from fedbcgd import UserError, checks
from fedbcgd import config as configuration
from fedbcgd.data import store
from fedbcgd.report import page
from fedbcgd.runner import execute

SEALED = ("config.toml", "summary.json", "holdings.json", "metrics.jsonl", "traffic.jsonl", "model.safetensors")
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
    """A data set of 40 images, a run of six rounds over it, and one of four that can go on."""
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
    """A copy of the run that can go on."""
    shutil.copytree(place / "cut", tmp_path / "cut")
    return tmp_path / "cut"


def state(path, name):
    return next(found.state for found in checks.check(path) if found.file == name)


def same(path, place):
    return (path / "model.safetensors").read_bytes() == (place / "whole" / "model.safetensors").read_bytes()


def damage(path, draw):
    """Flip a bit, cut the file, append to it, or empty a stretch; whether it is another file now."""
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
    data = store.place("mine")
    kept = data.read_bytes()
    seen = dict.fromkeys(("went on", "fell back", "refused"), 0)
    for trial in range(count):
        path = tmp_path / "cut"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(place / "cut", path)
        file = draw.choice([*files, None])
        changed = damage(data if file is None else path / file, draw)
        found = checks.check(path)
        if changed and file is not None and str(file) in (*SEALED, *CHECKPOINTS):
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
            if file.name != "metrics.jsonl":
                assert rows_of(path) == rows_of(place / "whole"), (trial, file)
            assert not [f for f in checks.check(path) if f.bad]
            seen["fell back" if back else "went on"] += 1
        if file is None:
            data.write_bytes(kept)
    return seen


def test_damage_anywhere_is_noticed_and_not_trained_on(place, tmp_path):
    seen = check_damages(place, tmp_path, 40, seed=1)
    assert all(seen.values()), seen


@pytest.mark.slow
def test_a_thousand_damages(place, tmp_path):
    seen = check_damages(place, tmp_path, 1000, seed=2)
    assert all(seen.values()), seen
