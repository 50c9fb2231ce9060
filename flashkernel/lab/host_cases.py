"""The calls whose host time `flashkernel bench --host` measures: every public operator, beside torch's own function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import flashkernel as fk

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


def _random(device: torch.device, dtype: torch.dtype, *shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.randn(shape, device=device).to(dtype) for shape in shapes)


def _attention_fp8(device: torch.device, dtype: torch.dtype) -> Call:
    q, k, v = _random(device, dtype, _HEADS, _KV, _KV)
    (q8, q_scale), (k8, k_scale), (v8, v_scale) = (
        fk.quantize_fp8(q), fk.quantize_fp8(k), fk.quantize_fp8(v, transpose=True),
    )  # fmt: skip
    options = {"mask": _CAUSAL, "out_dtype": dtype}
    return Call(lambda q, k, v, **given: fk.attention_fp8(q, k, v, q_scale, k_scale, v_scale, **given),
                (q8, k8, v8), lambda: options, differentiable=False)  # fmt: skip


def _rotary_attention(device: torch.device, dtype: torch.dtype) -> Call:
    cos, sin = _random(device, torch.float32, (256, 32), (256, 32))
    options = {"mask": _CAUSAL}
    return Call(
        lambda q, k, v, **given: fk.rotary_attention(q, k, v, cos, sin, **given),
        _random(device, dtype, _HEADS, _KV, _KV), lambda: options,
    )  # fmt: skip


def _quantized_linear(device: torch.device, dtype: torch.dtype) -> Call:
    x, plain = _random(device, dtype, (16, 1024), (1024, 1024))
    weight = fk.Weight.quantize(plain, "int4")
    (data, scales), layout = weight.tensors, weight.layout
    return Call(lambda x, **given: fk.quantized_linear(x, data, scales, layout=layout, **given), (x,), dict)


def _groups(device: torch.device) -> Tensor:
    """Where the 8 groups of 256 rows begin; one has no rows."""
    return torch.tensor([0, 32, 96, 96, 128, 160, 192, 240, 256], dtype=torch.int32, device=device)


def _grouped_matmul(device: torch.device, dtype: torch.dtype) -> Call:
    offsets = _groups(device)
    torch_own, ends = getattr(F, "grouped_mm", None), offsets[1:]
    own = None if torch_own is None else lambda x, weights: torch_own(x, weights, offs=ends)
    return Call(lambda x, weights, **given: fk.grouped_matmul(x, weights, offsets, **given),
                _random(device, dtype, (256, 512), (8, 512, 512)), dict, own)  # fmt: skip


def _grouped_weight_gradient(device: torch.device, dtype: torch.dtype) -> Call:
    offsets = _groups(device)
    return Call(lambda x, dz, **given: fk.grouped_weight_gradient(x, dz, offsets, **given),
                _random(device, dtype, (256, 512), (256, 512)), dict, differentiable=False)  # fmt: skip


def _moe_route(device: torch.device, dtype: torch.dtype) -> Call:
    router = fk.Router("softmax", 2)

    def run(logits: Tensor, backend: str | None = None) -> tuple[Tensor, Tensor]:
        routing = fk.moe_route(logits, router, backend=backend)
        return routing.weights, routing.experts

    return Call(run, _random(device, torch.float32, (64, 8)), dict)


def _moe_sort(device: torch.device, dtype: torch.dtype) -> Call:
    experts = torch.rand(64, 8, device=device).argsort(1)[:, :2].int()
    weights = torch.rand(64, 2, device=device)

    def run(weights: Tensor, backend: str | None = None) -> tuple[Tensor, Tensor]:
        routing = fk.moe_sort(experts, weights, num_experts=8, backend=backend)
        return routing.positions, routing.counts

    return Call(run, (weights,), dict, differentiable=False)


def _moe_experts(device: torch.device, dtype: torch.dtype) -> Call:
    routing = fk.moe_route(torch.randn(64, 8, device=device), fk.Router("softmax", 2))
    x, gate_up, down = _random(device, dtype, (64, 256), (8, 1024, 256), (8, 256, 512))
    return Call(lambda x, gate_up, down, **given: fk.moe_experts(x, routing, gate_up, down, **given),
                (x, gate_up / 16, down / 32), dict)  # fmt: skip


def _dequantize(device: torch.device, dtype: torch.dtype) -> Call:
    (x,) = _random(device, dtype, _X)
    data, scales = fk.quantize(x, torch.int8)
    return Call(lambda scales, **given: fk.dequantize(data, scales, dtype=dtype, **given), (scales,), dict,
                differentiable=False)  # fmt: skip


def _sample(device: torch.device, dtype: torch.dtype) -> Call:
    seeds = torch.arange(16, device=device)
    positions, top_p = torch.zeros_like(seeds), torch.full((16,), 0.9, device=device)
    return Call(lambda logits, **given: fk.sample(logits, seeds, positions, top_p=top_p, **given),
                _random(device, torch.float32, (16, 4096)), dict, differentiable=False)  # fmt: skip


def _argmax(device: torch.device, dtype: torch.dtype) -> Call:
    def run(x: Tensor, backend: str | None = None) -> Tensor:
        return fk.argmax(x) if backend is None else torch.argmax(x, -1)  # it has no backends to choose from

    return Call(run, _random(device, torch.float32, _X), dict, lambda x: torch.argmax(x, -1), False)


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
         make_call("attention", [_HEADS, _KV, _KV], _sdpa(True), mask=lambda: fk.causal() & fk.window(256))),
    Case("attention-gpt-oss", "attention",
         make_call("attention", [_OSS, _OSS_KV, _OSS_KV], mask=_SLIDING, sinks=lambda: _SINKS[0])),
    Case("attention_varlen", "attention_varlen", _varlen),
    Case("decode_attention", "decode_attention", _decode),
    Case("paged_attention", "paged_attention", _paged),
    Case("append_kv", "append_kv", _append),
    Case("attention_fp8", "attention_fp8", _attention_fp8),
    Case("rotary_attention", "rotary_attention", _rotary_attention),
    Case("quantized_linear", "quantized_linear", _quantized_linear),
    Case("matmul", "matmul", make_call("matmul", [(256, 1024), (1024, 1024)], torch.matmul)),
    Case("matmul-gelu", "matmul", make_call("matmul", [(256, 1024), (1024, 1024)], activation="gelu_tanh")),
    Case("matmul_dact", "matmul_dact", make_call("matmul_dact", [(256, 1024), (1024, 1024), (256, 1024)],
                                                 differentiable=False, activation="gelu_tanh")),
    Case("grouped_matmul", "grouped_matmul", _grouped_matmul),
    Case("grouped_weight_gradient", "grouped_weight_gradient", _grouped_weight_gradient),
    Case("moe_route", "moe_route", _moe_route),
    Case("moe_sort", "moe_sort", _moe_sort),
    Case("moe_experts", "moe_experts", _moe_experts),
    Case("quantize", "quantize", make_call("quantize", [_X], differentiable=False)),
    Case("dequantize", "dequantize", _dequantize),
    Case("rms_norm_quantize", "rms_norm_quantize", make_call("rms_norm_quantize", [_X, _W], differentiable=False)),
    Case("glu_quantize", "glu_quantize", make_call("glu_quantize", [_X, _X], differentiable=False)),
    Case("sample", "sample", _sample),
    Case("argmax", "max", _argmax),
)  # fmt: skip
_RESIDUAL: list[Tensor] = []
_SINKS: list[Tensor] = []


def prepare(device: torch.device, dtype: torch.dtype) -> None:
    """Makes the tensors that calls are given beside their inputs."""
    generator = torch.Generator(device).manual_seed(1)
    _RESIDUAL[:] = [torch.randn(_X, generator=generator, device=device).to(dtype)]
    _SINKS[:] = [torch.randn(64, generator=generator, device=device)]
