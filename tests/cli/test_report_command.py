"""`fedbcgd report`; as a real process where it serves the page."""

import signal
import subprocess
import urllib.request

from tests.command import COMMAND, fedbcgd

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
"""


def test_a_page_of_real_runs(tmp_path):
    (tmp_path / "run.toml").write_text(QUICK)
    fedbcgd("run", "run.toml", "--out", "runs/first", "--quiet", cwd=tmp_path)
    (tmp_path / "runs" / "second").mkdir()
    (tmp_path / "runs" / "second" / "summary.json").write_text("{")
    done = fedbcgd("report", "runs", cwd=tmp_path)
    assert done.stdout == "report.html written: 1 run\n"
    assert "runs/second/summary.json: cannot be read" in done.stderr
    html = (tmp_path / "report.html").read_text()
    for words in ("upload_wait_bytes", "block_bytes", '"classes": ["T-shirt', '"algorithm.momentum"'):
        assert words in html
    missing = fedbcgd("report", "nowhere", cwd=tmp_path, check=2)
    assert missing.stderr.startswith("fedbcgd: nowhere: expected the folder of a run")

    (tmp_path / "empty").mkdir()
    empty = fedbcgd("report", "empty", "--out", "empty.html", cwd=tmp_path, check=2)
    assert empty.stderr.startswith("fedbcgd: empty: expected runs, got none")
    assert not (tmp_path / "empty.html").exists()

    watched = subprocess.Popen(
        [*COMMAND, "report", "runs", "--watch"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        address = watched.stdout.readline().split()[0]
        assert address.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(address, timeout=60) as answer:
            assert "logistic on embedded" in answer.read().decode()
        watched.send_signal(signal.SIGINT)
        assert watched.wait(60) == 0
    finally:
        watched.kill()
        watched.communicate()


def test_no_name_or_message_reaches_the_terminal_with_control_characters(tmp_path):
    folder = tmp_path / "a\x1b[31mred\u202e"
    folder.mkdir()
    (folder / "summary.json").write_text('{"algorithm": "fedavg", "command": 1}')
    (folder / "metrics.jsonl").write_text('{"round": "\x1b"}\n')
    done = fedbcgd("report", str(folder), "--out", str(folder / "r.html"), cwd=tmp_path)
    assert "a [31mred /r.html written: 1 run" in done.stdout
    asked = fedbcgd("hours", str(folder), cwd=tmp_path, check=2)
    assert asked.stderr.count("\n") == 1
    assert "a [31mred /metrics.jsonl is damaged" in asked.stderr
    assert not set(done.stdout + done.stderr + asked.stdout + asked.stderr) & set("\x1b\u202e")
