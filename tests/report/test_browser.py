"""The page in a browser: what a person does with it, in headless Chromium."""

import csv
import io
import json

import pytest

from fedbcgd.report import page
from fedbcgd.report.collect import Collector
from tests.report.browser import ABSENT, CLIPBOARD
from tests.report.runfolders import comparison, make, rows, write_rows
from tests.report.serving import serving

pytestmark = pytest.mark.skipif(bool(ABSENT), reason=ABSENT)

NAMES = "return [...document.querySelectorAll('#curves-chart g[data-group]')].map(g => g.dataset.group)"
ANNOUNCED = "return document.querySelector('#announcement').textContent"


def names(browser):
    return browser.run(NAMES)


def axis_words(browser):
    return browser.text("#curves-chart .axis")


def path_of(browser, name):
    line = f"#curves-chart g[data-group='{name}'] .line"
    return browser.run("return document.querySelector(arguments[0]).getAttribute('d')", line)


def test_it_opens_from_a_file_with_every_section(opened):
    assert opened.text("h1") == "lenet5 on embedded"
    assert opened.text("#lead") == "9 runs: 9 finished."
    assert [t for t in opened.texts("main h2") if "show and hide" not in t] == [
        "Test accuracy",
        "Time to target",
        "Outcomes",
        "Traffic per block",
        "Labels of the clients",
        "Configuration",
    ]
    assert names(opened) == ["fedavg", "fedbcgd", "fedpaq"]
    assert len(opened.texts("#curves-chart .band")) == 3


def test_the_axis_is_switched(opened):
    assert axis_words(opened) == "upload of a client, in d"
    before = path_of(opened, "fedavg")
    seen = [axis_words(opened)]
    for axis in ("round", "gradient_evaluations", "time"):
        opened.click(f"label[for=axis-{axis}]")
        seen.append(axis_words(opened))
    assert seen[1:] == ["rounds", "gradient evaluations (minibatches)", "milliseconds on the chosen uplink"]
    opened.click("label[for=axis-round]")
    assert path_of(opened, "fedavg") != before  # ten rounds of fifty
    opened.run("document.querySelector('#axis-round').focus()")
    opened.type("#axis-round", "\ue014")  # the right arrow
    assert axis_words(opened) == "gradient evaluations (minibatches)"


def test_a_run_is_hidden_and_shown(opened):
    opened.click("#chip-0")
    assert names(opened) == ["fedbcgd", "fedpaq"]
    assert opened.run("return document.activeElement.id") == "chip-0"  # the focus is where it was
    assert opened.run("return document.querySelector('#chip-0').getAttribute('aria-pressed')") == "false"
    opened.wait_for("fedavg hidden", ANNOUNCED)
    assert not any("fedavg" in t for t in opened.texts("section[aria-labelledby=outcomes-heading] tbody tr"))
    opened.click("#hide-all")
    assert "no run that is shown" in opened.text("section[aria-labelledby=curves-heading]")
    opened.click("#show-all")
    assert names(opened) == ["fedavg", "fedbcgd", "fedpaq"]


def test_one_seed_is_left_out_of_the_mean(opened):
    cell = "section[aria-labelledby=outcomes-heading] tbody tr:first-child td:{}-of-type"
    assert opened.text(cell.format("last")) == "3"
    opened.run("document.querySelectorAll('details').forEach(d => d.open = true)")
    opened.click("#run-0-2")
    assert opened.text(cell.format("last")) == "2"
    # The last of ten rounds is the last tenth: 1 − 1/2 + 0.001·seed, of seeds 0 and 1
    assert opened.text(cell.format("first")) == "0.50050 ± 0.00071"


def test_tables_are_copied(opened):
    opened.run(CLIPBOARD)
    opened.click("#copy-csv")
    text = opened.wait("return copied[0]")
    table = list(csv.DictReader(io.StringIO(text)))
    assert [row["run"] for row in table] == ["fedavg", "fedbcgd", "fedpaq"]
    assert [float(row["upload_d"]) for row in table] == [10, 10, 10]
    assert float(table[0]["test_accuracy_last"]) == pytest.approx(0.501)
    assert float(table[0]["test_accuracy_last_sd"]) == pytest.approx(0.001)
    assert float(table[1]["gradient_evaluations"]) == 5000
    opened.click("#copy-latex")
    latex = opened.wait("return copied[1]").splitlines()
    assert latex[0] == "\\begin{tabular}{lrrrrrrrrr}"
    assert latex[-1] == "\\end{tabular}"
    assert latex[4].startswith("fedavg & 0.5010 $\\pm$ 0.0010 & 10 & 10 & ")
    assert all(line.endswith("\\\\") for line in latex[4:7])
    opened.wait_for("LaTeX copied", ANNOUNCED)


