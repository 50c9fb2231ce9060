"""Products with weights in tiles for few rows: which instance of few_rows.cu to launch, with which grid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks.cuda_headers import CUDA_HEADERS
from flashkernel.blocks.epilogue_cuda import cuda_steps
from flashkernel.blocks.weight import Weight
from flashkernel.blocks.weight_formats.grouped import scales_of
from flashkernel.blocks.weight_formats.tiles import SUFFIX
from flashkernel.core import cuda
from flashkernel.core.cuda import TYPES, Module
from flashkernel.core.tune import ceil_div
from flashkernel.ops.gemm.configs import MAX_COUNTERS
from flashkernel.ops.gemm.counters import counters
from flashkernel.ops.gemm.quantized.configs import (
    TILE,
    QuantizedConfig,
    few_rows_bytes,
    few_rows_configs,
    few_rows_error,
    slice_units,
    span,
)

__all__ = ["FewRows", "QuantizedConfig", "few_rows_configs", "few_rows_error", "launch", "max_chunks", "module"]
FOLDER = Path(__file__).parent
TILE_ROWS = 16  # of the weight: a work item
_ARGUMENTS = ", ".join(["pointer"] * 15 + ["int64"] * 4 + ["int32"] * 10)


@lru_cache(maxsize=1024)
def module(chain: str, bias: torch.dtype, residual: torch.dtype, out: torch.dtype) -> Module:
    """few_rows.cu with an epilogue and the dtypes of its operands."""
    defines = {"BIAS_TYPE": TYPES[bias], "RESIDUAL_TYPE": TYPES[residual], "OUT_TYPE": TYPES[out]}
    if chain:
        defines["EPILOGUE"] = cuda_steps(chain)
    return Module(FOLDER / "few_rows.cu", defines=defines, include=CUDA_HEADERS, specific=True)


@dataclass(frozen=True)
class Product:
    """y [rows, outputs] of x [rows, inner].

    Attributes:
        x: Unit stride along the rows, 16-byte aligned.
        weights: A matrix in tiles, or a gate's and an up one.
        y: Unit stride along the rows.
        biases: As many as weights.
        residual: As y.
        chain: The text of the epilogue.
    """

    x: Tensor
    weights: tuple[Weight, ...]
    y: Tensor
    biases: tuple[Tensor, ...] = ()
    residual: Tensor | None = None
    chain: str = ""


@dataclass(frozen=True)
class FewRows(Product):
    """A product, or that of the rows of x that experts compute, where there are `offsets`.

    Weights are then stacks of matrices, [experts, outputs, inner], and biases [experts, outputs].

    Attributes:
        interleaved: Even rows of the weight are the gate's, odd ones up's; one bias is for both.
        offsets: int32 [experts + 1]: rows of y by expert.
        gather: int32 [rows]: the row of x for each of y; without it they are the same.
        expert_rows: Rows of the weight from one expert to the next in memory, where not all of them are used.
    """

    interleaved: bool = False
    offsets: Tensor | None = None
    gather: Tensor | None = None
    expert_rows: int | None = None

    @property
    def gate(self) -> str:
        return "INTERLEAVED" if self.interleaved else "TWO_MATRICES" if len(self.weights) == 2 else "NO_GATE"

    def bias_arguments(self) -> tuple[list[Any], int, int]:
        """(pointers of the biases, elements between experts, elements between outputs)."""
        if not self.biases:
            return [None, None], 0, 0
        first = self.biases[0]
        apart = first.stride(0) if self.offsets is not None else 0  # of [experts, outputs]
        if self.interleaved:
            return [first, first[:, 1:]], apart, 2
        return [first, self.biases[-1]], apart, 1


def max_chunks(rows: int, tokens: int, experts: int) -> int:
    """Chunks of `tokens` rows that so many rows of y make at most; 0 experts: one weight for all rows."""
    return min(rows, experts + rows // tokens) if experts else ceil_div(rows, tokens)


def launch(call: FewRows, config: QuantizedConfig, shape: Mapping[str, int]) -> None:
    """Runs a call. `shape` is what configs are chosen by: inner, bits, group, scale_bytes, zeros, parts."""
    x, y, weight, target = call.x, call.y, call.weights[0], cuda.target(call.x.device)
    inner, outputs, rows = x.shape[1], y.shape[1], y.shape[0]
    experts = 0 if call.offsets is None else call.offsets.shape[0] - 1
    row_tiles = weight.shape[-2] // TILE_ROWS
    items = row_tiles * max_chunks(rows, config.tokens, experts)
    slices = config.slices
    blocks = slices * max(1, min(target.sms // slices, items))
    workspace = shared_by = None
    if slices > 1:
        size = items * slices * len(call.weights) * 16 * config.tokens
        workspace = torch.empty(size, dtype=torch.float32, device=x.device)
        few = items <= MAX_COUNTERS
        shared_by = counters(x.device) if few else torch.zeros(items, dtype=torch.int32, device=x.device)
    groups = scales_of(weight).shape[-1]
    instance = (
        TYPES[x.dtype], weight.format.removesuffix(SUFFIX).upper() + ("_ZEROS" if shape["zeros"] else ""),
        shape["group"], config.tokens, config.warps, config.blocks, span(config, shape["group"], inner), config.stages,
        call.gate, "true" if experts else "false", "true" if slices > 1 else "false",
    )  # fmt: skip
    biases, bias_stride, bias_step = call.bias_arguments()
    up = call.weights[-1]
    code = module(
        call.chain, call.biases[0].dtype if call.biases else x.dtype,
        x.dtype if call.residual is None else call.residual.dtype, y.dtype,
    )  # fmt: skip
    code.kernel(f"linear_quantized_few<{', '.join(map(str, instance))}>", _ARGUMENTS).launch(
        blocks, 32 * config.warps,
        (
            x, call.gather, call.offsets, weight.data, weight.scales, weight.zeros, up.data, up.scales, up.zeros,
            *biases, call.residual, y, workspace, shared_by, x.stride(0), bias_stride,
            0 if call.residual is None else call.residual.stride(0), y.stride(0), bias_step, rows, outputs,
            inner // TILE, groups, max(1, inner // groups // TILE), slices, slice_units(config, inner), experts,
            (weight.shape[-2] if call.expert_rows is None else call.expert_rows) // TILE_ROWS,
        ),
        shared=few_rows_bytes(config, shape, experts), programmatic=True,
    )  # fmt: skip
