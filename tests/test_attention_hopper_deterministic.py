"""Deterministic gradients of the Hopper attention kernels: dQ by a kernel of its own, without atomics."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from compiled import compiled
from emulated_hopper import check_case, emulated
from gluon_emulator.language import KNOWN, LANGUAGE
from gluon_emulator.memory import atomic_add
from sass import StackTraffic, stack_traffic

import flashkernel as fk
from flashkernel.blocks.mask import Mask, causal, custom, documents, sink_tokens, window
from flashkernel.core import device as devices
from flashkernel.core import tune
from flashkernel.core.check import execute, verify, wanted_gradients
from flashkernel.core.launch import Launch, collect_launches
from flashkernel.core.op import Case, Op
from flashkernel.lab.selection import shapes_only
from flashkernel.ops.attention import hopper
from flashkernel.ops.attention.hopper import varlen_schedule
from flashkernel.ops.attention.hopper.backward_configs import (
    BACKWARD,
    WIDE_BACKWARD,
    BackwardConfig,
    WideBackwardConfig,
)
from flashkernel.ops.attention.hopper.backward_dq_configs import BACKWARD_DQ
from flashkernel.ops.attention.hopper.forward_configs import Forward
from flashkernel.ops.attention.spec import ATTENTION
from flashkernel.ops.attention.varlen.spec import ATTENTION_VARLEN
from flashkernel.ops.attention.varlen.spec import _axes as _packed
from flashkernel.ops.attention.workload import axes_of

_DETERMINISTIC = {"deterministic": True}


@pytest.fixture(autouse=True)
def _emulated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An H200 whose Gluon kernels run in the emulator, on 3 SMs, and whose float atomics and TMA reductions fail."""

    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("something is added by atomics, in no fixed order")

    monkeypatch.setattr(LANGUAGE, "atomic_add", forbidden)  # float16: no overflow flags either
    monkeypatch.setitem(KNOWN, "add_tile", forbidden)
    with emulated(request, monkeypatch, hopper.forward_launch, hopper.backward_launch, varlen_schedule):
        yield


def _few_see() -> Mask:
    """Keys that no query sees, or those of one tile only, beside others that all see; heads differ."""
    return custom(lambda b, h, q, k: (k < 128) & (h < 3) | (k >= 256) & (k < 384) & (q < 40) | (k >= 500))


