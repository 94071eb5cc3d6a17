"""The regression of examples/: compared by a script and by a configuration, to the same bytes; stopped and started again."""

import importlib
import json
import shutil
import sys
from pathlib import Path

import pytest

from tests.command import fedbcgd as command
from tests.runs.test_execute import rows_of

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def example(tmp_path, monkeypatch, no_figures):
    for name in ("my_nets.py", "compare_regression.py", "regression.toml"):
        shutil.copy(EXAMPLES / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("compare_regression")
    for name in ("my_nets", "compare_regression"):
        sys.modules.pop(name, None)


def test_script_and_configuration_give_the_same_files(example, tmp_path, capsys):
    example.main("script", rounds=4)
    printed = capsys.readouterr().out
    assert "mae" in printed
    assert "accuracy" not in printed
    assert "fedbcgd" in (tmp_path / "script" / "report.html").read_text()
    names = ("--algorithms", "fedavg,fedbcgd,scaffold", "--seeds", "3", "--set", "run.rounds=4")
    done = command("compare", "regression.toml", *names, "--out", "configured", cwd=tmp_path)
    assert "mae" in done.stdout
    assert "accuracy" not in done.stdout
    for name in ("fedavg", "fedbcgd", "scaffold"):
        for seed in range(3):
            script, configured = (tmp_path / out / name / f"seed-{seed}" for out in ("script", "configured"))
            assert rows_of(script) == rows_of(configured)
            assert (script / "traffic.jsonl").read_bytes() == (configured / "traffic.jsonl").read_bytes()
            models = [model_of(folder) for folder in (script, configured)]
            assert models[0] == models[1]
    assert len(list((tmp_path / "script").glob("*/seed-*"))) == 9


def model_of(folder):
    """The bytes of all values of a model; its metadata have the name by which it is built."""
    data = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = {k: v for k, v in json.loads(data[8 : 8 + size]).items() if k != "__metadata__"}
    return header, data[8 + size :]


def test_after_ctrl_c_it_goes_on(example, tmp_path, monkeypatch):
    example.main("whole", rounds=4)
    from fedbcgd.engine.loop import Loop

    ordinary, count = Loop._after_commit, 0

    def interrupted(self, report):
        nonlocal count
        count += 1
        if count == 15:
            raise KeyboardInterrupt
        return ordinary(self, report)

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_after_commit", interrupted)
        with pytest.raises(KeyboardInterrupt, match="continues from there"):
            example.main("cut", rounds=4)
    example.main("cut", rounds=4)
    for folder in (tmp_path / "whole").glob("*/seed-*"):
        other = tmp_path / "cut" / folder.relative_to(tmp_path / "whole")
        assert rows_of(folder) == rows_of(other)
        assert (folder / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
