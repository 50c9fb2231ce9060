"""Times that kernels would take on a GPU that is not here, from the roofline model; estimates, never measurements.

A record has the bytes and FLOPs that the operator's cost counts, and the efficiency that was measured: the share of the
roof that it reached on the measured GPU. The estimate assumes the same efficiency under the other GPU's roof:

    ms = max(bytes / bandwidth, FLOPs / rate) / efficiency

Bandwidth and rate are those of the data sheet, which no copy and no matrix product reaches. Efficiency also differs: on
a Hopper GPU a kernel that multiplies by mma.sync, as Turing does, does not reach the matmul rate, whose products run by
wgmma. Compute-bound estimates for older GPUs are pessimistic by as much.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from flashkernel.core.device import KNOWN
from flashkernel.core.op import Case
from flashkernel.core.roofline import Ceilings
from flashkernel.lab import selection
from flashkernel.lab.profile_targets import preferred_order
from flashkernel.lab.results import Record

if TYPE_CHECKING:
    from rich.table import Table

# Peak rates from data sheets, by the names of core.device.KNOWN.
DATASHEETS = {"t4": Ceilings("Tesla T4", 0.320, {"float16": 65.0, "float32": 8.1})}
HALF = ("float16", "bfloat16")  # of equal size: a bfloat16 record stands for a float16 call
HEADINGS = ("operator", "case", "dtype", "direction", "build", "MB", "GFLOP", "efficiency", "roof, ms", "estimate, ms")


@dataclass(frozen=True)
class Estimate:
    """A kernel on a GPU that is not here."""

    op: str
    case: str
    dtype: str
    direction: str
    implementation: str  # the measured build
    measured_on: str
    measured_dtype: str
    measured_ms: float
    bytes: float
    flops: float
    efficiency: float  # share of the roof that was measured
    bound: str  # the roof of the other GPU: "memory" or "compute"
    roof_ms: float
    ms: float  # the estimate

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def estimates(files: Mapping[str, Mapping[str, Any]], device: str) -> list[Estimate]:
    """Estimates for a GPU from results files.

    Of the implementations of a case, the CUDA C++ build for the GPU's architecture ("cuda_sm75" for a T4) counts, and
    else Triton, where it supports the call on that GPU. float16 records are preferred to bfloat16 ones.

    Args:
        files: results files by name, as `results.load_folder` returns them.
        device: the GPU's name, a key of `DATASHEETS`.
    """
    ceilings = _ceilings(device)
    build = f"cuda_sm{KNOWN[device].arch}"
    supported = _Support(device)
    best: dict[tuple[str, str, str, str], tuple[tuple[bool, bool], Estimate]] = {}
    for file in files.values():
        for record in file["records"]:
            dtype = _dtype_there(record, ceilings)
            if dtype is None or record.implementation not in (build, "triton"):
                continue
            if record.implementation != build and not supported(record, dtype):
                continue
            key = (record.op, record.case, dtype, record.direction)
            rank = (record.implementation == build, record.dtype == dtype)
            if key not in best or rank > best[key][0]:
                best[key] = (rank, _estimate(record, dtype, file["device"], ceilings))
    most = KNOWN[device].memory_bytes
    return [found for _, found in best.values() if found.bytes <= most]


def _ceilings(device: str) -> Ceilings:
    if device not in DATASHEETS:
        raise selection.UnknownNameError(f"no data sheet of {device!r}; there is one of: {', '.join(DATASHEETS)}")
    return DATASHEETS[device]


def _dtype_there(record: Any, ceilings: Ceilings) -> str | None:
    """The dtype that a record is an estimate for; None where it gives none."""
    if not isinstance(record, Record) or not record.comparable or not record.roof or not record.tbs:
        return None
    name = "float16" if record.dtype in HALF else record.dtype
    return name if name in ceilings.matmul_tflops else None


def _estimate(record: Record, dtype: str, measured_on: str, ceilings: Ceilings) -> Estimate:
    assert record.ms is not None
    assert record.roof is not None
    seconds = record.ms["p50"] / 1e3
    bytes, flops = (record.tbs or 0.0) * 1e12 * seconds, (record.tflops or 0.0) * 1e12 * seconds
    memory_s = bytes / (ceilings.copy_tbs * 1e12)
    compute_s = flops / (ceilings.matmul_tflops[dtype] * 1e12)
    roof_ms = 1e3 * max(memory_s, compute_s)
    # Above 1 a measurement beat the roof, which an L2 cache can; a smaller one would not.
    efficiency = min(1.0, record.roof)
    return Estimate(
        record.op, record.case, dtype, record.direction, record.implementation, measured_on, record.dtype,
        record.ms["p50"], bytes, flops, efficiency, "compute" if compute_s > memory_s else "memory", roof_ms,
        roof_ms / efficiency,
    )  # fmt: skip


class _Support:
    """Answers whether Triton supports a record's case on a GPU; each case is asked once."""

    def __init__(self, device: str) -> None:
        from flashkernel.ops import registry

        self.hardware, self.ops = KNOWN[device], registry()
        self.answers: dict[tuple[str, str, str], bool] = {}

    def __call__(self, record: Record, dtype: str) -> bool:
        key = (record.op, record.case, dtype)
        if key not in self.answers:
            self.answers[key] = self._ask(*key)
        return self.answers[key]

    def _ask(self, name: str, case_name: str, dtype: str) -> bool:
        op = self.ops.get(name)
        case = None if op is None else _case_of(op.name, op.benches, case_name)
        if op is None or case is None:
            return False
        return selection.declined(op, case, getattr(torch, dtype), self.hardware, "triton") is None


