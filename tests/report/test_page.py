"""The data behind the page: what is read, grouped and escaped; the server on loopback."""

import json
import math
import re
import shutil
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from fedbcgd import UserError
from fedbcgd.engine.run_folder import find_runs
from fedbcgd.report import page
from fedbcgd.report.collect import MAX_ROWS
from fedbcgd.report.serve import PageServer
from tests.report.runfolders import collect, comparison, embedded, make, rows, shown, write_rows
from tests.report.serving import serving

NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(1)>&amp;\u2028{{SCRIPT}}{{DATA}}"


def test_folders_are_found_wherever_they_are_and_once(tmp_path):
    place = comparison(tmp_path / "runs")
    (place / "fedavg" / "seed-0" / "checkpoint").mkdir()
    (place / "fedavg" / "seed-0" / "checkpoint" / "summary.json").write_text("{}")
    (place / ".hidden").mkdir()
    (place / ".hidden" / "metrics.jsonl").write_text("")
    found = find_runs([place, place / "fedavg", place / "fedavg" / "seed-1"])
    assert len(found) == 9
    assert found[0] == place / "fedavg" / "seed-0"


def test_a_folder_that_several_paths_lead_to_is_there_once_under_the_first(tmp_path, monkeypatch):
    comparison(tmp_path / "runs")
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    found = find_runs([Path("runs/fedavg"), tmp_path / "runs", Path("link"), Path("link/../runs")])
    assert len(found) == 9
    assert found[:3] == [Path("runs/fedavg") / f"seed-{k}" for k in range(3)]
    assert found[3] == tmp_path / "runs" / "fedbcgd" / "seed-0"
    assert len(find_runs([Path("link"), Path("runs")])) == 9


def test_a_place_that_is_not_there_is_a_mistake(tmp_path):
    with pytest.raises(UserError, match="expected the folder of a run"):
        find_runs([tmp_path / "absent"])


def test_a_partition_that_several_runs_share_is_there_once(tmp_path):
    make(tmp_path / "a", "fedavg", 0)
    make(tmp_path / "b", "fedbcgd", 0)
    make(tmp_path / "c", "fedavg", 1)
    data = shown(tmp_path)
    assert [run["label_counts"] for run in data["runs"]] == [0, 0, 1]
    assert len(data["label_counts"]) == 2
    assert data["label_counts"][0]["counts"][1] == [3, 0, 7, 4]  # (3 + 7·label) mod 10


def test_damaged_folders_are_told_and_shown_as_far_as_they_go(tmp_path):
    half = make(tmp_path / "half", "fedavg", 0, finished=False)
    whole = (half / "metrics.jsonl").read_bytes()
    lines = whole.splitlines(keepends=True)
    (half / "metrics.jsonl").write_bytes(b"".join(lines[:3]) + lines[3][:20])  # being written
    odd = make(tmp_path / "odd", "fedavg", 1)
    (odd / "summary.json").write_text('{"algorithm": "fed')
    (odd / "metrics.jsonl").write_bytes(lines[0] + b"garbage\n" + b'{"round": "x"}\n' + b"[1]\n" + lines[1])
    (odd / "label_counts.json").write_text('{"classes": ["a"], "counts": [[1, 2], [3]]}')
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "metrics.jsonl").write_bytes(b"")
    (tmp_path / "list").mkdir()
    (tmp_path / "list" / "summary.json").write_text("[]")
    runs, problems = collect(tmp_path)
    assert [(run.seed, len(run.rows), run.status) for run in runs] == [(0, 3, "running"), (1, 2, "running")]
    shortened = {(p.where.removeprefix(f"{tmp_path}/"), p.what.partition(":")[0]) for p in problems}
    assert shortened == {
        ("odd/summary.json", "cannot be read"),
        ("odd/metrics.jsonl", "3 of 5 lines are damaged and left out"),
        ("odd/label_counts.json", "is not what a run writes"),
        ("empty", "no file names the algorithm"),
        ("list/summary.json", "cannot be read"),
        ("list", "no file names the algorithm"),
    }
    assert len(shown(tmp_path)["problems"]) == 6


def test_label_counts_under_their_earlier_name_are_read(tmp_path):
    folder = make(tmp_path / "run")
    expected = shown(tmp_path)["label_counts"]
    (folder / "label_counts.json").rename(folder / "holdings.json")
    assert shown(tmp_path)["label_counts"] == expected != []


