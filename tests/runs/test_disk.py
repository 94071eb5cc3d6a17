"""Real disks that are full or cannot be written to. Mounting needs privileges; without them the tests are skipped."""

import gc
import subprocess

import pytest

from tests.command import fedbcgd

QUICK = """
[algorithm]
name = "scaffold"
local_steps = 1
batch_size = 4

[run]
rounds = 30
cohort = 3
workers = 0
evaluate_every = 100
checkpoint_every = 1
"""


@pytest.fixture
def small_disk(tmp_path):
    """A tmpfs of 40 MB: room for a checkpoint or two of LeNet-5 and the state of some clients, not of all."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(place)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {done.stderr.strip()}")
    (tmp_path / "run.toml").write_text(QUICK)
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def run(place, *args, out="disk/out", check=0):
    return fedbcgd("run", "run.toml", "--out", out, "--quiet", *args, cwd=place.parent, check=check)


def test_a_full_disk_is_one_message_and_the_last_checkpoint_is_whole(small_disk):
    done = run(small_disk, check=2)
    assert "No space left on device" in done.stderr
    assert "--resume continues from the checkpoint of round" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    # with room again the run goes on, to the model of a run that never met a full disk
    subprocess.run(["mount", "-o", "remount,size=400m", str(small_disk)], check=True)
    run(small_disk, "--resume")
    run(small_disk, out="whole")
    model = "model.safetensors"
    assert (small_disk / "out" / model).read_bytes() == (small_disk.parent / "whole" / model).read_bytes()


def test_a_read_only_folder_is_one_message(small_disk):
    run(small_disk, "--set", "run.rounds=1")
    kept = (small_disk / "out" / "checkpoint" / "server.safetensors").read_bytes()
    gc.collect()  # the client state of the run is mapped until then, and a file in use keeps the disk writable
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    done = run(small_disk, "--resume", check=2)
    assert "Read-only file system" in done.stderr or "cannot be written" in done.stderr
    assert (small_disk / "out" / "checkpoint" / "server.safetensors").read_bytes() == kept
