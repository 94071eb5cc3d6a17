"""Where the clients' work is done: what is wrong with a choice is said before anything begins."""

import sys

import pytest

from fedbcgd import UserError, simulate
from fedbcgd.backends.placement import Placement
from fedbcgd.runs import config as configuration

WRONG = {
    "unknown backend": ({"backend": "rya"}, "backend.*workers, ray.*'rya'"),
    "no actors": ({"backend": "ray", "workers": 0}, "workers.*at least one"),
    "part of a worker": ({"workers": 1.5}, "workers.*whole number.*1.5"),
    "fewer than none": ({"workers": -1}, "workers.*at least 0"),
    "an address for workers": ({"address": "auto"}, "address.*only backend = 'ray'"),
    "a GPU for workers": ({"gpus": 0.5, "device": "cuda"}, "gpus.*only backend = 'ray'"),
    "less than no GPU": ({"backend": "ray", "gpus": -1.0}, "gpus.*at least 0"),
    "not a number": ({"backend": "ray", "gpus": "half"}, "gpus.*'half'"),
    "a GPU and a half": ({"backend": "ray", "gpus": 1.5, "device": "cuda"}, "gpus.*share up to 1 or a whole"),
    "a GPU unused": ({"backend": "ray", "gpus": 0.5}, "gpus.*device = 'cpu'"),
    "a GPU missing": ({"backend": "ray", "gpus": 0.0, "device": "cuda:0"}, "gpus: 0 leaves.*cuda:0"),
}


@pytest.mark.parametrize("case", WRONG)
def test_mistakes(case):
    given, words = WRONG[case]
    with pytest.raises(UserError, match=words):
        Placement(**given).check()


def test_mistakes_in_a_configuration_and_in_a_call(net, toys):
    with pytest.raises(UserError, match=r"test: run\.workers: backend 'ray' needs at least one"):
        configuration.check({"run": {"rounds": 1, "backend": "ray", "workers": 0}}, "test")
    with pytest.raises(UserError, match=r"test: run\.address"):
        configuration.check({"run": {"rounds": 1, "address": "auto"}}, "test")
    with pytest.raises(UserError, match=r"run\.backend: given 'dask'. Allowed: 'workers' or 'ray'"):
        configuration.check({"run": {"rounds": 1, "backend": "dask"}}, "test")
    with pytest.raises(UserError, match="workers: backend 'ray'"):
        simulate(net(), toys(), rounds=1, backend="ray", workers=0)
    with pytest.raises(UserError, match="transport"):
        simulate(net(), toys(), rounds=1, backend="ray", transport=lambda u: u)


def test_the_carrier_may_change_when_a_run_goes_on():
    a = configuration.check({"run": {"rounds": 1}}, "test")
    b = configuration.check({"run": {"rounds": 1, "backend": "ray", "address": "auto"}}, "test")
    assert configuration.differences(a, b) == []


def test_with_ray_the_server_stays_on_the_cpu():
    assert Placement("ray", device="cuda").home == "cpu"
    assert Placement(device="cuda").home == "cuda"


def test_without_the_extra_it_is_named(net, toys, tmp_path, monkeypatch):
    from fedbcgd.runs.execute import execute

    monkeypatch.setitem(sys.modules, "ray", None)
    words = r"backend 'ray' needs the extra `ray`: pip install 'fedbcgd\[ray\]'"
    with pytest.raises(UserError, match=words):
        simulate(net(), toys(), rounds=1, backend="ray")
    config = configuration.check({"run": {"rounds": 1, "backend": "ray"}}, "test")
    with pytest.raises(UserError, match=words):
        execute(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_ray_is_imported_only_when_asked_for():
    import subprocess

    code = "import sys, fedbcgd, fedbcgd.cli, fedbcgd.runs.batch; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0


def test_addresses_that_lead_nowhere(net, toys, monkeypatch):
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    import ray

    if ray.is_initialized():
        pytest.skip("this process has a Ray already, which is used whatever the address")
    for address, words in {
        "127.0.0.1:1": r"run\.address: nothing answers at 127\.0\.0\.1:1: Connection refused",
        "ray://127.0.0.1:1": "nothing answers at ray://127",
        "here": r'"auto", "host:port" or "ray://host:port" is wanted, given \'here\'',
        "host:port": "is wanted",
        "nowhere.invalid:6379": "nothing answers at nowhere.invalid:6379",
    }.items():
        with pytest.raises(UserError, match=words):
            simulate(net(), toys(), rounds=1, backend="ray", address=address)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(UserError, match=r"127\.0\.0\.1:1 \(from RAY_ADDRESS\)"):
        simulate(net(), toys(), rounds=1, backend="ray", address="auto")
    assert not ray.is_initialized()
