"""Kernels compiled ahead of a benchmark, in several processes.

A process that times must have the GPU to itself, but most of a cold run is compiling on one core. So worker processes
call every implementation that compiles once, at the sizes that are checked and timed. What they compile stays on disk
(Triton's cache, ours of CUDA C++, Inductor's FX graph cache, the driver's cache of PTX); the timing process loads it.

torch.compile(mode="max-autotune") times its choices inside the workers, while others use the GPU. Inductor ranks them
by the shortest of repeated runs. Processes take turns on a GPU, so a kernel that fits into a turn has the same shortest
run as on an idle GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from flashkernel.core import check
from flashkernel.core.op import Case, Op
from flashkernel.core.worker_pool import WorkerPool
from flashkernel.lab import builds
from flashkernel.lab.bench import BenchOptions, candidates, free_memory
from flashkernel.lab.verification import case_key

MAX_WORKERS = 12  # each has a CUDA context and several GB of host memory
TIMEOUT_S = 300.0
NOTHING_TO_COMPILE = ("torch", "eager", "reference")

Work = tuple[Op, Case, torch.dtype, BenchOptions]


@dataclass(frozen=True)
class Task:
    """An implementation to call on one case, with the settings of a check or with those of timing."""

    op: str
    case: Case
    dtype: torch.dtype
    implementation: str
    is_check: bool

    def __str__(self) -> str:
        return f"{self.op} {self.case.name} {str(self.dtype).removeprefix('torch.')}: {self.implementation}"


def default_workers() -> int:
    return min(MAX_WORKERS, os.cpu_count() or 1)


def batches(work: Iterable[Work]) -> list[list[Task]]:
    """The calls to make before the benchmarks of `work`; the calls of a batch may share kernels.

    A baseline is compiled for each shape, so each of its calls is a batch. They take longest and come first.
    """
    ours: dict[Any, dict[Any, Task]] = {}
    theirs: dict[Any, dict[Any, Task]] = {}
    for op, case, dtype, options in work:
        width = next(iter(op.inputs.values())).shape(case.axes)[-1]
        for candidate in candidates(op, case, dtype, options):
            if candidate.name in NOTHING_TO_COMPILE:
                continue
            for one, is_check in ((case.at(**case.check_axes), True), (case, False)):
                task = Task(op.name, replace(one, check_axes={}), dtype, candidate.name, is_check)
                call = (op.name, case_key(one), dtype, candidate.name)
                if candidate.kind == "baseline":
                    theirs.setdefault((*call, is_check), {}).setdefault(call, task)
                else:
                    ours.setdefault((op.name, dtype, candidate.name, width), {}).setdefault(call, task)
    return [list(batch.values()) for batch in (*theirs.values(), *ours.values())]


def run(
    planned: Sequence[Sequence[Task]], options: BenchOptions, workers: int, on_done: Callable[[Task], None]
) -> Iterator[str]:
    """Makes the calls in worker processes; yields a message for each that failed.

    Args:
        planned: as `batches` returns them.
        options: device and baselines of the benchmark.
        workers: processes.
        on_done: called after each call.
    """
    pool = WorkerPool(_call, (str(options.device), tuple(options.baselines)), min(workers, len(planned)), TIMEOUT_S)
    for task, failure, lost in pool.run(iter(planned)):
        on_done(task)
        if failure or lost:
            yield f"{task} was not compiled ahead: {failure or lost}"


def _call(device: str, baselines: Sequence[Any], task: Task) -> str:
    """Calls an implementation as it will be checked and timed; returns the error, or ""."""
    from flashkernel.ops import registry

    if baselines:
        import torch._inductor.config as inductor

        inductor.compile_threads = 1  # one worker per core
    # The key of Inductor's cache has all settings, also that the precision was set: the measured ceilings set it.
    torch.set_float32_matmul_precision(torch.get_float32_matmul_precision())
    where, op = torch.device(device), registry()[task.op]
    options = BenchOptions(where, implementations=[task.implementation], baselines=baselines)
    try:
        inputs = op.make_inputs(task.case, task.dtype, where)
        for candidate in candidates(op, task.case, task.dtype, options):
            settings = check.float32_sums() if task.is_check else nullcontext()
            with torch.no_grad(), settings, builds.build(candidate.name):
                candidate.function(**inputs, **candidate.options)
        if where.type == "cuda":
            torch.cuda.synchronize(where)
    except Exception as error:  # compilers raise anything; the timing process reports it in its record
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    finally:
        inputs = {}
        if baselines:
            torch._dynamo.reset()
        free_memory(where)
    return ""
