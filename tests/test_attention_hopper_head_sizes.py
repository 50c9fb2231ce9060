"""Head sizes between powers of two on the Hopper attention kernels: only columns with data are multiplied."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch
from compiled import compiled
from emulated_hopper import check_case, emulated
from sass import StackTraffic, stack_traffic

import flashkernel as fk
from flashkernel.blocks.mask import causal, window
from flashkernel.core import device as devices
from flashkernel.core import tune
from flashkernel.core.check import verify
from flashkernel.core.launch import Launch, collect_launches
from flashkernel.core.op import Case, Op
from flashkernel.lab.selection import explain_case
from flashkernel.ops.attention import hopper
from flashkernel.ops.attention.hopper import varlen_schedule
from flashkernel.ops.attention.hopper.backward_configs import (
    BACKWARD,
    WIDE_BACKWARD,
    BackwardConfig,
    WideBackwardConfig,
)
from flashkernel.ops.attention.hopper.backward_dq_configs import BACKWARD_DQ
from flashkernel.ops.attention.hopper.forward_configs import FORWARD, Forward
from flashkernel.ops.attention.hopper.shape_buckets import head_tail
from flashkernel.ops.attention.spec import ATTENTION
from flashkernel.ops.attention.varlen.spec import ATTENTION_VARLEN
from flashkernel.ops.attention.varlen.spec import _axes as _packed
from flashkernel.ops.attention.workload import axes_of

H200 = devices.KNOWN["h200"]
NARROW = BackwardConfig(64, 2, True, True, kv_stages=1, split_heads=True)
WIDE = WideBackwardConfig(3, split_heads=True)
WIDEST = WideBackwardConfig(2, split_heads=True)
TWO = Forward(2, 64, 2, 1, 240, split_heads=True)
THREE = Forward(3, 64, 4, 1, 160, split_heads=True)
DQ = Forward(2, 32, 3, 1, 240, split_heads=True)


Q_IN_REGISTERS = Forward(2, 64, 2, 1, 240, q_in_registers=True)


def _tunable(backward: Any) -> Any:
    return WIDE_BACKWARD if isinstance(backward, WideBackwardConfig) else BACKWARD


@pytest.fixture(autouse=True)
def _emulated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An H200 whose Gluon kernels run in the emulator, on 3 SMs, and others in Triton's interpreter."""
    with emulated(request, monkeypatch, hopper.forward_launch, hopper.backward_launch, varlen_schedule):
        yield


@pytest.mark.parametrize(
    "width, tail",
    [(40, 0), (64, 0), (72, 16), (80, 16), (96, 32), (104, 0), (128, 0), (144, 16), (160, 32), (192, 64), (200, 0)],
)
def test_tails(width: int, tail: int) -> None:
    """A head is split where two products of powers of two multiply fewer columns than one."""
    assert head_tail(width) == tail
    assert head_tail(width, split=False) == 0


def _check(op: Op, case: Case, forward: Forward, backward: Any, dq: Forward | None = None) -> None:
    with ExitStack() as configs:
        configs.enter_context(tune.override(FORWARD, forward))
        configs.enter_context(tune.override(_tunable(backward), backward))
        if dq is not None:
            configs.enter_context(tune.override(BACKWARD_DQ, dq))
        check_case(op, case)


_CAUSAL = {"mask": causal(), "return_lse": True}
CASES = {
    "80": (Case("80", axes_of(1, (130, 200), 2, 80)), TWO, NARROW),
    "96": (Case("96", axes_of(1, 300, (4, 2), 96), _CAUSAL), THREE, NARROW),
    "96-overlap": (
        Case("96-overlap", axes_of(1, (310, 290), (4, 2), 96), {"mask": causal() & window(150)}),
        Forward(2, 64, 4, 2, 240, overlap=True, split_heads=True),
        BackwardConfig(64, 2, False, False, split_heads=True),
    ),
    "80-sinks": (Case("80-sinks", axes_of(1, 150, (4, 1), 80), _CAUSAL, present=("sinks",)), THREE, NARROW),
    "192/128": (Case("192/128", axes_of(1, 150, (4, 2), (192, 128)), _CAUSAL), TWO, WIDE),
    "192/128-softcap": (Case("cap", axes_of(1, (70, 150), 2, (192, 128)), {"softcap": 2.0}), TWO, WIDE),
    "192": (Case("192", axes_of(1, (130, 100), 2, 192)), TWO, WIDEST),
    "128/80": (Case("128/80", axes_of(1, 140, 2, (128, 80)), _CAUSAL), TWO, NARROW),
}


@pytest.mark.parametrize("name", CASES)
def test_split_heads(name: str) -> None:
    _check(ATTENTION, *CASES[name])


