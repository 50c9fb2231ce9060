"""The compile tier: every Triton and Gluon kernel for every architecture it claims, with no GPU. No stack spills.

Run with `-m compile`, in a process where Triton's interpreter is off. `make compile-test` has a benchmark case of every
kind; those that differ from it in sizes alone are marked `every_config` (`make compile-test-configs`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch
from compiled import MachineCode, compiled, integers_of_one
from sass import StackTraffic, stack_traffic

from flashkernel.core import cuda
from flashkernel.core import device as devices
from flashkernel.core.check import execute, wanted_gradients
from flashkernel.core.dispatch import BackendError
from flashkernel.core.launch import Launch, collect_launches
from flashkernel.core.op import Case, Op
from flashkernel.lab.selection import explain_case, shapes_only
from flashkernel.ops import registry

pytestmark = pytest.mark.compile

PARKED = 160  # bytes of stack for values that are needed between loops
PARKED_BY = {"attention_backward_keys": 176}  # its offsets of heads are 64 bits wide
PARKED_MASKS = 160  # more in Triton's attention for heads of 80, 96 and 192: the masks of their columns
FEW = 2  # loads from there in the loops of warpgroups that hold nearly all registers there are
GPUS = {75: "t4", 80: "a100", 90: "h200"}
ONE_WIDTH = ("attention_fp8", "attention_varlen")  # they share tiles with attention, which has all widths of heads
# Why one of the two backends declines a benchmark that the other serves.
LEFT_TO_OTHERS = ("no shared prefix", "have kernels of their own", "reads weights in tiles", "read rows, not")


def _selected() -> Iterator[object]:
    """Every benchmark case on the newest GPU, those of a T4 (`turing_cases`) in float16, and else the first case.

    On the newest GPU, of cases that differ in sizes other than the head's, or in causality, the last one is marked
    `newest`, for the newest triton. What `make compile-test` leaves out is marked `every_config`.
    """
    for op in registry().values():
        names = {backend.name for backend in op.backends}
        for backend, arch in [("triton", arch) for arch in GPUS] + [("hopper", 90)]:
            if backend not in names:
                continue
            kinds = {_kind(case): case for case in op.benches} if arch == 90 else {}
            usual = _richest(op) if "hopper" in names else list(kinds.values())
            usual = usual[-1:] if op.name in ONE_WIDTH else usual
            for case in op.benches if arch == 90 else turing_cases(op) if arch == 75 else op.benches[:1]:
                dtype = torch.float16 if arch == 75 else case.dtypes[0]
                name = f"{op.name}-{case.name}-sm{arch}{'-hopper' if backend == 'hopper' else ''}"
                # Cases that may share kernels go to one worker, which compiles each once.
                marks = [pytest.mark.xdist_group(f"{op.name}-{backend}-{arch}-{case.axes.get('head_dim')}")]
                if arch == 90 and case in kinds.values():
                    marks.append(pytest.mark.newest)
                if arch == 90 and case not in usual:
                    marks.append(pytest.mark.every_config)
                yield pytest.param(op, case, dtype, arch, backend, id=name, marks=marks)


def turing_cases(op: Op) -> list[Case]:
    """A case of every kind that Triton serves on a T4, or the first one, which then says why it serves none.

    Kernels with matrix products are not among them: Triton has no tensor-core code before sm_80.
    """
    t4 = devices.KNOWN["t4"]
    served = [case for case in op.benches if explain_case(op, case, torch.float16, t4, "triton").chosen]
    return list({(_kind(case), case.gradients): case for case in served}.values()) or list(op.benches[:1])


def _kind(case: Case) -> tuple[str, object]:
    return re.sub(r"\d+|-causal", "", case.name), case.axes.get("head_dim")


def _richest(op: Op) -> list[Case]:
    """The first case, and of every width of heads those with inputs and options that no other case has all of.

    Kernels with matrix products take seconds to compile: these have every input and option once, not every combination.
    """
    variants = {(case.axes.get("head_dim"), _features(case)): case for case in op.benches}
    first = (op.benches[0].axes.get("head_dim"), _features(op.benches[0]))
    return [
        case
        for (dim, features), case in variants.items()
        if (dim, features) == first or not any(dim == other_dim and features < other for other_dim, other in variants)
    ]


def _features(case: Case) -> frozenset[str]:
    """What chooses among a kernel's variants: inputs, their dtypes, options (those that are names by value)."""
    options = {f"{name}={value}" if isinstance(value, str) else name for name, value in case.options.items()}
    dtypes = {f"{name}: {dtype}" for name, dtype in case.dtype_of.items()}
    return frozenset({*case.present, *options, *dtypes, *(["backward"] if case.gradients else [])})


def launches_of(op: Op, case: Case, dtype: torch.dtype, arch: int, backend: str = "triton") -> list[Launch]:
    """What a call and its backward would launch, found by running them on meta tensors."""
    return _all_launches(op, case, dtype, arch, backend)[0]


def _all_launches(
    op: Op, case: Case, dtype: torch.dtype, arch: int, backend: str
) -> tuple[list[Launch], list[cuda.RecordedLaunch]]:
    """Launches of Triton's kernels, and of those in CUDA C++."""
    inputs = shapes_only(op, case, dtype)
    pretended = devices.pretend(devices.KNOWN[GPUS[arch]])
    with pretended, collect_launches() as launches, cuda.recorded_launches() as others:
        execute(op.call, inputs, {**case.options, "backend": backend}, wanted_gradients(op, case, inputs))
    return launches, others


