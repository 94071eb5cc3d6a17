"""The files under results/: the overview agrees with the pages of the items."""

import importlib.util
import json
import re
import shutil
from pathlib import Path

import pytest

from fedbcgd.files import as_csv
from fedbcgd.paper import command, engine, packs, pages, plan
from fedbcgd.paper.items import ITEMS
from fedbcgd.paper.request import panels_for

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("keep_reproduced", ROOT / "scripts" / "keep_reproduced.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_overview_is_that_of_the_pages(script):
    text = (RESULTS / "README.md").read_text(encoding="utf-8")
    between = text.split(script.BEGIN)[1].split(script.END)[0].strip()
    assert between == script.overview(RESULTS / "reproduce").strip()
    for picture in re.findall(r"!\[.*?\]\((.+?)\)", text):
        assert (RESULTS / picture).exists(), picture


def test_every_claim_is_there_with_its_verdict(script):
    overview = script.overview(RESULTS / "reproduce")
    for item in ITEMS.values():
        about = RESULTS / "reproduce" / item.name / "about.json"
        verdicts = {v["key"]: v["verdict"] for v in json.loads(about.read_text())["claims"]} if about.exists() else {}
        for claim in item.claims:
            where = re.escape(f"| {claim.text} | **{verdicts.get(claim.key, 'not run')}** | ") + rf"\[?{item.name}"
            assert re.search(where, overview), claim.key


FACTS = {
    "cifar10": plan.DataFacts((3, 32, 32), 10, 50_000, 10_000),
    "emnist-byclass-part": plan.DataFacts((1, 28, 28), 2, 100_000, 10_000),
}


@pytest.mark.parametrize("name", ["figure4", "figure8"])
def test_scores_and_curves_are_those_of_the_packed_runs(name, tmp_path, monkeypatch):
    """The data sets need not be here: their sizes are known."""
    monkeypatch.setattr(plan, "_data_facts", lambda data: FACTS[json.loads(data)["name"]])
    for path in RESULTS.glob(f"reproduce/*/{packs.NAME}"):  # items share runs
        (tmp_path / path.parent.name).mkdir()
        shutil.copy(path, tmp_path / path.parent.name)
    request = command.make_request("cpu", tmp_path, data=["emnist-byclass=emnist-byclass-part"])
    results = engine.gather(panels_for(ITEMS[name], request), request)
    for file, rows in (("scores.csv", pages.scores(results)), ("curves.csv", pages.curves(results))):
        assert as_csv(rows) == (RESULTS / "reproduce" / name / file).read_text()


def test_nothing_outside_the_marks_is_touched(script, tmp_path):
    page = tmp_path / "README.md"
    page.write_text(f"before\n{script.BEGIN}\nold\n{script.END}\nafter\n")
    script.put(page, "new")
    assert page.read_text() == f"before\n{script.BEGIN}\n\nnew\n\n{script.END}\nafter\n"
    page.write_text("no marks\n")
    with pytest.raises(SystemExit, match="marks"):
        script.put(page, "new")
    assert page.read_text() == "no marks\n"
