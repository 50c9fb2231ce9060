"""The hardware: its properties for heuristics, versions for records, clocks and energy for measurements."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from flashkernel.core import replay_switch
from flashkernel.core.tracing import assume_constant_result

KIB, MIB, GIB = 2**10, 2**20, 2**30


@dataclass(frozen=True)
class Device:
    """The properties of a GPU or CPU that heuristics use. Sizes are in bytes; what a CPU does not have is zero."""

    kind: str  # "cpu" or "cuda"
    name: str
    arch: int  # 90 for sm_90; 0 on a CPU
    sms: int  # streaming multiprocessors; 1 on a CPU
    shared_per_block: int  # maximum of one block (opt-in)
    shared_per_sm: int
    registers_per_sm: int
    threads_per_sm: int
    l2_bytes: int
    memory_bytes: int

    def __hash__(self) -> int:
        return hash(self.name)  # strings cache their hash: devices are dictionary keys on the hot path


@dataclass(frozen=True)
class Health:
    """Clocks, temperature and power of a GPU at one moment; None for a reading that its driver does not support."""

    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    temperature_c: int | None
    power_w: float | None


def _gpu(name: str, arch: int, sms: int, shared_kib: int, threads: int, l2_mib: float, memory_gib: int) -> Device:
    """The properties of a GPU from its data sheet; `shared_kib` is the maximum of one block."""
    reserved = 1 if arch >= 80 else 0  # KiB of an SM's shared memory that the system reserves for each block
    return Device(
        kind="cuda",
        name=name,
        arch=arch,
        sms=sms,
        shared_per_block=shared_kib * KIB,
        shared_per_sm=(shared_kib + reserved) * KIB,
        registers_per_sm=65536,
        threads_per_sm=threads,
        l2_bytes=int(l2_mib * MIB),
        memory_bytes=memory_gib * GIB,
    )


KNOWN: dict[str, Device] = {
    "t4": _gpu("Tesla T4", 75, 40, 64, 1024, 4, 15),
    "a100": _gpu("NVIDIA A100-SXM4-80GB", 80, 108, 163, 2048, 40, 80),
    "a10": _gpu("NVIDIA A10", 86, 72, 99, 1536, 6, 22),
    "l4": _gpu("NVIDIA L4", 89, 58, 99, 1536, 48, 22),
    "h100": _gpu("NVIDIA H100 80GB HBM3", 90, 132, 227, 2048, 50, 80),
    "h200": _gpu("NVIDIA H200", 90, 132, 227, 2048, 60, 140),
    "b200": _gpu("NVIDIA B200", 100, 148, 227, 2048, 126, 178),
    "rtx5090": _gpu("NVIDIA GeForce RTX 5090", 120, 170, 99, 1536, 96, 31),
}

_pretended: ContextVar[Device | None] = ContextVar("flashkernel_pretended_device", default=None)
_known_devices: dict[torch.device, Device] = {}


def properties(device: torch.device) -> Device:
    """The properties of `device`, or those of the device that `pretend` sets. Costs a dictionary lookup.

    Example:
        >>> import torch
        >>> properties(torch.device("cpu")).kind
        'cpu'
    """
    if torch.compiler.is_compiling():
        # Dynamo cannot read a context variable, and a compiled graph must not keep a pretended device.
        return _constant_properties(device)
    pretended = _pretended.get()
    return _real_properties(device) if pretended is None else pretended


def half_dtype(device: Device) -> torch.dtype:
    """The 16-bit dtype that a device computes in: bfloat16, which GPUs have from sm_80 on, else float16.

    Example:
        >>> half_dtype(KNOWN["t4"]), half_dtype(KNOWN["h200"])
        (torch.float16, torch.bfloat16)
    """
    return torch.float16 if device.kind == "cuda" and device.arch < 80 else torch.bfloat16


def model_dtype(device: Device) -> torch.dtype:
    """The dtype that models usually run in: float32 on a CPU, on a GPU the 16-bit one that it computes in.

    Example:
        >>> model_dtype(KNOWN["t4"])
        torch.float16
    """
    return half_dtype(device) if device.kind == "cuda" else torch.float32


@contextmanager
def pretend(device: Device) -> Iterator[None]:
    """Let `properties` return `device` inside, for heuristics and explanations of a GPU that is not here.

    Args:
        device: The device to pretend, e.g. `KNOWN["h200"]`.
    """
    with replay_switch.scoped(_pretended, device):
        yield


def pretending() -> bool:
    """True inside `pretend`."""
    return _pretended.get() is not None


def _real_properties(device: torch.device) -> Device:
    known = _known_devices.get(device)
    if known is not None:
        return known
    if device.type == "cuda" and device.index is None:
        index = torch.cuda.current_device()  # may change later, so the answer is not kept
        return _real_properties(torch.device("cuda", index))
    if device.type == "cuda":
        known = _read_gpu(device)
    elif device.type in ("cpu", "meta"):
        known = _read_cpu()
    else:
        raise ValueError(f"device {str(device)!r} is not known; FlashKernel runs on 'cpu' and 'cuda' devices")
    _known_devices[device] = known
    return known


@assume_constant_result
def _constant_properties(device: torch.device) -> Device:
    return _real_properties(device)


def _read_gpu(device: torch.device) -> Device:
    found: Any = torch.cuda.get_device_properties(device)
    return Device(
        kind="cuda",
        name=found.name,
        arch=found.major * 10 + found.minor,
        sms=found.multi_processor_count,
        shared_per_block=found.shared_memory_per_block_optin,
        shared_per_sm=found.shared_memory_per_multiprocessor,
        registers_per_sm=found.regs_per_multiprocessor,
        threads_per_sm=found.max_threads_per_multi_processor,
        l2_bytes=found.L2_cache_size,
        memory_bytes=found.total_memory,
    )


def _read_cpu() -> Device:
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        memory = 0
    return Device("cpu", _cpu_name(), 0, 1, 0, 0, 0, 0, 0, memory)


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine() or "CPU"


def slug(device: Device) -> str:
    """A folder name for the device: "h100" for "NVIDIA H100 80GB HBM3", "cpu" for any CPU."""
    if device.kind == "cpu":
        return "cpu"
    words = re.findall(r"[a-z0-9]+", device.name.lower())
    noise = re.compile(r"nvidia|tesla|geforce|quadro|gpu|graphics|sxm\d*|hbm\d*e?|\d+gb")
    return "-".join(word for word in words if not noise.fullmatch(word)) or "gpu"


@cache
def _versions() -> dict[str, str]:
    import flashkernel

    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _distribution("triton"),
        "numpy": _distribution("numpy"),
        "cuda": torch.version.cuda,
        "cuda-core": _distribution("cuda-core"),
        "driver": _driver(),
        "flashkernel": getattr(flashkernel, "__version__", None) or _distribution("flashkernel"),
    }
    return {name: str(version) for name, version in found.items() if version is not None}


def versions() -> dict[str, str]:
    """Versions of the software that measurements and compiled kernels depend on, without what is not installed."""
    return dict(_versions())


def _distribution(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def energy_joules(device: torch.device) -> float | None:
    """Energy the GPU has used since its driver was loaded; None on a CPU, without pynvml or without the counter."""
    reading = _reading(device, "nvmlDeviceGetTotalEnergyConsumption")
    return None if reading is None else reading / 1e3


def health(device: torch.device) -> Health | None:
    """Clocks, temperature and power right now; None on a CPU or where pynvml cannot reach the GPU."""
    if _nvml_handle(device) is None:
        return None
    # NVML's constants: clock 1 is the SMs', 2 the memory's; temperature sensor 0 is the GPU chip.
    power = _reading(device, "nvmlDeviceGetPowerUsage")
    return Health(
        sm_clock_mhz=_reading(device, "nvmlDeviceGetClockInfo", 1),
        memory_clock_mhz=_reading(device, "nvmlDeviceGetClockInfo", 2),
        temperature_c=_reading(device, "nvmlDeviceGetTemperature", 0),
        power_w=None if power is None else power / 1e3,
    )


@cache
def _nvml() -> Any | None:
    """The pynvml module, initialized; None where it or its driver is missing."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, no driver library or no permission: there are no readings
        return None
    return pynvml


def _nvml_handle(device: torch.device) -> Any | None:
    if device.type != "cuda" or _nvml() is None:
        return None
    return _nvml_handle_of(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _nvml_handle_of(index: int) -> Any | None:
    """By UUID, since NVML numbers all GPUs of the machine and torch only the visible ones."""
    nvml: Any = _nvml()
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    try:
        return nvml.nvmlDeviceGetHandleByIndex(index) if uuid is None else nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except nvml.NVMLError:
        return None


def _reading(device: torch.device, function: str, *args: Any) -> Any | None:
    handle, nvml = _nvml_handle(device), _nvml()
    if handle is None or nvml is None:
        return None
    try:
        return getattr(nvml, function)(handle, *args)
    except nvml.NVMLError:
        return None


def _driver() -> str | None:
    nvml = _nvml()
    if nvml is None:
        return None
    version = nvml.nvmlSystemGetDriverVersion()
    return version.decode() if isinstance(version, bytes) else version
