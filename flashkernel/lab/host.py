"""Host time of a call: the time until a public function returns, against torch's own function for the same operation.

Launches are asynchronous, so a training or decoding loop of small kernels runs as fast as the host issues them. Shapes
are small, so the GPU is never behind, and calls are repeated, as layers and steps repeat them. The limit is 1.3 times
torch's own time, or 25 us where torch has no such function (backward: plus autograd's own overhead, measured on an
identity function). Attention's limits are 60 us forward and 100 us backward.

"fwd" is a call under no_grad, "fwd-grad" one whose inputs require gradients, "bwd" is torch.autograd.grad.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flashkernel.core import replay
from flashkernel.core.check import compare
from flashkernel.core.device import half_dtype, properties
from flashkernel.core.native.operator_call import RECORD_BACKWARD_AFTER
from flashkernel.core.op import Op
from flashkernel.lab import host_cases
from flashkernel.lab.host_cases import Call, Case
from flashkernel.lab.host_tables import OP
from flashkernel.lab.results import Record
from flashkernel.lab.training import statistics
from flashkernel.ops import registry

OURS, THEIRS = "flashkernel", "torch"
SHARE, ALONE_US = 1.3, 25.0
ATTENTION_US = {"fwd": 60.0, "bwd": 100.0}
ROUNDS, CALLS = 15, 60  # the calls of a round fit the launch queue
WARMUP = replay.RECORD_AFTER + 2 * RECORD_BACKWARD_AFTER


def dtype_of(device: torch.device) -> torch.dtype:
    """The dtype of the measured calls: the 16-bit one of the device."""
    return half_dtype(properties(device))


def measure(cases: Sequence[Case], device: torch.device) -> Iterator[list[Record]]:
    """Yields the records of each case."""
    dtype = dtype_of(device)
    host_cases.prepare(device, dtype)
    autograd_us = _autograd_us(device)
    for case in cases:
        yield _measure(case, device, dtype, autograd_us)


class _Identity(torch.autograd.Function):
    """The identity function, to measure autograd's own overhead."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


def _autograd_us(device: torch.device) -> float:
    """Host time of torch.autograd.grad on an identity function, in us."""
    step = make_step(_Identity.apply, (torch.zeros(8, device=device),), "bwd")
    return float(np.median([host_seconds(step, device) for _ in range(ROUNDS)])) * 1e6


def _measure(case: Case, device: torch.device, dtype: torch.dtype, autograd_us: float) -> list[Record]:
    call = case.make(device, dtype)
    wrong = check_result(registry()[case.op], call)
    records: list[Record] = []
    for direction in ("fwd", "fwd-grad", "bwd") if call.differentiable else ("fwd",):
        times: dict[str, list[float]] = {}
        runners = {OURS: lambda *given: call.function(*given, **call.options())}
        if call.torch_own is not None:
            runners[THEIRS] = call.torch_own
        steps = {name: make_step(run, call.tensors, direction) for name, run in runners.items()}
        for step in steps.values():
            for _ in range(WARMUP):
                step()
        for _ in range(ROUNDS):  # alternately: a busy host slows both alike
            for name, step in steps.items():
                times.setdefault(name, []).append(host_seconds(step, device))
        own = float(np.median(times[THEIRS])) * 1e6 if THEIRS in times else None
        for name, seconds in times.items():
            ours, kind = name == OURS, str(dtype).removeprefix("torch.")
            record = Record(
                OP, case.name, {}, kind, direction, name, "backend" if ours else "baseline",
                not wrong, statistics(seconds), mode="host", note=wrong, host_us=float(np.median(seconds)) * 1e6,
                limit_us=_limit(case, direction, own, autograd_us) if ours else None,
            )  # fmt: skip
            records.append(record)
    return records


def _limit(case: Case, direction: str, own_us: float | None, autograd_us: float) -> float:
    if case.op in ("attention", "attention_varlen", "attention_fp8", "rotary_attention"):
        return ATTENTION_US["bwd" if direction == "bwd" else "fwd"]
    if own_us is not None:
        return SHARE * own_us
    return ALONE_US + (autograd_us if direction == "bwd" else 0.0)


def make_step(run: Callable[..., Any], tensors: tuple[Tensor, ...], direction: str) -> Callable[[], Any]:
    if direction == "fwd":
        leaves = tuple(tensor.detach() for tensor in tensors)
        return lambda: run(*leaves)
    leaves = tuple(tensor.detach().requires_grad_() for tensor in tensors)
    if direction == "fwd-grad":
        return lambda: run(*leaves)
    outputs = run(*leaves)
    given = outputs if isinstance(outputs, tuple) else (outputs,)
    roots = tuple(output for output in given if output.requires_grad)
    weights = [torch.randn_like(root) for root in roots]
    return lambda: torch.autograd.grad(roots, leaves, weights, retain_graph=True)


def host_seconds(step: Callable[[], Any], device: torch.device) -> float:
    """Host seconds of a call; waits for the device before it starts."""
    _synchronize(device)
    began = time.perf_counter()
    for _ in range(CALLS):
        step()
    return (time.perf_counter() - began) / CALLS


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def check_result(op: Op, call: Call) -> str | None:
    """The error of the function's result against the reference in float64; None where it is right."""
    options = call.options()
    with torch.no_grad():
        for _ in range(WARMUP):  # so that the replayed launch that is timed is also the one checked
            found = call.function(*call.tensors, **options)
        wide = {name: value.double() if isinstance(value, Tensor) else value for name, value in options.items()}
        inputs = [tensor if tensor.element_size() == 1 else tensor.double() for tensor in call.tensors]
        exact = call.function(*inputs, **wide, backend="reference")
        own = call.function(*call.tensors, **options, backend="torch")
    results = [value if isinstance(value, tuple) else (value,) for value in (found, exact, own)]
    coarse = op.tolerance.through or (call.tensors[0].dtype if op.tolerance.of_inputs == "all" else None)
    for mine, right, theirs in zip(*results):
        report = compare("output", mine, right, theirs, op.tolerance, coarse)
        if not report.ok:
            return report.message
    return None