def _unsorted() -> Mask:
    return causal() & documents((torch.arange(200) // 30 % 3).to(torch.int32).repeat(2, 1))


def _case(name: str, axes: Any, mask: Mask | None = None, sinks: bool = False, **options: Any) -> Case:
    masked = {} if mask is None else {"mask": mask}
    return Case(name, axes, {**masked, **options, **_DETERMINISTIC}, present=("sinks",) if sinks else ())


CASES = [
    _case("full", axes_of(1, (130, 200), 2, 64)),
    _case("causal", axes_of(2, 330, (2, 1), 64), causal(), return_lse=True),
    _case("d128", axes_of(1, 300, (4, 1), 128), causal()),
    _case("gpt-oss", axes_of(1, 300, (8, 1), 64), causal() & window(128), sinks=True),
    _case("streaming", axes_of(1, 450, 1, 64), (window(100) | sink_tokens(4)) & causal()),
    _case("late-queries", axes_of(1, (300, 150), 2, 64), causal(), return_lse=True),
    _case("few", axes_of(1, (260, 530), (4, 2), 64), _few_see()),
    _case("documents", axes_of(2, 200, 2, 64), _unsorted()),
    _case("softcap", axes_of(1, 130, 2, 128), causal(), softcap=2.0),
    _case("negative-scale", axes_of(1, 130, 2, 64), scale=-0.1),
    _case("d256", axes_of(2, (130, 200), (2, 1), 256)),
    _case("d256-few", axes_of(1, (200, 530), (4, 2), 256), _few_see()),
    _case("192/128", axes_of(1, 150, (4, 2), (192, 128)), causal()),
    _case("wide-values", axes_of(1, (70, 90), 2, (64, 256)), causal(), softcap=3.0),
]
PACKED = [
    Case("packed-d64", _packed((130, 7, 0, 200, 65), (4, 2), 64, behind=9), {"causal": True, "return_lse": True}),
    Case("packed-d128", _packed((150, 1, 70), (4, 1), 128, (40, 90, 70)), {}, present=("cu_seqlens_k",)),
    Case("packed-gpt-oss", _packed((170, 20, 90), (8, 1), 64), {"window": 64}, present=("sinks",)),
    Case("packed-d256", _packed((100, 70), 2, 256), {"causal": True}),
    Case("packed-192/128", _packed((70, 30), (2, 1), (192, 128)), {"causal": True, "softcap": 2.0}),
]
PACKED = [replace(case, options={**case.options, **_DETERMINISTIC}) for case in PACKED]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_without_atomics(case: Case) -> None:
    check_case(ATTENTION, case)


@pytest.mark.parametrize("case", PACKED, ids=lambda case: case.name)
def test_packed_sequences_without_atomics(case: Case) -> None:
    check_case(ATTENTION_VARLEN, case)


def test_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward pass counts work tiles that overflow by atomics on integers, whose order makes no difference."""
    monkeypatch.setattr(LANGUAGE, "atomic_add", atomic_add)
    case = _case("bf16", axes_of(1, 200, (4, 2), 128), causal(), sinks=True)
    reports = list(verify(ATTENTION, case, torch.bfloat16, "hopper", "cpu"))
    assert reports
    assert all(report.ok for report in reports), "\n".join(report.message for report in reports)


@pytest.mark.parametrize(
    "dq, backward",
    [
        (Forward(2, 128, 2, 2, 240), BackwardConfig(64, 2, False, False, dq_mode="dq_kernel")),
        (Forward(3, 32, 4, 1, 160), BackwardConfig(128, 2, False, True, kv_stages=1, dq_mode="dq_kernel")),
        (Forward(3, 64, 2, 1, 160), BackwardConfig(64, 3, True, True, dq_mode="dq_kernel")),
    ],
    ids=str,
)
def test_every_kind_of_config(dq: Forward, backward: BackwardConfig) -> None:
    """The configs are in the tuning space of calls that need not be deterministic, too."""
    case = Case("config", axes_of(1, (310, 290), (4, 2), 64), {"mask": causal() & window(150)})
    packed = Case("packed", _packed((130, 7, 0, 90), (4, 2), 64), {"causal": True})
    with tune.override(BACKWARD_DQ, dq), tune.override(BACKWARD, backward):
        check_case(ATTENTION, case)
        check_case(ATTENTION_VARLEN, packed)
    assert backward in set(BACKWARD.space(devices.KNOWN["h200"], {"head_dim": 64, "value_dim": 64}))


def test_wide_heads_by_config() -> None:
    config = WideBackwardConfig(2, "dq_kernel")
    with tune.override(WIDE_BACKWARD, config):
        check_case(ATTENTION, Case("wide", axes_of(1, (200, 330), (4, 2), (192, 128)), {"mask": causal()}))
    assert config in set(WIDE_BACKWARD.space(devices.KNOWN["h200"], {"head_dim": 192, "value_dim": 128}))


@pytest.mark.parametrize(
    "config, reason",
    [
        (Forward(2, 64, 5, 1, 240), "2 to 4 stages"),
        (Forward(2, 64, 2, 1, 240, overlap=True), "do not overlap"),
        (Forward(2, 64, 2, 3, 240), "cannot share a work tile"),
        (Forward(2, 128, 4, 1, 240), "shared memory"),
        (Forward(4, 32, 2, 1, 160), "registers"),
    ],
)
def test_invalid_configs(config: Forward, reason: str) -> None:
    shape = {"head_dim": 128, "value_dim": 128, "group_size": 2}
    assert reason in str(BACKWARD_DQ.valid(config, devices.KNOWN["h200"], shape))


def test_selected_on_request() -> None:
    """Deterministic gradients go to the portable kernels by themselves; calls without gradients come here."""
    q = torch.zeros(1, 40, 2, 64, dtype=torch.float16)
    lengths = torch.tensor([0, 40])
    for gradients, chosen in ((False, "hopper"), (True, "triton")):
        q = q.detach().requires_grad_(gradients)
        answers = [
            fk.explain(fk.attention, q, q, q, **_DETERMINISTIC),
            fk.explain(fk.attention_varlen, q[0], q[0], q[0], lengths, **_DETERMINISTIC),
        ]
        for answer in answers:
            assert answer.chosen == chosen, str(answer)
            verdict = next(verdict for verdict in answer.verdicts if verdict.backend == "hopper")
            assert verdict.reason is None
            assert ("not been measured" in str(verdict.deprioritized)) == gradients


def _backward_launches(op: Op, case: Case) -> list[Launch]:
    inputs = shapes_only(op, case, torch.bfloat16)
    with devices.pretend(devices.KNOWN["h200"]), collect_launches() as launches:
        execute(op.call, inputs, {**case.options, "backend": "hopper"}, wanted_gradients(op, case, inputs))
    return [launch for launch in launches if "backward" in launch.name]


SHAPES = [
    (ATTENTION, _case("d64-causal", axes_of(2, 4096, (16, 4), 64), causal(), sinks=True)),
    (ATTENTION, _case("d64", axes_of(2, 4096, 16, 64))),
    (ATTENTION, _case("d128-causal", axes_of(2, 4096, (16, 4), 128), causal())),
    (ATTENTION, _case("d128-softcap", axes_of(2, 1024, 16, 128), causal(), softcap=20.0)),
    (ATTENTION, _case("d128-window", axes_of(2, 4096, 16, 128), causal() & window(128))),
    (ATTENTION, _case("d256", axes_of(2, 4096, 8, 256), causal())),
    (ATTENTION, _case("192/128", axes_of(2, 4096, 8, (192, 128)), causal())),
    (ATTENTION_VARLEN, replace(PACKED[0], axes=_packed((4000, 37, 2900), (32, 8), 128))),
    (ATTENTION_VARLEN, replace(PACKED[0], axes=_packed((4000, 37, 2900), 32, 64))),
    (ATTENTION_VARLEN, replace(PACKED[3], axes=_packed((4000, 37, 2900), 8, 256))),
]
BESIDE = (1, 4, 8, 9)  # widths that others have too, with other masks


def _shapes() -> Iterator[object]:
    for place, (op, case) in enumerate(SHAPES):
        yield pytest.param(op, case, marks=[pytest.mark.every_config] * (place in BESIDE))


@pytest.mark.compile
@pytest.mark.parametrize("op, case", list(_shapes()), ids=lambda x: x.name)
def test_machine_code_has_no_float_atomics(op: Op, case: Case) -> None:
    """No reduction by atomics or TMA in any kernel of the backward pass, no spills in loops (with a softcap the main
    kernel spills in every dq_mode), and asynchronous products."""
    launches = _backward_launches(op, case)
    assert "attention_backward_dq" in {launch.name for launch in launches}
    assert "attention_backward_postprocess" not in {launch.name for launch in launches}
    for launch in launches:
        machine = compiled(launch, 90)
        found = re.findall(r"\b(?:RED|ATOM|ATOMG|UTMAREDG|UBLKRED)\b[^;]*", machine.sass)
        assert not found, f"{launch.name}: {found[:3]}"
        if launch.name == "attention_backward_dq" or "softcap" not in case.options:
            traffic = stack_traffic(machine.sass)
            assert traffic == StackTraffic(0, 0), f"{launch.name}: {machine.stack} bytes of stack, {traffic}"
        assert not launch.kernel.is_gluon() or "HGMMA" in machine.sass


ON_GPU = [
    (ATTENTION, _case("d64", axes_of(4, 1100, (16, 4), 64), causal(), sinks=True)),
    (ATTENTION, _case("d64-full", axes_of(2, (900, 1300), 8, 64))),
    (ATTENTION, _case("d128", axes_of(4, 1100, (16, 4), 128), causal() & window(300))),
    (ATTENTION, _case("d128-softcap", axes_of(2, (500, 700), 8, 128), causal(), softcap=2.0)),
    (ATTENTION, _case("d256", axes_of(4, 600, 8, 256), causal())),
    (ATTENTION, _case("192/128", axes_of(4, 600, (8, 4), (192, 128)), causal())),
    (ATTENTION, _case("heads-differ", axes_of(2, 333, (4, 2), 64), _few_see())),
    (ATTENTION_VARLEN, replace(PACKED[0], axes=_packed((700, 33, 0, 1, 512, 390) * 2, (16, 4), 128, behind=40))),
    (ATTENTION_VARLEN, replace(PACKED[2], axes=_packed((700, 33, 0, 1, 512, 390) * 2, (16, 2), 64))),
    (ATTENTION_VARLEN, replace(PACKED[3], axes=_packed((700, 33, 0, 1, 512, 390), 8, 256))),
]


@pytest.mark.gpu
@pytest.mark.parametrize("op, case", ON_GPU, ids=lambda x: x.name)
def test_bit_equal_on_repeat_on_a_gpu(op: Op, case: Case) -> None:
    """Right, and the same bits in ten runs."""
    reports = list(verify(op, case, torch.bfloat16, "hopper", "cuda"))
    assert reports
    assert all(report.ok for report in reports), "\n".join(report.message for report in reports)
    inputs = op.make_inputs(case, torch.bfloat16, "cuda")
    wanted = wanted_gradients(op, case, inputs)
    options = {**case.options, "backend": "hopper"}
    first = execute(op.call, inputs, options, wanted)
    for _ in range(9):
        again = execute(op.call, inputs, options, wanted)
        for name, value in (again.outputs | again.gradients).items():
            assert torch.equal((first.outputs | first.gradients)[name], value), name
