"""The process that is profiled: it runs benchmark cases, each direction in an NVTX range of its own.

    ncu ... python -m flashkernel.lab.profile_worker work.json status.jsonl

`work.json` has the tool, the device and the targets. A line is appended to `status.jsonl` before and after each target,
so that the parent knows how far the process came, even if a kernel ends it. The process ends early, after the target at
hand, once a file `stop` lies beside `work.json`. Compilation and allocation happen in calls before the range.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.autograd.grad_mode import set_multithreading_enabled

from flashkernel.core import check
from flashkernel.core.op import Case, Op
from flashkernel.lab import bench, builds, selection

WARM_UPS = 2
STOP = "stop"


@dataclass(frozen=True)
class Target:
    """A case to profile on one implementation; the case and the dtype by name, so that it travels as JSON."""

    op: str
    case: str
    dtype: str
    implementation: str

    def resolve(self) -> tuple[Op, Case, torch.dtype]:
        (op,) = selection.operators([self.op])
        found = [case for case in (*op.benches, *op.cases) if case.name == self.case]
        if not found:
            raise selection.UnknownNameError(f"{op.name} has no case {self.case!r}")
        return op, found[0], selection.DTYPES[self.dtype]

    def directions(self) -> list[str]:
        """The directions that it is profiled in: forward, and backward where case and backend have one."""
        op, case, dtype = self.resolve()
        backward = op.backend(builds.backend_of(self.implementation)).offers(op.backward)
        return [name for name in bench.directions_of(op, case, dtype) if name == "fwd" or backward]


@dataclass(frozen=True)
class WarmUp:
    """How the first calls of a target went: "" or the error, and whether the process can go on."""

    error: str
    worker_is_broken: bool = False


def label(index: int, direction: str) -> str:
    """The NVTX range of a target's direction; no label is part of another."""
    return f"flashkernel.{index}.{direction};"


def prepared(target: Target, device: torch.device) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yields (direction, call) of a target, warmed up; call it before taking the next one.

    Kernels of the backward launch from the calling thread, since an NVTX range belongs to a thread.
    """
    op, case, dtype = target.resolve()
    inputs = op.make_inputs(case, dtype, device)
    function = partial(op.call, backend=builds.backend_of(target.implementation), **case.options)
    for direction in target.directions():
        wanted = check.wanted_gradients(op, case, inputs) if direction != "fwd" else []
        with torch.set_grad_enabled(direction != "fwd"):
            (call,) = bench.build_calls(function, direction, [inputs], wanted, device)
            for _ in range(WARM_UPS):
                call()
            yield direction, call


def warm_up(device: str, target: Target) -> WarmUp:
    """Runs a target without a profiler: what it compiles is on the disk afterwards.

    An error in the backward alone is left to the profiled run, which keeps the forward.
    """
    warnings.simplefilter("ignore")
    where, error, ran = torch.device(device), "", 0
    try:
        with builds.build(target.implementation):
            for _ in prepared(target, where):
                ran += 1
    except Exception as failure:  # a kernel may raise anything; the target gets a record with the error
        error = f"{type(failure).__name__}: {failure}".splitlines()[0][:300]
    try:
        bench.free_memory(where)
    except bench.DeviceLostError as lost:
        return WarmUp(error or str(lost), True)
    return WarmUp("" if ran else error)


@contextmanager
def _counted(name: str) -> Iterator[list[dict[str, Any]]]:
    """ncu profiles the kernels launched inside; it writes them itself."""
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    torch.cuda.nvtx.range_push(name)
    try:
        yield []
        torch.cuda.synchronize()
    finally:
        torch.cuda.nvtx.range_pop()
        torch.cuda.cudart().cudaProfilerStop()


@contextmanager
def _timed(device: torch.device) -> Iterator[list[dict[str, Any]]]:
    """torch's profiler: names and microseconds of kernels; of torch's outermost operators on a CPU."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device.type == "cuda"
    found: list[dict[str, Any]] = []
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        yield found
        if on_gpu:
            torch.cuda.synchronize(device)
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    for event in profiler.events():
        if event.device_type == kind and (on_gpu or event.cpu_parent is None):
            found.append({"name": event.name, "duration_us": event.time_range.elapsed_us()})


def profile_target(index: int, target: Target, tool: str, device: torch.device) -> dict[str, Any]:
    """Runs one target under a tool; returns its status line: the kernels by direction, and the error if it failed."""
    kernels: dict[str, list[dict[str, Any]]] = {}
    error = None
    try:
        with builds.build(target.implementation), set_multithreading_enabled(False):
            for direction, call in prepared(target, device):
                with _timed(device) if tool == "torch" else _counted(label(index, direction)) as found:
                    call()
                kernels[direction] = found
    except Exception as failure:  # as in warm_up
        error = f"{type(failure).__name__}: {failure}".splitlines()[0][:300]
    return {"done": index, "kernels": kernels, "error": error}


def main(work_file: Path, status_file: Path) -> int:
    """Profiles the targets of `work_file`; returns the exit code: 1 where the GPU is unusable after an error."""
    warnings.simplefilter("ignore")
    work: Mapping[str, Any] = json.loads(work_file.read_text(encoding="utf-8"))
    device = torch.device(work["device"])
    with status_file.open("a", encoding="utf-8") as status:

        def report(line: Mapping[str, Any]) -> None:
            status.write(json.dumps(line) + "\n")
            status.flush()

        report({"pid": os.getpid()})
        for index, values in work["targets"]:
            if (work_file.parent / STOP).exists():
                break
            report({"start": index})
            report(profile_target(index, Target(**values), work["tool"], device))
            try:
                bench.free_memory(device)
            except bench.DeviceLostError:
                return 1
    return 0


def write_work(path: Path, tool: str, device: torch.device, targets: Mapping[int, Target]) -> None:
    """Writes the file that `main` reads."""
    listed = [[index, asdict(target)] for index, target in targets.items()]
    path.write_text(json.dumps({"tool": tool, "device": str(device), "targets": listed}), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
