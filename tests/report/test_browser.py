"""The page in a browser: what a person does with it, in headless Chromium."""

import csv
import io
import json
import re
import xml.etree.ElementTree as ET

import pytest
from PIL import Image

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
        "Other metrics",
        "Time to target",
        "Outcomes",
        "Runs",
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
    for axis in ("upload_mb", "round", "gradient_evaluations", "time"):
        opened.click(f"label[for=axis-{axis}]")
        seen.append(axis_words(opened))
    assert seen[1:] == [
        "upload of all clients, in MB",
        "rounds",
        "gradient evaluations (minibatches)",
        "milliseconds on the chosen uplink",
    ]
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
    opened.click("#outcomes-table-csv")
    text = opened.wait("return copied[0]")
    table = list(csv.DictReader(io.StringIO(text)))
    assert [row["run"] for row in table] == ["fedavg", "fedbcgd", "fedpaq"]
    assert [float(row["upload_d"]) for row in table] == [10, 10, 10]
    assert float(table[0]["test_accuracy"]) == pytest.approx(0.501)
    assert float(table[0]["test_accuracy_sd"]) == pytest.approx(0.001)
    assert float(table[1]["gradient_evaluations"]) == 5000
    opened.click("#outcomes-table-latex")
    latex = opened.wait("return copied[1]").splitlines()
    assert latex[0] == "\\begin{tabular}{lrrrrrrrrr}"
    assert latex[-1] == "\\end{tabular}"
    assert latex[4].startswith("fedavg & 0.5010 $\\pm$ 0.0010 & 1 & ")
    assert all(line.endswith("\\\\") for line in latex[4:7])
    opened.wait_for("LaTeX copied", ANNOUNCED)


@pytest.mark.parametrize("table", ["outcomes-table", "target-table"])
def test_a_table_says_the_same_as_csv_as_latex_and_on_the_page(opened, table):
    """The same rows and columns; each number of the CSV, rounded as on the page, is that of the LaTeX."""
    opened.run(CLIPBOARD + "; state.target = 0.8; draw()")  # FedAvg does not reach it
    opened.click(f"#{table}-sort-1")
    opened.click(f"#{table}-csv")
    head, *lines = csv.reader(io.StringIO(opened.wait("return copied[0]")))
    opened.click(f"#{table}-latex")
    latex = opened.wait("return copied[1]").splitlines()
    headings, *rows = (line.removesuffix(" \\\\").split(" & ") for line in (latex[2], *latex[4:7]))
    page = f"section:has(#{table}-csv)"
    shown = opened.texts(f"{page} .scroll:has(#{table}-sort-0) tbody tr > *")
    assert [len(row) for row in rows] == [len(headings)] * 3
    means = [k for k, name in enumerate(head) if not name.endswith("_sd")]
    assert len(means) == len(headings)
    unlatex = {"$\\pm$": "±", "$\\infty$": "∞", "--": "–"}
    texts = []
    for line, row in zip(lines, rows, strict=True):
        for k, text in zip(means, row, strict=True):
            for code, sign in unlatex.items():
                text = text.replace(code, sign)
            texts.append(text)
            if k:
                sd = line[k + 1] if k + 1 < len(line) and k + 1 not in means else ""
                value = {"": "NaN", "inf": "Infinity"}.get(line[k], line[k])
                assert opened.run(f"return plusMinus({value}, {sd or 'NaN'})") == text
    assert texts == shown


def test_a_table_is_sorted_by_its_headings(opened):
    first = "section[aria-labelledby=outcomes-heading] tbody th"
    assert opened.texts(first) == ["fedavg", "fedbcgd", "fedpaq"]
    opened.click("#outcomes-table-sort-1")  # test accuracy
    assert opened.texts(first) == ["fedavg", "fedpaq", "fedbcgd"]
    assert opened.run("return document.activeElement.id") == "outcomes-table-sort-1"
    opened.click("#outcomes-table-sort-1")
    assert opened.texts(first) == ["fedbcgd", "fedpaq", "fedavg"]
    order = "return document.querySelector('#outcomes-table-sort-1').closest('th').getAttribute('aria-sort')"
    assert opened.run(order) == "descending"
    opened.wait_for("sorted by test accuracy, falling", ANNOUNCED)
    opened.click("#runs-table-sort-1")
    seeds = opened.texts("section[aria-labelledby=each-run-heading] tbody td:nth-child(2)")
    assert seeds == ["0"] * 3 + ["1"] * 3 + ["2"] * 3


