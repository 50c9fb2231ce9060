"""The declaration of the matrix products."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks.epilogue import ACTIVATIONS
from flashkernel.blocks.fp8 import FP8, SCALE_BLOCK
from flashkernel.core import backends
from flashkernel.core.op import FLOATS, Axes, Baseline, Call, Case, Cost, Input, Op, count, normal
from flashkernel.core.random_case import Rng
from flashkernel.core.shapes import MODELS
from flashkernel.ops.matmul.grouped.spec import GROUPED_MATMUL

_ROOM = "flashkernel.ops.matmul"
_HALF = (torch.bfloat16,)


def _triton(call: Call) -> str | None:
    if call.gradients and call.dtype not in FLOATS:
        return "products of 8-bit operands are forward only"
    if call.dtype == FP8 and call.device.kind == "cuda" and call.device.arch < 89:
        return f"FP8 products need sm_89 or newer; {call.device.name} is sm_{call.device.arch}"
    return None


def _hopper(call: Call) -> str | None:
    if call.gradients and call.dtype not in FLOATS:
        return "products of 8-bit operands are forward only"
    return None


def _cublas_is_faster(call: Call) -> str | None:
    if call.dtype.itemsize > 1 and not call.facts["fused"]:
        return "cuBLAS serves products without an activation better"
    return None


def _positive(shape: tuple[int, ...], axes: Axes, generator: torch.Generator) -> Tensor:
    return 0.5 + torch.rand(shape, generator=generator, device=generator.device)


_INPUTS = {
    "a": Input(("*a_batch", "m", "k")),
    "b": Input(("*b_batch", "k", "n"), draw=normal(0.1)),
    "bias": Input(("n",), optional=True),
    "residual": Input(("*c_batch", "m", "n"), optional=True),
    "a_scale": Input(("*a_scales",), torch.float32, _positive, grad=False, optional=True),
    "b_scale": Input(("*b_scales",), torch.float32, _positive, grad=False, optional=True),
}


def _axes(m: int, n: int, k: int, a: tuple[int, ...] = (), b: tuple[int, ...] = ()) -> dict[str, Any]:
    batch = () if not a + b else b if a in ((), (1,)) and b else a
    return {"m": m, "n": n, "k": k, "a_batch": a, "b_batch": b, "c_batch": batch, "a_scales": (), "b_scales": ()}


def _scaled(name: str, dtype: torch.dtype, axes: dict[str, Any], kind: str, **options: Any) -> Case:
    return Case(
        name, {**axes, **_scale_axes(axes, kind)}, options, present=("a_scale", "b_scale"), gradients=False,
        dtype_of={"a": dtype, "b": dtype}, through=_tensor_core_dtype(dtype, options),
    )  # fmt: skip


def _tensor_core_dtype(dtype: torch.dtype, options: Mapping[str, Any]) -> torch.dtype | None:
    """FP8 tensor cores keep about 13 bits of partial sums: a float32 output is not better than float16."""
    return torch.float16 if dtype == FP8 and options.get("out_dtype") == torch.float32 else None


def _scale_axes(axes: Mapping[str, Any], kind: str) -> dict[str, tuple[int, ...]]:
    m, n, blocks_k, blocks_n = axes["m"], axes["n"], -(-axes["k"] // SCALE_BLOCK), -(-axes["n"] // SCALE_BLOCK)
    kinds: dict[str, dict[str, tuple[int, ...]]] = {
        "tensor": {"a_scales": (), "b_scales": ()},
        "row": {"a_scales": (m,), "b_scales": (n,)},
        "batch": {"a_scales": (*axes["a_batch"], m, 1), "b_scales": (*axes["b_batch"], 1, n)},
        "block": {"a_scales": (*axes["a_batch"], m, blocks_k), "b_scales": (*axes["b_batch"], blocks_k, blocks_n)},
    }
    return kinds[kind]


_SMALL = _axes(33, 24, 40)
_CASES = (
    Case("plain", _SMALL),
    Case("several-tiles", _axes(70, 90, 100)),
    Case("odd", _axes(17, 13, 7)),
    Case("one-row", _axes(1, 50, 64), present=("bias",)),
    Case("one-column", _axes(37, 1, 40), present=("residual",)),
    Case("one-k", _axes(20, 30, 1)),
    *(Case(f"transposed-{'-'.join(which)}", _axes(48, 64, 40), layout_of=dict.fromkeys(which, "transposed"))
      for which in (("a",), ("b",), ("a", "b"))),
    Case("batch", _axes(20, 24, 16, (3,), (3,)), present=("bias", "residual")),
    Case("batch-of-a", _axes(20, 24, 16, (3,)), present=("residual",)),
    Case("batch-of-b", _axes(20, 24, 16, (), (2,))),
    Case("broadcast-a", _axes(9, 24, 16, (1,), (2,)), {"activation": "silu"}),
    Case("broadcast-b", _axes(9, 24, 16, (2,), (1,)), {"activation": "gelu"}, present=("bias",)),
    Case("bias", _SMALL, present=("bias",)),
    Case("residual", _SMALL, {"scale": 0.5}, present=("bias", "residual")),
    *(Case(kind.replace("_", "-"), _SMALL, {"activation": kind, "scale": 0.5}, present=("bias",))
      for kind in ACTIVATIONS),
    Case("everything", _axes(33, 24, 40, (2,), (2,)), {"activation": "gelu_tanh", "scale": 0.5},
         present=("bias", "residual")),
    Case("float32-out", _SMALL, {"out_dtype": torch.float32}, present=("residual",)),
    Case("float32-extras", _SMALL, present=("bias", "residual"), dtypes=(torch.float16, torch.bfloat16),
         dtype_of={"bias": torch.float32, "residual": torch.float32}),
    Case("padded", _axes(33, 24, 40, (2,), (2,)), {"activation": "relu"}, present=("residual",), layout="padded"),
    Case("transposed", _axes(33, 24, 40), {"activation": "silu", "scale": 0.5}, present=("bias", "residual"),
         layout="transposed"),
    Case("no-rows", _axes(0, 24, 40), present=("bias",)),
    Case("no-columns", _axes(33, 0, 40)),
    Case("no-k", _axes(5, 24, 0), present=("bias",)),
    Case("no-batch", _axes(5, 24, 8, (0,), (1,))),
    _scaled("fp8-tensor", FP8, _axes(33, 48, 64), "tensor"),
    _scaled("fp8-row", FP8, _axes(33, 48, 80), "row", activation="silu"),
    _scaled("fp8-batch", FP8, _axes(17, 20, 32, (2,), (2,)), "batch", out_dtype=torch.float32),
    _scaled("fp8-block", FP8, _axes(20, 140, 300), "block"),
    _scaled("int8-tensor", torch.int8, _axes(33, 48, 64), "tensor"),
    _scaled("int8-row", torch.int8, _axes(17, 20, 50), "row", out_dtype=torch.float32),
)  # fmt: skip


def _random_case(rng: Rng, case: Case) -> Case:
    """Batches that fit, scales for 8-bit operands only, and no gradients where rounding may cross a kink."""
    axes, options, present = dict(case.axes), dict(case.options), list(case.present)
    batch = rng.call.choice((1, 2, 3))
    left, right = rng.one((((), ()), ((), ()), ((batch,), (batch,)), ((batch,), ()), ((1,), (batch,)), ((), (batch,))))
    axes |= {"a_batch": left, "b_batch": right, "c_batch": _axes(1, 1, 1, left, right)["c_batch"]}
    eight_bits = "a" in case.dtype_of
    present = [name for name in present if not name.endswith("_scale")]
    dtype_of = {name: dtype for name, dtype in case.dtype_of.items() if name in ("a", "b", *present)}
    if eight_bits:
        present += ["a_scale", "b_scale"]
        axes |= _scale_axes(axes, rng.one(("tensor", "row", "batch", "block")))
    kinked = options.get("activation") == "relu" and case.dtypes[0] != torch.float32
    return replace(case, axes=axes, options=options, present=tuple(present), dtype_of=dtype_of,
                   gradients=not eight_bits and not kinked,
                   through=_tensor_core_dtype(case.dtype_of.get("a", torch.float32), options))  # fmt: skip


def _bench(name: str, m: int, n: int, k: int, present: tuple[str, ...] = (), **options: Any) -> Case:
    """The weight is (N, K), as in torch.nn.Linear."""
    small = {"m": min(m, 512), "n": min(n, 512), "k": min(k, 1024)}
    return Case(name, _axes(m, n, k), options, dtypes=_HALF, present=present, layout_of={"b": "transposed"},
                check_axes=small)  # fmt: skip


def _benches() -> tuple[Case, ...]:
    llama, gpt_oss = MODELS["llama-3.1-8b"], MODELS["gpt-oss-20b"]
    qkv = (llama.heads + 2 * llama.kv_heads) * llama.head_dim
    layers = {"qkv": (qkv, llama.hidden), "gate-up": (2 * llama.intermediate, llama.hidden),
              "down": (llama.hidden, llama.intermediate)}  # fmt: skip
    return (
        *(_bench(f"{size}x{size}x{size}", size, size, size) for size in (4096, 8192)),
        *(_bench(f"llama-8b-{layer}-{rows}", rows, n, k) for layer, (n, k) in layers.items()
          for rows in (512, 4096, 16384)),
        _bench("llama-8b-gelu-16384", 16384, llama.intermediate, llama.hidden, ("bias",), activation="gelu_tanh"),
        _bench("gpt-oss-o-4096", 4096, gpt_oss.hidden, gpt_oss.heads * gpt_oss.head_dim, ("bias", "residual")),
        *(
            replace(
                _scaled(f"fp8-{kind}-8192x8192x8192", FP8, _axes(8192, 8192, 8192), kind),
                dtypes=_HALF, layout_of={"b": "transposed"},
                check_axes={"m": 512, "n": 512, "k": 1024, **_scale_axes(_axes(512, 512, 1024), kind)},
            )
            for kind in ("row", "block")
        ),
    )  # fmt: skip


def _cost(case: Case, dtype: torch.dtype) -> Mapping[str, Cost]:
    """Every operand is read once and the output written once."""
    axes, each = case.axes, case.dtype_of.get("a", dtype).itemsize
    batch, m, n, k = count(axes["c_batch"]), axes["m"], axes["n"], axes["k"]
    moved = (count(axes["a_batch"]) * m * k + count(axes["b_batch"]) * k * n) * each
    moved += batch * m * n * dtype.itemsize * (2 if "residual" in case.present else 1)
    flops = 2.0 * batch * m * n * k
    return {"fwd": Cost(flops, moved), "bwd": Cost(2 * flops, 2 * moved)}


MATMUL = Op(
    name="matmul",
    backward=None,  # the gradients are products of the same kernels
    summary="matrix products, batched and scaled, with bias, activation and residual",
    function=f"{_ROOM}.api:matmul",
    reference=f"{_ROOM}.reference:matmul",
    inputs=_INPUTS,
    backends=(
        backends.hopper(
            f"{_ROOM}.hopper", _hopper, (torch.bfloat16, torch.float16, FP8, torch.int8), _cublas_is_faster
        ),
        replace(
            backends.triton(f"{_ROOM}.triton", _triton, dtypes=(*FLOATS, FP8, torch.int8), min_arch=80),
            deprioritised=_cublas_is_faster,
        ),
        backends.torch_native(f"{_ROOM}.torch:matmul"),
        backends.reference(f"{_ROOM}.reference:matmul"),
    ),
    cases=_CASES,
    benches=_benches(),
    cost=_cost,
    ranges={"m": (0, 70, 1), "n": (0, 70, 1), "k": (0, 90, 1)},
    random_case=_random_case,
    random_share=3,
    baselines=(Baseline("eager", f"{_ROOM}.baselines:eager"), Baseline("compile", f"{_ROOM}.baselines:compiled")),
)
OPS = (MATMUL, GROUPED_MATMUL)
