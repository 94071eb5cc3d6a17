"""Folders that hold what no run writes: one never takes the others with it."""

import json
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from runfolders import add_to_run, collect, embedded, make, shown

from fedbcgd.report import facts, page
from fedbcgd.report.collect import read


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
    st.dictionaries(st.sampled_from([*facts.SUMMARY, "final"]), ODD),
    st.dictionaries(st.sampled_from([*facts.LEDGER]), ODD),
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