def test_runs_are_filtered_by_name_option_and_note(opened):
    runs = "section[aria-labelledby=each-run-heading] tbody th"
    assert len(opened.texts(runs)) == 9
    opened.click("#filter")
    opened.keys("algorithm.blocks=5")
    opened.wait_for(3, f"return document.querySelectorAll('{runs}').length")
    assert [text.strip() for text in opened.texts(runs)] == ["fedbcgd"] * 3
    assert opened.run("return [document.activeElement.id, document.activeElement.value]") == [
        "filter",
        "algorithm.blocks=5",
    ]
    opened.click("#only")
    assert names(opened) == ["fedbcgd"]
    opened.run("state.filter = 'no such run'; draw()")
    assert opened.texts(runs) == []
    opened.run("state.filter = ''; draw()")
    opened.click("#show-0")
    assert names(opened) == ["fedavg", "fedbcgd"]


def x_of(browser, chart="curves-chart"):
    """The numbers under the x axis."""
    script = (
        f"return [...document.querySelectorAll('#{chart} .words text[text-anchor=middle]')].map(t => t.textContent)"
    )
    return [float(text) for text in browser.run(script)[:-1]]


def places(browser, *shares):
    """Points at these shares of the width of the plot, half way up."""
    box = "document.querySelector('#curves-chart')"
    browser.run(f"{box}.scrollIntoView({{block: 'center'}})")
    left, top, width, height = browser.run(
        f"const b = {box}.getBoundingClientRect(); return [b.left, b.top, b.width, b.height]"
    )
    inner = width - 54 - 14
    return [(left + 54 + share * inner, top + height / 2) for share in shares]


def test_a_part_of_the_chart_is_enlarged_by_a_drag_and_shown_whole_again(opened):
    assert x_of(opened) == list(range(11))
    whole = path_of(opened, "fedavg")
    opened.drag(places(opened, 0.5, 0.6, 0.8))
    zoom = "return state.zoom['curves-chart'] || null"
    assert opened.run(zoom)["from"] == pytest.approx(5, abs=0.05)
    assert opened.run(zoom)["to"] == pytest.approx(8, abs=0.05)
    assert min(x_of(opened)) >= 5
    assert max(x_of(opened)) <= 8.05
    assert path_of(opened, "fedavg") != whole
    # What is shown fits itself: accuracies after half of the upload, FedAvg's lowest 1 − 1/1.5
    words = "[...document.querySelectorAll('#curves-chart .words text[text-anchor=end]')]"
    low = opened.run(f"return Math.min(...{words}.map(t => Number(t.textContent)))")
    assert low >= 0.3
    opened.click("label[for=axis-round]")  # another axis has no part of its own
    assert max(x_of(opened)) == 50
    opened.click("label[for=axis-upload_d]")
    opened.click("#curves-chart-reset")
    assert opened.run(zoom) is None
    assert x_of(opened) == list(range(11))
    assert path_of(opened, "fedavg") == whole
    assert opened.texts("#curves-chart-reset") == []


def test_the_chart_is_zoomed_with_keys_and_with_the_wheel(opened):
    opened.run("document.querySelector('#curves-chart').focus()")
    opened.type("#curves-chart", "+")
    zoom = "const z = state.zoom['curves-chart']; return z ? [z.from, z.to] : null"
    assert opened.run(zoom) == pytest.approx([2.5, 7.5], abs=0.3)
    assert opened.run("return document.activeElement.id") == "curves-chart"
    opened.type("#curves-chart", "0")
    assert opened.run(zoom) is None
    ((x, y),) = places(opened, 0.0)
    options = "{deltaY: -100, clientX: %d, clientY: %d, bubbles: true, cancelable: true}"
    wheel = f"document.querySelector('#curves-chart').dispatchEvent(new WheelEvent('wheel', {options}))"
    opened.run(wheel % (round(x), round(y)))
    assert opened.run(zoom) == pytest.approx([0, 8], abs=0.05)
    opened.run("document.activeElement.blur()")
    opened.run(wheel % (round(x), round(y)))
    assert opened.run(zoom) == pytest.approx([0, 8], abs=0.05)  # without the focus the page scrolls
    opened.run("document.querySelector('#curves-chart').dispatchEvent(new MouseEvent('dblclick', {bubbles: true}))")
    assert opened.run(zoom) is None


def test_what_is_constant_but_for_rounding_is_drawn(opened):
    """Means of 0.1 differ in their last digit, and so do their ends."""
    opened.run(
        "DATA.runs.forEach(r => r.columns.test_accuracy = r.columns.round.map(k => 0.1 + k % 3 * 1e-17)); draw()"
    )
    opened.run("state.smooth = 5; draw()")
    assert not any("cannot be drawn" in text for text in opened.texts("section"))
    assert names(opened)[-3:] == ["fedavg", "fedbcgd", "fedpaq"]


