"""What matrix products are timed against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks.activation import NATIVE, apply_gate
from flashkernel.blocks.epilogue import GATES
from flashkernel.blocks.fp8 import block_scaled_mm_missing, cublas_block_scales
from flashkernel.blocks.gate_up import split_gate_up
from flashkernel.core.op import Case, Op
from flashkernel.ops.matmul.cases import scale_kind
from flashkernel.ops.matmul.params import MatmulOptions
from flashkernel.ops.matmul.reference import as_matrices
from flashkernel.ops.matmul.torch import matmul_dact

_OPTIONS = {"activation", "scale", "packed"}
_TENSORS = {"bias", "residual", "a_scale", "b_scale"}


def model_code(a: Tensor, b: Tensor, **options: Any) -> Tensor:
    """What people write: cuBLAS, whose result is rounded, then torch's operators.

    FP8 products keep their sums in the tensor cores (`use_fast_accum`), as the kernels do.
    """
    params = MatmulOptions(**options)
    bias: Any = params.bias
    activation: Any = params.activation
    if params.a_scale is None or params.b_scale is None:
        value = torch.matmul(a, b) if bias is None else torch.addmm(bias, a, b)
    else:
        a_scale, b_scale = as_matrices(params.a_scale, params.b_scale)
        value = torch._scaled_mm(a, b, a_scale, b_scale, out_dtype=torch.bfloat16, use_fast_accum=True)
        value = value if bias is None else value + bias
    if activation in GATES:
        value = apply_gate(NATIVE, GATES[activation], *split_gate_up(value, params.packed))
    elif activation is not None:
        value = NATIVE[activation](value)
    value = value if params.scale == 1.0 else value * params.scale
    return value if params.residual is None else value + params.residual


def eager(op: Op, case: Case) -> Callable[..., Any]:
    """cuBLAS and torch's operators, as model code writes them."""
    return _block_scaled(case) if scale_kind(case.axes) == "block" else _written(case, model_code)


def _block_scaled(case: Case) -> Callable[..., Any]:
    """cuBLAS's product with scales of blocks, which adds its parts in float32.

    The scales are laid out as it reads them the first time they are seen, outside the measured time.
    """
    if case.options or set(case.present) != {"a_scale", "b_scale"}:
        raise ValueError("written for products with scales of blocks and nothing else")
    missing = block_scaled_mm_missing()
    if missing is not None:
        raise ValueError(missing)
    known: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # by id; the tensor is kept, so that it is not used again

    def run(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor) -> Tensor:
        found = known.get(id(a_scale))
        if found is None:
            found = known[id(a_scale)] = a_scale, *cublas_block_scales(a_scale, b_scale)
        return torch._scaled_mm(a, b, found[1], found[2], out_dtype=torch.bfloat16)

    return run


def compiled(op: Op, case: Case) -> Callable[..., Any]:
    return _written(case, torch.compile(model_code, dynamic=False))


def max_autotune(op: Op, case: Case) -> Callable[..., Any]:
    """Inductor's choice among cuBLAS and its own Triton templates, with the epilogue fused."""
    if case.options.get("activation") is None:
        raise ValueError("written for products with an activation")
    return _written(case, torch.compile(model_code, dynamic=False, mode="max-autotune-no-cudagraphs"))


def addmm_activation(op: Op, case: Case) -> Callable[..., Any]:
    """cuBLASLt's epilogue: bias and GeLU in one launch."""
    if case.options != {"activation": "gelu_tanh"} or case.present != ("bias",):
        raise ValueError("torch._addmm_activation is GeLU (tanh) with a bias")
    if not torch.cuda.is_available():
        raise ValueError("torch._addmm_activation is exact GeLU on a CPU")

    def run(a: Tensor, b: Tensor, bias: Tensor, activation: str) -> Tensor:
        return torch._addmm_activation(bias, a, b, use_gelu=True)

    return run


def _written(case: Case, function: Callable[..., Any]) -> Callable[..., Any]:
    if not (set(case.present) <= _TENSORS and set(case.options) <= _OPTIONS):
        raise ValueError("written for one b, a new output and the activations of models")
    if scale_kind(case.axes) == "block":
        raise ValueError("scales of blocks are eager's alone")
    return function


def eager_dact(op: Op, case: Case) -> Callable[..., Any]:
    """cuBLAS, and torch's operators for the activation and its gradient."""
    if case.present or "in_place" in case.options:
        raise ValueError("written for a new dz")
    return matmul_dact
