"""Rotary position embedding in Triton: q and k in one launch, forward and backward by the same kernel.

A program holds the heads of one token, or a share of them, so that cos and sin are loaded once and every load is issued
before the first store. The backward is the rotation by the opposite angle.
"""

import torch
import triton
import triton.language as tl

from flashkernel.core import device, tune
from flashkernel.core.launch import launch
from flashkernel.core.tune import ceil_div, power_of_2
from flashkernel.ops.rope.configs import ROTATE, tile


@triton.jit
def _cos_sin(phase):
    """(cos, sin) of a phase in units of 2^-64 turns."""
    top = (phase >> 32).to(tl.int32)  # 2^-32 turns
    quarter = ((top >> 29) + 1) >> 1  # the nearest quarter turn
    x = (top - (quarter << 30)).to(tl.float32) * 1.4629180792671596e-09  # radians in [-pi / 4, pi / 4]
    y = x * x
    sine = x + x * y * (-1 / 6 + y * (1 / 120 + y * (-1 / 5040 + y / 362880)))
    cosine = 1.0 + y * (-1 / 2 + y * (1 / 24 + y * (-1 / 720 + y / 40320)))
    odd = (quarter & 1) == 1
    real = tl.where(odd, sine, cosine)
    imaginary = tl.where(odd, cosine, sine)
    return tl.where(((quarter + 1) & 2) == 2, -real, real), tl.where((quarter & 2) == 2, -imaginary, imaginary)


@triton.jit
def _token_cos_sin(
    cos, sin, rates, positions, batch, place,
    table_batch, table_row, positions_batch, positions_seq, table_rows, scaling,
    HALF: tl.constexpr, PAIRS: tl.constexpr, TABLE_STEP: tl.constexpr,
):  # fmt: skip
    """(cos, sin) of one token, each [1, PAIRS]; NaN where its position is outside the table."""
    pair = tl.arange(0, PAIRS)
    inside = pair < HALF
    if positions is not None:
        position = tl.load(positions + batch * positions_batch + place * positions_seq).to(tl.int64)
    else:
        position = place
    if rates is not None:
        cosine, sine = _cos_sin(position * tl.load(rates + pair, mask=inside, other=0))
        cosine *= scaling
        sine *= scaling
    else:
        if positions is not None:
            inside = inside & (position >= 0) & (position < table_rows)
        offset = batch * table_batch + position * table_row
        cosine = tl.load(cos + offset + pair * TABLE_STEP, mask=inside, other=float("nan")).to(tl.float32)
        sine = tl.load(sin + offset + pair * TABLE_STEP, mask=inside, other=float("nan")).to(tl.float32)
    return cosine[None, :], sine[None, :]


@triton.jit
def _load_pairs(source, inside, HALF: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The two members of each pair, [HEADS, PAIRS] each; source and inside are [HEADS, 1]."""
    if INTERLEAVED:
        both = tl.arange(0, 2 * PAIRS)[None, :]
        values = tl.load(source + both, mask=inside & (both < 2 * HALF), other=0.0)
        first, second = tl.split(tl.reshape(values, (source.shape[0], PAIRS, 2)))
    else:
        pair = tl.arange(0, PAIRS)[None, :]
        first = tl.load(source + pair, mask=inside & (pair < HALF), other=0.0)
        second = tl.load(source + HALF + pair, mask=inside & (pair < HALF), other=0.0)
    return first, second


@triton.jit
def _store_turned(
    target, inside, first, second, cosine, sine,
    HALF: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    a = first.to(tl.float32)
    b = second.to(tl.float32)
    real = (a * cosine - b * sine).to(first.dtype)
    imaginary = (b * cosine + a * sine).to(first.dtype)
    if INTERLEAVED:
        both = tl.arange(0, 2 * PAIRS)[None, :]
        tl.store(target + both, tl.interleave(real, imaginary), mask=inside & (both < 2 * HALF))
    else:
        pair = tl.arange(0, PAIRS)[None, :]
        tl.store(target + pair, real, mask=inside & (pair < HALF))
        tl.store(target + HALF + pair, imaginary, mask=inside & (pair < HALF))


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
    q_first, q_second = _load_pairs(q_source, q_inside, HALF, PAIRS, INTERLEAVED)
    if k is not None:
        head = (share * K_HEADS + tl.arange(0, K_HEADS))[:, None]  # [K_HEADS, 1]
        k_inside = head < k_heads
        k_source = k + batch * k_batch + place * k_seq + head.to(tl.int64) * k_head
        k_target = k_source if IN_PLACE else k_out + (token * k_heads + head) * HEAD_DIM
        k_first, k_second = _load_pairs(k_source, k_inside, HALF, PAIRS, INTERLEAVED)
    cosine, sine = _token_cos_sin(
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