def test_an_old_folder_without_the_newer_columns_is_shown(tmp_path):
    old = make(tmp_path / "old")
    write_rows(old, [{k: v for k, v in row.items() if k != "upload_wait_bytes"} for row in rows("fedavg", 0)])
    (old / "label_counts.json").unlink()
    run = shown(tmp_path)["runs"][0]
    assert "upload_wait_bytes" not in run["columns"]
    assert run["label_counts"] is None
    assert run["columns"]["upload_d"] == [float(k) for k in range(1, 11)]


def test_a_federation_on_flower_is_a_run_too(tmp_path):
    folder = make(tmp_path / "flower", "fedbcgd", 3)
    (folder / "config.toml").unlink()
    summary = json.loads((folder / "summary.json").read_text())
    summary |= {"backend": "flower", "options": {"blocks": 5}, "precision": "bf16"}
    del summary["config"]
    (folder / "summary.json").write_text(json.dumps(summary))
    (run,), problems = collect(tmp_path)
    assert (run.algorithm, run.seed, run.options) == (
        "fedbcgd",
        3,
        {"algorithm.blocks": 5, "algorithm.name": "fedbcgd", "run.precision": "bf16"},
    )
    assert problems == []


def test_a_run_of_before_there_were_precisions_stands_with_those_in_fp32(tmp_path):
    old, new = (make(tmp_path / name, "fedbcgd", seed) for seed, name in enumerate(("old", "new")))
    assert "precision" not in (old / "config.toml").read_text()
    text = (new / "config.toml").read_text()
    (new / "config.toml").write_text(text.replace("[run]\n", '[run]\nprecision = "fp32"\n'))
    assert "precision" in (new / "config.toml").read_text()
    (only,) = shown(tmp_path)["groups"]
    assert len(only["runs"]) == 2


def test_what_is_no_number_and_very_long_runs(tmp_path):
    folder = make(tmp_path / "long", "fedbcgd", count=MAX_ROWS + 500)
    metrics = rows("fedbcgd", 0, MAX_ROWS + 500)
    metrics[0] |= {"train_loss": None}
    write_rows(folder, metrics)
    (run,), problems = collect(tmp_path)
    assert problems == []
    assert len(run.rows) == 1251  # every second, and the last
    assert run.rows[-1]["round"] == 2500
    assert math.isnan(run.rows[0]["train_loss"])
    assert embedded(page.document(shown(tmp_path)))["runs"][0]["columns"]["train_loss"][0] is None


def test_nothing_in_a_folder_becomes_markup(tmp_path):
    folder = make(tmp_path / "a<b>&c", "fedavg", data=NASTY, notes=(NASTY,), trick=NASTY)
    (folder / "label_counts.json").write_text(json.dumps({"classes": [NASTY], "counts": [[3]]}))
    (folder.parent / "<svg onload=alert(1)>").mkdir()
    (folder.parent / "<svg onload=alert(1)>" / "summary.json").write_text("{")
    data = shown(tmp_path)
    html = page.document(data)
    clean = page.document(shown(make(tmp_path / "other" / "x").parent))
    tags = re.compile(r"<[a-z!/][^>]*>", re.IGNORECASE)
    differ = [t for t in tags.findall(html) if t not in tags.findall(clean)]
    assert differ == []  # the same elements, whatever the folders say
    assert embedded(html)["runs"][0]["options"]["data.name"] == NASTY.replace("\u2028", " ")
    assert embedded(html)["problems"][0]["where"].endswith("<svg onload=alert(1)>/summary.json")
    title = re.search(r"<title>(.*?)</title>", html, re.DOTALL)[1]
    assert "<" not in title
    assert "{{SCRIPT}}" in title  # a placeholder in the data is not filled


def test_the_page_needs_nothing_from_elsewhere(tmp_path):
    html = page.document(shown(comparison(tmp_path)))
    outside = re.findall(r"""(?:src|href)=["'](?!#)[^"']*|url\((?!#)[^)]*|@import|https?://[^\s"'`)]*""", html)
    assert outside == ["http://www.w3.org/2000/svg"]  # the name of a language, not an address that is fetched
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)[1]
    assert "default-src &#x27;none&#x27;" in policy
    assert "unsafe" not in policy
    assert len(html) < 150_000