@pytest.mark.parametrize("forward", [TWO, THREE], ids=str)
def test_split_heads_with_a_fixed_row_max(forward: Forward) -> None:
    """In bfloat16 the row max is that of a work tile's first K block, and nothing is rescaled."""
    case = Case("bf16", axes_of(1, 300, (4, 2), 96), _CAUSAL)
    with tune.override(FORWARD, forward), tune.override(BACKWARD, NARROW):
        reports = list(verify(ATTENTION, case, torch.bfloat16, "hopper", "cpu"))
    assert reports
    assert all(report.ok for report in reports), "\n".join(report.message for report in reports)


@pytest.mark.parametrize("dims, backward", [(96, NARROW), ((192, 128), WIDE)], ids=str)
def test_split_heads_of_packed_sequences_and_in_a_fixed_order(dims: Any, backward: Any) -> None:
    packed = Case("packed", _packed((130, 7, 0, 90), (4, 2), dims), {"causal": True, "return_lse": True})
    _check(ATTENTION_VARLEN, packed, TWO, backward)
    ordered = Case("ordered", axes_of(1, 150, (4, 2), dims), {**_CAUSAL, "deterministic": True})
    _check(ATTENTION, ordered, TWO, backward, DQ)


Q_CASES = {
    "256": Case("256", axes_of(1, (130, 200), (2, 1), 256), {"return_lse": True}),
    "256-sinks": Case("256-sinks", axes_of(2, (70, 300), 2, 256), {"softcap": 2.0}, present=("sinks",)),
    "192/128": Case("192/128", axes_of(1, 150, (4, 2), (192, 128))),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", Q_CASES)
def test_half_of_q_in_registers(name: str, dtype: torch.dtype) -> None:
    with tune.override(FORWARD, Q_IN_REGISTERS):
        reports = list(verify(ATTENTION, Q_CASES[name], dtype, "hopper", "cpu"))
    assert reports
    assert all(report.ok for report in reports), "\n".join(report.message for report in reports)


def test_q_in_registers_is_a_candidate_without_a_mask() -> None:
    shape = {"head_dim": 256, "value_dim": 256, "group_size": 1, "masked": 0, "seqlen_q": 4096, "seqlen_k": 4096,
             "mean_visible_keys": 4096, "fixed_max": 1, "has_tables": 0}  # fmt: skip
    assert any(config.q_in_registers for config in FORWARD.space(H200, shape))
    assert FORWARD.valid(Q_IN_REGISTERS, H200, shape) is None
    assert not FORWARD.heuristic(H200, shape).q_in_registers
    for changed, why in (({"masked": 1}, "no registers left"), ({"head_dim": 128}, "heads padded to 256")):
        assert not any(config.q_in_registers for config in FORWARD.space(H200, {**shape, **changed}))
        assert why in str(FORWARD.valid(Q_IN_REGISTERS, H200, {**shape, **changed}))


SHAPES = (
    "d80-n1024", "d96-n4096-causal", "d192-128-n4096-causal", "d64-n8192-causal", "d64-n2048", "d128-n8192",
    "d128-n2048-causal", "chunk-1024-of-16384",
)  # fmt: skip
PACKED_SHAPES = ("gqa-d128", "gpt-oss", "d64", "short-gqa-d128", "short-d64")


@pytest.mark.parametrize(
    "op, name",
    [*((ATTENTION, name) for name in SHAPES), *((ATTENTION_VARLEN, name) for name in PACKED_SHAPES)],
    ids=lambda x: getattr(x, "name", x),
)
def test_benchmarks_are_served_here(op: Op, name: str) -> None:
    """Dispatch selects these kernels for the benchmarks of head sizes, lengths and packed sequences on an H200."""
    case = next(case for case in op.benches if case.name == name)
    answer = explain_case(op, case, torch.bfloat16, H200)
    assert answer.chosen == "hopper", str(answer)


def test_in_the_tuning_space() -> None:
    shape = {"head_dim": 96, "value_dim": 96, "group_size": 1}
    for tunable in (FORWARD, BACKWARD, WIDE_BACKWARD, BACKWARD_DQ):
        split = [config for config in tunable.space(H200, shape) if config.split_heads]
        assert any(tunable.valid(config, H200, shape) is None for config in split)
        padded = {**shape, "head_dim": 128, "value_dim": 128}
        assert not any(config.split_heads for config in tunable.space(H200, padded))
        assert "no padding" in str(tunable.valid(split[0], H200, padded))


def _launches(dims: Any, heads: Any, masked: bool, configs: dict[Any, Any], **options: Any) -> list[Launch]:
    axes = axes_of(2, 4096, heads, dims)
    q, k, v = (
        torch.empty((2, 4096, axes[count], axes[width]), dtype=torch.bfloat16, device="meta").requires_grad_()
        for count, width in (("heads", "head_dim"), ("kv_heads", "head_dim"), ("kv_heads", "value_dim"))
    )
    with ExitStack() as stack:
        for tunable, config in configs.items():
            stack.enter_context(tune.override(tunable, config))
        stack.enter_context(devices.pretend(H200))
        launches = stack.enter_context(collect_launches())
        fk.attention(q, k, v, causal=masked, backend="hopper", **options).sum().backward()
    return [launch for launch in launches if launch.kernel.is_gluon()]


def _multiplied(launch: Launch) -> int:
    """Columns multiplied by all WGMMAs in the machine code, each of 64 rows and 16 deep; no spills in loops."""
    machine = compiled(launch, 90)
    traffic = stack_traffic(machine.sass)
    assert traffic == StackTraffic(0, 0), f"{launch.name}: {machine.stack} bytes of stack, in loops {traffic}"
    assert machine.shared <= H200.shared_per_block
    return sum(int(columns) for columns in re.findall(r"HGMMA\.64x(\d+)x16", machine.sass))


BESIDE = [pytest.mark.every_config]
COMPILED = {
    "80": (80, 16, False, (TWO, NARROW), 80 / 128),
    "96": (96, 16, True, (THREE, NARROW), 96 / 128),
    "96-gqa": (96, (16, 4), True, (THREE, NARROW), 96 / 128),
    "192/128": ((192, 128), 16, True, (TWO, WIDE), 5 / 6),
}


@pytest.mark.compile
@pytest.mark.parametrize("name", [pytest.param(name, marks=BESIDE * (name == "96")) for name in COMPILED])
def test_machine_code_multiplies_less(name: str) -> None:
    """Of the WGMMA work of padded heads, the share that has data is left, and a little more."""
    dims, heads, masked, (forward, backward), share = COMPILED[name]
    tunable = _tunable(backward)
    split = _launches(dims, heads, masked, {FORWARD: forward, tunable: backward})
    padded = [type(config)(**{**vars(config), "split_heads": False}) for config in (forward, backward)]
    whole = _launches(dims, heads, masked, {FORWARD: padded[0], tunable: padded[1]})
    assert [launch.name for launch in split] == [launch.name for launch in whole]
    for mine, other in zip(split, whole):
        assert share - 0.01 <= _multiplied(mine) / _multiplied(other) <= share + 0.04, mine.name


@pytest.mark.compile
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=BESIDE)], ids=str)
def test_machine_code_with_half_of_q_in_registers(dtype: torch.dtype) -> None:
    """Half of the products of S read a block of Q from registers; as many waits as without, and no stack traffic in
    loops."""
    waits = []
    for config in (replace(Q_IN_REGISTERS, q_in_registers=False), Q_IN_REGISTERS):
        q, k, v = (torch.empty((2, 4096, 16, 256), dtype=dtype, device="meta") for _ in range(3))
        with tune.override(FORWARD, config), devices.pretend(H200), collect_launches() as launches:
            fk.attention(q, k, v, backend="hopper")
        machine = compiled(launches[0], 90)
        assert stack_traffic(machine.sass) == StackTraffic(0, 0), f"{machine.stack} bytes of stack"
        products = re.findall(r"HGMMA\.64x64x16\S* R\d+, (R\d+|gdesc)", machine.sass)
        from_registers = sum(operand != "gdesc" for operand in products)
        assert from_registers == (len(products) // 2 if config.q_in_registers else 0)
        waits.append(machine.sass.count("WARPGROUP.DEPBAR"))
    assert waits[0] == waits[1]


@pytest.mark.compile
@pytest.mark.parametrize("dims, backward", [(96, NARROW), ((192, 128), WIDE)], ids=str)
def test_the_kernel_of_dq_multiplies_less(dims: Any, backward: Any) -> None:
    tunable = _tunable(backward)
    for launch in _launches(dims, 16, True, {FORWARD: TWO, tunable: backward, BACKWARD_DQ: DQ}, deterministic=True):
        assert _multiplied(launch) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_of_q_in_registers_on_a_gpu(dtype: torch.dtype) -> None:
    for lengths in (1024, (700, 1333)):
        case = Case("256", axes_of(2, lengths, (8, 4), 256), {"return_lse": True})
        with tune.override(FORWARD, Q_IN_REGISTERS):
            reports = list(verify(ATTENTION, case, dtype, "hopper", "cuda"))
        assert reports
        assert all(report.ok for report in reports), "\n".join(report.message for report in reports)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dims, heads, backward",
    [(80, 8, NARROW), (96, (16, 4), NARROW), ((192, 128), (16, 4), WIDE), (192, 8, WIDEST)],
    ids=["80", "96-shared", "192/128-shared", "192"],
)
def test_split_heads_on_a_gpu(dims: Any, heads: Any, backward: Any) -> None:
    for options in ({}, {"mask": causal()}, {"mask": causal() & window(200), "deterministic": True}):
        case = Case("split", axes_of(4, 700, heads, dims), options)
        with ExitStack() as configs:
            configs.enter_context(tune.override(FORWARD, TWO))
            configs.enter_context(tune.override(BACKWARD_DQ, DQ))
            configs.enter_context(tune.override(_tunable(backward), backward))
            reports = list(verify(ATTENTION, case, torch.bfloat16, "hopper", "cuda"))
        assert reports
        assert all(report.ok for report in reports), "\n".join(report.message for report in reports)
