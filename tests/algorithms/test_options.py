"""The table of options is made from the parts; options by other libraries' names get a hint."""

import inspect

import pytest
import torch
from torch import nn

import fedbcgd
from fedbcgd import UserError, algorithm_names, make_algorithm, simulate
from fedbcgd.algorithms.options import options, page
from fedbcgd.algorithms.registry import all_option_names, option_names
from fedbcgd.errors import ALIASES
from fedbcgd.runs import config as configuration


@pytest.mark.parametrize("algorithm", algorithm_names())
def test_the_options_of_an_algorithm_are_those_that_it_takes(algorithm):
    shown = [option.name for option in options(algorithm)]
    kinds = {"uplink", "local", "server", "codec"}
    assert sorted(shown) == sorted(option_names(algorithm, {}) | kinds)
    own = make_algorithm(algorithm, max_norm=1.0).options()
    for option in options(algorithm):
        if option.name not in ("max_norm", "clip_norm", "local_steps"):
            assert option.default == str(own[option.name]).lower().replace("'", "")
        assert option.default != "None"
        assert algorithm in option.algorithms


def test_every_option_has_one_meaning_and_says_who_takes_it():
    rows = options()
    assert {row.name for row in rows} == all_option_names()
    assert all(len(row.meaning) > 8 for row in rows)
    assert len({(row.name, row.meaning, row.default) for row in rows}) == len(rows)
    takers = {(row.name, row.default): row.takers for row in rows}
    assert takers["lr", "0.1"] == "all"
    assert takers["mu", "0.01"] == "fedprox"
    assert takers["momentum", "0.8"] == "server=momentum"
    assert takers["bucket", "4096"] == "codec=float16"


def test_the_default_shown_is_that_of_the_algorithm():
    def derived(name):
        return {option.name: option.default for option in options(name)}["derived"]

    assert (derived("fedbcgd+"), derived("fedbcgd+derived")) == ("false", "true")
    with pytest.raises(UserError, match="Did you mean 'fedavg'"):
        options("fedavgg")


def test_the_help_of_simulate_has_every_option():
    text = " ".join(simulate.__doc__.split())
    for option in options():
        assert f"{option.name} ({option.default}): {option.meaning}" in text
    assert all(len(line) <= 120 for line in inspect.getdoc(simulate).splitlines())
    assert "`derived`" in page()


CLIENTS = [(torch.randn(4, 2), torch.zeros(4, dtype=torch.int64))]
SAID = {
    "learning_rate": "learning_rate: no such option; it is called lr$",
    "epochs": "epochs: no such option; it is called local_epochs$",
    "num_rounds": "num_rounds: no such option; it is called rounds$",
    "clients_per_round": "no such option; it is called cohort$",
    "optimizer": r"optimizer: no such option; clients step by SGD with lr.*train=… keeps an optimiser of your own",
    "algoritm": "algoritm: expected an argument .*Did you mean 'algorithm'",
    "roundz": "roundz: expected an argument .*Did you mean 'rounds'",
    "mu": "mu: expected only with the local rule 'prox'",
}


@pytest.mark.parametrize(("option", "message"), SAID.items(), ids=SAID)
def test_simulate_says_what_an_option_is_called(option, message):
    with pytest.raises(UserError, match=message):
        simulate(nn.Linear(2, 2), CLIENTS, rounds=1, **{option: 1})


def test_make_algorithm_says_it_too():
    with pytest.raises(UserError, match=r"learning_rate: no such option; it is called lr$"):
        make_algorithm("fedavg", learning_rate=0.1)


def test_every_other_name_leads_to_one_that_exists():
    arguments = set(fedbcgd.simulate.__annotations__)
    assert set(ALIASES.values()) <= all_option_names() | arguments
    assert not set(ALIASES) & (all_option_names() | arguments)


IN_A_FILE = {
    "an alias": ({"algorithm": {"learning_rate": 1}, "run": {"rounds": 1}}, "algorithm.learning_rate: .*called lr$"),
    "an optimiser": (
        {"algorithm": {"optimizer": "adam"}, "run": {"rounds": 1}},
        "algorithm.optimizer: no such option",
    ),
    "of run": ({"algorithm": {"rounds": 3}}, r"algorithm.rounds: no such key here; it belongs to \[run\]$"),
    "of run, alias": ({"algorithm": {"num_rounds": 3}}, r"it belongs to \[run\] and is called rounds$"),
    "of the algorithm": ({"run": {"lr": 1}}, r"run.lr: no such key here; it belongs to \[algorithm\]$"),
    "of it, alias": ({"run": {"epochs": 1}}, r"run.epochs: .* belongs to \[algorithm\] and is called local_epochs$"),
    "alias in run": ({"run": {"random_seed": 1}}, "run.random_seed: no such option; it is called seed$"),
    "of data": ({"run": {"clients": 3}}, r"run.clients: no such key here; it belongs to \[data\]$"),
    "no section": (
        {"learning_rate": 3},
        r"learning_rate: no such key here; it belongs to \[algorithm\] and is called lr$",
    ),
    "section": ({"algoritm": {}}, "algoritm: expected one of .*Did you mean 'algorithm'"),
    "spelling": ({"run": {"roudns": 3}}, "run.roudns: expected one of .*Did you mean 'rounds'"),
}


@pytest.mark.parametrize(("raw", "message"), IN_A_FILE.values(), ids=IN_A_FILE)
def test_configurations_say_it_too(raw, message):
    with pytest.raises(UserError, match=message):
        configuration.check(raw, "run.toml")
