"""The page in a browser, where things are not as they should be: diverged runs, odd folders, emptied fields, places that
vanish, and a reader who is in the middle of something while the page refreshes."""

import csv
import io
import json
import shutil

import pytest

from fedbcgd.report import page
from tests.report.browser import ABSENT, CLIPBOARD
from tests.report.runfolders import comparison, make, rows, write_rows
from tests.report.serving import serving

pytestmark = pytest.mark.skipif(bool(ABSENT), reason=ABSENT)

ANNOUNCED = "return document.querySelector('#announcement').textContent"
TIME = "section[aria-labelledby=time-heading]"
OUTCOMES = "section[aria-labelledby=outcomes-heading]"
BACKSPACE, ENTER, LEFT = "\ue003", "\ue007", "\ue012"
REFRESHED = "return Number(document.documentElement.dataset.refreshed || 0)"


def show(browser, runs, out):
    page.write([runs], out / "r.html")
    browser.dark(False)
    browser.size(1280, 900)
    browser.go((out / "r.html").as_uri())


def cells(browser, section, row):
    """The cells of a row by their headings."""
    headings = browser.texts(f"{section} thead th")
    return dict(zip(headings, browser.texts(f"{section} tbody tr:nth-child({row}) > *"), strict=True))


def outcome(browser, row):
    return cells(browser, OUTCOMES, row)


def drawn_whole(browser):
    return [t for t in browser.texts("section") if "cannot be drawn" in t] + browser.errors() == []


@pytest.fixture
def diverged(browser, tmp_path):
    """FedAvg finished twice; one seed of FedBCGD and both of SCAFFOLD diverged, and looked well until they did."""
    runs = tmp_path / "runs"
    for seed in range(2):
        make(runs / "fedavg" / f"{seed}", "fedavg", seed)
        make(runs / "fedbcgd" / f"{seed}", "fedbcgd", seed, stopped="diverged" if seed else "rounds")
        make(runs / "scaffold" / f"{seed}", "scaffold", seed, stopped="diverged")
    show(browser, runs, tmp_path)
    return browser


def test_a_diverged_run_is_a_seed_that_came_to_nothing(diverged):
    diverged.run("state.target = 0.5; draw()")
    fedavg, fedbcgd, scaffold = (outcome(diverged, k) for k in (1, 2, 3))
    assert (fedavg["run"], fedavg["test accuracy"], fedavg["seeds"]) == ("fedavg", "0.50050 ± 0.00071", "2")
    # The last five of 50 rounds of seed 0 alone: the mean of 1 − 10/(10 + r), r = 46 … 50
    expected = sum(1 - 10 / (10 + r) for r in range(46, 51)) / 5
    assert (fedbcgd["test accuracy"], fedbcgd["rounds"], fedbcgd["seeds"]) == (f"{expected:.4g}", "50", "2")
    assert [row["diverged"] for row in (fedavg, fedbcgd, scaffold)] == ["0", "1", "2"]
    assert set(scaffold.values()) == {"scaffold", "–", "2"}
    to_target = [cells(diverged, TIME, k) for k in (1, 2, 3)]
    assert [(row["reached"], row["rounds"]) for row in to_target] == [("2", "10"), ("1", "10"), ("0", "∞")]
    bars = diverged.texts("ol.bars li")
    assert bars == [
        "fedavg320 ms10 d, 10 rounds",
        "fedbcgdreached by 1 of 2 seeds, 1 of 2 diverged",
        "scaffold2 of 2 diverged",
    ]
    assert diverged.texts(".chip .badge") == ["1 diverged", "2 diverged"]
    assert "A seed that diverged is in no mean" in diverged.text(OUTCOMES)
    assert drawn_whole(diverged)


def test_diverged_seeds_are_in_what_is_copied(diverged):
    diverged.run(CLIPBOARD + "; state.target = 0.5; draw()")
    diverged.click("#outcomes-table-csv")
    table = list(csv.DictReader(io.StringIO(diverged.wait("return copied[0]"))))
    assert [(row["seeds"], row["diverged"]) for row in table] == [("2", "0"), ("2", "1"), ("2", "2")]
    assert float(table[1]["test_accuracy"]) == pytest.approx(sum(1 - 10 / (10 + r) for r in range(46, 51)) / 5)
    assert table[2]["test_accuracy"] == table[2]["rounds"] == ""
    diverged.click("#target-table-csv")
    table = list(csv.DictReader(io.StringIO(diverged.wait("return copied[1]"))))
    assert [(row["reached"], row["rounds"]) for row in table] == [("2", "10"), ("1", "10"), ("0", "inf")]
    diverged.click("#outcomes-table-latex")
    latex = diverged.wait("return copied[2]").splitlines()
    assert latex[5].endswith(" & 2 & 1 \\\\")
    assert latex[6].startswith("scaffold & -- & ")


