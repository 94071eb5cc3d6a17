"""Folders that hold what no run writes: one never takes the others with it."""

import io
import json
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from fedbcgd import UserError
from fedbcgd.files import add_checksum
from fedbcgd.report import page, validation
from fedbcgd.report.collect import RunData, read
from fedbcgd.report.groups import group
from fedbcgd.report.network import bias_table, hours_table
from fedbcgd.runs.retiming import hours
from tests.report.odd import FILES, copy
from tests.report.runfolders import add_to_run, collect, embedded, make, shown


def test_a_date_in_a_configuration_is_text(tmp_path):
    folder = make(tmp_path / "a")
    add_to_run(folder, since="2026-01-02", at="[07:30:00, {day = 2026-01-03T04:05:06}]")
    options = embedded(page.document(shown(tmp_path)))["runs"][0]["options"]
    assert options["run.since"] == "2026-01-02"
    assert options["run.at"] == ["07:30:00", {"day": "2026-01-03 04:05:06"}]


ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=30)
@given(
    st.dictionaries(st.sampled_from([*validation.SUMMARY, "final"]), ODD),
    st.dictionaries(st.sampled_from([*validation.LEDGER]), ODD),
    st.lists(st.dictionaries(st.sampled_from(["round", "test_accuracy", "upload_d"]), ODD), max_size=3),
)
def test_whatever_a_folder_holds_the_page_is_written(summary, ledger, lines):
    with tempfile.TemporaryDirectory() as name:
        folder = make(Path(name) / "odd", "fedavg", 1)
        make(Path(name) / "whole", "fedavg", 0)
        (folder / "summary.json").write_text(json.dumps({"ledger": ledger} | summary))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (folder / "traffic.jsonl").write_text('{"blocks": ["a", 3e300], "upload": [1, 2]}\n')
        data = embedded(page.document(shown(Path(name))))
    assert [run["seed"] for run in data["runs"]] == [1, 0]
    odd = data["runs"][0]
    assert all(isinstance(note, str) for note in odd["facts"].get("notes", []))
    assert all(isinstance(n, (int, float)) for n in [*odd["blocks"], *odd["ledger"].get("block_bytes", [])])
    assert isinstance(odd["facts"].get("machine", {}), dict)


def test_what_nobody_foresaw_in_one_folder_leaves_the_others(tmp_path, monkeypatch):
    make(tmp_path / "bad", "fedavg", 0)
    make(tmp_path / "good", "fedavg", 1)

    def broken(folder, problems):
        if folder.name == "bad":
            raise ZeroDivisionError("of all things")
        return read(folder, problems)

    monkeypatch.setattr("fedbcgd.report.collect.read", broken)
    runs, problems = collect(tmp_path)
    assert [run.seed for run in runs] == [1]
    assert [(p.where, p.what) for p in problems] == [
        (str(tmp_path / "bad"), "cannot be shown: ZeroDivisionError: of all things")
    ]


def test_what_is_no_file_is_told_and_neither_followed_nor_waited_for(tmp_path):
    (tmp_path / "secret").write_text('{"algorithm": "a linked secret", "notes": ["a linked secret"]}\n')
    for k, name in enumerate(FILES):
        folder = make(tmp_path / "runs" / f"fifo-{k}", "fedavg", 3 * k)
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
        folder = make(tmp_path / "runs" / f"link-{k}", "fedavg", 3 * k + 1)
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(tmp_path / "secret")
        folder = make(tmp_path / "runs" / f"folder-{k}", "fedavg", 3 * k + 2)
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()
    runs, problems = collect(tmp_path / "runs")
    html = page.document(page.content(runs, problems))
    assert len(runs) == 15
    assert "a linked secret" not in html
    not_regular = [p for p in problems if "expected a regular file, got a link, a folder or a device" in p.what]
    assert len(not_regular) == 12  # traffic.jsonl is for hours alone, of which none are shown


@pytest.mark.parametrize(
    "name", ["²", "\ud800", "a\ud800b²", "\x1b[31mred\x1b[0m", "\u202eevil", "\x9b31m", "x" * 10**5]
)
def test_any_name_of_an_algorithm_or_a_task_is_shown(tmp_path, name):
    (tmp_path / "a").mkdir()
    config = {"data": {"name": name}, "model": {"name": name}, "algorithm": {name: name}}
    (tmp_path / "a" / "summary.json").write_text(json.dumps({"algorithm": name, "config": config}))
    make(tmp_path / "b", "fedavg")
    page.write([tmp_path], tmp_path / "r.html")
    html = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert len(embedded(html)["runs"]) == 2
    assert len(html) < 200_000
    assert not set(html) & set("\x1b\x9b\u202e")
    everything = json.dumps(embedded(html))
    assert not any(escaped in everything for escaped in ("\\ud800", "\\u001b", "\\u009b", "\\u202e"))


