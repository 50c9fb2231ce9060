"""The roofline model: measured ceilings of a machine, and the share of them that a measurement reaches.

A computation that moves B bytes and does F operations takes at least max(B / bandwidth, F / rate): its roofline time.
The larger of the two says whether it is memory-bound or compute-bound. Both ceilings are measured here, on random data
(zeros draw less power and run faster), not taken from a data sheet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from flashkernel.core.device import GIB, MIB, properties
from flashkernel.core.timing import measure

GPU_DTYPES = ("bfloat16", "float16", "float32", "tf32")
CPU_DTYPES = ("bfloat16", "float16", "float32")
BUDGET_S = 0.5  # of timing for each point
SLOW_CPU_TFLOPS = 0.01  # a CPU without instructions for a dtype: larger products would take seconds


@dataclass(frozen=True)
class Ceilings:
    """Measured peak rates: a large copy in TB/s (bytes read plus written), matrix products in TFLOP/s."""

    device: str
    copy_tbs: float
    matmul_tflops: Mapping[str, float] = field(default_factory=dict)  # by dtype name; "tf32" is float32 on tensor cores

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "matmul_tflops": dict(self.matmul_tflops)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Ceilings:
        rates = {str(name): float(rate) for name, rate in values["matmul_tflops"].items()}
        return cls(str(values["device"]), float(values["copy_tbs"]), rates)


@dataclass(frozen=True)
class RooflinePoint:
    """A measurement in the roofline model."""

    tflops: float
    tbs: float  # TB/s
    roof: float  # roofline time / measured time; 1.0 is on the roof
    bound: str  # "memory" or "compute"


_copy_rates: dict[torch.device, float] = {}
_matmul_rates: dict[tuple[torch.device, str], float] = {}


def ceilings(device: torch.device | str, dtypes: Sequence[str | torch.dtype] | None = None) -> Ceilings:
    """Measure this machine's ceilings; each is measured once per process."""
    device = _indexed(torch.device(device))
    if dtypes is None:
        dtypes = GPU_DTYPES if device.type == "cuda" else CPU_DTYPES
    names = [dtype_name(dtype) for dtype in dtypes]
    if device not in _copy_rates:
        _copy_rates[device] = _measure_copy(device)
    for name in names:
        if (device, name) not in _matmul_rates:
            _matmul_rates[device, name] = _measure_matmul(device, name)
    return Ceilings(properties(device).name, _copy_rates[device], {name: _matmul_rates[device, name] for name in names})


def point(flops: float, bytes: float, ms: float, dtype: str | torch.dtype, ceilings: Ceilings) -> RooflinePoint:
    """The point of a computation in the roofline model.

    Args:
        flops: Floating-point operations.
        bytes: Bytes through device memory.
        ms: Measured milliseconds.
        dtype: Selects the matrix-product ceiling; not used where `flops` is 0.
        ceilings: The machine's.
    """
    if not ms > 0:
        raise ValueError(f"roofline: ms is {ms}; a measured time is above zero")
    seconds = ms / 1e3
    compute_s = 0.0
    if flops:
        name = dtype_name(dtype)
        if name not in ceilings.matmul_tflops:
            known = ", ".join(ceilings.matmul_tflops) or "none"
            raise ValueError(
                f"roofline: no matmul ceiling was measured for {name} (there are: {known}); measure it first"
            )
        compute_s = flops / (ceilings.matmul_tflops[name] * 1e12)
    memory_s = bytes / (ceilings.copy_tbs * 1e12)
    bound = "compute" if compute_s > memory_s else "memory"
    return RooflinePoint(flops / seconds / 1e12, bytes / seconds / 1e12, max(compute_s, memory_s) / seconds, bound)


def dtype_name(dtype: str | torch.dtype) -> str:
    """ "bfloat16" for torch.bfloat16; "tf32" stays, being a way to multiply float32 rather than a dtype of its own."""
    name = str(dtype).removeprefix("torch.")
    if name != "tf32" and not isinstance(getattr(torch, name, None), torch.dtype):
        raise ValueError(f"{dtype!r} is no dtype; use one of {', '.join(GPU_DTYPES)}, or another torch dtype's name")
    return name


def _indexed(device: torch.device) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device


def _median_s(call: Callable[[], Any], device: torch.device) -> float:
    """Median seconds of a call whose data exceed the cache, so that one input set is enough."""
    mode = "events" if device.type == "cuda" else "cpu"
    return measure(call, device=device, mode=mode, warmup=20, repeats=200, budget_s=BUDGET_S).p50 / 1e3


def _measure_copy(device: torch.device) -> float:
    size = 64 * MIB
    if device.type == "cuda":
        size = max(size, min(GIB, torch.cuda.mem_get_info(device)[0] // 4))
    source = torch.randn(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _median_s(lambda: target.copy_(source), device) / 1e12


def _measure_matmul(device: torch.device, name: str) -> float:
    dtype = torch.float32 if name == "tf32" else getattr(torch, name)
    with _float32_matmul("high" if name == "tf32" else "highest"):
        if device.type == "cuda":
            return max(_matmul_tflops(size, dtype, device) for size in (4096, 8192))
        small = _matmul_tflops(128, dtype, device)
        return small if small < SLOW_CPU_TFLOPS else max(small, _matmul_tflops(1024, dtype, device))


def _matmul_tflops(size: int, dtype: torch.dtype, device: torch.device) -> float:
    a = torch.randn(size, size, device=device).to(dtype)
    b = torch.randn(size, size, device=device).to(dtype)
    out = torch.empty_like(a)
    return 2 * size**3 / _median_s(lambda: torch.mm(a, b, out=out), device) / 1e12


@contextmanager
def _float32_matmul(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
