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
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import flashkernel as fk
from flashkernel.core import replay
from flashkernel.core.check import compare
from flashkernel.core.device import half_dtype, properties
from flashkernel.core.op import Op
from flashkernel.lab.host_tables import OP
from flashkernel.lab.results import Record
from flashkernel.lab.training import statistics
from flashkernel.ops import registry

OURS, THEIRS = "flashkernel", "torch"
SHARE, ALONE_US = 1.3, 25.0
ATTENTION_US = {"fwd": 60.0, "bwd": 100.0}
ROUNDS, CALLS = 15, 60  # the calls of a round fit the launch queue
WARMUP = replay.RECORD_AFTER + 6

Make = Callable[[torch.device, torch.dtype], "Call"]


@dataclass(frozen=True)
class Call:
    """A public function with its arguments, and torch's function for the same operation, if there is one."""

    function: Callable[..., Any]
    tensors: tuple[Tensor, ...]
    options: Callable[[], dict[str, Any]]
    torch_own: Callable[..., Any] | None = None
    differentiable: bool = True


@dataclass(frozen=True)
class Case:
    """One function to time."""

    name: str
    op: str
    make: Make


def make_call(
    function: str, shapes: Sequence[tuple[int, ...]], own: Callable[..., Any] | None = None,
    differentiable: bool = True, **options: Any,
) -> Make:  # fmt: skip
    """A call with random tensors of these shapes; options that are functions are evaluated at each call."""

    def make(device: torch.device, dtype: torch.dtype) -> Call:
        generator = torch.Generator(device).manual_seed(0)
        tensors = tuple(torch.randn(shape, generator=generator, device=device).to(dtype) for shape in shapes)

        def given() -> dict[str, Any]:
            return {name: value() if callable(value) else value for name, value in options.items()}

        return Call(getattr(fk, function), tensors, given, own, differentiable)

    return make


def _sdpa(causal: bool) -> Callable[..., Any]:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=causal, enable_gqa=True
        )

    return run


_X, _W = (64, 1024), (1024,)
_HEADS, _KV = (1, 256, 16, 64), (1, 256, 4, 64)
_OSS, _OSS_KV = (1, 256, 64, 64), (1, 256, 8, 64)
_CAUSAL, _SLIDING = fk.causal(), fk.causal() & fk.window(128)


def _cross_entropy(device: torch.device, dtype: torch.dtype) -> Call:
    target = torch.randint(0, 1024, (64,), device=device)
    logits = torch.randn(64, 1024, device=device).to(dtype)
    own = lambda logits: F.cross_entropy(logits, target)  # noqa: E731
    return Call(lambda logits, **options: fk.cross_entropy(logits, target, **options), (logits,), dict, own)


def _linear_cross_entropy(device: torch.device, dtype: torch.dtype) -> Call:
    target = torch.randint(0, 1024, (64,), device=device)
    x, weight = torch.randn(64, 256, device=device).to(dtype), torch.randn(1024, 256, device=device).to(dtype)
    own = lambda x, weight: F.cross_entropy(F.linear(x, weight), target)  # noqa: E731
    return Call(
        lambda x, weight, **options: fk.linear_cross_entropy(x, weight, target, **options), (x, weight), dict, own
    )


def _varlen(device: torch.device, dtype: torch.dtype) -> Call:
    q, k, v = (torch.randn(shape[1:], device=device).to(dtype) for shape in (_HEADS, _KV, _KV))
    lengths = torch.tensor([0, 100, 130, 256], dtype=torch.int32, device=device)
    return Call(
        lambda q, k, v, **options: fk.attention_varlen(q, k, v, lengths, causal=True, **options), (q, k, v), dict
    )


def _decode(device: torch.device, dtype: torch.dtype) -> Call:
    q, k, v = (torch.randn(shape, device=device).to(dtype) for shape in ((4, 1, 16, 128), *[(4, 256, 4, 128)] * 2))
    lengths = torch.full((4,), 256, dtype=torch.int32, device=device)
    own = _sdpa(False)
    return Call(
        lambda q, k, v, **options: fk.decode_attention(q, k, v, lengths, **options), (q, k, v), dict, own, False
    )


