"""docs/operations.md, command by command."""

import configparser
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the extra flower is not installed")

from .test_deployment import ROOT, loopback

GUIDE = (ROOT / "docs" / "operations.md").read_text()
APP = Path(__file__).parent / "faulty_app"
BLOCKS = re.findall(r"^```(\w+)(?: ([\w-]+))?\n(.*?)^```$", GUIDE, re.M | re.S)


def test_every_block_of_commands_says_whether_it_is_run():
    assert {mark for kind, mark, _ in BLOCKS if kind == "sh"} == {"run", "background", "not-run"}
    assert {kind for kind, _, _ in BLOCKS} == {"sh", "ini"}
    inline = re.sub(r"^```.*?^```$", "", GUIDE, flags=re.M | re.S)
    assert not re.findall(r"^(?: {4,}|\$ )\w", inline, re.M)  # no command outside of the blocks


@pytest.mark.parametrize("unit", [text for kind, _, text in BLOCKS if kind == "ini"])
def test_units(unit, tmp_path):
    read = configparser.ConfigParser(strict=False)
    read.optionxform = str
    read.read_string(unit)
    program, *options = read["Service"]["ExecStart"].split()
    path = Path(sys.executable).parent / Path(program).name
    said = subprocess.run([path, "--help"], capture_output=True, text=True, timeout=120, env=environment(tmp_path))
    for option in (word for word in options if word.startswith("--")):
        assert option in said.stdout, option
    if shutil.which("systemd-analyze") is None:
        return
    file = tmp_path / "fedbcgd.service"
    file.write_text(unit.replace(program, str(path)).replace("User=fedbcgd\n", ""))
    done = subprocess.run(["systemd-analyze", "verify", file], capture_output=True, text=True, timeout=60)
    assert "fedbcgd.service" not in done.stderr, done.stderr


def environment(place):
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    source = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    own = {"FLWR_HOME": str(place / "home"), "PATH": path, "PYTHONPATH": source, "APP": str(APP)}
    return {**os.environ, **loopback.QUIET, **own}


@pytest.mark.slow
def test_the_commands_of_the_guide(tmp_path):
    """From certificates to a rollback, on this machine: another port, and this machine's address for names."""
    ports = {"8000": loopback.free_port(), **{f"900{k}": loopback.free_port() for k in range(3)}}
    running, said = [], ""
    try:
        for mark, text in [(mark, text) for kind, mark, text in BLOCKS if kind == "sh"]:
            text = text.replace("DNS:superlink.example.org", "DNS:localhost").replace("0.0.0.0", "127.0.0.1")
            text = re.sub(r"superlink\.example\.org(?=:)", "127.0.0.1", text)
            for written, port in ports.items():
                text = re.sub(rf"\b{written}\b", str(port), text)
            if mark == "run":
                said += run(text, tmp_path)
            elif mark == "background":
                running += [start(line, tmp_path) for line in text.splitlines()]
                wait_for_port(ports["8000"])
    finally:
        for process in reversed(running):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in running:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    assert "notAfter=" in said
    assert said.count("finished:completed") == 1
    assert said.count("damaged") == 0
    assert "will continue after round 1" in said
    assert "going on after round 1" in said
    out = tmp_path / "runs" / "first"
    assert json.loads((out / "summary.json").read_text())["rounds"] == 3
    assert json.loads((out / "summary.json").read_text())["ledger"]["lost"] == 0
    assert (tmp_path / "superlink-backup.db").stat().st_size > 0
    assert "fedbcgd" in (tmp_path / "page.html").read_text()


def run(text, place):
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text], cwd=place, env=environment(place), capture_output=True, text=True,
        timeout=600, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def start(line, place):
    with (place / "background.log").open("ab") as log:
        return subprocess.Popen(
            ["bash", "-c", f"exec env {line}"], cwd=place, env=environment(place), stdout=log, stderr=log,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip


def wait_for_port(port):
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.2)
    raise AssertionError("the SuperLink did not start")