def test_the_default_target_and_the_thick_lines_are_of_runs_that_did_not_diverge(diverged):
    line = (
        "return [...document.querySelectorAll('#curves-chart g[data-group={}]')].map(g => g.classList.contains('thin'))"
    )
    assert diverged.run(line.format("fedbcgd")) == [True, False]
    assert diverged.run(line.format("scaffold")) == [True, True]
    assert diverged.run("return target()") == 0.5
    diverged.click("#chip-0")
    assert (
        diverged.run("return target()") == 0.827
    )  # the last five of 50 rounds; SCAFFOLD's runs had come to 0.5 and 0.501
    diverged.click("#chip-1")
    assert diverged.run("return [Number.isNaN(target()), document.querySelector('#target').value]") == [True, ""]
    diverged.run("document.querySelector('#curves-chart').focus()")
    diverged.type("#curves-chart", "\ue010")  # End: thin lines are read where there are no others
    diverged.wait("return document.querySelector('#announcement').textContent.includes('scaffold 0.501')")
    assert drawn_whole(diverged)


ODD = {
    "notes": "a string",
    "blocks": {"a": 1},
    "machine": ["Linux"],
    "versions": "3.11",
    "seconds": "long",
    "command": ["fedbcgd"],
    "stopped": 3,
    "finished": 7,
    "shared": "none",
}


def test_facts_of_the_wrong_kind_blank_nothing(browser, tmp_path):
    runs = comparison(tmp_path / "runs")
    odd = make(runs / "odd", "scaffold")
    summary = json.loads((odd / "summary.json").read_text()) | ODD
    summary["ledger"] |= {"block_bytes": "many", "lost": [1]}
    (odd / "summary.json").write_text(json.dumps(summary))
    (odd / "config.toml").write_text((odd / "config.toml").read_text() + "\n[extra]\nwhen = 2026-01-02\n")
    bare = make(runs / "bare", "fedavg", 7)
    write_rows(bare, [{"round": row["round"], "test_accuracy": row["test_accuracy"]} for row in rows("fedavg", 7)])
    show(browser, runs, tmp_path)
    browser.run("state.target = 0.4; draw(); document.querySelectorAll('details').forEach(d => d.open = true)")
    problems = browser.text("#problems")
    for fact in (*ODD, "ledger.block_bytes", "ledger.lost"):
        assert f"summary.json {fact} is not" in problems
    assert len(browser.texts("ol.bars li")) == 4
    assert (outcome(browser, 4)["run"], outcome(browser, 4)["test accuracy"]) == ("scaffold", "0.5")
    assert "2026-01-02" in browser.text("section[aria-labelledby=configuration-heading]")
    for axis in ("round", "gradient_evaluations", "time"):
        browser.click(f"label[for=axis-{axis}]")
    assert drawn_whole(browser)


def test_a_part_that_cannot_be_drawn_leaves_the_others(opened):
    opened.run("DATA.runs[0].ledger.block_bytes = {length: 1}; draw()")
    assert "This part cannot be drawn" in opened.text("section[aria-labelledby=traffic-heading]")
    assert len(opened.texts("section.card")) == 8
    assert outcome(opened, 1)["run"] == "fedavg"


@pytest.mark.parametrize(
    ("field", "typed", "key", "back"),
    [
        ("target", "", "target", "0.5"),
        ("target", "e", "target", "0.5"),
        ("uplink", "", "uplink", "1"),
        ("uplink", "0", "uplink", "1"),
        ("uplink", "-3", "uplink", "1"),
        ("latency", "e", "latency", "0"),
        ("minibatch", "-1", "minibatch", "0"),
    ],
)
def test_a_field_that_is_emptied_goes_back_to_what_it_began_with(opened, field, typed, key, back):
    opened.run("state.target = 0.31; state.uplink = 7; state.latency = 5; state.minibatch = 9; draw()")
    opened.click(f"#{field}")
    opened.type(f"#{field}", BACKSPACE * 8 + typed + ENTER)
    opened.wait(f"return document.querySelector('#{field}').value === '{back}'")
    assert opened.run(f"return state.{key} === DEFAULTS.{key}") is True
    opened.wait(f"return document.querySelector('#announcement').textContent.endsWith('back to {back}')")
    assert opened.run(f"return document.querySelector('#{field}').validity.badInput") is False


def test_a_number_that_is_typed_holds(opened):
    opened.click("#target")
    opened.type("#target", BACKSPACE * 8 + "0.25" + ENTER)
    opened.wait("return state.target === 0.25")
    assert opened.run("return [document.activeElement.id, document.querySelector('#target').value]") == [
        "target",
        "0.25",
    ]


def grow(browser, folder, count):
    """The run writes so many rows, and its line comes to have as many points."""
    write_rows(folder, rows("scaffold", 0, count))
    line = "document.querySelector('#curves-chart g[data-group=scaffold] .line')"
    browser.wait_for(count, f"return {line} ? {line}.getAttribute('d').split('L').length : 0")


