"""FP8 attention in Triton, for sm_89 and newer: Q K^T in FP8, P V in float16, to which e4m3 widens exactly."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashkernel.blocks.mask import Mask
from flashkernel.blocks.runs import plan, span
from flashkernel.blocks.softmax_triton import LOG2E, tanh
from flashkernel.core import device, tune
from flashkernel.core.launch import launch
from flashkernel.ops.attention.fp8.configs import TRITON, Tiles
from flashkernel.ops.attention.triton import Problem
from flashkernel.ops.attention.triton.forward import finish
from flashkernel.ops.attention.triton.scores import program_of, visible

SCALE_BLOCK = tl.constexpr(128)  # positions that share a scale


@triton.jit
def _tile(source, first, count, step, along, SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Rows from `first` on, [SIZE, BLOCK]; what lies outside is zero."""
    row = first + tl.arange(0, SIZE)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < count) & (column < WIDTH)
    return tl.load(source + row.to(tl.int64) * step + column.to(tl.int64) * along, mask=inside, other=0.0)


@triton.jit
def attention_fp8(
    q, k, v, q_scale, k_scale, v_scale, sinks, o, lse, mask_tables, runs, counts,
    q_batch, q_seq, q_head, q_dim, k_batch, k_seq, k_head, k_dim, v_batch, v_seq, v_head, v_dim,
    q_blocks, k_blocks, v_blocks, runs_batch, runs_head, heads, group, queries, keys, tiles, most_runs, scale, softcap,
    MASK: tl.constexpr, HAS_SINKS: tl.constexpr, CAP: tl.constexpr, Q_STEP: tl.constexpr, K_STEP: tl.constexpr,
    V_STEP: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    tile, h, b = program_of(tiles, heads)
    tile = tiles - 1 - tile  # under a causal mask the last tiles are the longest: they go first
    pair = (h // group).to(tl.int64)
    row = tile * ROWS + tl.arange(0, ROWS)  # [ROWS]
    query = _tile(q + b * q_batch + h.to(tl.int64) * q_head, tile * ROWS, queries, q_seq, q_dim, ROWS, WIDTH, BLOCK_D)
    k += b * k_batch + pair * k_head
    v += b * v_batch + pair * v_head
    k_scale += (b * (heads // group) + pair) * k_blocks
    v_scale += (b * (heads // group) + pair) * v_blocks
    q_place = (b * heads + h) * q_blocks + tl.minimum(row, queries - 1) // SCALE_BLOCK * Q_STEP
    factor = tl.load(q_scale + q_place) * scale  # [ROWS]
    top = tl.full([ROWS], float("-inf"), tl.float32)  # largest score so far, in powers of two
    total = tl.zeros([ROWS], tl.float32)  # sum of 2^(score - top)
    output = tl.zeros([ROWS, BLOCK_V], tl.float32)
    place = (b * runs_batch + h * runs_head + tile).to(tl.int64)
    for run in range(tl.load(counts + place)):
        begin = tl.load(runs + (place * most_runs + run) * 3)
        end = tl.load(runs + (place * most_runs + run) * 3 + 1)
        must_mask = tl.load(runs + (place * most_runs + run) * 3 + 2)
        for index in tl.range(begin, end, num_stages=STAGES):
            block = index * COLUMNS // SCALE_BLOCK
            key = _tile(k, index * COLUMNS, keys, k_seq, k_dim, COLUMNS, WIDTH, BLOCK_D)
            score = tl.dot(query, tl.trans(key)) * (factor * tl.load(k_scale + block * K_STEP))[:, None]
            if CAP:
                score = softcap * tanh(score / softcap)
            score *= LOG2E
            if must_mask != 0:
                k_index = (index * COLUMNS + tl.arange(0, COLUMNS))[None, :]
                seen = visible(b, h, row[:, None], k_index, queries, keys, mask_tables, MASK, EVEN)
                score = tl.where(seen, score, float("-inf"))
            higher = tl.maximum(top, tl.max(score, 1))
            anchor = tl.where(higher == float("-inf"), 0.0, higher)
            rescale = tl.exp2(top - anchor)
            weight = tl.exp2(score - anchor[:, None])  # [ROWS, COLUMNS]
            total = total * rescale + tl.sum(weight, 1)
            value = _tile(v, index * COLUMNS, keys, v_seq, v_dim, COLUMNS, VALUES, BLOCK_V).to(tl.float16)
            product = tl.dot(weight.to(tl.float16), value)
            output = output * rescale[:, None] + product * tl.load(v_scale + block * V_STEP)
            top = higher
    finish(output, total, top, row, b, h, sinks, o, lse, heads, queries, HAS_SINKS, VALUES, BLOCK_V)


def forward(
    q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor, k_scale: Tensor, v_scale: Tensor, sinks: Tensor | None,
    mask: Mask | None, scale: float, softcap: float, out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(o, lse): o is (batch, queries, heads, value_dim) in `out_dtype`, lse (batch, heads, queries) in float32."""
    batch, queries, heads, width = q.shape
    keys, pairs, values = k.shape[1], k.shape[2], v.shape[3]
    o = torch.empty((batch, queries, heads, values), dtype=out_dtype, device=q.device)
    lse = torch.empty((batch, heads, queries), dtype=torch.float32, device=q.device)
    shape = {
        "queries": queries, "keys": keys, "span": span(mask, batch, heads, queries, keys), "head_dim": width,
        "value_dim": values,
    }  # fmt: skip
    config: Tiles = tune.pick(TRITON, device.facts(q.device), shape)
    runs, _ = plan(mask, batch, heads, queries, keys, config.rows, config.columns, q.device)
    visible_function, _, _, _, mask_tables = Problem(mask, scale, softcap, None, 0.0, 0).functions()
    run_batch, run_heads, tiles = runs.count.shape
    scales = [x.contiguous() for x in (q_scale, k_scale, v_scale)]
    steps = [int(x.ndim == 3) for x in scales]
    launch(
        attention_fp8, (tiles * heads * batch,),
        q, k, v, *scales, sinks, o, lse, mask_tables, runs.table, runs.count,
        *q.stride(), *k.stride(), *v.stride(), *(x.shape[2] if x.ndim == 3 else 1 for x in scales),
        run_heads * tiles if run_batch > 1 else 0, tiles if run_heads > 1 else 0, heads, heads // pairs, queries, keys,
        tiles, runs.table.shape[3], scale, softcap,
        MASK=visible_function, HAS_SINKS=sinks is not None, CAP=softcap > 0, Q_STEP=steps[0], K_STEP=steps[1],
        V_STEP=steps[2], WIDTH=width, VALUES=values, BLOCK_D=max(32, tune.power_of_2(width)),
        BLOCK_V=max(16, tune.power_of_2(values)), ROWS=config.rows, COLUMNS=config.columns, STAGES=config.stages,
        EVEN=queries % config.rows == 0 and keys % config.columns == 0, num_warps=config.warps,
    )  # fmt: skip
    return o, lse
