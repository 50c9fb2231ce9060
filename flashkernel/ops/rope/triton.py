"""Rotary position embedding in Triton: q and k in one launch, forward and backward by the same kernel.

A program holds the heads of one token, or a share of them, so that cos and sin are loaded once and every load is issued
before the first store. The backward is the rotation by the opposite angle.
"""

import torch
import triton
import triton.language as tl

from flashkernel.blocks.heads import tile
from flashkernel.blocks.rope_triton import load_pairs, store_pairs, token_cos_sin, turn
from flashkernel.core import device, tune
from flashkernel.core.launch import launch
from flashkernel.core.tune import ceil_div, power_of_2
from flashkernel.ops.rope.configs import ROTATE


@triton.jit
def _store_turned(
    target, inside, first, second, cosine, sine,
    HALF: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    real, imaginary = turn(first, second, cosine, sine)
    store_pairs(target, inside, real.to(first.dtype), imaginary.to(first.dtype), HALF, PAIRS, INTERLEAVED)


@triton.jit
def _copy_rest(source, target, inside, HEAD_DIM: tl.constexpr, ROTARY: tl.constexpr, REST: tl.constexpr):
    column = ROTARY + tl.arange(0, REST)[None, :]
    inside = inside & (column < HEAD_DIM)
    tl.store(target + column, tl.load(source + column, mask=inside), mask=inside)


@triton.jit
def rope_rotate(
    q, k, q_out, k_out, cos, sin, rates, positions,
    q_batch, q_seq, q_head, k_batch, k_seq, k_head, table_batch, table_row, positions_batch, positions_seq,
    batches, seq, q_heads, k_heads, table_rows, scaling,
    INVERSE: tl.constexpr, INTERLEAVED: tl.constexpr, IN_PLACE: tl.constexpr, TABLE_STEP: tl.constexpr,
    HEAD_DIM: tl.constexpr, ROTARY: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
    SPLITS: tl.constexpr, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = ROTARY // 2
    share = tl.program_id(0) % SPLITS
    place = (tl.program_id(0) // SPLITS).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    if batch >= batches:
        return
    token = batch * seq + place

    head = (share * Q_HEADS + tl.arange(0, Q_HEADS))[:, None]  # [Q_HEADS, 1]
    q_inside = head < q_heads
    q_source = q + batch * q_batch + place * q_seq + head.to(tl.int64) * q_head
    q_target = q_source if IN_PLACE else q_out + (token * q_heads + head) * HEAD_DIM
    q_first, q_second = load_pairs(q_source, q_inside, HALF, PAIRS, INTERLEAVED)
    if k is not None:
        head = (share * K_HEADS + tl.arange(0, K_HEADS))[:, None]  # [K_HEADS, 1]
        k_inside = head < k_heads
        k_source = k + batch * k_batch + place * k_seq + head.to(tl.int64) * k_head
        k_target = k_source if IN_PLACE else k_out + (token * k_heads + head) * HEAD_DIM
        k_first, k_second = load_pairs(k_source, k_inside, HALF, PAIRS, INTERLEAVED)
    cosine, sine = token_cos_sin(
        cos, sin, rates, positions, batch, place,
        table_batch, table_row, positions_batch, positions_seq, table_rows, scaling, HALF, PAIRS, TABLE_STEP,
    )  # fmt: skip
    if INVERSE:
        sine = -sine

    _store_turned(q_target, q_inside, q_first, q_second, cosine, sine, HALF, PAIRS, INTERLEAVED)
    if k is not None:
        _store_turned(k_target, k_inside, k_first, k_second, cosine, sine, HALF, PAIRS, INTERLEAVED)
    if REST > 0 and not IN_PLACE:
        _copy_rest(q_source, q_target, q_inside, HEAD_DIM, ROTARY, REST)
        if k is not None:
            _copy_rest(k_source, k_target, k_inside, HEAD_DIM, ROTARY, REST)


def forward(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    rates: torch.Tensor | None,
    positions: torch.Tensor | None,
    scaling: float,
    rotary: int,
    interleaved: bool,
    inverse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(q, k) rotated, both contiguous; without a k, an empty tensor stands for it."""
    q = _unit_stride(q)
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k = None if k is None else _unit_stride(k)
    k_out = torch.empty(0 if k is None else k.shape, dtype=q.dtype, device=q.device)
    _launch(q, k, q_out, k_out, cos, sin, rates, positions, scaling, rotary, interleaved, inverse, in_place=False)
    return q_out, k_out


def forward_in_place(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    rates: torch.Tensor | None,
    positions: torch.Tensor | None,
    scaling: float,
    rotary: int,
    interleaved: bool,
) -> None:
    """Rotates q and k where they are; each element is read and written by one program."""
    _launch(q, k, q, k, cos, sin, rates, positions, scaling, rotary, interleaved, inverse=False, in_place=True)


def _launch(q, k, q_out, k_out, cos, sin, rates, positions, scaling, rotary, interleaved, inverse, in_place) -> None:
    batch, seq, q_heads, head_dim = q.shape
    k_heads = 0 if k is None else k.shape[2]
    if cos is not None and (cos.stride() != sin.stride() or cos.stride(-1) > 2):
        cos, sin = cos.contiguous(), sin.contiguous()
    shape = {"tokens": batch * seq, "q_heads": q_heads, "k_heads": k_heads, "dim": rotary, "bytes": q.element_size()}
    config = tune.pick(ROTATE, device.facts(q.device), shape)
    across = min(batch, 65535)  # what a grid's second axis holds; the third takes the rest
    by_token = cos is not None and cos.ndim == 3
    launch(
        rope_rotate, (seq * config.splits, across, ceil_div(batch, max(1, across))),
        q, k, q_out, None if k is None else k_out, cos, sin, rates, positions,
        *q.stride()[:3], *((0, 0, 0) if k is None else k.stride()[:3]),
        cos.stride(0) if by_token and cos.shape[0] > 1 else 0, 0 if cos is None else cos.stride(-2),
        positions.stride(0) if positions is not None and positions.ndim == 2 and positions.shape[0] > 1 else 0,
        0 if positions is None else positions.stride(-1),
        batch, seq, q_heads, k_heads, 0 if cos is None else cos.shape[-2], scaling,
        INVERSE=inverse, INTERLEAVED=interleaved, IN_PLACE=in_place, TABLE_STEP=1 if cos is None else cos.stride(-1),
        HEAD_DIM=head_dim, ROTARY=rotary, PAIRS=power_of_2(rotary // 2),
        REST=power_of_2(head_dim - rotary) if head_dim > rotary else 0,
        SPLITS=config.splits, Q_HEADS=tile(q_heads, config.splits), K_HEADS=tile(k_heads, config.splits),
        num_warps=config.warps,
    )  # fmt: skip


def _unit_stride(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