def test_it_goes_on_refreshing_around_a_field_that_has_the_focus(browser, tmp_path):
    runs = comparison(tmp_path / "runs")
    folder = make(runs / "scaffold" / "seed-0", "scaffold", finished=False, count=2)
    with serving(runs) as server:
        browser.size(1280, 900)
        browser.go(server.address)
        browser.run("pause = 100")
        browser.wait_for(1, REFRESHED)
        browser.run("document.querySelector('#metric').focus()")
        grow(browser, folder, 3)
        assert browser.run("return document.activeElement.id") == "metric"
        browser.run("document.querySelector('#uplink-slider').focus()")
        grow(browser, folder, 4)
        assert browser.run("return document.activeElement.id") == "uplink-slider"
        browser.click("#latency")
        browser.type("#latency", BACKSPACE + "25" + ENTER + LEFT)
        grow(browser, folder, 5)
        assert browser.run("return [document.activeElement.id, state.latency]") == ["latency", 25]
        browser.run("window.held = document.querySelector('#latency')")
        # WebDriver puts the caret at the end before it types, so keys are sent to whatever has the focus
        browser.keys("7")
        grow(browser, folder, 6)
        assert browser.run("return [held.isConnected, held.value, state.latency]") == [True, "275", 25]
        browser.keys("1" + ENTER)
        browser.wait("return state.latency === 2715")
        browser.run("held.blur()")
        grow(browser, folder, 7)
        assert browser.run("return document.querySelector('#latency').value") == "2715"
    browser.leave()


def test_a_slider_is_dragged_while_everything_around_it_is_drawn_again(opened):
    box = "const b = document.querySelector('#target-slider').getBoundingClientRect();"
    left, top, width = opened.run(
        "document.querySelector('#target-slider').scrollIntoView({block: 'center'});"
        + box
        + "return [b.left, b.top + b.height / 2, b.width]"
    )
    opened.run("window.slider = document.querySelector('#target-slider')")
    opened.drag([(left + width * share, top) for share in (0.5, 0.6, 0.7, 0.8)])
    assert opened.run("return slider.isConnected") is True
    low, high = opened.run("return targetRange()")
    share = (0.8 * width - 8) / (width - 16)  # the thumb is 16 pixels wide
    assert opened.run("return state.target") == pytest.approx(low + share * (high - low), abs=0.02 * (high - low))


def test_a_place_that_was_taken_away_is_not_live(browser, tmp_path):
    runs = comparison(tmp_path / "runs")
    with serving(runs) as server:
        browser.go(server.address)
        browser.run("pause = 100")
        browser.wait_for("live", "return document.querySelector('#live-text').textContent")
        runs.rename(tmp_path / "elsewhere")
        browser.wait_for("not live", "return document.querySelector('#live-text').textContent")
        assert browser.run("return document.querySelector('#live').classList.contains('lost')") is True
        assert f"{runs}: expected the folder of a run" in browser.text("#problems")
        assert len(browser.texts("ol.bars li")) == 3  # what was known is still shown
        shutil.move(tmp_path / "elsewhere", runs)
        browser.wait_for("live", "return document.querySelector('#live-text').textContent")
        assert browser.text("#problems") == ""
    browser.leave()


def test_the_task_that_is_looked_at_stays_when_others_come(browser, tmp_path):
    runs = tmp_path / "runs"
    make(runs / "m", "fedavg", data="mine")
    with serving(runs) as server:
        browser.go(server.address)
        browser.run("pause = 100")
        browser.wait_for(1, REFRESHED)
        for seed in range(2):
            make(runs / f"a{seed}", "fedavg", seed, data="other")
        browser.wait("return DATA.tasks.length === 2 && DATA.groups.length === 2")
        assert browser.run("return DATA.tasks")[0] == "lenet5 on other"
        assert browser.text("h1") == "lenet5 on mine"
    browser.leave()


def test_what_uploads_nothing_is_not_ranked_by_the_time_of_uploads(browser, tmp_path):
    runs = comparison(tmp_path / "runs")
    central = make(runs / "central", "fedavg", 5, note="all in one place")
    nothing = dict.fromkeys(("upload_d", "upload_bytes", "upload_max_bytes", "upload_wait_bytes"), 0)
    write_rows(central, [row | nothing for row in rows("fedavg", 0)])
    summary = json.loads((central / "summary.json").read_text())
    summary["ledger"]["block_bytes"] = [0]
    (central / "summary.json").write_text(json.dumps(summary))
    show(browser, runs, tmp_path)
    browser.run("state.target = 0.5; draw()")
    bars = browser.texts("ol.bars li")
    assert len(bars) == 3
    assert not any(bar.startswith("fedavg, note all") for bar in bars)
    apart = browser.text("section[aria-labelledby=time-heading] .aside")
    assert "uploads nothing, so no uplink ranks it; the target after 10 rounds" in apart
    traffic = browser.texts("section[aria-labelledby=traffic-heading] .multiples .note")
    assert [note == "uploads nothing" for note in traffic].count(True) == 1
    row = next(
        row for row in (cells(browser, TIME, k) for k in range(1, 5)) if row["run"].startswith("fedavg, note all")
    )
    assert (row["upload, d"], row["rounds"], row["time, ms"]) == ("0", "10", "–")
    assert drawn_whole(browser)
