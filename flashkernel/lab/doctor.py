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
    yield from _before_ampere()
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
    from flashkernel.core import cpp, cuda, env, replay

    reason = replay.disabled_reason()
    detail = f"off: {reason}" if reason else f"on: launches are recorded after {replay.RECORD_AFTER} equal calls"
    yield Finding("environment", "replay", "missing" if reason else "ok", detail)
    if not reason:
        from flashkernel.core.native import build

        yield Finding("environment", "replay in C++", "ok", build.status())
    reason = cuda.can_compile()
    advice = "" if reason is None else "pip install 'flashkernel[cuda]'"
    yield Finding("environment", "NVRTC", "ok" if reason is None else "missing", reason or "compiles CUDA C++", advice)
    reason = cpp.can_compile()
    detail = f"compiles C++ for the CPU: {cpp.compiler()}"
    if reason is not None:
        detail = f"{reason}; quantized weights are dequantized on the CPU"
    yield Finding("environment", "C++ compiler", "ok" if reason is None else "missing", detail)
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


def _before_ampere() -> Iterator[Finding]:
    """What is different on a GPU before sm_80 (Turing: T4, RTX 20): the dtype, and who multiplies matrices."""
    from flashkernel.core import cuda
    from flashkernel.core import device as devices
    from flashkernel.lab import selection

    hardware = selection.hardware(None)
    if hardware.kind != "cuda" or hardware.arch >= 80:
        return
    detail = f"sm_{hardware.arch} has no bfloat16: models run in float16, and calls in bfloat16 go to torch"
    yield Finding("before sm_80", "dtype", "ok", detail)
    if hardware.arch < 75:
        yield Finding("before sm_80", "kernels", "missing", "they need sm_75 or newer; every operator runs on torch")
        return
    half, chosen, without_cuda = devices.half_dtype(hardware), dict[str, list[str]](), list[str]()
    for op in selection.operators(None):
        ends = dict.fromkeys((op.benches[0].name, op.benches[-1].name))  # a few rows of `linear`, and many of them
        cases = [case for case in op.benches if case.name in ends]
        answers = [selection.explain_case(op, case, half, hardware) for case in cases]
        for backend in dict.fromkeys(answer.chosen for answer in answers):
            chosen.setdefault(backend or "", []).append(op.name)
        reasons = {verdict.reason for answer in answers for verdict in answer.verdicts if verdict.backend == "cuda"}
        if cuda.can_compile() in reasons and any(answer.chosen == "torch" for answer in answers):
            without_cuda.append(op.name)
    detail = f"kernels without matrix products: {', '.join(chosen.get('triton', ['none']))}"
    yield Finding("before sm_80", "triton", "ok", detail)
    reason = cuda.can_compile()
    if reason is None:
        detail = f"tensor cores by CUDA C++, compiled by NVRTC at first use: {', '.join(chosen.get('cuda', ['none']))}"
        yield Finding("before sm_80", "cuda", "ok", detail)
    else:
        detail = f"without NVRTC these fall to torch, all or in part: {', '.join(without_cuda)} ({reason})"
        yield Finding("before sm_80", "cuda", "missing", detail, "pip install 'flashkernel[cuda]'")


def _operators() -> Iterator[Finding]:
    """The backend that each operator uses on this machine."""
    from flashkernel.core import device as devices
    from flashkernel.lab import selection

    hardware = selection.hardware(None)
    try:
        found = selection.operators(None)
    except Exception as error:  # importing an operator package may raise anything
        yield Finding("operators", "registry", "broken", f"{type(error).__name__}: {error}")
        return
    for op in found:
        try:
            chosen = selection.explain_case(op, op.benches[0], devices.model_dtype(hardware), hardware).chosen
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