@pytest.mark.parametrize("depth", [500, 100_000])
def test_tables_in_tables_are_shown_to_some_depth_or_told(tmp_path, depth):
    for k, (start, end) in enumerate((('{"a":', "}"), ("[", "]"))):
        (tmp_path / f"json-{k}").mkdir()
        nested = f'{{"algorithm": "fedavg", "seed": {k}, "config": {start * depth}1{end * depth}}}'
        (tmp_path / f"json-{k}" / "summary.json").write_text(nested)
        folder = make(tmp_path / f"toml-{k}", "fedavg", k)
        add_to_run(folder, odd="[" * depth + "]" * depth if k else 1, **({} if k else {".".join("a" * depth): 1}))
        (folder / "metrics.jsonl").write_text(f'{{"round": {start * depth}1{end * depth}}}\n')
    runs, problems = collect(tmp_path)
    assert len(page.document(page.content(runs, problems))) < 200_000
    for folder in tmp_path.iterdir():
        assert any(run.folder == str(folder) for run in runs) or any(str(folder) in p.where for p in problems)


def test_a_key_of_many_parts_costs_no_memory(tmp_path):
    """The parser keeps every beginning of a key: 30,000 parts would be 3.6 GB."""
    folder = make(tmp_path / "a")
    add_to_run(folder, **{".".join("a" * 30_000): 1})
    (run,), (problem,) = collect(tmp_path)
    assert problem.what == "cannot be read: a line has more than 2,000 dots"
    assert run.options["data.name"] == "embedded"  # from the summary


def test_sizes_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("fedbcgd.report.collect.MAX_LINES", 1000)
    big = make(tmp_path / "big", "fedavg", 0)
    (big / "metrics.jsonl").write_bytes((big / "metrics.jsonl").read_bytes() + b"\n" * 2000)
    (big / "config.toml").write_bytes(b"# much\n" * 100_000)
    (big / "label_counts.json").write_bytes(b'{"classes": [], "counts": [' + b"[0]," * 3_000_000 + b"[0]]}")
    bigger = make(tmp_path / "bigger", "fedavg", 1)
    (bigger / "summary.json").write_bytes(b'{"algorithm": "fedavg"' + b" " * 3_000_000 + b"}")
    wide = make(tmp_path / "wide", "fedavg", 2)
    (wide / "metrics.jsonl").write_text(json.dumps({"round": 1, **{f"c{k}": k for k in range(500)}}) + "\n")
    summary = json.loads((wide / "summary.json").read_text())
    (wide / "summary.json").write_text(json.dumps(summary | {"notes": ["x"] * 10_000, "blocks": [1] * 100_000}))
    runs, problems = collect(tmp_path)
    assert [(run.seed, len(run.rows)) for run in runs] == [(0, 10), (1, 10), (2, 0)]
    shortened = [(p.where.removeprefix(f"{tmp_path}/"), p.what.removeprefix("cannot be read: ")[:36]) for p in problems]
    assert shortened == [
        ("big/config.toml", "expected a file of at most 65,536 by"),
        ("big/metrics.jsonl", "has more than 1,000 lines or 268,435"),
        ("big/metrics.jsonl", "990 of 1000 lines are damaged and le"),
        ("big/label_counts.json", "expected a file of at most 8,388,608"),
        ("bigger/summary.json", "expected a file of at most 2,097,152"),
        ("wide/summary.json", "notes is not a list of texts, or too"),
        ("wide/summary.json", "blocks is not a list of numbers, or "),
        ("wide/metrics.jsonl", "1 of 1 lines are damaged and left ou"),
    ]


def test_a_map_of_too_many_clients_is_left_out(tmp_path):
    folder = make(tmp_path / "a")
    for clients, expected in ((300_000, True), (300_001, False)):
        (folder / "label_counts.json").write_text(json.dumps({"classes": ["x"], "counts": [[1]] * clients}))
        assert (len(shown(tmp_path)["label_counts"]) == 1) == expected


def test_a_page_holds_so_many_runs_and_no_more(tmp_path, monkeypatch):
    for seed in range(6):
        make(tmp_path / f"seed-{seed}", "fedavg", seed)
    monkeypatch.setattr("fedbcgd.report.collect.MAX_RUNS", 4)
    runs, problems = collect(tmp_path)
    assert (len(runs), problems[0].what[:28]) == (4, "2 folders are left out: the ")
    monkeypatch.setattr("fedbcgd.report.collect.MAX_PAGE_BYTES", int(2.5 * runs[0].size))
    runs, problems = collect(tmp_path)
    assert (len(runs), problems[0].what[:28]) == (3, "3 folders are left out: the ")
    for seed in range(6):
        (tmp_path / f"seed-{seed}" / "label_counts.json").write_text("{")
    monkeypatch.setattr("fedbcgd.report.collect.MAX_PROBLEMS", 2)
    assert [p.what for p in collect(tmp_path)[1]][2:] == ["2 more such messages"]


def test_many_variants_are_named_without_comparing_all_with_all(tmp_path):
    """Each of 400 runs has options of its own; every one of them was once compared with every other."""
    runs = [
        RunData(f"{k}", "fedavg", 0, "finished", [], {f"algorithm.own-{k}-{j}": j for j in range(150)})
        for k in range(400)
    ]
    grouped = group(runs)
    assert len({g.name for g in grouped.groups}) == 400