def test_text_that_tables_must_not_take_for_something_else(opened):
    assert (
        opened.run("return latex('50 % of a_b & {c} ± \\\\d')")
        == "50 \\% of a\\_b \\& \\{c\\} $\\pm$ \\textbackslash{}d"
    )
    assert opened.run("return quoted('a, \"b\"')") == '"a, ""b"""'
    assert opened.run("return notFormula('=1+1')") == "'=1+1"


def test_time_to_a_target(opened):
    """FedBCGD is at 0.5 + when 1 − 1/(1 + r/10) + 0.001·seed ≥ 0.5: r = 10, of 800 bytes each: 8,000 B = 64 ms at 1 Mbit/s.
    FedAvg needs r = 10 rounds of 4,000 bytes: 320 ms."""
    opened.run("state.target = 0.5; draw()")
    bars = opened.texts("ol.bars li")
    assert bars[0].startswith("fedbcgd64 ms2 d, 10 rounds")
    assert bars[2].startswith("fedavg320 ms10 d, 10 rounds")
    opened.run("const f = document.querySelector('#uplink'); f.value = '0.1'; f.dispatchEvent(new Event('change'))")
    assert opened.texts("ol.bars li")[0].startswith("fedbcgd640 ms")
    opened.run("state.latency = 2; state.minibatch = 10; draw()")
    # 10 rounds · 2 s, and 10 minibatches a round and client: 100 · 10 ms
    assert opened.texts("ol.bars li")[0].startswith("fedbcgd21.6 s")
    assert "2 s a round" in opened.text("section[aria-labelledby=time-heading] > .note")
    opened.run("state.target = 0.999; draw()")
    assert all("not reached" in bar for bar in opened.texts("ol.bars li"))


def test_numbers_and_their_deviations_have_one_unit_and_the_same_decimals(opened):
    assert opened.run("return [plusMinus(0.45, 0.018), plusMinus(12.3456, 0), plusMinus(1234.5, 67.8)]") == [
        "0.450 ± 0.018",
        "12.35",
        "1,235 ± 68",
    ]
    assert opened.run("return [duration([1.2, 2.5]), duration([0.064]), duration([119]), duration([7200])]") == [
        "1.85 ± 0.92 s",
        "64 ms",
        "119 s",
        "2 h",
    ]


def test_the_target_is_what_every_run_holds_at_its_end(opened):
    """FedAvg ends at 0.5, seed 0, and the first evaluation that meets it counts."""
    assert opened.run("return target()") == 0.5
    opened.run("DATA.runs[0].columns.test_accuracy = DATA.runs[0].columns.test_accuracy.map(() => 0.1); draw()")
    assert opened.run("return target()") == 0.501  # one that stayed at chance does not set it
    note = opened.text("section[aria-labelledby=time-heading] > .note")
    assert "the value that every finished run that is shown ends with" in note
    assert "The first evaluation that meets the target counts" in note


def test_what_is_not_divided_says_how_much_is_sent(opened):
    notes = opened.texts("section[aria-labelledby=traffic-heading] .multiples .note")
    assert notes[0].startswith("not divided: every client uploads the whole model;")
    assert notes[1].startswith("5 blocks, ")
    assert notes[2].startswith("not divided: a client uploads 0.25 d a round at most;")


def test_the_names_stay_in_sight_on_a_phone(opened):
    """Of the table of outcomes the name, the accuracy and the upload to the target are seen at once; names stay there."""
    opened.size(390, 800)
    opened.run("draw()")
    table = "document.querySelector('section[aria-labelledby=outcomes-heading] .scroll')"
    cells = f"{table}.querySelectorAll('tbody tr:first-child > *')"
    assert opened.run(f"return {cells}[2].getBoundingClientRect().right") <= 390
    left = f"return {table}.querySelector('tbody th').getBoundingClientRect().left"
    before = opened.run(left)
    opened.run(f"{table}.scrollLeft = 300")
    assert opened.run(left) == before