def test_curves_are_smoothed(opened):
    opened.run("DATA.runs.forEach(r => r.columns.test_accuracy = r.columns.round.map(k => k % 2)); draw()")
    jagged = path_of(opened, "fedavg")
    select = "const s = document.querySelector('#smooth'); s.value = '3'; s.dispatchEvent(new Event('change'))"
    opened.run(select)
    lines = opened.run(
        "return [...document.querySelectorAll('#curves-chart g[data-group=fedavg]')].map(g => g.classList.contains('thin'))"
    )
    assert lines == [True, False]  # what was measured stays behind the mean
    solid = "return document.querySelector('#curves-chart g[data-group=fedavg]:not(.thin) .line').getAttribute('d')"
    assert opened.run(solid) != jagged
    # Values 1 0 1 0 …: means of three are 1/3 and 2/3, and the ends are themselves
    assert opened.run("return smoothed([1, 0, 1, 0].map((y, x) => ({x, y})), 3).map(p => p.y)") == pytest.approx(
        [1, 2 / 3, 1 / 3, 0]
    )


@pytest.mark.parametrize("chart", ["curves-chart", "metrics-test_loss", "time", "traffic", "labels"])
def test_each_chart_is_saved_as_png_svg_and_csv(opened, tmp_path, chart):
    files = {}
    for kind in ("csv", "svg", "png"):
        files[kind] = opened.download(f"#{chart}-{kind}", tmp_path).read_bytes()
    table = list(csv.reader(io.StringIO(files["csv"].decode())))
    assert len({len(line) for line in table}) == 1
    assert len(table) > 3
    picture = ET.fromstring(files["svg"])
    assert picture.tag == "{http://www.w3.org/2000/svg}svg"
    words = ["".join(e.itertext()) for e in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert any(name in " ".join(words) for name in ("fedavg", "Labels of the clients"))
    assert not re.search(r"class=|style=|var\(|currentColor", files["svg"].decode())  # it keeps its colours elsewhere
    assert files["png"].startswith(b"\x89PNG\r\n\x1a\n")
    drawn = Image.open(io.BytesIO(files["png"])).convert("RGB")
    assert drawn.width == 2 * float(picture.attrib["width"])
    assert len(drawn.getcolors(1 << 24) or []) > 10  # something is drawn


def test_the_csv_of_the_chart_has_every_point(opened, tmp_path):
    saved = opened.download("#curves-chart-csv", tmp_path)
    assert saved.name == "test-accuracy-over-upload-of-a-client-in-d.csv"
    table = list(csv.DictReader(io.StringIO(saved.read_text())))
    assert len(table) == 10 + 50 + 40
    assert float(table[9]["test accuracy"]) == pytest.approx(0.501)
    assert float(table[9]["standard deviation"]) == pytest.approx(0.001)
    assert (float(table[9]["upload of a client, in d"]), table[9]["seeds"]) == (10, "3")


def test_every_panel_has_one_short_explanation(opened):
    texts = "[...s.querySelectorAll('.explanation')].map(p => p.textContent)"
    script = f"return [...document.querySelectorAll('section.card')].map(s => {texts})"
    explained = opened.run(script)
    assert [len(texts) for texts in explained] == [1] * len(explained)
    assert all(20 < len(text) <= 160 for (text,) in explained)


def test_notes_of_runs_are_in_their_table(browser, tmp_path):
    make(tmp_path / "a", "fedavg", notes=("items are shared", "few examples"))
    page.write([tmp_path], tmp_path / "r.html")
    browser.go((tmp_path / "r.html").as_uri())
    assert "items are shared; few examples" in browser.text("section[aria-labelledby=each-run-heading] table")


@pytest.mark.parametrize("said", [{}, {"metric": "mae", "goal": "min"}])
def test_any_metric_has_a_panel_a_column_and_a_target(browser, tmp_path, said):
    """A regression: no accuracy anywhere; a run reaches a target from above."""
    for seed in range(2):
        folder = make(tmp_path / f"{seed}", "fedavg", seed)
        own = [{k: v for k, v in row.items() if "accuracy" not in k} for row in rows("fedavg", seed)]
        write_rows(folder, [row | {"test_mae": 2 / row["round"], "test_r2": 1 - 1 / row["round"]} for row in own])
        summary = json.loads((folder / "summary.json").read_text())
        (folder / "summary.json").write_text(json.dumps(summary | said))
    page.write([tmp_path], tmp_path / "r.html")
    browser.go((tmp_path / "r.html").as_uri())
    first = "Test mae"  # a loss only if nothing else is there
    assert browser.text("section[aria-labelledby=curves-heading] h2") == first
    others = browser.texts("section[aria-labelledby=metrics-heading] h3")
    assert sorted([first, *others]) == ["Test loss", "Test mae", "Test r2", "Train loss"]
    headings = browser.texts("section[aria-labelledby=outcomes-heading] thead th")
    assert {"test mae", "test r2", "test loss", "train loss"} <= set(headings)
    browser.run("state.metric = 'test_mae'; state.target = 0.5; draw()")
    assert browser.texts("ol.bars li")[0].endswith("4 rounds")  # 2/4
    assert browser.run("return [falls('test_mae'), falls('test_r2'), falls('test_loss')]") == [True, False, True]
    text = browser.run("return document.body.innerText")
    assert "accuracy" not in text.lower()
    assert "nan" not in text.lower()
    assert browser.errors() == []


def test_what_a_run_says_of_its_metric_counts_more_than_the_name(browser, tmp_path):
    folder = make(tmp_path / "a", "fedavg")
    write_rows(folder, [row | {"test_loss_avoided": row["round"]} for row in rows("fedavg", 0)])
    summary = json.loads((folder / "summary.json").read_text()) | {"metric": "loss_avoided", "goal": "max"}
    (folder / "summary.json").write_text(json.dumps(summary))
    page.write([tmp_path], tmp_path / "r.html")
    browser.go((tmp_path / "r.html").as_uri())
    assert browser.run("return [metric(), falls('test_loss_avoided'), falls('test_loss')]") == [
        "test_loss_avoided",
        False,
        True,
    ]


def test_measurements_of_clients_have_panels(browser, tmp_path):
    folder = make(tmp_path / "a", "fedavg")
    parts = ("mean", "std", "worst_tenth", "lowest_quarter")
    write_rows(
        folder, [row | {f"clients_accuracy_{p}": 0.1 * row["round"] for p in parts} for row in rows("fedavg", 0)]
    )
    page.write([tmp_path], tmp_path / "r.html")
    browser.go((tmp_path / "r.html").as_uri())
    card = "section[aria-labelledby=clients-heading]"
    expected = ["Accuracy mean", "Accuracy std", "Accuracy worst tenth", "Accuracy lowest quarter"]
    assert browser.texts(f"{card} h3") == expected
    assert len(browser.texts(f"{card} .line")) == 4
    assert not any("clients" in name for name in browser.texts("#metric option"))
    browser.click("label[for=axis-round]")
    assert browser.texts(f"{card} .axis") == ["rounds"] * 4
    assert browser.errors() == []


def test_hours_on_a_chosen_network_are_an_axis(browser, real_run, tmp_path):
    page.write([real_run], tmp_path / "r.html")
    browser.go((tmp_path / "r.html").as_uri())
    browser.click("label[for=axis-hours]")
    assert axis_words(browser).endswith(" on 4g")  # the run had no network of its own
    browser.run(
        "const s = document.querySelector('#network'); s.value = 'datacentre'; s.dispatchEvent(new Event('change'))"
    )
    assert axis_words(browser).endswith(" on datacentre")
    assert browser.errors() == []


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


@pytest.mark.parametrize("width", [320, 360, 390, 768, 1280, 1920])
def test_nothing_hangs_over(opened, width):
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
    assert "For some older runs" in browser.text("section[aria-labelledby=time-heading] .explanation")
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
    assert opened.texts(f"{table} thead th") == ["run", "algorithm.name", "algorithm.blocks"]  # and not run.seed
    assert opened.texts(f"{table} tbody td:last-child") == ["unset", "5", "unset"]
    opened.click("#chip-0")  # two runs, two options: a row for each option
    assert opened.texts(f"{table} tbody th") == ["algorithm.name", "algorithm.blocks"]
    assert opened.texts(f"{table} tbody tr:last-child td") == ["5", "unset"]


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
    browser.size(1280, 900)
    browser.run("state.target = 0.5; draw()")
    table = "section[aria-labelledby=time-heading] table"
    assert browser.texts(f"{table} thead th")[6:-1] == ["time, ms", "on 4g, h", "on broadband, h"]
    assert browser.texts(f"{table} tbody tr:first-child td")[6:8] == ["10", "5"]  # accuracy 0.5 is reached in round 10
    wide = "return [...document.querySelectorAll('.scroll')].filter(s => s.scrollWidth > s.clientWidth).length"
    assert browser.run(wide) == 0
    browser.run("delete DATA.runs[0].profiles; draw()")
    assert "on 4g" not in browser.text(table)
    assert browser.errors() == []
