"""What is installed, what the hardware offers, what will be used and what is missing, with the command that gets it."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flashkernel.core.versions import INSTALL_TRITON, TRIED_TRITON, triton_version

GIB = 2**30
# Distributions beside torch: what each is for, and the command that installs it.
OPTIONAL = {
    "triton": ("the kernels for GPUs, and their tests on a CPU", INSTALL_TRITON),
    "cuda-core": ("kernels in CUDA C++", "pip install 'flashkernel[cuda]'"),
    "matplotlib": ("flashkernel plot", "pip install 'flashkernel[plot]'"),
    "nvidia-ml-py": ("clocks, power and driver version in records", "pip install nvidia-ml-py"),
}
PEERS = {
    "liger-kernel": ("a baseline in benchmarks", "pip install liger-kernel"),
    "cut-cross-entropy": ("a baseline in benchmarks", "pip install cut-cross-entropy"),
}


@dataclass(frozen=True)
class Finding:
    """One thing looked at: "ok", "missing" (works without it) or "broken"."""

    topic: str
    name: str
    status: str
    detail: str
    advice: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def examine() -> Iterator[Finding]:
    """Everything `flashkernel doctor` says, in order."""
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
    """Whether the installed triton is one that the kernels were tried with."""
    tried = " and ".join(TRIED_TRITON)
    if version.split("+")[0] in TRIED_TRITON:
        return Finding("software", "triton", "ok", f"{version}; tried: {tried}")
    detail = f"{version} was not tried; {tried} were. Kernels may not compile, or spill registers and be slow"
    return Finding("software", "triton", "missing", detail, f"pip install triton=={TRIED_TRITON[-1]}")


def _gpus(torch: Any) -> Iterator[Finding]:
    from flashkernel.core import device as devices

    if not torch.cuda.is_available():
        driver = Path("/proc/driver/nvidia/version")
        if driver.exists() and torch.version.cuda is None:
            advice = "pip install torch --index-url https://download.pytorch.org/whl/cu130"
            yield Finding(
                "hardware", "gpu", "missing", "a driver is here, but this torch was built without CUDA", advice
            )
        else:
            facts = devices.facts(torch.device("cpu"))
            detail = f"none; {facts.name}, {os.cpu_count()} cores, {facts.memory_bytes / GIB:.0f} GiB"
            yield Finding("hardware", "gpu", "missing", detail)
        return
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        facts = devices.facts(device)
        detail = (
            f"{facts.name}: sm_{facts.arch}, {facts.sms} multiprocessors, {facts.memory_bytes / GIB:.0f} GiB, "
            f"L2 {facts.l2_bytes / 2**20:.0f} MiB, {facts.shared_per_block // 1024} KiB shared per block"
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

    reason = replay.off()
    detail = f"off: {reason}" if reason else f"on: calls of the same shapes are repeated after {replay.RECORD_AFTER}"
    yield Finding("set-up", "replay", "missing" if reason else "ok", detail)
    reason = cuda.can_compile()
    advice = "" if reason is None else "pip install 'flashkernel[cuda]'"
    yield Finding("set-up", "NVRTC", "ok" if reason is None else "missing", reason or "compiles CUDA C++", advice)
    folder = env.cache_dir()
    if _writable(folder):
        yield Finding("set-up", "cache folder", "ok", str(folder))
    else:
        advice = "set FLASHKERNEL_CACHE_DIR to a folder you can write to; until then kernels compile in every process"
        yield Finding("set-up", "cache folder", "missing", f"{folder} cannot be written", advice)
    if env.interpreting():
        yield Finding(
            "set-up", "TRITON_INTERPRET", "ok", "1: Triton kernels run in Python, for tests; unset it for speed"
        )
        numpy = _version("numpy") or "0"
        if tuple(int(part) for part in numpy.split(".")[:2]) >= (2, 4):
            detail = f"numpy {numpy} breaks the interpreter of triton 3.6"
            yield Finding("set-up", "numpy", "missing", detail, "pip install 'numpy<2.4'")
        if (triton_version() or (0, 0)) >= (3, 9):
            detail = "the interpreter of triton 3.9 refuses masks that were broadcast from a scalar comparison"
            yield Finding("set-up", "interpreter", "missing", detail, f"pip install triton=={TRIED_TRITON[0]}")
    else:
        yield Finding("set-up", "TRITON_INTERPRET", "ok", "not set: Triton kernels run on a GPU only")


def _operators() -> Iterator[Finding]:
    """The backend each operator will use here."""
    from flashkernel.lab import selection

    hardware = selection.hardware(None)
    try:
        found = selection.operators(None)
    except Exception as error:  # any room's import may fail, in any way
        yield Finding("operators", "registry", "broken", f"{type(error).__name__}: {error}")
        return
    for op in found:
        try:
            chosen = selection.question(op, op.benches[0], selection.default_dtype(hardware), hardware).chosen
        except Exception as error:
            yield Finding("operators", op.name, "broken", f"{type(error).__name__}: {error}")
            continue
        yield Finding("operators", op.name, "ok" if chosen else "broken", chosen or "no backend can serve it here")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _writable(folder: Path) -> bool:
    """Whether files could be made in the folder, or it could be made itself."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
