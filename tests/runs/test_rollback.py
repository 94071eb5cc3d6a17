"""`fedbcgd rollback`: back to the checkpoint before the last one."""

import json

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from fedbcgd import UserError
from fedbcgd.cli import app, rollback  # noqa: F401 (registers the command)
from fedbcgd.engine.run_folder import exclusive_lock
from fedbcgd.runs.config import check
from fedbcgd.runs.execute import execute
from fedbcgd.runs.rollback import checkpoints, roll_back


def config(rounds):
    return check(
        {
            "data": {"name": "quadratics", "clients": 6},
            "model": {"name": "point"},
            "algorithm": {"name": "fedbcgd+", "blocks": 2, "lr": 0.01},
            "run": {"rounds": rounds, "cohort": 4, "workers": 0, "checkpoint_every": 1},
        },
        "test",
    )


def says(*arguments):
    done = CliRunner().invoke(app, ["rollback", *map(str, arguments)])
    return done.exit_code, done.output


def test_a_run_goes_on_from_the_checkpoint_before_to_the_same_bits(tmp_path):
    """Control variates of the clients included."""
    execute(config(5), tmp_path / "straight", figures=False)
    out = tmp_path / "run"
    execute(config(4), out, figures=False)
    assert [kept.round for kept in checkpoints(out)] == [4, 3]
    aside = roll_back(out, 3)
    assert [path.name for path in aside] == ["model-rolled-back.safetensors", "server-rolled-back.safetensors"]
    assert not (out / "summary.json").exists()
    assert not (out / "model.safetensors").exists()
    execute(config(5), out, resume=True, figures=False)
    for name in ("metrics.jsonl", "traffic.jsonl"):
        rows = [json.loads(line) for line in (out / name).read_text().splitlines()]
        assert [row["round"] for row in rows] == [1, 2, 3, 4, 5]
    ours, theirs = (load_file(place / "model.safetensors") for place in (out, tmp_path / "straight"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_the_command(tmp_path):
    execute(config(3), tmp_path, figures=False)
    assert says(tmp_path) == (
        0,
        f"round 3: {tmp_path}/checkpoint/server.safetensors\nround 2: {tmp_path}/checkpoint/previous.safetensors\n",
    )
    assert says(tmp_path, 3) == (0, f"{tmp_path} is at round 3 already\n")
    assert (tmp_path / "model.safetensors").exists()
    with pytest.raises(UserError, match=r"expected one of the checkpoints in .* \(3, 2\), got 1"):
        roll_back(tmp_path, 1)
    with exclusive_lock(tmp_path), pytest.raises(UserError, match="expected a folder that no other process uses"):
        roll_back(tmp_path, 2)
    assert [kept.round for kept in checkpoints(tmp_path)] == [3, 2]
    code, output = says(tmp_path, 2)
    assert code == 0
    assert output.startswith(f"{tmp_path} will continue after round 2\nrenamed: ")
    assert says(tmp_path) == (0, f"round 2: {tmp_path}/checkpoint/previous.safetensors\n")
    assert says(tmp_path, 2)[1] == f"{tmp_path} is at round 2 already\n"


def test_a_damaged_checkpoint_is_told_and_can_be_left(tmp_path):
    execute(config(3), tmp_path, figures=False)
    path = tmp_path / "checkpoint" / "server.safetensors"
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    assert says(tmp_path)[1].startswith("damaged: ")
    assert says(tmp_path, 2)[0] == 0
    assert execute(config(3), tmp_path, resume=True, figures=False).rounds == 3


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="with a checkpoint, got one without"):
        checkpoints(tmp_path)