@pytest.mark.parametrize("op, case, dtype, arch, backend", list(_selected()))
def test_compiles_without_spills(op: Op, case: Case, dtype: torch.dtype, arch: int, backend: str) -> None:
    try:
        launches, others = _all_launches(op, case, dtype, arch, backend)
    except BackendError as refusal:
        if any(reason in str(refusal).splitlines()[0] for reason in LEFT_TO_OTHERS):
            pytest.skip(str(refusal).splitlines()[0])
        first = 89 if "sm_89" in str(refusal) else 80  # where Triton has tensor cores: those for FP8 came later
        if arch >= first:
            raise
        pytest.skip(str(refusal).splitlines()[0])
    assert launches or others, f"{op.name} launched nothing"
    for other in others:
        log = other.kernel.module.compile(other.kernel.name, arch).log
        assert " 0 bytes spill stores" in log, f"{other.kernel.name} spills: {log}"
        assert "C75" not in log, f"{other.kernel.name}: wgmma is serialized, or setmaxnreg ignored"
    for launch in launches:
        machine = compiled(launch, arch)
        gluon = launch.kernel.is_gluon()
        _assert_no_spills(launch, machine, arch)
        assert not machine.lost, f"{launch.name}: Triton takes the first iteration's {machine.lost} for all iterations"
        assert machine.shared <= devices.KNOWN[GPUS[arch]].shared_per_block, (
            f"{launch.name} asks for {machine.shared} bytes"
        )
        if arch == 75:
            assert "tt.dot" not in machine.ttir, f"{launch.name} multiplies matrices, without tensor cores on sm_75"
        if gluon:
            product = "QGMMA" if launch.name.endswith("fp8") or _multiplies_in_fp8(case) else "HGMMA"
            assert product in machine.sass, f"{launch.name} does not multiply on the tensor cores' asynchronous path"


def _multiplies_in_fp8(case: Case) -> bool:
    rounded = case.options.get("activations") == "fp8" or "x:float8" in case.options.get("layout", "")
    return rounded or torch.float8_e4m3fn in case.dtype_of.values()


def _assert_no_spills(launch: Launch, machine: MachineCode, arch: int) -> None:
    """No stack traffic in loops but the few loads that warpgroups with nearly all registers may have."""
    if machine.stack == 0:
        return
    traffic = stack_traffic(machine.sass)
    spilled = f"{launch.name} {launch.constants}: {machine.stack} bytes of stack on sm_{arch}, in loops {traffic}"
    head_dim = getattr(launch.constants.get("TRAITS"), "HEAD_DIM", 64)
    padded = launch.name.startswith("attention") and head_dim in (80, 96, 192)
    assert machine.stack <= PARKED_BY.get(launch.name, PARKED) + padded * PARKED_MASKS, spilled
    assert traffic.stores == 0, spilled
    assert not launch.kernel.is_gluon() or traffic.loads <= FEW, spilled


def _with_ones() -> Iterator[object]:
    """Operators whose sizes are 1 in use: one row, one query, one sequence."""
    for name in ("decode_attention", "rms_norm", "softmax", "rope"):
        op = registry()[name]
        for backend in op.backends:
            if backend.name in ("triton", "hopper"):
                yield pytest.param(op, backend.name, id=f"{op.name}-{backend.name}")


@pytest.mark.every_config
@pytest.mark.parametrize("op, backend", list(_with_ones()))
def test_integers_of_one_do_not_spill(op: Op, backend: str) -> None:
    """Triton compiles an integer equal to 1 in: on an H200, every such variant of what the benchmarks launch."""
    launches: list[Launch] = []
    for case in op.benches:
        with suppress(BackendError):  # test_compiles_without_spills asks for the reason
            launches += launches_of(op, case, case.dtypes[0], 90, backend)
    assert launches, f"{op.name} launched nothing"
    for launch in launches:
        if integers_of_one(launch):
            _assert_no_spills(launch, compiled(launch, 90, ones=True), 90)


@pytest.mark.parametrize(
    "store, counted", [(0x10, False), (0x30, True), (0x70, True), (0xA0, False)],
    ids=["before", "in the loop", "in the loop inside it", "in the outer loop"],
)  # fmt: skip
def test_finds_spills_in_loops_that_multiply(store: int, counted: bool) -> None:
    """A loop of products with a small loop inside and a wait out of line, in an outer loop."""
    code = dict.fromkeys(range(0, 0x100, 0x10), "NOP")
    code[0x40] = "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24"
    code[0x50] = "@!P1 BRA 0xd0"  # to wait
    code[0x80] = "@P2 BRA 0x70"  # the small loop
    code[0x90] = "@P3 BRA 0x30"  # the products' loop
    code[0xB0] = "@P4 BRA 0x20"  # the outer loop
    code[0xC0] = "EXIT"
    code[0xE0] = "@!P1 BRA 0xd0"
    code[0xF0] = "BRA 0x60"  # back to where it was left: no loop
    code[store] = "STL [R1], R0"
    sass = "".join(f"/*{address:04x}*/ {text} ;\n" for address, text in sorted(code.items()))
    assert stack_traffic(sass) == StackTraffic(int(counted), 0)
    assert stack_traffic(sass.replace("STL [R1], R0", "LDL R0, [R1]")) == StackTraffic(0, int(counted))
