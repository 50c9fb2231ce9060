"""Experts for few tokens: two launches over the experts that have rows, and one that adds each token's rows.

Few tokens are bound by the bytes of the weights. A program multiplies a tile of one expert's weight by a block of that
expert's rows; nearly always that is all of them, so that each weight that is used is read once and no other is. The
grid has a program for each tile of as many blocks of rows as there may be: its size depends on the shapes alone, and a
CUDA graph can hold it. Programs without rows leave at once.

The product is computed transposed, weight times rows: the weight's tile is the wide operand, and the rows, padded to
16, the narrow one. MXFP4 weights are read as they are stored: the even columns of x multiply the low halves of the
bytes, the odd ones the high halves.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashkernel.blocks.epilogue_triton import apply_epilogue
from flashkernel.blocks.weight import Weight
from flashkernel.core import device, tune
from flashkernel.core.arguments import near, unit_stride
from flashkernel.core.launch import launch
from flashkernel.ops.gemm import rounded_to_fp8
from flashkernel.ops.moe.configs import FEW, FEW_TOKENS
from flashkernel.ops.moe.params import Experts
from flashkernel.ops.moe.routing.router import Routing
from flashkernel.ops.moe.triton.combine import combine


@triton.jit
def _rows_of_slot(offsets, slot, experts, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """(expert, first row, row behind the expert's last) of the slot-th block of rows; no rows if there are fewer."""
    index = tl.arange(0, EXPERTS)
    begin = tl.load(offsets + index, mask=index < experts, other=0)
    end = tl.load(offsets + index + 1, mask=index < experts, other=0)
    blocks = tl.cdiv(end - begin, BLOCK_M)
    behind = tl.cumsum(blocks, 0)
    mine = (behind - blocks <= slot) & (slot < behind)
    first = begin + (slot - (behind - blocks)) * BLOCK_M
    expert = tl.sum(tl.where(mine, index, 0), 0)
    return expert, tl.sum(tl.where(mine, first, 0), 0), tl.sum(tl.where(mine, end, 0), 0)


@triton.jit
def decode_e2m1(code, factor, dtype: tl.constexpr):
    """Values of e2m1 codes [N, G, 16] times factor [N, G], in `dtype`, [N, G * 16].

    The three low bits become exponent and fraction of a float16, which is then 2^14 times too small.
    """
    half = (((code & 8) << 12) | ((code & 7) << 9)).to(tl.int16).to(tl.float16, bitcast=True)
    value = (half.to(tl.float32) * factor[:, :, None]).to(dtype)
    return tl.reshape(value, [code.shape[0], code.shape[1] * code.shape[2]])


@triton.jit
def scale_factor(scale):
    """2^14 times the value of e8m0 scales; 255 stands for NaN."""
    value = tl.where(scale == 0, 1 << 22, scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return tl.where(scale == 255, float("nan"), value * 16384.0)


@triton.jit
def _product(
    total, x, x_row, in_rows, weight, scales, n_index, in_n, first_k, last_k, K, x_stride, weight_strides,
    scale_strides, PRECISION: tl.constexpr, MXFP4: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """total [N, M] plus the product of weight rows `n_index` with rows `x_row` of x, over k from first_k to last_k."""
    for k in tl.range(first_k, last_k, BLOCK_K, num_stages=NUM_STAGES):
        if MXFP4:
            byte = k // 2 + tl.arange(0, BLOCK_K // 2)
            in_bytes = byte < K // 2
            inside = in_n[:, None] & in_bytes[None, :]
            codes = tl.load(weight + n_index[:, None] * weight_strides[0] + byte[None, :], mask=inside, other=0)
            codes = tl.reshape(codes.to(tl.int32), [n_index.shape[0], BLOCK_K // 32, 16])
            group = k // 32 + tl.arange(0, BLOCK_K // 32)
            places = scales + n_index[:, None] * scale_strides[0] + group[None, :]
            scale = tl.load(places, mask=in_n[:, None] & (group < K // 32)[None, :], other=127)
            factor = scale_factor(scale)
            places = x + x_row[None, :] * x_stride + 2 * byte[:, None]  # [K / 2, M]
            x_inside = in_bytes[:, None] & in_rows[None, :]
            even = tl.load(places, mask=x_inside, other=0.0)
            odd = tl.load(places + 1, mask=x_inside, other=0.0)
            low, high = decode_e2m1(codes & 15, factor, even.dtype), decode_e2m1(codes >> 4, factor, even.dtype)
            total = tl.dot(low, even, total, input_precision=PRECISION)
            total = tl.dot(high, odd, total, input_precision=PRECISION)
        else:
            column = k + tl.arange(0, BLOCK_K)
            in_k = column < K
            places = weight + n_index[:, None] * weight_strides[0] + column.to(tl.int64)[None, :] * weight_strides[1]
            tile = tl.load(places, mask=in_n[:, None] & in_k[None, :], other=0.0)
            rows = tl.load(
                x + x_row[None, :] * x_stride + column[:, None], mask=in_k[:, None] & in_rows[None, :], other=0.0
            )  # fmt: skip
            total = tl.dot(tile, rows, total, input_precision=PRECISION)
    return total


@triton.jit
def few_tokens_kernel(
    x, gather, weights, scales, bias, y, offsets, x_stride, weight_strides, scale_strides, bias_strides, experts, K,
    columns, rows, split_k,
    PRECISION: tl.constexpr, MXFP4: tl.constexpr, GATE: tl.constexpr, ACTIVATION: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """y[split, row] = activation(x[gather[row]] W[expert]^T + bias), for BLOCK_N columns and BLOCK_M rows of an expert.

    Strides of weights, scales and biases: those of the experts first. A grid of (tiles, blocks of rows that there may
    be, splits of K); the bias belongs to the first split. With a gate, a tile has gate and up of each column in turn.
    """
    split = tl.program_id(2)
    expert, first, end = _rows_of_slot(offsets, tl.program_id(1), experts, EXPERTS, BLOCK_M)
    if first >= end:
        return
    expert = expert.to(tl.int64)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)  # of y
    in_columns = column < columns
    weight = weights + expert * weight_strides[0]
    scale = scales
    if MXFP4:
        scale = scales + expert * scale_strides[0]
    first_k, last_k = split * split_k, tl.minimum((split + 1) * split_k, K)
    row = first + tl.arange(0, BLOCK_M)
    in_rows = row < end
    x_row = row.to(tl.int64)
    if gather is not None:
        x_row = tl.load(gather + row, mask=in_rows, other=0).to(tl.int64)
    if GATE == "":
        n_index = column
        in_n = in_columns
        value = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        pair, part = tl.program_id(0) * BLOCK_N + tl.arange(0, 2 * BLOCK_N) // 2, tl.arange(0, 2 * BLOCK_N) % 2
        n_index = 2 * pair + part if GATE == "interleaved" else pair + part * columns
        in_n = pair < columns
        value = tl.zeros([2 * BLOCK_N, BLOCK_M], tl.float32)
    value = _product(
        value, x, x_row, in_rows, weight, scale, n_index.to(tl.int64), in_n, first_k, last_k, K, x_stride,
        (weight_strides[1], weight_strides[2]), (scale_strides[1], scale_strides[2]),
        PRECISION, MXFP4, BLOCK_K, NUM_STAGES,
    )  # fmt: skip
    if bias is not None:
        there = bias + expert * bias_strides[0] + n_index * bias_strides[1]
        value += tl.load(there, mask=in_n & (split == 0), other=0.0).to(tl.float32)[:, None]
    value = tl.trans(value)  # [BLOCK_M, ...]
    up = value
    if GATE != "":
        value, up = tl.split(tl.reshape(value, [BLOCK_M, BLOCK_N, 2]))
    value = apply_epilogue(value, up, row, column, column, in_rows, in_columns, y, y, 0, y, 0, ACTIVATION)
    offset = (split * rows + row).to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(y + offset, value.to(y.dtype.element_ty), mask=in_rows[:, None] & in_columns[None, :])


def serves(x: Tensor, routing: Routing, experts: Experts) -> bool:
    """Whether these kernels compute a call: few tokens, plain weights or MXFP4."""
    if x.shape[0] > FEW_TOKENS or routing.tokens.shape[0] == 0 or 0 in (*x.shape, experts.inner):
        return False
    return all(not isinstance(one, Weight) or one.format == "mxfp4" for one in (experts.gate_up, experts.down))


def forward(x: Tensor, routing: Routing, experts: Experts) -> Tensor:
    """[tokens, hidden]; x has unit stride along its columns."""
    gate_up, down, tokens = experts.gate_up, experts.down, x.shape[0]
    hidden = _launch(
        _rounded(x, gate_up), routing.tokens, gate_up, experts.gate_up_bias, routing, tokens, x.dtype, experts.inner,
        experts.gate, experts.piece.text,
    )[0]  # fmt: skip
    hidden = _rounded(hidden, down)
    y = _launch(hidden, None, down, experts.down_bias, routing, tokens, torch.float32, down.shape[1], "", "")
    return combine(y, routing.positions, routing.weights, x.dtype)


def _rounded(x: Tensor, weight: Tensor | Weight) -> Tensor:
    """x, rounded if the weight asks for it in fp8."""
    if isinstance(weight, Weight) and weight.activation_dtype is not None:
        return rounded_to_fp8(x, weight, gradients=False)
    return x


def _launch(
    x: Tensor, gather: Tensor | None, weight: Tensor | Weight, bias: Tensor | None, routing: Routing, tokens: int,
    dtype: torch.dtype, columns: int, gate: str, activation: str,
) -> Tensor:  # fmt: skip
    """[splits, rows, columns]; rows behind the last group are not written."""
    packed = isinstance(weight, Weight)
    data, scales = (weight.data, weight.scales) if isinstance(weight, Weight) else (weight, None)
    if scales is not None:
        data, scales = unit_stride(data), unit_stride(scales)
    experts, _, k = weight.shape
    rows = routing.tokens.shape[0]
    # Twice the average; an expert with more rows has several blocks of them, whose programs share the L2 cache.
    block_m = max(16, min(tune.power_of_2(tokens), tune.power_of_2(tune.ceil_div(2 * rows, experts))))
    shape = {
        "experts": experts, "rows": rows, "n": columns, "k": k, "bits": 4 if packed else 8 * data.element_size(),
        "gated": bool(gate), "splittable": not activation, "block_m": block_m,
    }  # fmt: skip
    bias = None if bias is None else near(bias)
    config = tune.pick(FEW, device.properties(x.device), shape)
    split_k = tune.ceil_div(tune.ceil_div(k, config.splits), config.block_k) * config.block_k
    splits = tune.ceil_div(k, split_k)
    active = min(experts, rows)
    blocks = active + (rows - active) // block_m  # at most: each expert begins one
    y = torch.empty((splits, rows, columns), dtype=dtype, device=x.device)
    precision = "ieee" if x.dtype == torch.float32 else "tf32"
    launch(
        few_tokens_kernel, (tune.ceil_div(columns, config.block_n), blocks, splits), x, gather, data,
        scales, bias, y, routing.offsets, x.stride(0), data.stride(), (0, 0, 0) if scales is None else scales.stride(),
        (0, 0) if bias is None else bias.stride(), experts, k, columns, rows, split_k,
        PRECISION=precision, MXFP4=packed, GATE=gate, ACTIVATION=activation, EXPERTS=tune.power_of_2(experts),
        BLOCK_M=block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, NUM_STAGES=config.num_stages,
        num_warps=config.num_warps,
    )  # fmt: skip
    return y
