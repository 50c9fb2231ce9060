"""What a profile keeps: hardware counters of each kernel, and the operator's point on the roofline.

The rule of `limiter`, from Nsight Compute's percentages of peak: memory is the larger of DRAM and L2 throughput,
compute the larger of SM and tensor-pipe throughput. Where both are under 60%, neither unit is kept busy and the kernel
is bound by latency; otherwise it is bound by the larger of the two (by memory where they are equal).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

BUSY_PCT = 60.0  # of peak: a unit below it is not what bounds the kernel; Nsight Compute's own threshold
TOP_STALLS = 3
MEANINGS = {  # of warp stall reasons: what the warps wait for
    "barrier": "other warps at a barrier",
    "branch_resolve": "a branch",
    "dispatch_stall": "the dispatcher",
    "drain": "stores to drain at the kernel's end",
    "gmma": "wgmma (tensor cores)",
    "imc_miss": "the constant cache",
    "lg_throttle": "the queue of global memory instructions",
    "long_scoreboard": "loads from global or local memory",
    "math_pipe_throttle": "a busy math pipe",
    "membar": "a memory fence",
    "mio_throttle": "the queue of shared memory instructions",
    "misc": "other reasons",
    "no_instruction": "instruction fetch",
    "not_selected": "other warps that were ready too",
    "short_scoreboard": "shared memory or special functions",
    "sleeping": "nanosleep",
    "tex_throttle": "the texture queue",
    "wait": "a fixed-latency instruction",
}


@dataclass(frozen=True)
class KernelProfile:
    """The launches of one kernel with one launch configuration. A counter that was not read is None.

    Percentages and stalls of several launches are averages weighted by duration; durations and bytes are sums.
    """

    name: str
    launches: int
    duration_us: float
    grid: str | None = None
    block: str | None = None
    registers: int | None = None  # per thread
    shared_static: int | None = None  # bytes per block
    shared_dynamic: int | None = None
    achieved_occupancy: float | None = None  # % of the SM's warps
    theoretical_occupancy: float | None = None
    dram_pct: float | None = None  # of peak throughput
    l2_pct: float | None = None
    sm_pct: float | None = None
    tensor_pct: float | None = None
    dram_bytes: float | None = None
    stalls: Mapping[str, float] | None = None  # top reasons: cycles a warp waits per issued instruction

    @property
    def limiter(self) -> str | None:
        """ "memory", "compute" or "latency"; None without counters."""
        memory = [value for value in (self.dram_pct, self.l2_pct) if value is not None]
        compute = [value for value in (self.sm_pct, self.tensor_pct) if value is not None]
        if not memory or not compute:
            return None
        if max(*memory, *compute) < BUSY_PCT:
            return "latency"
        return "memory" if max(memory) >= max(compute) else "compute"

    @property
    def meaning(self) -> str:
        """The rule's verdict in a sentence, with the figures that it follows from."""
        limiter = self.limiter
        if limiter is None:
            return "no counters: names and durations only"
        figures = {"DRAM": self.dram_pct, "L2": self.l2_pct, "SM": self.sm_pct, "tensor pipe": self.tensor_pct}
        known = {name: value for name, value in figures.items() if value is not None}
        if limiter == "latency":
            busiest = ", ".join(f"{name} {value:.0f}%" for name, value in known.items())
            stall = next(iter(self.stalls or {}), None)
            waits = "" if stall is None else f"; warps wait mostly for {MEANINGS.get(stall, stall)}"
            return f"bound by latency: {busiest}{waits}"
        names = ("DRAM", "L2") if limiter == "memory" else ("SM", "tensor pipe")
        name = max((name for name in names if name in known), key=lambda name: known[name])
        return f"bound by {limiter}: {name} at {known[name]:.0f}% of peak"

    def as_dict(self) -> dict[str, Any]:
        values = {**asdict(self), "limiter": self.limiter}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class Measured:
    """What was measured: one implementation on one case in one direction."""

    op: str
    case: str
    axes: Mapping[str, Any]
    dtype: str
    direction: str  # "fwd", "bwd" or "fwd+bwd"
    implementation: str  # a backend, a build such as "cuda_sm75", or a baseline


