"""The GEMM ladder measured: every rung, and cuBLAS, on one product in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace

import torch
from torch import Tensor

from flashkernel.core import cuda, roofline, timing
from flashkernel.core.check import compare
from flashkernel.lab.ladder_tables import OP
from flashkernel.lab.results import STATISTICS, Record
from flashkernel.ops.gemm import ladder

BASELINE = "cublas"  # torch.matmul


def measure(
    size: int,
    dtype: torch.dtype,
    device: torch.device,
    ceilings: roofline.Ceilings,
    budget_s: float = 1.0,
    on_progress: Callable[[str], None] = lambda text: None,
) -> Iterator[Record]:
    """Yields a record for each rung that takes the dtype on this GPU, then cuBLAS's.

    Each is first checked against the product in float64; a wrong one is not timed, and one that fails has the error.

    Args:
        size: M, N and K.
        dtype: The dtype of the matrices.
        device: A GPU.
        ceilings: Its measured bandwidth and FLOP rates.
        budget_s: Seconds per measurement.
        on_progress: Called with the name of the rung that is measured next.
    """
    sets = timing.rotation(3 * size * size * dtype.itemsize, device)
    generator = torch.Generator(device).manual_seed(1)
    inputs = [_matrices(size, dtype, device, generator) for _ in range(sets)]
    a, b = inputs[0]
    exact, torch_own = a.double() @ b.double(), a @ b
    target = cuda.target(device)
    runs: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        rung.name: lambda a, b, name=rung.name: ladder.matmul(a, b, name)  # type: ignore[misc]
        for rung in ladder.RUNGS
        if ladder.unsupported(rung, a, b, target) is None
    }
    for name, run in {**runs, BASELINE: torch.matmul}.items():
        on_progress(name)
        sizes, kind = dict.fromkeys(("m", "n", "k"), size), "baseline" if name == BASELINE else "backend"
        record = Record(OP, str(size), sizes, roofline.dtype_name(dtype), "fwd", name, kind, correct=False)
        calls = [lambda a=a, b=b, run=run: run(a, b) for a, b in inputs]  # type: ignore[misc]
        try:
            report = compare("C", run(a, b), exact, torch_own)
            timed = timing.measure(calls, device=device, budget_s=budget_s) if report.ok else None
        except RuntimeError as error:  # of the compiler or the driver
            yield replace(record, error=f"{type(error).__name__}: {error}")
            continue
        if timed is None:
            yield replace(record, note=report.message)
            continue
        flops, moved = 2.0 * size**3, 3.0 * size * size * dtype.itemsize
        point = roofline.point(flops, moved, timed.p50, dtype, ceilings)
        ms = {statistic: value for statistic, value in asdict(timed).items() if statistic in STATISTICS}
        yield replace(
            record, correct=True, ms=ms, tflops=point.tflops, tbs=point.tbs, roof=point.roof, bound=point.bound,
            mode=timed.mode, note="; ".join(timed.notes) or None,
        )  # fmt: skip


def _matrices(size: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    a, b = (torch.randn(size, size, generator=generator, device=device).to(dtype) for _ in range(2))
    return a, b