def _case_of(op: str, benches: Iterable[Case], name: str) -> Case | None:
    from flashkernel.lab import suites

    return next((case for case in (*benches, *suites.cases_of(op)) if case.name == name), None)


def representative(found: Sequence[Estimate]) -> list[Estimate]:
    """For each operator, build, dtype and direction its most representative case, by the rule of the profiles."""
    groups: dict[tuple[str, str, str, str], list[Estimate]] = {}
    for one in found:
        groups.setdefault((one.op, one.implementation, one.dtype, one.direction), []).append(one)
    chosen = []
    for group in groups.values():
        chosen.append(group[preferred_order([one.bytes / 1e9 + one.flops / 1e12 for one in group])[0]])
    return [one for one in found if one in chosen]


def _amount(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _cells(one: Estimate) -> list[str]:
    from flashkernel.lab.tables import milliseconds

    return [
        one.op, one.case, one.dtype, one.direction, one.implementation, _amount(one.bytes / 1e6),
        _amount(one.flops / 1e9), f"{one.efficiency:.0%}", f"{milliseconds(one.roof_ms)} ({one.bound})",
        milliseconds(one.ms),
    ]  # fmt: skip


def rich_table(found: Sequence[Estimate], device: str) -> Table:
    """A terminal table of estimates."""
    from rich.markup import escape
    from rich.table import Table

    ceilings = _ceilings(device)
    rates = ", ".join(f"{name} {rate:g} TFLOP/s" for name, rate in ceilings.matmul_tflops.items())
    title = f"estimates for {ceilings.device} ({ceilings.copy_tbs * 1e3:.0f} GB/s, {rates}), measured on another GPU"
    caption = "efficiency: the measured share of the measured GPU's roof; estimate: this GPU's roof / efficiency"
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for index, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="left" if index < 5 else "right")
    for one in found:
        table.add_row(*map(escape, _cells(one)))
    return table


def markdown(found: Sequence[Estimate]) -> str:
    """The same table in markdown."""
    lines = ["| " + " | ".join(HEADINGS) + " |", "| " + " | ".join(["---"] * 5 + ["---:"] * 5) + " |"]
    lines += ["| " + " | ".join(_cells(one)) + " |" for one in found]
    return "\n".join(lines)
