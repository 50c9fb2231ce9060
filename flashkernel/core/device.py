"""What the hardware is and can do: facts for heuristics, versions for records, clocks and energy for measurements."""

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

from flashkernel.core import state

KIB, MIB, GIB = 2**10, 2**20, 2**30


@dataclass(frozen=True)
class Device:
    """A processor as launch heuristics see it. Sizes are in bytes; what a CPU does not have is zero."""

    kind: str  # "cpu" or "cuda"
    name: str
    arch: int  # 90 for sm_90; 0 on a CPU
    sms: int  # multiprocessors; 1 on a CPU
    shared_per_block: int  # the most one block may ask for
    shared_per_sm: int
    registers_per_sm: int
    threads_per_sm: int
    l2_bytes: int
    memory_bytes: int

    def __hash__(self) -> int:
        return hash(self.name)  # a string's hash is kept with it: devices are dictionary keys on the hot path


@dataclass(frozen=True)
class Health:
    """A GPU's state at one moment; a reading its driver does not give is None."""

    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    temperature_c: int | None
    power_w: float | None


def _gpu(name: str, arch: int, sms: int, shared_kib: int, threads: int, l2_mib: float, memory_gib: int) -> Device:
    """A GPU from its data sheet; `shared_kib` is what one block may use."""
    reserved = 1 if arch >= 80 else 0  # KiB of a multiprocessor's shared memory that each block costs
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
}

_pretended: ContextVar[Device | None] = ContextVar("flashkernel_pretended_device", default=None)
_facts: dict[torch.device, Device] = {}


def facts(device: torch.device) -> Device:
    """What `device` is, or what `pretend` says it is. Costs a dictionary lookup."""
    if torch.compiler.is_compiling():
        return _constant_facts(device)  # tracers cannot read a context variable, and a graph must not keep a pretence
    pretended = _pretended.get()
    return _real_facts(device) if pretended is None else pretended


@contextmanager
def pretend(device: Device) -> Iterator[None]:
    """Let `facts` answer `device` inside: heuristics and explanations for a GPU that is not here (`KNOWN["h200"]`)."""
    token = _pretended.set(device)
    try:
        with state.suspended():
            yield
    finally:
        _pretended.reset(token)


def pretending() -> bool:
    """Whether a `pretend` is in force."""
    return _pretended.get() is not None


def _real_facts(device: torch.device) -> Device:
    known = _facts.get(device)
    if known is not None:
        return known
    if device.type == "cuda" and device.index is None:
        return _real_facts(torch.device("cuda", torch.cuda.current_device()))  # not kept: the current device may change
    if device.type == "cuda":
        known = _read_gpu(device)
    elif device.type in ("cpu", "meta"):
        known = _read_cpu()
    else:
        raise ValueError(f"device {str(device)!r} is not known; FlashKernel runs on 'cpu' and 'cuda' devices")
    _facts[device] = known
    return known


@torch.compiler.assume_constant_result
def _constant_facts(device: torch.device) -> Device:
    return _real_facts(device)


def _read_gpu(device: torch.device) -> Device:
    properties: Any = torch.cuda.get_device_properties(device)
    return Device(
        kind="cuda",
        name=properties.name,
        arch=properties.major * 10 + properties.minor,
        sms=properties.multi_processor_count,
        shared_per_block=properties.shared_memory_per_block_optin,
        shared_per_sm=properties.shared_memory_per_multiprocessor,
        registers_per_sm=properties.regs_per_multiprocessor,
        threads_per_sm=properties.max_threads_per_multi_processor,
        l2_bytes=properties.L2_cache_size,
        memory_bytes=properties.total_memory,
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
    """A folder name for the device: "NVIDIA H100 80GB HBM3" is "h100", any CPU is "cpu"."""
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
    """Versions of what a measurement or a compiled kernel depends on; what is not installed is left out."""
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
    # NVML's constants: clock 1 is the multiprocessors', 2 the memory's; temperature sensor 0 is the chip.
    power = _reading(device, "nvmlDeviceGetPowerUsage")
    return Health(
        sm_clock_mhz=_reading(device, "nvmlDeviceGetClockInfo", 1),
        memory_clock_mhz=_reading(device, "nvmlDeviceGetClockInfo", 2),
        temperature_c=_reading(device, "nvmlDeviceGetTemperature", 0),
        power_w=None if power is None else power / 1e3,
    )


@cache
def _nvml() -> Any | None:
    """The pynvml module, initialised; None where it or its driver is missing."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, no driver library, no permission: all mean that there are no readings
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
