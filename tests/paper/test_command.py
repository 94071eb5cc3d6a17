"""What `reproduce` checks before anything runs, and what it prints."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fedbcgd
from fedbcgd.cli import app
from fedbcgd.cli import paper as _registered  # noqa: F401
from fedbcgd.display.progress import wide_console
from fedbcgd.display.terminal import display
from fedbcgd.errors import UserError
from fedbcgd.paper import command, origin, plan
from fedbcgd.paper.items import ITEMS
from fedbcgd.paper.plan import Machine
from fedbcgd.paper.request import Request


def reproduce(name, request, run=True):
    names = command.item_names(name, request.scale, request.only)
    command.check(names, request, run)
    if run:
        command.run(names, request, lambda labels: display(labels, True, False), wide_console())
    for each in names:
        command.show(each, request, wide_console())


@pytest.fixture(scope="module")
def figure8(tmp_path_factory):
    out = tmp_path_factory.mktemp("figure8")
    reproduce("figure8", command.make_request("smoke", out))
    return out


@pytest.fixture
def copy(figure8, tmp_path):
    return Path(shutil.copytree(figure8, tmp_path / "copy"))


def test_two_scales_do_not_share_a_folder(copy):
    before = (copy / "claims.md").read_bytes()
    with pytest.raises(
        UserError, match="expected results of scale cpu, got results of scale smoke; choose another folder"
    ):
        reproduce("figure8", command.make_request("cpu", copy), run=False)
    assert (copy / "claims.md").read_bytes() == before


def test_results_are_not_lost_where_a_data_set_is_missing(copy, monkeypatch):
    """Without its data set a run cannot be identified: the page stays as it is."""
    page = (copy / "figure8" / "README.md").read_bytes()
    real = plan.load_data

    def load(data):
        if data.name == "embedded":
            raise UserError("embedded is not here")
        return real(data)

    monkeypatch.setattr(plan, "load_data", load)
    plan._data_facts.cache_clear()
    try:
        with pytest.raises(UserError, match="would be lost, got none: embedded is not here"):
            reproduce("figure8", command.make_request("smoke", copy), run=False)
    finally:
        plan._data_facts.cache_clear()
    assert (copy / "figure8" / "README.md").read_bytes() == page


def test_shown_again_the_page_is_the_same(copy):
    page = (copy / "figure8" / "README.md").read_bytes()
    reproduce("figure8", command.make_request("smoke", copy), run=False)
    assert (copy / "figure8" / "README.md").read_bytes() == page


def test_a_data_set_that_no_item_uses_is_a_mistake(tmp_path):
    with pytest.raises(UserError, match="emnist"):
        command.check(["figure8"], command.make_request("cpu", tmp_path, data=["emnist-byclas=mine"]))


def test_a_missing_data_set_is_told_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDBCGD_DATA", str(tmp_path / "nothing"))
    with pytest.raises(UserError, match="cifar100"):
        command.check(command.item_names("all"), command.make_request("cpu", tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_of_all_items_those_with_the_panel():
    assert command.item_names("all", "cpu", "lenet5") == [
        "table2",
        "table3",
        "table6",
        "figure3",
        "figure4",
        "figure5",
        "figure7",
    ]
    assert command.item_names("all") == list(ITEMS)
    with pytest.raises(UserError, match=r"--only: expected part of one of .*, got 'lenet6'"):
        command.item_names("all", "cpu", "lenet6")


def test_with_json_standard_output_is_json_alone(copy):
    done = CliRunner().invoke(app, ["reproduce", "figure8", "--scale", "smoke", "--out", str(copy), "--json"])
    assert done.exit_code == 0
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    (last,) = lines  # all is finished
    assert last["item"] == "figure8"
    assert {c["verdict"] for c in last["claims"]} == {"not testable at this scale"}


def test_another_device_is_part_of_the_command(tmp_path):
    request = Request("smoke", tmp_path, machine=Machine(device="cuda"))
    assert request.command(ITEMS["figure8"]).endswith("--device cuda")
    mine, theirs = (
        plan.seed_runs(ITEMS["figure8"].panels["smoke"][0], {"fedavg": {"lr": 0.01}}, 1, machine)[0][1].folder
        for machine in (Machine(), Machine(device="cuda"))
    )
    assert mine != theirs


def test_another_precision_is_part_of_the_command_and_of_each_run(tmp_path):
    request = Request("smoke", tmp_path, machine=Machine(precision="bf16"))
    assert request.command(ITEMS["figure8"]).endswith("--precision bf16")
    plain, bf16 = (
        plan.seed_runs(ITEMS["figure8"].panels["smoke"][0], {"fedavg": {"lr": 0.01}}, 1, machine)[0][1]
        for machine in (Machine(), Machine(precision="bf16"))
    )
    assert (plain.config.run.precision, bf16.config.run.precision) == ("fp32", "bf16")
    assert plain.folder != bf16.folder


def test_the_commit_is_that_of_this_project_or_unknown(tmp_path):
    """A copy within another repository is no checkout of this one; changed files are done."""

    def git(*arguments):
        name = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
        subprocess.run(["git", *name, "-C", str(tmp_path), *arguments], check=True, capture_output=True)

    package = tmp_path / "vendored" / "fedbcgd"
    package.mkdir(parents=True)
    (package / "a.py").write_text("1\n")
    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "first")
    assert origin.current_commit(package) == "unknown"
    mine = tmp_path / "src" / "fedbcgd"
    mine.mkdir(parents=True)
    (mine / "a.py").write_text("1\n")
    git("add", "-A")
    git("commit", "-qm", "second")
    at = origin.current_commit(mine)
    assert len(at) >= 7
    (mine / "a.py").write_text("2\n")
    origin.current_commit.cache_clear()
    assert origin.current_commit(mine) == f"{at}-changed"
    assert Path(fedbcgd.__file__).parent.name == "fedbcgd"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"scale": "smoke", "claims": [{"key": "figure8-plus"}]}', '{"scale": 1}']
)
def test_a_damaged_page_is_named(copy, text):
    (copy / "figure8" / "about.json").write_text(text)
    done = CliRunner().invoke(app, ["reproduce", "figure8", "--scale", "smoke", "--out", str(copy), "--show"])
    assert done.exit_code == 2
    assert "about.json is damaged: delete it" in " ".join(done.output.split())
    (copy / "figure8" / "about.json").unlink()
    reproduce("figure8", command.make_request("smoke", copy), run=False)
    assert json.loads((copy / "figure8" / "about.json").read_text())["scale"] == "smoke"


def test_table_1_has_no_panels(tmp_path):
    with pytest.raises(UserError, match="--only: expected none with table1, which has no panels, got 'lenet5'"):
        command.check(["table1"], command.make_request("cpu", tmp_path, only="lenet5"))


def test_what_was_written_is_what_is_said_to_be(tmp_path, capsys):
    reproduce("figure8", command.make_request("smoke", tmp_path), run=False)
    output = capsys.readouterr().out
    assert " ".join(output.split()).endswith("README.md, about.json; nothing was run")  # wherever the line was broken
    assert sorted(p.name for p in (tmp_path / "figure8").iterdir()) == ["README.md", "about.json"]