@dataclass(frozen=True)
class ProfileRecord(Measured):
    """One implementation profiled on one case in one direction."""

    tool: str  # "ncu", or "torch": torch's profiler, which reads no counters
    kernels: tuple[KernelProfile, ...] = ()
    ms: float | None = None  # sum of the kernels' durations
    flops: float | None = None  # the least that the operator must do, as it declares
    bytes: float | None = None
    intensity: float | None = None  # FLOP per byte
    tflops: float | None = None  # achieved, TFLOP/s
    tbs: float | None = None  # achieved, TB/s
    roof: float | None = None  # least possible time / measured time
    bound: str | None = None  # the roof above this intensity: "memory" or "compute"
    error: str | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        """A later record with the same key replaces this one."""
        return self.op, f"{self.op} {self.case}", self.dtype

    @property
    def main(self) -> KernelProfile | None:
        """The kernel that takes most of the time."""
        return max(self.kernels, key=lambda kernel: kernel.duration_us, default=None)

    @property
    def meaning(self) -> str:
        """What bounds the kernel that takes most of the time, or why there is no profile."""
        if self.error is not None:
            return f"failed: {self.error}"
        return "no kernel ran" if self.main is None else self.main.meaning

    def as_dict(self) -> dict[str, Any]:
        values = {**asdict(self), "kernels": [kernel.as_dict() for kernel in self.kernels], "meaning": self.meaning}
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ProfileRecord:
        axes = {axis: tuple(size) if isinstance(size, list) else size for axis, size in values["axes"].items()}
        kernels = tuple(
            KernelProfile(**{name: value for name, value in kernel.items() if name != "limiter"})
            for kernel in values["kernels"]
        )
        kept = {name: value for name, value in values.items() if name != "meaning"}
        return cls(**{**kept, "axes": axes, "kernels": kernels})


def merged(kernels: Sequence[KernelProfile]) -> tuple[KernelProfile, ...]:
    """Launches of the same kernel with the same launch configuration as one entry, in order of first launch."""
    groups: dict[tuple[Any, ...], list[KernelProfile]] = {}
    for kernel in kernels:
        key = (kernel.name, kernel.grid, kernel.block, kernel.registers, kernel.shared_static, kernel.shared_dynamic)
        groups.setdefault(key, []).append(kernel)
    return tuple(_merged_group(group) for group in groups.values())


def _merged_group(group: Sequence[KernelProfile]) -> KernelProfile:
    averaged = ("achieved_occupancy", "theoretical_occupancy", "dram_pct", "l2_pct", "sm_pct", "tensor_pct")
    stalls = {name for kernel in group for name in kernel.stalls or {}}
    waits = {name: _average(group, [(kernel.stalls or {}).get(name, 0.0) for kernel in group]) for name in stalls}
    means: dict[str, Any] = {name: _average(group, [getattr(kernel, name) for kernel in group]) for name in averaged}
    moved = [kernel.dram_bytes for kernel in group if kernel.dram_bytes is not None]
    return replace(
        group[0],
        launches=sum(kernel.launches for kernel in group),
        duration_us=sum(kernel.duration_us for kernel in group),
        dram_bytes=sum(moved) if moved else None,
        stalls=top_stalls(waits) or None,
        **means,
    )


def _average(group: Sequence[KernelProfile], values: Sequence[float | None]) -> float | None:
    """The mean weighted by duration, over the launches that have a value."""
    known = [(kernel.duration_us, value) for kernel, value in zip(group, values) if value is not None]
    weight = sum(duration for duration, _ in known)
    if not known:
        return None
    if weight <= 0:
        return sum(value for _, value in known) / len(known)
    return sum(duration * value for duration, value in known) / weight


def top_stalls(waits: Mapping[str, float | None]) -> dict[str, float]:
    """The largest stall reasons, in falling order; those that never occur are left out."""
    known = {name: value for name, value in waits.items() if value is not None and value > 0}
    return dict(sorted(known.items(), key=lambda item: -item[1])[:TOP_STALLS])
