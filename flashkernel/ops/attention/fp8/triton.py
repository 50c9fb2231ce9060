"""FP8 attention in Triton, for sm_89 and newer. Q K^T is in FP8, P V in float16, to which e4m3 widens exactly."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashkernel.blocks.softmax_triton import LOG2E, SoftmaxState, tanh
from flashkernel.blocks.tile_ranges import tile_ranges
from flashkernel.core import device, tune
from flashkernel.core.launch import launch
from flashkernel.ops.attention.fp8.configs import TRITON, AttentionConfig
from flashkernel.ops.attention.fp8.params import Fp8Inputs
from flashkernel.ops.attention.params import AttentionParams
from flashkernel.ops.attention.triton.arguments import Outputs, Ranges, Sizes
from flashkernel.ops.attention.triton.forward_kernel import store_output
from flashkernel.ops.attention.triton.scores import TileIndices, load_range, program_of, ranges_row, visible

SCALE_BLOCK = tl.constexpr(128)  # positions that share a scale


@triton.jit
def _load_tile(
    source, first, seqlen, strides, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Returns rows first to first + ROWS, [ROWS, BLOCK_D]; zero outside of (seqlen, DIM)."""
    row = first + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK_D)[None, :]
    inside = (row < seqlen) & (column < DIM)
    address = source + row.to(tl.int64) * strides.seq + column.to(tl.int64) * strides.dim
    return tl.load(address, mask=inside, other=0.0)


class Strides(NamedTuple):
    """Of a (batch, seqlen, heads, dim) tensor, in elements."""

    batch: Any
    seq: Any
    head: Any
    dim: Any


class Scale(NamedTuple):
    """Scales float32 [batch, heads, blocks] of a tensor: one for SCALE_BLOCK rows, or per head, and then `per_block` is
    None, which is compiled in."""

    data: Any
    blocks: Any
    per_block: Any


class AttentionFp8Traits(NamedTuple):
    """What the kernel is compiled for; the fields of `AttentionTraits` mean the same there."""

    SOFTCAP: bool
    HEAD_DIM: int
    VALUE_DIM: int
    BLOCK_D: int
    BLOCK_DV: int
    BLOCK_M: int
    BLOCK_N: int
    NUM_STAGES: int
    EVEN: bool


@triton.jit
def _load_scale(scale, pointer, block):
    """The scale of a block of rows; `pointer` is that of the head."""
    if scale.per_block is None:
        block *= 0
    return tl.load(pointer + block)


