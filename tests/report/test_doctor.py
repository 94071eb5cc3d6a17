"""What `fedbcgd doctor` warns about."""

import os
from types import SimpleNamespace

import pytest

from fedbcgd.backends.workers.processes import ENVIRONMENT
from fedbcgd.report import doctor


def warnings(monkeypatch, **patched):
    for name, value in patched.items():
        monkeypatch.setattr(doctor, name, value)
    return "\n".join(doctor.inspect_machine()[1])


def test_a_quiet_machine_has_no_complaint_about_others(monkeypatch):
    monkeypatch.setattr(doctor.psutil, "getloadavg", lambda: (0.0, 9.0, 9.0))
    assert "processes were busy" not in warnings(monkeypatch)
    monkeypatch.setattr(doctor.psutil, "getloadavg", lambda: (7.0, 0.0, 0.0))
    assert "7.0 processes were busy" in warnings(monkeypatch)


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
    assert doctor._quota(tmp_path, tmp_path / "absent") == cores


def test_limits_of_the_group_and_of_those_above_it(tmp_path):
    """The smallest counts; a limit beside the path does not."""
    membership = tmp_path / "membership"
    membership.write_text("1:name=systemd:/elsewhere\n0::/pod/box\n")
    for group, cpu, memory in (
        ("pod", "150000 100000", "max"),
        ("pod/box", "max 100000", "5000"),
        ("other", "1 2", "7"),
    ):
        (tmp_path / group).mkdir()
        (tmp_path / group / "cpu.max").write_text(cpu)
        (tmp_path / group / "memory.max").write_text(memory)
    assert doctor._quota(tmp_path, membership) == 1.5
    assert doctor._memory(tmp_path, membership) == 5000
    membership.write_text("0::/\n")
    assert doctor._quota(tmp_path, membership) is None
    assert doctor._memory(tmp_path, membership) > 2**20


def test_a_process_tied_to_a_core_and_a_gpu_left_alone(monkeypatch):
    assert "OMP_PROC_BIND" not in warnings(monkeypatch)
    monkeypatch.setitem(os.environ, "OMP_PROC_BIND", "close")
    monkeypatch.setattr(doctor.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(doctor.torch.cuda, "get_device_name", lambda k: "a GPU")
    text = warnings(monkeypatch)
    assert "OMP_PROC_BIND binds this process to one core" in text
    assert "there is a GPU" in text


@pytest.mark.parametrize(("used", "swapping"), [(101, True), (50, False)])
def test_swapping(monkeypatch, used, swapping):
    monkeypatch.setattr(doctor.psutil, "swap_memory", lambda: SimpleNamespace(used=used))
    monkeypatch.setattr(doctor.psutil, "virtual_memory", lambda: SimpleNamespace(total=1000))
    assert ("this machine is swapping" in warnings(monkeypatch)) == swapping


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
    text = warnings(monkeypatch, has_fused_step=lambda *_: False)
    assert "no fused SGD step" in text
    assert "no oneDNN" in text
    assert "AVX2 is not used" in text


@pytest.mark.parametrize(
    ("native", "ratio", "line"),
    [
        ("avx512_bf16", 0.25, "cpu: avx512_bf16; a matrix product is 4.0 times as fast as in float32"),
        (
            "",
            3.0,
            "cpu: not native; a matrix product takes 3.0 times as long as in float32, "
            'so precision = "bf16" is slower here',
        ),
    ],
)
def test_what_bfloat16_costs_here(monkeypatch, native, ratio, line):
    monkeypatch.setattr(doctor, "native_bf16", lambda device: native)
    monkeypatch.setattr(doctor, "product_ratio", lambda device: ratio)
    monkeypatch.setattr(doctor.torch.cuda, "device_count", lambda: 0)
    assert doctor.inspect_machine()[0]["bfloat16"] == line
