"""Where the clients' work is done: what is wrong with a choice is said before anything begins."""

import sys

import pytest
import torch

from fedbcgd import UserError, simulate
from fedbcgd.backends.placement import Placement
from fedbcgd.models import Logistic
from fedbcgd.runs import config as configuration

WRONG = {
    "unknown backend": ({"backend": "rya"}, "backend: expected one of inprocess, workers, ray, got 'rya'"),
    "no actors": ({"backend": "ray", "workers": 0}, "workers: expected at least one with backend = 'ray', got 0"),
    "workers of this process": ({"backend": "inprocess", "workers": 2}, "workers: expected none .*'inprocess', got 2"),
    "part of a worker": ({"workers": 1.5}, "workers: expected an integer.*1.5"),
    "fewer than none": ({"workers": -1}, "workers: expected an integer ≥ 0, got -1"),
    "an address for workers": (
        {"address": "auto"},
        "address: expected none with backend = 'workers', got 'auto'; .*'ray'",
    ),
    "a GPU for workers": (
        {"gpus": 0.5, "device": "cuda"},
        "gpus: expected none with backend = 'workers', got 0.5; .*'ray'",
    ),
    "less than no GPU": ({"backend": "ray", "gpus": -1.0}, "gpus: expected a number ≥ 0"),
    "not a number": ({"backend": "ray", "gpus": "half"}, "gpus.*'half'"),
    "a GPU and a half": ({"backend": "ray", "gpus": 1.5, "device": "cuda"}, "gpus: expected at most 1 or a whole"),
    "a GPU unused": ({"backend": "ray", "gpus": 0.5}, "gpus.*device = 'cpu'"),
    "a GPU missing": (
        {"backend": "ray", "gpus": 0.0, "device": "cuda:0"},
        "gpus: expected more than 0 with device = 'cuda:0'",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_mistakes(case):
    given, words = WRONG[case]
    with pytest.raises(UserError, match=words):
        Placement(**given).check()


def test_mistakes_in_a_configuration_and_in_a_call(net, toys):
    with pytest.raises(UserError, match=r"test: run\.workers: expected at least one with backend = 'ray'"):
        configuration.check({"run": {"rounds": 1, "backend": "ray", "workers": 0}}, "test")
    with pytest.raises(UserError, match=r"test: run\.address"):
        configuration.check({"run": {"rounds": 1, "address": "auto"}}, "test")
    with pytest.raises(UserError, match=r"run\.backend: expected 'inprocess', 'workers' or 'ray', got 'dask'"):
        configuration.check({"run": {"rounds": 1, "backend": "dask"}}, "test")
    with pytest.raises(UserError, match="workers: expected at least one"):
        simulate(net(), toys(), rounds=1, backend="ray", workers=0)
    with pytest.raises(UserError, match="transport"):
        simulate(net(), toys(), rounds=1, backend="ray", transport=lambda u: u)


def test_the_backend_may_change_when_a_run_goes_on():
    a = configuration.check({"run": {"rounds": 1}}, "test")
    b = configuration.check({"run": {"rounds": 1, "backend": "ray", "address": "auto"}}, "test")
    assert configuration.differences(a, b) == []


def test_with_ray_the_server_stays_on_the_cpu():
    assert Placement("ray", device="cuda").local_device == "cpu"
    assert Placement(device="cuda").local_device == "cuda"


def test_without_the_extra_it_is_named(net, toys, tmp_path, monkeypatch):
    from fedbcgd.runs.execute import execute

    monkeypatch.setitem(sys.modules, "ray", None)
    words = r"backend 'ray': expected the extra `ray`, got none: pip install 'fedbcgd\[ray\]'"
    with pytest.raises(UserError, match=words):
        simulate(net(), toys(), rounds=1, backend="ray")
    config = configuration.check({"run": {"rounds": 1, "backend": "ray"}}, "test")
    with pytest.raises(UserError, match=words):
        execute(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_backend_is_one_entry(net, toys, monkeypatch):
    """Configuration, checks and `simulate` know a backend by its entry alone."""
    from fedbcgd.backends.inprocess import InProcess
    from fedbcgd.backends.registry import BACKENDS, BackendEntry

    log = []

    def make(job, store, cohort, where, transport):
        log.append(("make", cohort, where.workers))
        return InProcess(job, store)

    entry = BackendEntry(
        "mine", "of a test", make, lambda: log.append("installed"), lambda: log.append("early"), device_is_remote=True
    )
    monkeypatch.setitem(BACKENDS, "mine", entry)
    ends = [simulate(net(), toys(), rounds=1, blocks=2, backend=name).module for name in ("mine", "inprocess")]
    assert log == ["installed", "early", ("make", 6, None)]
    assert all(torch.equal(a, b) for a, b in zip(ends[0].parameters(), ends[1].parameters(), strict=True))
    config = configuration.check({"run": {"rounds": 1, "backend": "mine", "device": "cuda"}}, "test")
    assert (config.placement.entry, config.placement.local_device) == (entry, "cpu")
    images = [(torch.randn(4, 1, 2, 2), torch.randint(3, (4,)))] * 2
    with pytest.raises(
        UserError,
        match=r"batch_clients: expected none with backend = 'mine', got 2; .* backend = 'inprocess' or 'workers'",
    ):
        simulate(Logistic(3, (1, 2, 2)), images, "fedavg", rounds=1, backend="mine", batch_clients=2)
    with pytest.raises(UserError, match=r"network\.crash: expected backend = 'workers'.* got 'mine'"):
        simulate(net(), toys(), rounds=1, backend="mine", network={"crash": 0.5})


def test_what_an_entry_says_is_what_the_backend_has():
    from fedbcgd.backends.inprocess import InProcess
    from fedbcgd.backends.ray.backend import Ray
    from fedbcgd.backends.registry import BACKENDS
    from fedbcgd.backends.workers.backend import Workers

    for name, backend in {"inprocess": InProcess, "workers": Workers, "ray": Ray}.items():
        assert BACKENDS[name].overlaps_evaluation == hasattr(backend, "begin_evaluation")
        assert not BACKENDS[name].crashes_workers or hasattr(backend, "pids")


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({}, "workers"),
        ({"workers": 0}, "inprocess"),
        ({"device": "cuda:1"}, "inprocess"),
        ({"backend": "inprocess"}, "inprocess"),
        ({"backend": "ray", "device": "cuda"}, "ray"),
    ],
)
def test_who_does_the_work(given, name):
    assert Placement(**given).entry.name == name


def test_several_runs_keep_what_they_share_once(monkeypatch):
    import dataclasses
    from contextlib import contextmanager

    from fedbcgd.backends.registry import BACKENDS, keep_for

    log = []

    @contextmanager
    def keep(where):
        log.append(where.workers)
        yield
        log.append("left")

    monkeypatch.setitem(BACKENDS, "ray", dataclasses.replace(BACKENDS["ray"], shared_by_runs=keep))
    with keep_for([Placement(), Placement("ray", 3), Placement("ray", 4)]):
        assert log == [3]
    assert log == [3, "left"]


@pytest.mark.parametrize("module", ["placement", "registry", "workers.processes"])
def test_torch_is_not_imported_to_choose_a_backend_or_to_start_one(module):
    """The forkserver imports torch while this process does; and a configuration is read without it."""
    import subprocess

    code = f"import sys, fedbcgd.backends.{module}; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0


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
        "127.0.0.1:1": r"run\.address: expected a Ray cluster, got no answer at 127\.0\.0\.1:1: Connection refused",
        "ray://127.0.0.1:1": "no answer at ray://127",
        "here": r'expected "auto", "host:port" or "ray://host:port", got \'here\'',
        "host:port": "expected .*got 'host:port'",
        "nowhere.invalid:6379": "no answer at nowhere.invalid:6379",
    }.items():
        with pytest.raises(UserError, match=words):
            simulate(net(), toys(), rounds=1, backend="ray", address=address)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(UserError, match=r"127\.0\.0\.1:1 \(from RAY_ADDRESS\)"):
        simulate(net(), toys(), rounds=1, backend="ray", address="auto")
    assert not ray.is_initialized()
