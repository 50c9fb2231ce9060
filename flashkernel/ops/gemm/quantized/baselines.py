"""What products with quantized weights are timed against. Weights are prepared once, outside the measured time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flashkernel.blocks.checkpoint_layouts import write_gptq
from flashkernel.blocks.weight import Layout, Weight, rounded_activations
from flashkernel.blocks.weight_formats.tiles import FORMATS
from flashkernel.core.op import Case, Op

Product = Callable[[Tensor], Tensor]


def _prepared(prepare: Callable[[Weight, torch.dtype], Product]) -> Callable[..., Tensor]:
    """A function of the operator's signature that prepares a weight the first time it sees its data."""
    known: dict[int, tuple[Tensor, Product]] = {}  # by address; the tensor is kept, so that it is not used again

    def run(x: Tensor, data: Tensor, scales: Tensor, *, layout: str) -> Tensor:
        if data.data_ptr() not in known:
            known[data.data_ptr()] = data, prepare(Weight.from_tensors((data, scales), layout), x.dtype)
        return known[data.data_ptr()][1](x)

    return run


def _supported(case: Case, *layouts: str) -> None:
    if case.options["layout"] not in layouts or case.present:
        raise ValueError(f"benchmarked for weights in {' or '.join(layouts)}, without a bias")


def cublas(op: Op, case: Case) -> Callable[..., Tensor]:
    """The dequantized weight in x's dtype, through torch.

    Where the layout wants x in 8 bits, x is rounded for the check alone: what is timed is the product that the
    quantized one replaces.
    """
    if case.present:
        raise ValueError("benchmarked without zeros and a bias")

    def prepare(weight: Weight, dtype: torch.dtype) -> Product:
        matrix = weight.dequantize(dtype)
        return lambda x: F.linear(x, matrix)

    def prepare_checked(weight: Weight, dtype: torch.dtype) -> Product:
        product = prepare(weight, dtype)
        return lambda x: product(rounded_activations(x, weight))

    run = _prepared(prepare)
    if Layout.parse(case.options["layout"]).activation_dtype is not None:
        run.checked = _prepared(prepare_checked)  # type: ignore[attr-defined]
    return run


def _gptq(weight: Weight) -> tuple[Tensor, Tensor]:
    """(codes (in / 8, out) int32, scales (groups, out)) of an int4 weight without zero points."""
    if weight.format in FORMATS:
        weight = FORMATS[weight.format].row_major(weight)
    parts = write_gptq(weight)
    return parts["qweight"].contiguous(), parts["scales"].to(torch.bfloat16).contiguous()


def marlin(op: Op, case: Case) -> Callable[..., Tensor]:
    """Marlin, as vLLM ships it."""
    _supported(case, "int4_tiles group", "int4 group")
    from vllm import _custom_ops as ops  # type: ignore[import-not-found]
    from vllm.model_executor.layers.quantization.utils import marlin_utils  # type: ignore[import-not-found]
    from vllm.scalar_type import scalar_types  # type: ignore[import-not-found]

    multiply: Any = getattr(ops, "marlin_gemm", None) or ops.gptq_marlin_gemm

    def prepare(weight: Weight, dtype: torch.dtype) -> Product:
        columns, inner = weight.shape
        words, scales = _gptq(weight)
        none = torch.empty(0, dtype=torch.int32, device=words.device)
        packed = ops.gptq_marlin_repack(words, none, inner, columns, 4)
        scales = marlin_utils.marlin_permute_scales(scales, inner, columns, 128)
        workspace = marlin_utils.marlin_make_workspace_new(words.device)

        def product(x: Tensor) -> Tensor:
            return multiply(
                a=x, c=None, b_q_weight=packed, b_bias=None, b_scales=scales, a_scales=None, global_scale=None,
                b_zeros=none, g_idx=none, perm=none, workspace=workspace, b_q_type=scalar_types.uint4b8,
                size_m=x.shape[0], size_n=columns, size_k=inner, is_k_full=True, use_atomic_add=False,
                use_fp32_reduce=True, is_zp_float=False,
            )  # fmt: skip

        return product

    return _prepared(prepare)


def machete(op: Op, case: Case) -> Callable[..., Tensor]:
    """Machete, as vLLM ships it."""
    _supported(case, "int4_tiles group", "int4 group")
    from vllm import _custom_ops as ops  # type: ignore[import-not-found]
    from vllm.scalar_type import scalar_types  # type: ignore[import-not-found]

    def prepare(weight: Weight, dtype: torch.dtype) -> Product:
        words, scales = _gptq(weight)
        packed = ops.machete_prepack_B(words.t().contiguous().t(), torch.bfloat16, scalar_types.uint4b8, scales.dtype)
        return lambda x: ops.machete_mm(
            a=x, b_q=packed, b_type=scalar_types.uint4b8, b_group_scales=scales, b_group_size=128
        )

    return _prepared(prepare)


def cutlass_fp8(op: Op, case: Case) -> Callable[..., Tensor]:
    """CUTLASS's fp8 product in vLLM, x quantized for each token in the measured time."""
    _supported(case, "fp8 row x:float8_e4m3fn")
    from vllm import _custom_ops as ops  # type: ignore[import-not-found]

    def prepare(weight: Weight, dtype: torch.dtype) -> Product:
        data, scales = weight.data.t(), weight.scales

        def product(x: Tensor) -> Tensor:
            x_data, x_scales = ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True)
            return ops.cutlass_scaled_mm(x_data, data, x_scales, scales, x.dtype)

        return product

    return _prepared(prepare)