def _pages(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    lengths = torch.full((4,), 256, dtype=torch.int32, device=device)
    table = torch.arange(64, dtype=torch.int32, device=device).view(4, 16)
    return lengths, table, torch.tensor([0, 16, 32, 48, 64], dtype=torch.int32, device=device)


def _paged(device: torch.device, dtype: torch.dtype) -> Call:
    lengths, table, starts = _pages(device)
    q, k, v = (torch.randn(shape, device=device).to(dtype) for shape in ((64, 16, 64), *[(64, 16, 4, 64)] * 2))
    return Call(
        lambda q, k, v, **options: fk.paged_attention(q, k, v, starts, lengths, table, **options), (q, k, v), dict,
        differentiable=False,
    )  # fmt: skip


def _append(device: torch.device, dtype: torch.dtype) -> Call:
    pages = [torch.zeros(64, 16, 4, 64, device=device, dtype=dtype) for _ in range(2)]
    slots = torch.arange(8, device=device)
    k, v = (torch.randn(8, 4, 64, device=device).to(dtype) for _ in range(2))

    def run(k: Tensor, v: Tensor, backend: str | None = None) -> Tensor:
        fk.append_kv(k, v, pages[0], pages[1], slots, backend=backend)
        return pages[0].view(-1, 4, 64)[:8]

    return Call(run, (k, v), dict, differentiable=False)


def _rope(device: torch.device, dtype: torch.dtype) -> Call:
    frequencies = fk.Frequencies.plain(64)
    return make_call("rope", [_HEADS, _KV], frequencies=frequencies)(device, dtype)


def _rope_tables(device: torch.device, dtype: torch.dtype) -> Call:
    """RoPE as Transformers calls it: with cos and sin of each token."""
    cos, sin = (torch.randn(1, 256, 64, device=device).to(dtype) for _ in range(2))
    call = make_call("rope", [_HEADS, _KV])(device, dtype)
    return Call(lambda q, k, **options: fk.rope(q, k, cos, sin, **options), call.tensors, dict)


CASES = (
    Case("rms_norm", "rms_norm", make_call("rms_norm", [_X, _W], lambda x, w: F.rms_norm(x, (1024,), w, 1e-6))),
    Case("rms_norm-residual", "rms_norm", make_call("rms_norm", [_X, _W], residual=lambda: _RESIDUAL[0])),
    Case("layer_norm", "layer_norm",
         make_call("layer_norm", [_X, _W, _W], lambda x, w, b: F.layer_norm(x, (1024,), w, b))),
    Case("gelu", "gelu", make_call("gelu", [_X], F.gelu)),
    Case("silu", "silu", make_call("silu", [_X], F.silu)),
    Case("relu", "relu", make_call("relu", [_X], F.relu)),
    Case("squared_relu", "squared_relu", make_call("squared_relu", [_X])),
    Case("swiglu", "swiglu", make_call("swiglu", [_X, _X])),
    Case("geglu", "geglu", make_call("geglu", [_X, _X])),
    Case("reglu", "reglu", make_call("reglu", [_X, _X])),
    Case("gpt_oss_glu", "gpt_oss_glu", make_call("gpt_oss_glu", [(64, 2048)])),
    Case("sum", "sum", make_call("sum", [_X], lambda x: torch.sum(x, -1))),
    Case("mean", "mean", make_call("mean", [_X], lambda x: torch.mean(x, -1))),
    Case("max", "max", make_call("max", [_X], lambda x: torch.amax(x, -1))),
    Case("logsumexp", "logsumexp", make_call("logsumexp", [_X], lambda x: torch.logsumexp(x, -1))),
    Case("softmax", "softmax", make_call("softmax", [_X], lambda x: torch.softmax(x, -1))),
    Case("weighted_sum", "weighted_sum", make_call("weighted_sum", [_X, _W], torch.mv)),
    Case("rope", "rope", _rope),
    Case("rope-tables", "rope", _rope_tables),
    Case("cross_entropy", "cross_entropy", _cross_entropy),
    Case("linear_cross_entropy", "linear_cross_entropy", _linear_cross_entropy),
    Case("linear-1", "linear", make_call("linear", [(1, 1024), (1024, 1024)], F.linear)),
    Case("linear-64", "linear", make_call("linear", [(64, 1024), (1024, 1024)], F.linear)),
    Case("linear-1-swiglu", "linear", make_call("linear", [(1, 1024), (2048, 1024)], activation="swiglu")),
    Case("linear-16-gelu", "linear", make_call("linear", [(16, 1024), (1024, 1024), (1024,)], activation="gelu_tanh")),
    Case("mlp-1", "mlp", make_call("mlp", [(1, 1024), (4096, 1024), (1024, 2048)])),
    Case("mlp-256", "mlp", make_call("mlp", [(256, 1024), (4096, 1024), (1024, 2048)])),
    Case("attention", "attention", make_call("attention", [_HEADS, _KV, _KV], _sdpa(False))),
    Case("attention-causal", "attention", make_call("attention", [_HEADS, _KV, _KV], _sdpa(True), mask=_CAUSAL)),
    Case("attention-mask-anew", "attention",
         make_call("attention", [_HEADS, _KV, _KV], _sdpa(True), mask=lambda: fk.causal() & fk.window(64))),
    Case("attention-gpt-oss", "attention",
         make_call("attention", [_OSS, _OSS_KV, _OSS_KV], mask=_SLIDING, sinks=lambda: _SINKS[0])),
    Case("attention_varlen", "attention_varlen", _varlen),
    Case("decode_attention", "decode_attention", _decode),
    Case("paged_attention", "paged_attention", _paged),
    Case("append_kv", "append_kv", _append),
)  # fmt: skip
_RESIDUAL: list[Tensor] = []
_SINKS: list[Tensor] = []


def dtype_of(device: torch.device) -> torch.dtype:
    """The dtype of the measured calls: the 16-bit one of the device."""
    return half_dtype(properties(device))


def measure(cases: Sequence[Case], device: torch.device) -> Iterator[list[Record]]:
    """Yields the records of each case."""
    dtype = dtype_of(device)
    generator = torch.Generator(device).manual_seed(1)
    _RESIDUAL[:] = [torch.randn(_X, generator=generator, device=device).to(dtype)]
    _SINKS[:] = [torch.randn(64, generator=generator, device=device)]
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
    if case.op in ("attention", "attention_varlen"):
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
    roots = outputs if isinstance(outputs, tuple) else (outputs,)
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
        exact = call.function(*[tensor.double() for tensor in call.tensors], **wide, backend="reference")
        own = call.function(*call.tensors, **options, backend="torch")
    results = [value if isinstance(value, tuple) else (value,) for value in (found, exact, own)]
    coarse = call.tensors[0].dtype if op.tolerance.of_inputs == "all" else None
    for mine, right, theirs in zip(*results):
        report = compare("output", mine, right, theirs, op.tolerance, coarse)
        if not report.ok:
            return report.message
    return None
