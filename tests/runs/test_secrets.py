"""Secrets are masked in run folders."""

import json
import sys

import pytest

from fedbcgd import UserError
from fedbcgd.algorithms.registry import algorithm_names, option_names
from fedbcgd.engine.run_folder import RunFolder
from fedbcgd.runs import config
from fedbcgd.runs.config import SECTIONS, flat
from fedbcgd.runs.execute import execute
from fedbcgd.runs.folder import finished
from fedbcgd.runs.secrets import looks_secret, mask_command, mask_config, refuse_masked

SECRET = "hunter2 and more"


@pytest.mark.parametrize(
    "name",
    [
        *("token", "data.options.hf_token", "apiKey", "api_key", "key", "accessToken", "password", "db-passwd"),
        *("client_secret", "secret_file", "data.options.credentials.user", "PASSWORD", ' "token" ', "--token"),
    ],
)
def test_names_of_secrets(name):
    assert looks_secret(name)


@pytest.mark.parametrize("name", ["max_tokens", "key_size", "tokenizer", "keys", "run.seed", "author"])
def test_other_names(name):
    assert not looks_secret(name)


def test_no_setting_of_our_own_looks_like_a_secret():
    names = {key for section in SECTIONS.values() for key in section.model_fields}
    names |= {key for name in algorithm_names() for key in option_names(name, {})}
    assert [name for name in names if looks_secret(name)] == []


def test_a_command_by_hand():
    command = ["run", "x.toml", "--set", f"data.options.token={SECRET}", "--set=model.options.key=abc", "--out", "key"]
    command += ["--set", 'data.options={user="a", token = "b", c=1}', "--password", SECRET, "--set", "run.seed=1"]
    assert mask_command(command) == [
        *("run", "x.toml", "--set", "data.options.token=***", "--set=model.options.key=***", "--out", "key"),
        *("--set", 'data.options={user="a", token =***', "--password", "***", "--set", "run.seed=1"),
    ]


def test_a_configuration_by_hand():
    values = {"data": {"options": {"token": "a", "max_tokens": 5, "secrets": {"b": 1}, "lists": [{"key": 2, "d": 3}]}}}
    masked = {
        "data": {"options": {"token": "***", "max_tokens": 5, "secrets": "***", "lists": [{"key": "***", "d": 3}]}}
    }
    assert mask_config(values) == masked
    refuse_masked(values)
    with pytest.raises(
        UserError, match=r"data.options.token: expected a value, got \*\*\*.* --set data.options.token=…"
    ):
        refuse_masked(masked)


LOADER = """
import numpy as np

def load(token, password):
    assert (token, password) == ("hunter2 and more", 98765432123)
    chance = np.random.default_rng(0)
    train, test = ((chance.random((40, 1, 8, 8), np.float32), np.arange(40) % 2) for _ in range(2))
    return train, test
"""
RUN = """
[data]
name = "loader_with_secrets:load"
clients = 4
[model]
name = "logistic"
[algorithm]
name = "fedavg"
local_steps = 1
[run]
rounds = 1
cohort = 2
workers = 0
"""


def test_a_run_with_a_secret_writes_it_nowhere_and_goes_on_when_it_is_given_again(tmp_path, monkeypatch):
    sets = [f"data.options.token={SECRET}", "data.options.password=98765432123"]
    monkeypatch.setattr(sys, "argv", ["fedbcgd", "run", "x.toml", "--set", sets[0], "--set", sets[1]])
    (tmp_path / "loader_with_secrets.py").write_text(LOADER)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "run.toml").write_text(RUN)
    settings = config.load(tmp_path / "run.toml", sets)
    execute(settings, tmp_path / "run", figures=False)
    for path in (tmp_path / "run").rglob("*"):
        assert not path.is_file() or not (b"hunter2" in path.read_bytes() or b"98765432123" in path.read_bytes()), path
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["command"] == "fedbcgd run x.toml --set data.options.token=*** --set data.options.password=***"
    assert summary["config"]["data"]["options"] == {"token": "***", "password": "***"}
    assert flat(config.load(tmp_path / "run" / "config.toml").model_dump())["data.options.token"] == "***"

    assert finished(RunFolder(tmp_path / "run"), config.complete(settings)) is not None
    execute(config.load(tmp_path / "run.toml", [*sets, "run.rounds=2"]), tmp_path / "run", resume=True, figures=False)
    with pytest.raises(UserError, match=r"data.options.token: expected a value, got \*\*\*"):
        execute(config.load(tmp_path / "run" / "config.toml"), tmp_path / "again")
