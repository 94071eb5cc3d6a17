"""The command line; as real processes where it matters what they import, or how they end."""

import csv
import os
import signal
import subprocess
import sys

import pytest

from fedbcgd import __version__
from tests.command import COMMAND, fedbcgd, process


def test_version():
    assert process("--version").stdout == f"fedbcgd {__version__}\n"


def test_help_names_the_commands():
    done = process("--help")
    assert done.stdout.split() == fedbcgd("--help").stdout.split()  # the tests know the same commands
    assert "demo" in done.stdout
    assert "slow uplinks" in done.stdout
    assert "--budget" in fedbcgd("demo", "--help").stdout


@pytest.mark.parametrize("args", [(), ("data",)])
def test_no_command_shows_the_help(args):
    done = fedbcgd(*args, check=2)
    assert done.stdout == fedbcgd(*args, "--help").stdout
    assert "Commands:" in done.stdout


def test_help_says_what_each_command_does_in_full():
    text = " ".join(fedbcgd("--help").stdout.split())
    assert "Train LeNet-5 on Fashion-MNIST with FedAvg, FedBCGD and FedPAQ under the same upload budget." in text


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["rollback"], "Number of finished rounds at the checkpoint to return to."),
        (["data", "add"], "Its name in configurations, such as cifar10."),
        (["run"], "A configuration file (TOML)"),
        (["compare"], "options of [algorithm] that it has, and those of [compare.NAME], which"),
    ],
)
def test_help_shows_what_is_said_of_arguments_and_words_in_brackets(command, words):
    """click 8.5 drops the help of typer 0.20's arguments; rich's markup drops what is in brackets."""
    text = fedbcgd(*command, "--help").stdout
    assert words in " ".join("".join(c if c.isascii() else " " for c in text).split())


def test_help_of_blocks_lists_models_and_codecs():
    from fedbcgd.algorithms.codecs import CODECS
    from fedbcgd.models import MODELS

    text = fedbcgd("blocks", "--help").stdout
    assert [name for name in [*MODELS, *CODECS] if name not in text] == []


def test_help_does_not_wait_for_what_draws_it():
    code = "import sys; from fedbcgd.cli import main; sys.argv = ['fedbcgd', '--help']\n"
    code += "try: main()\nexcept SystemExit: pass\n"
    code += "sys.exit(bool({'torch', 'numpy', 'rich.markdown', 'matplotlib'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["dmo"], "dmo"),
        (["demo", "--bugdet", "3"], "--budget"),
        (["demo", "--budget", "0"], "0"),
        (["demo", "--budget", "many"], "many"),
        (["demo", "--out", "file/folder"], "file/folder could not be created"),
    ],
)
def test_mistakes_end_with_exit_code_2_and_no_traceback(args, words, tmp_path):
    (tmp_path / "file").write_text("")
    assert words in fedbcgd(*args, cwd=tmp_path, check=2).stderr


def test_a_short_demo(tmp_path, figures):
    done = fedbcgd("demo", "--budget", "1", "--out", "out", cwd=tmp_path)
    assert "fedavg" in done.stdout
    assert "largest upload" in done.stdout
    assert "fedbcgd: started" in done.stderr  # plain lines without a terminal
    assert sorted(os.listdir(tmp_path / "out")) == [
        "curves.png",
        "curves.svg",
        "label_counts.png",
        "label_counts.svg",
        "metrics.csv",
    ]
    rows = list(csv.DictReader((tmp_path / "out" / "metrics.csv").open()))
    last = {row["run"]: row for row in rows}
    assert set(last) == {"fedavg", "fedbcgd", "fedpaq"}
    assert int(last["fedavg"]["round"]) == 1
    assert int(last["fedbcgd"]["round"]) == 4
    assert int(last["fedpaq"]["round"]) == 3
    assert all(float(row["upload_d"]) <= 1 for row in rows)


def test_ctrl_c_keeps_what_was_measured(tmp_path):
    process = subprocess.Popen(
        [*COMMAND, "demo", "--budget", "50"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        assert any("accuracy" in line for line in process.stderr)  # waits until something was measured
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert "interrupted" in errors
    assert "Traceback" not in errors
    rows = list(csv.DictReader((tmp_path / "fedbcgd-demo" / "metrics.csv").open()))
    assert rows
    assert rows[0]["run"] == "fedavg"
