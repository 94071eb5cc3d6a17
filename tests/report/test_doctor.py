"""What `fedbcgd doctor` warns about."""

import os

import pytest

from fedbcgd.carriers.workers import ENVIRONMENT
from fedbcgd.report import doctor


def warnings(monkeypatch, **patched):
    for name, value in patched.items():
        monkeypatch.setattr(doctor, name, value)
    return "\n".join(doctor.look()[1])


def test_a_quiet_machine_has_no_complaint_about_others(monkeypatch):
    assert "busy now" not in warnings(monkeypatch, _load=lambda: 0.0)
    assert "7.0 of" in warnings(monkeypatch, _load=lambda: 7.0)


def test_a_containers_limit(monkeypatch, tmp_path):
    assert "allows 0.5 cores of time" in warnings(monkeypatch, _quota=lambda: 0.5)
    assert "cores of time" not in warnings(monkeypatch, _quota=lambda: None)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, None),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "nonsense"}, None),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4.0),
    ],
)
def test_limits_of_both_generations(tmp_path, files, cores):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert doctor._quota(tmp_path) == cores


def test_swapping(tmp_path):
    info = tmp_path / "meminfo"
    info.write_text("MemTotal: 1000 kB\nSwapTotal: 500 kB\nSwapFree: 399 kB\n")
    assert doctor._swapped(info)
    info.write_text("MemTotal: 1000 kB\nSwapTotal: 500 kB\nSwapFree: 450 kB\n")
    assert not doctor._swapped(info)
    assert not doctor._swapped(tmp_path / "absent")


def test_allocators(monkeypatch):
    name = next(k for k in ENVIRONMENT if k.startswith("MALLOC"))
    monkeypatch.setitem(os.environ, name, "1")
    monkeypatch.setitem(os.environ, "LD_PRELOAD", "/usr/lib/libjemalloc.so")
    text = warnings(monkeypatch)
    assert f"{name}=1 is set here" in text
    assert "replaces the allocator" in text


def test_a_pytorch_without_its_libraries(monkeypatch):
    monkeypatch.setattr(doctor.torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(doctor.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(doctor.torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    text = warnings(monkeypatch)
    assert "no oneDNN" in text
    assert "no AVX2" in text
