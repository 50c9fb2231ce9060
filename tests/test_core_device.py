"""Device properties, pretence, folder names, versions, NVML readings, and the environment variables."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flashkernel.core import device as devices
from flashkernel.core import env
from flashkernel.core.device import KNOWN, Device

CPU = torch.device("cpu")


def test_cpu_properties_are_kept_and_plain() -> None:
    found = devices.properties(CPU)
    assert (found.kind, found.arch, found.sms, found.l2_bytes) == ("cpu", 0, 1, 0)
    assert found.name
    assert found.memory_bytes > 2**28
    assert devices.properties(CPU) is found


def test_interpreting_does_not_change_what_a_cpu_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(devices, "_known_devices", {})
    assert env.interpreting()
    assert devices.properties(CPU).kind == "cpu"


def test_pretend_is_scoped_nests_and_stays_on_its_thread() -> None:
    real = devices.properties(CPU)
    seen: list[Device] = []
    with devices.pretend(KNOWN["h200"]):
        assert devices.pretending()
        assert devices.properties(CPU) is KNOWN["h200"]
        with devices.pretend(KNOWN["t4"]):
            assert devices.properties(torch.device("cuda", 0)).arch == 75
        assert devices.properties(CPU).arch == 90
        thread = threading.Thread(target=lambda: seen.append(devices.properties(CPU)))
        thread.start()
        thread.join()
    assert seen == [real]
    with pytest.raises(KeyError), devices.pretend(KNOWN["t4"]):
        raise KeyError
    assert not devices.pretending()
    assert devices.properties(CPU) is real


def test_properties_can_be_traced_by_torch_compile() -> None:
    def double_on_a_cpu(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if devices.properties(x.device).kind == "cpu" else x * 3

    compiled = torch.compile(double_on_a_cpu, fullgraph=True, backend="eager")
    assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]
    with devices.pretend(KNOWN["h200"]):  # a graph must not keep a pretence
        torch._dynamo.reset()
        assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]


def test_a_cuda_device_without_index_follows_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        devices, "_known_devices", {torch.device("cuda", 0): KNOWN["t4"], torch.device("cuda", 1): KNOWN["l4"]}
    )
    for index, name in ((0, "t4"), (1, "l4"), (0, "t4")):
        monkeypatch.setattr(torch.cuda, "current_device", lambda index=index: index)
        assert devices.properties(torch.device("cuda")) is KNOWN[name]


def test_an_unknown_kind_of_device_is_refused() -> None:
    with pytest.raises(ValueError, match="'cpu' and 'cuda'"):
        devices.properties(torch.device("xpu"))


def test_gpu_properties_come_from_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(
        name="NVIDIA H200",
        major=9,
        minor=0,
        multi_processor_count=132,
        shared_memory_per_block_optin=232448,
        shared_memory_per_multiprocessor=233472,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        L2_cache_size=62914560,
        total_memory=140 * 2**30,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(devices, "_known_devices", {})
    assert devices.properties(torch.device("cuda", 0)) == KNOWN["h200"]


@pytest.mark.parametrize("name, arch", [("t4", 75), ("a100", 80), ("a10", 86), ("l4", 89), ("h100", 90), ("b200", 100)])
def test_known_devices_are_named_by_their_slug(name: str, arch: int) -> None:
    known = KNOWN[name]
    assert known.arch == arch
    assert devices.slug(known) == name
    assert known.shared_per_block <= known.shared_per_sm


@pytest.mark.parametrize(
    "name, expected",
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 3080 Laptop GPU", "rtx-3080-laptop"),
        ("NVIDIA A10G", "a10g"),
        ("GPU", "gpu"),
    ],
)
def test_slugs(name: str, expected: str) -> None:
    assert devices.slug(Device("cuda", name, 80, 1, 0, 0, 0, 0, 0, 0)) == expected


def test_any_cpu_has_one_slug() -> None:
    assert devices.slug(devices.properties(CPU)) == "cpu"


def test_versions_name_what_runs() -> None:
    found = devices.versions()
    assert found["torch"] == torch.__version__
    assert found["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}")
    found["torch"] = "changed"
    assert devices.versions()["torch"] == torch.__version__


class _NVMLError(Exception):
    pass


def _fake_nvml(**functions: object) -> SimpleNamespace:
    def missing(*args: object) -> None:
        raise _NVMLError

    names = ("nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetClockInfo")
    given = {"nvmlDeviceGetTemperature": missing, **dict.fromkeys(names, missing), **functions}
    return SimpleNamespace(
        NVMLError=_NVMLError, nvmlInit=lambda: None, nvmlDeviceGetHandleByUUID=lambda uuid: uuid, **given
    )


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch):
    """Install a fake pynvml with the functions given; the device is GPU-0001."""

    def install(**functions: object) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", _fake_nvml(**functions))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="0001"))
        devices._nvml.cache_clear()
        devices._nvml_handle_of.cache_clear()

    yield install
    devices._nvml.cache_clear()
    devices._nvml_handle_of.cache_clear()


def test_energy_and_health_are_read_by_uuid(nvml) -> None:
    handles = []
    nvml(
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: handles.append(handle) or 2500,
        nvmlDeviceGetPowerUsage=lambda handle: 75_000,
        nvmlDeviceGetClockInfo=lambda handle, clock: {1: 1980, 2: 3201}[clock],
    )
    gpu = torch.device("cuda", 0)
    assert devices.energy_joules(gpu) == 2.5
    assert handles == ["GPU-0001"]
    # The temperature raises in this driver: the others are read all the same.
    assert devices.health(gpu) == devices.Health(1980, 3201, None, 75.0)


def test_readings_are_none_where_there_is_no_counter(nvml) -> None:
    nvml()
    assert devices.energy_joules(torch.device("cuda", 0)) is None
    assert devices.energy_joules(CPU) is None
    assert devices.health(CPU) is None


def test_readings_are_none_without_a_driver(nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml()

    def no_driver() -> None:
        raise _NVMLError

    monkeypatch.setattr(sys.modules["pynvml"], "nvmlInit", no_driver)
    devices._nvml.cache_clear()
    assert devices.energy_joules(torch.device("cuda", 0)) is None
    assert devices.health(torch.device("cuda", 0)) is None


def test_cache_folder_prefers_its_own_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("FLASHKERNEL_CACHE_DIR", str(tmp_path / "own"))
    assert env.cache_dir() == tmp_path / "own"
    monkeypatch.delenv("FLASHKERNEL_CACHE_DIR")
    assert env.cache_dir() == tmp_path / "flashkernel"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert env.cache_dir() == Path.home() / ".cache" / "flashkernel"


@pytest.mark.gpu
def test_a_real_gpu_agrees_with_the_table() -> None:
    found = devices.properties(torch.device("cuda"))
    assert found.kind == "cuda"
    assert found.arch == 10 * torch.cuda.get_device_capability()[0] + torch.cuda.get_device_capability()[1]
    assert devices.properties(torch.device("cuda", torch.cuda.current_device())) == found
    known = KNOWN.get(devices.slug(found))
    if known is None:
        pytest.skip(f"{found.name} is not in the table")
    for fact in ("arch", "sms", "shared_per_block", "shared_per_sm", "registers_per_sm", "threads_per_sm", "l2_bytes"):
        assert getattr(found, fact) == getattr(known, fact), fact
    assert found.memory_bytes == pytest.approx(known.memory_bytes, rel=0.1)


@pytest.mark.gpu
def test_a_real_gpu_uses_energy() -> None:
    gpu = torch.device("cuda")
    before = devices.energy_joules(gpu)
    if before is None:
        pytest.skip("no pynvml, or no energy counter")
    a = torch.randn(8192, 8192, device=gpu)
    for _ in range(40):
        a @ a
    torch.cuda.synchronize()
    after = devices.energy_joules(gpu)
    assert after is not None
    assert after > before
    health = devices.health(gpu)
    assert health is not None
    assert health.sm_clock_mhz is not None
    assert health.sm_clock_mhz > 100
