"""Diagnosis of the installation: packages, GPUs, environment, the backend of each operator, and what to install."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flashkernel.core.versions import INSTALL_TRITON, TESTED_TRITON, triton_version

GIB = 2**30
# package -> (what it is needed for, the command that installs it)
OPTIONAL = {
    "triton": ("the kernels for GPUs, and their tests on a CPU", INSTALL_TRITON),
    "cuda-core": ("kernels in CUDA C++", "pip install 'flashkernel[cuda]'"),
    "transformers": ("flashkernel.hf, and flashkernel step and e2e", "pip install 'flashkernel[hf]'"),
    "matplotlib": ("flashkernel plot", "pip install 'flashkernel[plot]'"),
    "nvidia-ml-py": ("clocks, power and driver version in records", "pip install nvidia-ml-py"),
}
PEERS = {
    "liger-kernel": ("a baseline in benchmarks", "pip install liger-kernel"),
    "cut-cross-entropy": ("a baseline in benchmarks", "pip install cut-cross-entropy"),
}


@dataclass(frozen=True)
class Finding:
    """One finding: status is "ok", "missing" (flashkernel works without it) or "broken"."""

    topic: str
    name: str
    status: str
    detail: str
    advice: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def diagnose() -> Iterator[Finding]:
    """Yields all findings, in the order that `flashkernel doctor` prints them."""
    yield Finding("software", "python", "ok", platform.python_version())
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:  # OSError: a library it needs cannot be loaded
        yield Finding("software", "torch", "broken", str(error), "pip install torch")
        return
    yield Finding("software", "torch", "ok", f"{torch.__version__}, CUDA {torch.version.cuda or 'not built in'}")
    for name, (purpose, command) in {**OPTIONAL, **PEERS}.items():
        version = _version(name)
        if version is None:
            yield Finding("software", name, "missing", f"for {purpose}", command)
        elif name == "triton":
            yield _triton(version)
        else:
            yield Finding("software", name, "ok", version)
    yield from _gpus(torch)
    yield from _set_up()
    yield from _operators()


def _triton(version: str) -> Finding:
    """Reports "ok" if the kernels are tested with the installed version of triton."""
    tested = " and ".join(TESTED_TRITON)
    if version.split("+")[0] in TESTED_TRITON:
        return Finding("software", "triton", "ok", f"{version}; tested versions: {tested}")
    detail = f"{version} is not tested; {tested} are. Kernels may fail to compile, or spill registers and be slow"
    return Finding("software", "triton", "missing", detail, f"pip install triton=={TESTED_TRITON[-1]}")


def _gpus(torch: Any) -> Iterator[Finding]:
    from flashkernel.core import device as devices

    if not torch.cuda.is_available():
        driver = Path("/proc/driver/nvidia/version")
        if driver.exists() and torch.version.cuda is None:
            advice = "pip install torch --index-url https://download.pytorch.org/whl/cu130"
            yield Finding(
                "hardware",
                "gpu",
                "missing",
                "an NVIDIA driver is installed, but this torch was built without CUDA",
                advice,
            )
        else:
            found = devices.properties(torch.device("cpu"))
            detail = f"no GPU; CPU: {found.name}, {os.cpu_count()} cores, {found.memory_bytes / GIB:.0f} GiB"
            yield Finding("hardware", "gpu", "missing", detail)
        return
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        found = devices.properties(device)
        detail = (
            f"{found.name}: sm_{found.arch}, {found.sms} SMs, {found.memory_bytes / GIB:.0f} GiB, "
            f"L2 {found.l2_bytes / 2**20:.0f} MiB, {found.shared_per_block // 1024} KiB shared memory per block"
        )
        try:
            working = int(torch.ones(4, device=device).sum()) == 4
        except RuntimeError as error:
            working, detail = False, f"{detail}; {error}"
        yield Finding("hardware", f"cuda:{index}", "ok" if working else "broken", detail)
    driver_version = devices.versions().get("driver")
    yield Finding(
        "hardware", "driver", "ok" if driver_version else "missing", driver_version or "not readable without pynvml"
    )


def _set_up() -> Iterator[Finding]:
    from flashkernel.core import cuda, env, replay

    reason = replay.disabled_reason()
    detail = f"off: {reason}" if reason else f"on: launches are recorded after {replay.RECORD_AFTER} equal calls"
    yield Finding("environment", "replay", "missing" if reason else "ok", detail)
    reason = cuda.can_compile()
    advice = "" if reason is None else "pip install 'flashkernel[cuda]'"
    yield Finding("environment", "NVRTC", "ok" if reason is None else "missing", reason or "compiles CUDA C++", advice)
    folder = env.cache_dir()
    if _writable(folder):
        yield Finding("environment", "cache folder", "ok", str(folder))
    else:
        advice = "set FLASHKERNEL_CACHE_DIR to a writable folder; until then kernels are compiled in every process"
        yield Finding("environment", "cache folder", "missing", f"{folder} is not writable", advice)
    if env.interpreting():
        yield Finding(
            "environment",
            "TRITON_INTERPRET",
            "ok",
            "1: Triton kernels run in the interpreter, for tests; unset it for speed",
        )
        numpy = _version("numpy") or "0"
        if tuple(int(part) for part in numpy.split(".")[:2]) >= (2, 4):
            detail = f"triton 3.6's interpreter fails with numpy {numpy}"
            yield Finding("environment", "numpy", "missing", detail, "pip install 'numpy<2.4'")
        if (triton_version() or (0, 0)) >= (3, 9):
            detail = "triton 3.9's interpreter rejects masks broadcast from a scalar comparison"
            yield Finding("environment", "interpreter", "missing", detail, f"pip install triton=={TESTED_TRITON[0]}")
    else:
        yield Finding("environment", "TRITON_INTERPRET", "ok", "not set: Triton kernels need a GPU")


def _operators() -> Iterator[Finding]:
    """The backend that each operator uses on this machine."""
    from flashkernel.lab import selection

    hardware = selection.hardware(None)
    try:
        found = selection.operators(None)
    except Exception as error:  # importing an operator package may raise anything
        yield Finding("operators", "registry", "broken", f"{type(error).__name__}: {error}")
        return
    for op in found:
        try:
            chosen = selection.explain_case(op, op.benches[0], selection.default_dtype(hardware), hardware).chosen
        except Exception as error:
            yield Finding("operators", op.name, "broken", f"{type(error).__name__}: {error}")
            continue
        yield Finding(
            "operators", op.name, "ok" if chosen else "broken", chosen or "no backend supports it on this machine"
        )


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _writable(folder: Path) -> bool:
    """True if files can be created in the folder, or the folder itself can."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