@triton.jit
def attention_fp8(
    q, k, v, q_scale, k_scale, v_scale, sinks, outputs, mask_tables, ranges, sizes, q_strides, k_strides, v_strides,
    softmax_scale, softcap, MASK: tl.constexpr, TRAITS: tl.constexpr,
):  # fmt: skip
    """O and LSE of one tile of queries; `outputs`, `ranges` and `sizes` are those of attention/triton/arguments.py."""
    HEAD_DIM: tl.constexpr = TRAITS.HEAD_DIM
    VALUE_DIM: tl.constexpr = TRAITS.VALUE_DIM
    BLOCK_D: tl.constexpr = TRAITS.BLOCK_D
    BLOCK_DV: tl.constexpr = TRAITS.BLOCK_DV
    BLOCK_M: tl.constexpr = TRAITS.BLOCK_M
    BLOCK_N: tl.constexpr = TRAITS.BLOCK_N
    heads, seqlen_q, seqlen_k = sizes.heads, sizes.seqlen_q, sizes.seqlen_k
    tiles = tl.cdiv(seqlen_q, BLOCK_M)
    tile, h, b = program_of(tiles, heads)
    tile = tiles - 1 - tile  # under a causal mask the last tiles are the longest: they go first
    kv_head = (h // sizes.group_size).to(tl.int64)
    kv_heads = heads // sizes.group_size
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    q += b * q_strides.batch + h.to(tl.int64) * q_strides.head
    q_tile = _load_tile(q, tile * BLOCK_M, seqlen_q, q_strides, BLOCK_M, HEAD_DIM, BLOCK_D)
    k += b * k_strides.batch + kv_head * k_strides.head
    v += b * v_strides.batch + kv_head * v_strides.head
    k_scales = k_scale.data + (b * kv_heads + kv_head) * k_scale.blocks
    v_scales = v_scale.data + (b * kv_heads + kv_head) * v_scale.blocks
    q_scales = q_scale.data + (b * heads + h) * q_scale.blocks
    row_scale = (
        _load_scale(q_scale, q_scales, tl.minimum(row, seqlen_q - 1) // SCALE_BLOCK) * softmax_scale
    )  # [BLOCK_M]
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)  # m, in units of log2
    row_sum = tl.zeros([BLOCK_M], tl.float32)  # l = sum of 2^(s - m)
    o_acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    table_row = ranges_row(ranges, b, h, tile)
    for index in range(tl.load(ranges.counts + table_row)):
        block_begin, block_end, masked = load_range(ranges, table_row, index)
        for block in tl.range(block_begin, block_end, num_stages=TRAITS.NUM_STAGES):
            scale_block = block * BLOCK_N // SCALE_BLOCK
            k_tile = _load_tile(k, block * BLOCK_N, seqlen_k, k_strides, BLOCK_N, HEAD_DIM, BLOCK_D)
            block_scale = row_scale * _load_scale(k_scale, k_scales, scale_block)  # [BLOCK_M]
            s = tl.dot(q_tile, tl.trans(k_tile)) * block_scale[:, None]
            if TRAITS.SOFTCAP:
                s = softcap * tanh(s / softcap)
            s *= LOG2E
            if masked != 0:
                key = (block * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
                in_mask = visible(TileIndices(b, h, row[:, None], key), sizes, mask_tables, MASK, TRAITS.EVEN)
                s = tl.where(in_mask, s, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(s, 1))
            finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
            rescale = tl.exp2(row_max - finite_max)
            p = tl.exp2(s - finite_max[:, None])  # [BLOCK_M, BLOCK_N]
            row_sum = row_sum * rescale + tl.sum(p, 1)
            v_tile = _load_tile(v, block * BLOCK_N, seqlen_k, v_strides, BLOCK_N, VALUE_DIM, BLOCK_DV)
            pv = tl.dot(p.to(tl.float16), v_tile.to(tl.float16))
            o_acc = o_acc * rescale[:, None] + pv * _load_scale(v_scale, v_scales, scale_block)
            row_max = new_max
    state = SoftmaxState(o_acc, row_sum, row_max)
    store_output(state, row, b, h, sinks, outputs, sizes, VALUE_DIM, BLOCK_DV)


def forward(inputs: Fp8Inputs, params: AttentionParams, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns o (batch, seqlen_q, heads, value_dim) in `out_dtype` and lse (batch, heads, seqlen_q) in float32."""
    (q, k, v, *scales, sinks), (mask, scale, softcap, *_) = inputs, params
    batch, seqlen_q, heads, head_dim = q.shape
    seqlen_k, value_dim = k.shape[1], v.shape[3]
    o = torch.empty((batch, seqlen_q, heads, value_dim), dtype=out_dtype, device=q.device)
    lse = torch.empty((batch, heads, seqlen_q), dtype=torch.float32, device=q.device)
    shape = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "head_dim": head_dim, "value_dim": value_dim}
    config: AttentionConfig = tune.pick(TRITON, device.properties(q.device), shape)
    ranges = tile_ranges(mask, batch, heads, seqlen_q, seqlen_k, config.block_m, config.block_n, q.device)
    functions = params.functions()
    tiles = tune.ceil_div(seqlen_q, config.block_m)
    scales = [x.contiguous() for x in scales]
    groups = (Scale(x, x.shape[2] if x.ndim == 3 else 1, 1 if x.ndim == 3 else None) for x in scales)
    traits = AttentionFp8Traits(
        SOFTCAP=softcap > 0,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        BLOCK_D=max(32, tune.power_of_2(head_dim)),
        BLOCK_DV=max(16, tune.power_of_2(value_dim)),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        NUM_STAGES=config.num_stages,
        EVEN=seqlen_q % config.block_m == 0 and seqlen_k % config.block_n == 0,
    )
    launch(
        attention_fp8, (tiles * heads * batch,),
        q, k, v, *groups, sinks, Outputs(o, lse), functions.mask_tables, Ranges.of(ranges), Sizes.of(q, k),
        *(Strides(*x.stride()) for x in (q, k, v)), scale, softcap,
        MASK=functions.mask, TRAITS=traits, num_warps=config.num_warps,
    )  # fmt: skip
    return o, lse
