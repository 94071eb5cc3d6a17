"""Configuration: each mistake is reported with its field, the value, and what is allowed."""

import datetime
import tomllib

import pytest

from fedbcgd import UserError
from fedbcgd.runs import config as configuration

GOOD = """
[run]
rounds = 3
"""

# The text of a file (or what replaces it) and what its one message must contain.
BROKEN = {
    "unknown section": (GOOD + "[modle]\n", ["modle", "Did you mean 'model'"]),
    "unknown key": ("[run]\nroudns = 3\n", ["run.roudns", "Did you mean 'rounds'", "budget"]),
    "unknown key in data": (GOOD + "[data]\nclient = 5\n", ["data.client", "Did you mean 'clients'"]),
    "section is a value": ("run = 3\n", ["run", "3"]),
    "wrong type": ("[run]\nrounds = 'many'\n", ["run.rounds", "'many'", "integer"]),
    "fraction of a client": ("[run]\nrounds = 3\ncohort = 2.5\n", ["run.cohort", "2.5"]),
    "out of range": ("[run]\nrounds = 0\n", ["run.rounds", "0", "greater than or equal to 1"]),
    "negative seed": ("[run]\nrounds = 1\nseed = -1\n", ["run.seed", "-1"]),
    "not a number": ("[run]\nbudget = nan\n", ["run.budget", "nan"]),
    "target above 1": ("[run]\ntarget = 85\n", ["run.target", "85", "an accuracy > 0 and ≤ 1", "{ mae = 0.3 }"]),
    "unknown partition": (
        GOOD + "[data]\npartition = 'shard'\n",
        ["data.partition", "'shard'", "Did you mean 'shards'", "'dirichlet'", "'shards'", "'group'"],
    ),
    "unknown norm": (GOOD + "[model]\nnorm = 'layer'\n", ["model.norm", "'layer'", "'group'"]),
    "no width": (GOOD + "[model]\nwidth = 0.0\n", ["model.width", "greater than 0"]),
    "unknown algorithm": (
        GOOD + "[algorithm]\nname = 'fedbcdg'\n",
        ["algorithm", "'fedbcdg'", "Did you mean 'fedbcgd'"],
    ),
    "option of another": (
        GOOD + "[algorithm]\nname = 'fedavg'\nmomentum = 0.9\n",
        ["momentum: expected only with", "server='momentum'"],
    ),
    "option out of range": (GOOD + "[algorithm]\nmomentum = 1.0\n", ["momentum", "less than 1", "1.0"]),
    "unknown codec": (GOOD + "[algorithm]\ncodec = 'zip'\n", ["codec", "'zip'", "qsgd"]),
    "quadratics without a point": (
        GOOD + "[data]\nname = 'quadratics'\n",
        ["model.name: expected point with data.name = 'quadratics'"],
    ),
    "quadratics upside down": (
        GOOD + "[data]\nname = 'quadratics'\n[model]\nname = 'point'\n[quadratics]\nmu = 5.0\nbeta = 2.0\n",
        ["quadratics.mu", "beta = 2", "5"],
    ),
    "unknown key in quadratics": (GOOD + "[quadratics]\nbetta = 2.0\n", ["quadratics.betta", "Did you mean 'beta'"]),
    "never stops": ("[run]\nseed = 1\n", ["when to stop", "rounds", "budget", "target"]),
    "cohort too large": ("[run]\nrounds = 1\ncohort = 101\n", ["run.cohort", "101", "100"]),
    "not TOML": ("rounds: 3\n", ["expected TOML, got", "line 1"]),
    "not text": (b"\xff\xfe\x00", ["expected UTF-8 text"]),
    "absent": (None, ["expected a configuration file, got none", "fedbcgd init"]),
    "a folder": (..., ["expected a configuration file, got a folder"]),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_are_explained_in_one_message(case, tmp_path):
    content, parts = BROKEN[case]
    path = tmp_path / "run.toml"
    if content is ...:
        path.mkdir()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        path.write_text(content)
    with pytest.raises(UserError) as error:
        configuration.load(path)
    for part in [*parts, "run.toml"]:
        assert part in str(error.value)


def load(tmp_path, text=GOOD, *overrides):
    path = tmp_path / "run.toml"
    path.write_text(text)
    return configuration.load(path, overrides)


def test_overrides(tmp_path):
    config = load(
        tmp_path, GOOD, "algorithm.momentum=0.9", "run.seed=7", "data.partition=iid", "run.tensorboard=true",
        'algorithm.divider=[["conv*"], ["fc1"], ["fc2"]]', "algorithm.blocks=3", "algorithm.name=fedbcgd",
    )  # fmt: skip
    assert config.algorithm["momentum"] == 0.9
    assert (config.run.seed, config.data.partition, config.run.tensorboard) == (7, "iid", True)
    assert config.algorithm["divider"] == [["conv*"], ["fc1"], ["fc2"]]


@pytest.mark.parametrize("item", ["seed=1", "run.seed", "run.=1", "=1", "run.seed.x=1"])
def test_broken_overrides(tmp_path, item):
    with pytest.raises(UserError) as error:
        load(tmp_path, "[run]\nrounds = 3\nseed = 1\n", item)
    assert item.split("=")[0] in str(error.value)


def test_a_complete_configuration_says_the_same_again(tmp_path):
    config = configuration.complete(load(tmp_path, GOOD, "algorithm.codec=qsgd", "algorithm.shared=none"))
    text = config.text()
    assert "levels = 127" in text
    assert 'shared = "none"' in text
    assert configuration.complete(load(tmp_path, text)) == config


def test_the_template_is_valid_and_says_the_defaults(tmp_path):
    config = load(tmp_path, configuration.template())
    assert config.run.rounds == 100
    plain = load(tmp_path, "[run]\nrounds = 100\n")
    assert configuration.complete(config) == configuration.complete(plain)


def test_differences(tmp_path):
    a = configuration.complete(load(tmp_path))
    b = configuration.complete(
        load(tmp_path, GOOD, "algorithm.lr=0.2", "run.rounds=9", "run.workers=1", "data.clients=50")
    )
    assert configuration.differences(a, b) == ["data.clients: 100 → 50", "algorithm.lr: 0.1 → 0.2"]
    c = configuration.complete(load(tmp_path, GOOD, "algorithm.name=fedavg"))
    assert "algorithm.momentum: 0.8 → unset" in configuration.differences(a, c)


def test_toml_round_trip(tmp_path):
    options = {"s": 'quote " and \\ ü', "i": 3, "f": 1e-3, "b": True, "l": [["x"], [1, 2.5]], "t": {"a b": {"e": 1}}}
    options |= {"day": datetime.date(2026, 1, 2), "tables": [{"a": 1}, {"b": "x"}]}
    config = configuration.check({"run": {"rounds": 3}, "data": {"options": options}}, "made")
    assert config.data.positive is None
    again = load(tmp_path, config.text())
    assert again == config
    assert again.data.options == options
    assert "compare" not in config.text()  # what is empty is not written


def test_the_template_says_the_same_as_an_empty_file():
    text = configuration.template()
    assert all("  # " in line for line in text.splitlines() if line.startswith(("clients", "lr =", "cohort")))
    made = (tomllib.loads(text), {"run": {"rounds": 100}})
    one, two = (configuration.complete(configuration.check(raw, "made")) for raw in made)
    assert one == two


def test_the_template_lists_models_codecs_and_uplinks():
    from fedbcgd.algorithms.codecs import CODECS
    from fedbcgd.algorithms.uplinks import UPLINKS
    from fedbcgd.models import MODELS

    lines = {line.removeprefix("# ").split(" ")[0]: line for line in configuration.template().splitlines()}
    models = next(line for line in configuration.template().splitlines() if line.startswith('name = "lenet5"'))
    for line, names in ((models, MODELS), (lines["codec"], CODECS), (lines["uplink"], UPLINKS)):
        assert [name for name in names if name not in line] == []
    assert "round 0" not in configuration.template()


@pytest.mark.parametrize(("earlier", "now", "value"), [("carrier", "backend", "ray"), ("together", "batch_clients", 3)])
def test_earlier_names_still_work(tmp_path, caplog, earlier, now, value):
    configuration._warn_of_earlier_name.cache_clear()
    config = load(tmp_path, GOOD + f"{earlier} = {value!r}\n")
    assert getattr(config.run, now) == value
    assert f"run.{earlier} is called run.{now} now" in caplog.text