def test_the_chart_is_read_with_the_keyboard(opened):
    opened.run("document.querySelector('#curves-chart').focus()")
    opened.type("#curves-chart", "\ue010")  # End
    announced = opened.wait(
        "const text = document.querySelector('#announcement').textContent; return text.startsWith('upload') && text"
    )
    assert announced.startswith("upload of a client, in d 10: fedbcgd 0.8343")
    assert "fedavg 0.5010 ± 0.0010" in announced
    assert opened.run("return document.querySelector('.tip').hidden") is False
    opened.type("#curves-chart", "\ue00c")
    assert opened.run("return document.querySelector('.tip').hidden") is True


def test_everything_has_a_name(opened):
    nameless = """
      const named = e => (e.getAttribute('aria-label') || e.textContent.trim() || (e.labels && e.labels.length)
        || (e.getAttribute('aria-labelledby') && document.getElementById(e.getAttribute('aria-labelledby'))));
      const all = [...document.querySelectorAll('button, input, select, a, section, [tabindex="0"]')];
      return all.filter(e => !named(e)).map(e => e.outerHTML)
    """
    assert opened.run(nameless) == []
    ids = opened.run("return [...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(set(ids)) == len(ids)
    for landmark in ("main", "header", "footer", "h1"):
        assert len(opened.texts(landmark)) == 1
    assert opened.run("return [...document.querySelectorAll('table')].filter(t => !t.caption).length") == 0


CONTRAST = """
  const parse = c => c.match(/[\\d.]+/g).map(Number);
  const part = v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  const ground = e => {
    for (; e; e = e.parentElement) {
      const c = parse(getComputedStyle(e).backgroundColor);
      if (c.length < 4 || c[3] > 0) return c;
    }
    return [255, 255, 255];
  };
  const texts = 'p, h1, h2, button, label, legend, span, th, td, summary, strong, dt, dd, li, figcaption';
  const low = [];
  for (const e of document.querySelectorAll(texts)) {
    if (!e.textContent.trim() || e.closest('.unseen') || e.offsetParent === null) continue;
    const [a, b] = [light(parse(getComputedStyle(e).color)), light(ground(e))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) low.push(e.textContent.trim().slice(0, 40) + ' ' + getComputedStyle(e).color);
  }
  return low
"""


@pytest.mark.parametrize("dark", [False, True])
def test_words_can_be_read(opened, dark):
    opened.dark(dark)
    opened.wait(f"return document.documentElement.dataset.theme === '{'dark' if dark else 'light'}'")
    assert opened.run(CONTRAST) == []


def test_the_theme_is_switched(opened):
    ground = "return getComputedStyle(document.body).backgroundColor"
    bright = opened.run(ground)
    opened.click("#theme")  # light
    opened.click("#theme")  # dark
    assert opened.text("#theme") == "Theme: dark"
    assert opened.run(ground) != bright
    opened.click("#theme")
    assert opened.run(ground) == bright


@pytest.mark.parametrize("width", [320, 360, 768])
def test_nothing_hangs_over_on_a_phone(opened, width):
    opened.size(width, 740)
    opened.run("draw(); document.querySelectorAll('details').forEach(d => d.open = true)")
    assert opened.run("return document.documentElement.scrollWidth") <= width
    assert names(opened) == ["fedavg", "fedbcgd", "fedpaq"]


def test_old_and_damaged_folders(browser, tmp_path):
    old = make(tmp_path / "old")
    write_rows(old, [{k: v for k, v in row.items() if k != "upload_wait_bytes"} for row in rows("fedavg", 0)])
    (old / "label_counts.json").unlink()
    (old / "summary.json").write_text("{")
    nasty = "<img src=x onerror='window.hit = 1'>"
    make(tmp_path / "nasty", "fedbcgd", data=nasty, note=nasty)
    page.write([tmp_path], tmp_path / "r.html")
    browser.go((tmp_path / "r.html").as_uri())
    assert "summary.json cannot be read" in browser.text("#problems")
    browser.run("state.task = 1; draw()")
    assert "For some older runs" in browser.text("section[aria-labelledby=time-heading] > .note")
    assert "Not known: the folders" in browser.text("section[aria-labelledby=labels-heading]")
    browser.run("state.task = 0; draw(); document.querySelectorAll('details').forEach(d => d.open = true)")
    assert nasty in browser.text("h1")
    assert browser.run("return [window.hit || 0, document.images.length]") == [0, 0]
    assert browser.errors() == []


def test_hours_on_a_networks_clock_are_an_axis_where_a_run_has_them(browser, tmp_path):
    folder = make(tmp_path / "run")
    write_rows(folder, [row | {"hours": 0.25 * row["round"]} for row in rows("fedavg", 0)])
    page.write([tmp_path], tmp_path / "r.html")
    browser.go((tmp_path / "r.html").as_uri())
    browser.click("label[for=axis-hours]")
    assert axis_words(browser) == "hours on the run's own network"
    browser.run("document.querySelector('#curves-chart').focus()")
    browser.type("#curves-chart", "\ue010")
    announced = (
        "const t = document.querySelector('#announcement').textContent; return t.endsWith('2.5: fedavg 0.5') && t"
    )
    assert browser.wait(announced)


def test_configurations_that_differ(opened):
    table = "section[aria-labelledby=configuration-heading] table"
    assert opened.texts(f"{table} tbody th") == ["algorithm.name", "algorithm.blocks"]  # and not run.seed
    assert opened.texts(f"{table} tbody tr:last-child td") == ["unset", "5", "unset"]


def test_a_folder_without_runs(browser, tmp_path):
    page.write([tmp_path], tmp_path / "r.html")
    browser.go((tmp_path / "r.html").as_uri())
    assert browser.text("#lead") == "There are no runs in these folders."
    assert browser.errors() == []


def test_it_refreshes_while_runs_go_on_and_keeps_what_was_chosen(browser, tmp_path):
    folder = comparison(tmp_path / "runs")
    with serving(folder) as server:
        browser.size(1280, 900)
        browser.go(server.address)
        browser.run("pause = 100")
        browser.wait("return document.documentElement.dataset.refreshed === '1'")
        browser.click("label[for=axis-round]")
        browser.click("#chip-0")
        browser.run("document.querySelector('#same, details').open = true")
        run = make(folder / "scaffold" / "seed-0", "scaffold", finished=False, count=2)
        browser.wait_for(["fedbcgd", "fedpaq", "scaffold"], NAMES)
        assert axis_words(browser) == "rounds"
        assert browser.run("return document.querySelector('details').open") is True
        assert browser.run("return document.activeElement.id") == "chip-0"
        before = path_of(browser, "scaffold")
        write_rows(run, rows("scaffold", 0, 5))
        line = "document.querySelector('#curves-chart g[data-group=scaffold] .line').getAttribute('d')"
        browser.wait(f"return {line} !== {json.dumps(before)}")
        assert "1 running" in browser.text("#lead")
    browser.wait("return document.querySelector('#live').classList.contains('lost')")
    assert browser.text("#live-text") == "not connected"
    browser.leave()


def test_hours_on_each_network_are_in_the_table(browser, tmp_path):
    """Where all shown runs have a record of what was sent."""
    data = page.content(*Collector([comparison(tmp_path / "runs")]).collect())
    for run in data["runs"]:
        count = len(run["columns"]["round"])
        run["profiles"] = {"4g": [k + 1.0 for k in range(count)], "broadband": [0.5 * (k + 1) for k in range(count)]}
    (tmp_path / "r.html").write_text(page.document(data))
    browser.go((tmp_path / "r.html").as_uri())
    browser.run("state.target = 0.5; draw()")
    text = browser.text("section[aria-labelledby=outcomes-heading] table")
    assert "on 4g" in text
    assert "on broadband" in text
    assert "9.5 h" in text or "10 h" in text  # accuracy 0.5 is reached in round 10
    browser.run("delete DATA.runs[0].profiles; draw()")
    assert "on 4g" not in browser.text("section[aria-labelledby=outcomes-heading] table")
    assert browser.errors() == []