def test_written_to_a_file(tmp_path):
    place = comparison(tmp_path / "runs")
    count, problems = page.write([place], tmp_path / "r.html")
    assert (count, problems) == (9, [])
    assert embedded((tmp_path / "r.html").read_text())["watch"] is False


@pytest.fixture
def server(tmp_path):
    with serving(comparison(tmp_path / "runs")) as server:
        yield server


def ask(address, **headers):
    with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=20) as answer:
        return answer.status, answer.headers, answer.read().decode()


def test_the_server_tells_what_is_new(server, tmp_path):
    assert server.address.startswith("http://127.0.0.1:")
    _, headers, html = ask(server.address)
    assert embedded(html)["watch"] is True
    assert headers["Cache-Control"] == "no-store"
    _, headers, body = ask(server.address + "data.json")
    assert len(json.loads(body)["runs"]) == 9
    tag = headers["ETag"]
    with pytest.raises(urllib.error.HTTPError) as same:
        ask(server.address + "data.json", **{"If-None-Match": tag})
    assert same.value.code == 304
    make(tmp_path / "runs" / "scaffold" / "seed-0", "scaffold", finished=False, count=2)
    _, headers, body = ask(server.address + "data.json", **{"If-None-Match": tag})
    assert headers["ETag"] != tag
    assert [run["status"] for run in json.loads(body)["runs"]].count("running") == 1


@pytest.mark.parametrize("path", ["secret", "../etc/passwd", "runs/fedavg/seed-0/config.toml", "data.json/x"])
def test_the_server_has_two_answers(server, path):
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(server.address + path)
    assert refused.value.code == 404


def test_the_server_says_what_is_wrong(server, tmp_path, monkeypatch):
    (tmp_path / "runs").rename(tmp_path / "elsewhere")
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(server.address + "data.json")
    assert (refused.value.code, refused.value.read().decode()) == (
        503,
        f"{tmp_path / 'runs'}: expected the folder of a run, or one that holds several, got no folder\n",
    )
    monkeypatch.setattr(server, "content", lambda: 1 / 0)
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(server.address + "data.json")
    assert refused.value.code == 500
    assert refused.value.read().decode() == "the page cannot be made: ZeroDivisionError: division by zero\n"


def test_a_name_that_was_pointed_here_is_refused(server):
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(server.address + "data.json", Host="evil.example")
    assert refused.value.code == 403


def test_a_port_that_is_taken(server):
    with pytest.raises(UserError, match=r"--port: expected .*, got \d+: Address already in use; choose another"):
        PageServer([], server.server_address[1])


def test_hours_under_each_profile_are_those_of_the_clock(real_run):
    from fedbcgd.network.profiles import PROFILES
    from fedbcgd.runs import retiming as afterwards

    run = shown(real_run)["runs"][0]
    assert list(run["profiles"]) == list(PROFILES)
    for profile, hours in run["profiles"].items():
        assert hours == pytest.approx(afterwards.hours(real_run, profile), rel=1e-6)
        assert 0 < hours[0] < hours[1]


def test_without_a_whole_record_of_traffic_there_are_no_profiles(real_run, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(real_run, copy)
    traffic = copy / "traffic.jsonl"
    traffic.write_bytes(b"".join(traffic.read_bytes().splitlines(keepends=True)[:-1]))
    assert shown(copy)["runs"][0]["profiles"] == {}
    traffic.write_text("nonsense\n")
    assert shown(copy)["runs"][0]["profiles"] == {}
    traffic.unlink()
    assert shown(copy)["runs"][0]["profiles"] == {}


def test_traffic_per_block_is_there_while_a_run_goes_on(real_run, tmp_path):
    whole = shown(real_run)["runs"][0]["ledger"]["block_bytes"]
    assert len(whole) == 2
    copy = tmp_path / "run"
    shutil.copytree(real_run, copy)
    (copy / "summary.json").unlink()
    assert shown(copy)["runs"][0]["ledger"] == {"block_bytes": whole}  # of four rounds, all alike
    traffic = copy / "traffic.jsonl"
    lines = traffic.read_bytes().splitlines(keepends=True)
    traffic.write_bytes(b"".join(lines[:2]) + lines[2][:20])  # it is being written
    assert shown(copy)["runs"][0]["ledger"] == {"block_bytes": [sent // 2 for sent in whole]}
    traffic.write_text("nonsense\n")
    assert shown(copy)["runs"][0]["ledger"] == {"block_bytes": []}
