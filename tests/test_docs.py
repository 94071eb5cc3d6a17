"""What the documentation says exists."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn

import fedbcgd
from fedbcgd.algorithms.codecs import CODECS
from fedbcgd.algorithms.local_rules import LOCALS
from fedbcgd.algorithms.options import page
from fedbcgd.algorithms.server_rules import SERVERS
from fedbcgd.algorithms.uplinks import UPLINKS
from fedbcgd.runs import config as configuration

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.toml")), ids=lambda p: p.name)
def test_example_configurations_are_valid(path):
    run = configuration.load(path).run
    assert run.rounds == 100 if path.name == "regression.toml" else run.budget == 20


def test_the_example_script_runs(tmp_path):
    script = ROOT / "examples" / "own_model.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.search(r"fedbcgd: accuracy 0\.\d+", done.stdout) or "fedbcgd: accuracy 1.000" in done.stdout


def test_the_quickstart_runs_in_a_notebook(tmp_path):
    """It is kept without outputs; progress is live, results are tables with curves, figures are drawn."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    updates = []

    class Client(nbclient.NotebookClient):
        def process_message(self, msg, cell, cell_index):
            updates.append(msg["msg_type"])
            return super().process_message(msg, cell, cell_index)

    notebook = nbformat.read(ROOT / "examples" / "quickstart.ipynb", 4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
    Client(notebook, timeout=280, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    data = [output.get("data", {}) for cell in code for output in cell.outputs]
    pages = [kinds.get("text/html", "") for kinds in data]
    assert sum("<progress" in page for page in pages) == 2
    assert updates.count("update_display_data") > 2
    tables = [page for page in pages if "<table" in page]
    assert ["fedbcgd" in page for page in tables] == [False, True]
    assert all(page.count("<svg") == 2 for page in tables)
    assert sum("image/png" in kinds for kinds in data) == 2
    assert not any(output.output_type in ("error", "stream") for cell in code for output in cell.outputs)


@pytest.mark.slow
def test_the_adapters_example_sends_a_tenth(tmp_path):
    script = ROOT / "examples" / "lora.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path, timeout=900)
    assert done.returncode == 0, done.stderr
    sent = [float(kb) for kb in re.findall(r"at most ([\d.]+) kB", done.stdout)]
    assert len(sent) == 2
    assert sent[1] < sent[0] / 10


def test_the_layers_of_the_code_are_those_of_the_documentation():
    """Every folder has its row, in the order that import-linter checks; every file that is named is there."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    source = ROOT / "src" / "fedbcgd"
    table = text[text.index("## The layers") : text.index("### Where to begin reading")]
    rows = re.findall(r"^\| `(\w+)(?:/|\.py)`", table, re.M)
    folders = {path.name for path in source.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders <= set(rows)
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]["layers"]
    checked = [name for layer in settings for name in re.findall(r"fedbcgd\.(\w+)", layer)]
    assert checked[: len(rows) - 1] == rows[:-1]


def test_files_and_modules_in_the_documentation_exist():
    source = ROOT / "src" / "fedbcgd"
    folders = "cli|paper|report|runs|network|backends|display|engine|models|algorithms|core|data"
    found = 0
    for file in (ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        text = file.read_text()
        files = re.findall(rf"`(?:src/fedbcgd/)?((?:{folders})/[\w/]+\.py)`", text)
        modules = [name.replace(".", "/") for name in re.findall(rf"`fedbcgd\.((?:{folders})[\w.]*)`", text)]
        for name in files:
            assert (source / name).exists(), f"{file.name}: {name}"
        for name in modules:  # a module, or a name in one
            places = (source / name, source / f"{name}.py", (source / name).parent.with_suffix(".py"))
            assert any(place.exists() for place in places), f"{file.name}: fedbcgd.{name.replace('/', '.')}"
        found += len(files) + len(modules)
    assert found > 30


def test_lists_of_parts_and_algorithms_are_those_of_the_registries():
    kinds = {"uplink": UPLINKS, "local rule": LOCALS, "server rule": SERVERS, "codec": CODECS}
    table = (ROOT / "docs" / "architecture.md").read_text()
    for kind, registry in kinds.items():
        row = re.search(rf"^\| {kind} \| [^|]* \| ([^|]*) \|$", table, re.M)
        assert row, kind
        assert set(re.findall(r"`([^`]+)`", row[1])) == set(registry), kind
    readme = (ROOT / "README.md").read_text()
    rows = readme[readme.index("| name |") : readme.index("Any other combination")].splitlines()[2:]
    named = {name for row in rows if row for name in re.findall(r"`([^`]+)`", row.split("|")[1])}
    assert named | {"fedbcgd+derived"} == set(fedbcgd.algorithm_names())
    codecs = re.search(r'codec = "plain" .*: (.*)', configuration.template())
    assert codecs
    assert set(re.sub(r" \([^)]*\)", "", codecs[1]).split(", ")) == set(CODECS)
    shown = re.search(
        r"codec: Annotated\[str, typer.Option\(help=\"(.*?)\.\"", (ROOT / "src/fedbcgd/cli/blocks.py").read_text()
    )
    assert shown
    assert set(re.split(r", | or ", shown[1].split(": ")[-1])) == set(CODECS)


def test_costs_are_no_metrics_on_the_page():
    """Every column of a row that is a cost is named in `COSTS` of the page, which offers all others as metrics."""
    script = (ROOT / "src/fedbcgd/report/page/numbers.js").read_text()
    costs = set(re.findall(r'"(\w+)"', script[script.index("COSTS") : script.index("]);")]))
    row = fedbcgd.simulate(nn.Linear(2, 2), [(torch.ones(2, 2), torch.tensor([0, 1]))], rounds=1, workers=0).rows[0]
    assert set(row) - {"train_loss"} <= costs


def test_the_page_of_options_is_current():
    """`fedbcgd options --markdown > docs/options.md` writes it."""
    assert (ROOT / "docs" / "options.md").read_text() == page()


def test_links_and_files_in_the_readme_exist():
    text = (ROOT / "README.md").read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text) + re.findall(
        r"`((?:docs|examples|benchmarks|src)/[\w./-]+)`", text
    ):
        assert (ROOT / target).exists(), target


def test_no_placeholder_is_left():
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        text = re.sub(r"^@@ -\d+,\d+ \+\d+,\d+ @@$", "", path.read_text(), flags=re.M)  # of a diff
        assert "@@" not in text