def test_numbers_that_are_none(tmp_path):
    folder = make(tmp_path / "a")
    lines = ['{"round": 1e999}', '{"round": -1}', '{"round": 1, "x": 1e999}', '{"round": 2, "x": 1' + "0" * 400 + "}"]
    lines += ['{"round": 3, "round": 4, "x": NaN}', '{"round": true}', '{"round": 5, "x": "6"}', "9" * 5000]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (run,), (problem,) = collect(tmp_path)
    assert [row["round"] for row in run.rows] == [1, 4]
    assert problem.what == "6 of 8 lines are damaged and left out"
    assert embedded(page.document(shown(tmp_path)))["runs"][0]["columns"]["x"] == [None, None]


def test_a_line_whose_checksum_is_wrong_is_left_out(tmp_path):
    folder = make(tmp_path / "a")
    good = add_checksum('{"round": 1, "test_accuracy": 0.5}')
    (folder / "metrics.jsonl").write_text(f"{good}\n{good.replace('0.5', '0.9')}\n")
    (run,), (problem,) = collect(tmp_path)
    assert run.rows == [{"round": 1, "test_accuracy": 0.5}]
    assert problem.what == "1 of 2 lines are damaged and left out"


def test_names_of_folders_are_shown_on_one_plain_line(tmp_path):
    for name in (b"a\xff\xfe", b"\x1b[31mred", "\u202eevil".encode(), b"two\nlines"):
        os.makedirs(os.fsencode(tmp_path) + b"/" + name)
        with open(os.fsencode(tmp_path) + b"/" + name + b"/summary.json", "w") as file:
            file.write('{"algorithm": "fedavg", "seed": []}')
    runs, problems = collect(tmp_path)
    assert len(runs) == len(problems) == 4
    assert all(text.isprintable() for text in [*(run.folder for run in runs), *(p.where for p in problems)])
    page.write([tmp_path], tmp_path / "r.html")


def test_secrets_of_older_folders_are_not_shown(tmp_path):
    folder = make(tmp_path / "a", password="hunter2")
    summary = json.loads((folder / "summary.json").read_text())
    summary["command"] = "fedbcgd run x.toml --set data.options.token=hunter2 and more --out b"
    (folder / "summary.json").write_text(json.dumps(summary))
    data = shown(tmp_path)
    assert "hunter2" not in json.dumps(data)
    assert data["runs"][0]["options"]["algorithm.password"] == "***"
    assert data["runs"][0]["facts"]["command"] == "fedbcgd run x.toml --set data.options.token=*** --out b"


def with_network(folder, real_run, *lines):
    copy(real_run, folder)
    text = (real_run / "config.toml").read_text().rpartition("# crc")[0]
    (folder / "config.toml").write_text("\n".join([text, "[network]", *lines, ""]))
    return folder


def test_a_file_of_measurements_that_a_folder_names_is_an_ordinary_one(real_run, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    folder = with_network(tmp_path / "a", real_run, f'csv = "{tmp_path}/fifo"', "dropout = 0.1")
    assert shown(folder)["runs"][0]["profiles"] == {}
    with pytest.raises(UserError, match=r"network.csv: expected a file of at most 67,108,864 bytes, got .*fifo"):
        hours(folder, "4g")


def test_links_of_more_clients_than_there_can_be_are_not_drawn(real_run, tmp_path):
    folder = with_network(tmp_path / "a", real_run)
    text = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(text.replace("clients = 20", "clients = 100000000000"))
    assert shown(folder)["runs"][0]["profiles"] == {}
    with pytest.raises(UserError, match=r"data.clients: expected at most 1,000,000, got 100000000000"):
        hours(folder, "4g")


@pytest.mark.parametrize(
    "change",
    [{"clients": [20, 1, 2, 3]}, {"clients": [-1, 1, 2, 3]}, {"upload": [1]}, {"waited": -1.0}, {"blocks": ["a"] * 4}],
)
def test_a_record_of_traffic_that_cannot_be_is_no_record(real_run, tmp_path, change):
    folder = with_network(tmp_path / "a", real_run)
    lines = (folder / "traffic.jsonl").read_text().splitlines()
    spoilt = json.loads(lines[1])
    del spoilt["crc"]
    lines[1] = json.dumps(spoilt | change)
    (folder / "traffic.jsonl").write_text("\n".join(lines) + "\n")
    assert shown(folder)["runs"][0]["profiles"] == {}
    with pytest.raises(UserError, match=r"traffic.jsonl, line 2: "):
        hours(folder, "4g")


def test_a_table_prints_names_as_they_are_and_nothing_else():
    console = Console(file=io.StringIO(), width=200, force_terminal=True, color_system=None)
    console.print(hours_table([{"network": "[/red]\x1b[31m[bold]a.csv\u202e", "hours": 1.0}]))
    console.print(bias_table([], "[/red]\x9b31mb.csv"))
    printed = console.file.getvalue()
    assert "[/red] [31m[bold]a.csv " in printed
    assert "[/red] 31mb.csv" in printed
    assert not set("\x1b\x9b\u202e") & set(printed)
