"""What the documentation says exists."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedbcgd.runs import config as configuration

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.toml")), ids=lambda p: p.name)
def test_example_configurations_are_valid(path):
    assert configuration.load(path).run.budget == 20


def test_the_example_script_runs(tmp_path):
    script = ROOT / "examples" / "own_model.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.search(r"fedbcgd: accuracy 0\.\d+", done.stdout) or "fedbcgd: accuracy 1.000" in done.stdout


@pytest.mark.slow
def test_the_adapters_example_sends_a_tenth(tmp_path):
    script = ROOT / "examples" / "lora.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path, timeout=900)
    assert done.returncode == 0, done.stderr
    sent = [float(kb) for kb in re.findall(r"at most ([\d.]+) kB", done.stdout)]
    assert len(sent) == 2
    assert sent[1] < sent[0] / 10


def test_the_walk_through_the_code_names_every_file():
    text = (ROOT / "docs" / "architecture.md").read_text()
    source = ROOT / "src" / "fedbcgd"
    for path in source.rglob("*.py"):
        name = path.relative_to(source)
        if path.name in ("__init__.py", "__main__.py", "version.py") or name.parts[0] == "cli":
            continue
        assert f"`{name}`" in text, name


def test_links_and_files_in_the_readme_exist():
    text = (ROOT / "README.md").read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text) + re.findall(
        r"`((?:docs|examples|benchmarks|src)/[\w./-]+)`", text
    ):
        assert (ROOT / target).exists(), target


def test_no_placeholder_is_left():
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        assert "@@" not in path.read_text()
