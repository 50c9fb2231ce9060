"""Time of the first use of CUDA C++ kernels: compiled by NVRTC into an empty cache, and read from that cache.

The kernels are those that the first benchmark of each operator launches in float16, forward and backward, on a GPU that
need not be here: NVRTC compiles on the CPU. A macro that no compile had before keeps CUDA's own cache out of it.
Neither time includes importing NVRTC or loading the code onto the GPU.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from flashkernel.core import cuda, nvrtc
from flashkernel.core import device as devices
from flashkernel.core.cuda import Module
from flashkernel.lab import cuda_resources
from flashkernel.lab.cuda_resources import Instance
from flashkernel.lab.first_use_tables import CACHED, COMPILED, OP
from flashkernel.lab.results import Record
from flashkernel.lab.training import statistics

REPEATS = 3  # reads from the cache
OPERATORS = Path(__file__).resolve().parents[1] / "ops"


def instances(gpu: devices.Device, names: Sequence[str] | None = None) -> list[Instance]:
    """The kernels of operators, or of all that have some in CUDA C++; ValueError for a GPU without them."""
    if gpu.arch not in cuda_resources.GPUS:
        known = ", ".join(f"sm_{arch}" for arch in cuda_resources.GPUS)
        raise ValueError(f"first-use: {gpu.name} is no GPU that kernels are compiled for; name one of {known}")
    chosen = [op for op in cuda_resources.operators() if names is None or op.name in names]
    cases = {op.name: [op.benches[0] if op.benches else op.cases[0]] for op in chosen}
    found = cuda_resources.instances(gpu.arch, chosen, lambda op: cases[op.name])
    return [one for one in found if "__nv_bfloat16" not in one.kernel.name]


def measure(
    found: Sequence[Instance], gpu: devices.Device, on_progress: Callable[[str], None] = lambda text: None
) -> Iterator[list[Record]]:
    """Yields the records of each kernel, for the GPU's own architecture."""
    reason = nvrtc.can_compile()  # imports NVRTC
    if reason is not None:
        raise ValueError(f"first-use: {reason}")
    cpu = devices.properties(torch.device("cpu")).name
    for one in found:
        module, name = one.kernel.module, one.kernel.name
        case = f"{module.source_path.relative_to(OPERATORS)}: {name}"
        on_progress(f"compiling {case}")
        unique = Module(
            module.source_path, options=(*module.options, f"--define-macro=FIRST_USE={time.time_ns()}"),
            include=module.include, specific=module.specific, virtual_arch=module.virtual_arch,
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as folder, cuda.built_for(None):
            compile = partial(unique.compile, name, gpu.arch, Path(folder))
            times = [_seconds(compile) for _ in range(1 + REPEATS)]
        operators = {"operators": ", ".join(one.operators)}
        yield [
            Record(
                OP, case, operators, "float16", what, "cuda", "backend", True, statistics(seconds), mode="cpu",
                note=f"compiled on {cpu}",
            )
            for what, seconds in ((COMPILED, times[:1]), (CACHED, times[1:]))
        ]  # fmt: skip


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
