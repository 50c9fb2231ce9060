"""Keys and values into pages in Triton: rotation of q and k, quantisation and the write, in one launch.

A program holds the heads of one token, or a share of them: cos, sin and the slot are loaded once, and every load is
issued before the first store.
"""

import torch
import triton
import triton.language as tl

from flashkernel.blocks.codec_triton import encode_e4m3, encode_int8, largest_bits
from flashkernel.blocks.heads import tile
from flashkernel.blocks.pdl_triton import pdl_enter
from flashkernel.blocks.rope_triton import load_pairs, store_pairs, token_cos_sin, turn
from flashkernel.core import device, tune
from flashkernel.core.launch import launch, pdl_options
from flashkernel.core.tune import power_of_2
from flashkernel.ops.append_kv.configs import APPEND


@triton.jit
def _load_plain(source, inside, FIRST: tl.constexpr, LAST: tl.constexpr, COLUMNS: tl.constexpr):
    """The dims from FIRST up to LAST of each head, [HEADS, COLUMNS]; source and inside are [HEADS, 1]."""
    column = FIRST + tl.arange(0, COLUMNS)[None, :]
    return tl.load(source + column, mask=inside & (column < LAST), other=0.0)


@triton.jit
def _store_plain(target, inside, values, FIRST: tl.constexpr, LAST: tl.constexpr, COLUMNS: tl.constexpr):
    column = FIRST + tl.arange(0, COLUMNS)[None, :]
    tl.store(target + column, values, mask=inside & (column < LAST))


@triton.jit
def _scale_of(bits, MOST: tl.constexpr):
    """(the scale to be kept, what to divide by), each [HEADS, 1]; a head of zeros is kept with scale 0."""
    scale = tl.div_rn(bits.to(tl.float32, bitcast=True), tl.full(bits.shape, MOST, tl.float32))[:, None]
    return scale, tl.where(scale > 0, scale, 1.0)


@triton.jit
def _coded(values, divisor, target, CODE: tl.constexpr):
    """Values as the pages hold them; `divisor` is [HEADS, 1]."""
    if CODE == "none":
        return values.to(target.dtype.element_ty)
    else:
        scaled = tl.div_rn(values.to(tl.float32), tl.broadcast_to(divisor, values.shape))
        if CODE == "int8":
            return encode_int8(scaled)
        else:
            return encode_e4m3(scaled)


@triton.jit
def append_kv(
    k, v, q, q_out, k_pages, v_pages, k_scale, v_scale, slots, cos, sin, rates, positions,
    k_token, k_head, v_token, v_head, q_token, q_head,
    kp_page, kp_offset, kp_head, vp_page, vp_offset, vp_head,
    ks_page, ks_offset, ks_head, vs_page, vs_offset, vs_head,
    slots_step, table_row, positions_step, q_heads, kv_heads, all_slots, table_rows, scaling,
    PAGE_SIZE: tl.constexpr, CODE: tl.constexpr, MOST: tl.constexpr, INTERLEAVED: tl.constexpr,
    TABLE_STEP: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, V_COLUMNS: tl.constexpr,
    ROTARY: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
    SPLITS: tl.constexpr, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = ROTARY // 2
    if PDL:
        pdl_enter()
    share = tl.program_id(0) % SPLITS
    token = (tl.program_id(0) // SPLITS).to(tl.int64)
    slot = tl.load(slots + token * slots_step).to(tl.int64)

    head = (share * KV_HEADS + tl.arange(0, KV_HEADS))[:, None].to(tl.int64)  # [KV_HEADS, 1]
    inside = head < kv_heads
    k_source = k + token * k_token + head * k_head
    if ROTARY > 0:
        k_first, k_second = load_pairs(k_source, inside, HALF, PAIRS, INTERLEAVED)
    if REST > 0:
        k_rest = _load_plain(k_source, inside, ROTARY, K_DIM, REST)
    v_tile = _load_plain(v + token * v_token + head * v_head, inside, 0, V_DIM, V_COLUMNS)
    if q is not None:
        q_row = (share * Q_HEADS + tl.arange(0, Q_HEADS))[:, None].to(tl.int64)  # [Q_HEADS, 1]
        q_inside = q_row < q_heads
        q_source = q + token * q_token + q_row * q_head
        q_target = q_out + (token * q_heads + q_row) * K_DIM
        q_first, q_second = load_pairs(q_source, q_inside, HALF, PAIRS, INTERLEAVED)
    if ROTARY > 0:
        cosine, sine = token_cos_sin(
            cos, sin, rates, positions, 0, token, 0, table_row, 0, positions_step, table_rows, scaling,
            HALF, PAIRS, TABLE_STEP,
        )  # fmt: skip
        k_first, k_second = turn(k_first, k_second, cosine, sine)

    page = slot // PAGE_SIZE
    offset = slot % PAGE_SIZE
    kept = inside & (slot >= 0) & (slot < all_slots)
    k_target = k_pages + page * kp_page + offset * kp_offset + head * kp_head
    v_target = v_pages + page * vp_page + offset * vp_offset + head * vp_head
    k_divisor = 1.0
    v_divisor = 1.0
    if CODE != "none":
        k_most = tl.zeros((KV_HEADS,), tl.int32)
        if ROTARY > 0:
            whole = tl.arange(0, PAIRS)[None, :] < HALF  # the lanes beside the pairs hold NaN
            k_most = tl.maximum(k_most, largest_bits(tl.where(whole, k_first, 0.0)))
            k_most = tl.maximum(k_most, largest_bits(tl.where(whole, k_second, 0.0)))
        if REST > 0:
            k_most = tl.maximum(k_most, largest_bits(k_rest.to(tl.float32)))
        k_unit, k_divisor = _scale_of(k_most, MOST)
        v_unit, v_divisor = _scale_of(largest_bits(v_tile.to(tl.float32)), MOST)
        tl.store(k_scale + page * ks_page + offset * ks_offset + head * ks_head, k_unit, mask=kept)
        tl.store(v_scale + page * vs_page + offset * vs_offset + head * vs_head, v_unit, mask=kept)
    if ROTARY > 0:
        k_first = _coded(k_first, k_divisor, k_pages, CODE)
        k_second = _coded(k_second, k_divisor, k_pages, CODE)
        store_pairs(k_target, kept, k_first, k_second, HALF, PAIRS, INTERLEAVED)
    if REST > 0:
        _store_plain(k_target, kept, _coded(k_rest, k_divisor, k_pages, CODE), ROTARY, K_DIM, REST)
    _store_plain(v_target, kept, _coded(v_tile, v_divisor, v_pages, CODE), 0, V_DIM, V_COLUMNS)

    if q is not None:
        real, imaginary = turn(q_first, q_second, cosine, sine)
        real, imaginary = real.to(q_out.dtype.element_ty), imaginary.to(q_out.dtype.element_ty)
        store_pairs(q_target, q_inside, real, imaginary, HALF, PAIRS, INTERLEAVED)
        if REST > 0:
            _store_plain(q_target, q_inside, _load_plain(q_source, q_inside, ROTARY, K_DIM, REST), ROTARY, K_DIM, REST)


_CODES = {torch.float8_e4m3fn: ("e4m3", 448.0), torch.int8: ("int8", 127.0)}


def forward(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slots: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    q: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    rates: torch.Tensor | None,
    positions: torch.Tensor | None,
    scaling: float,
    rotary: int,
    interleaved: bool,
) -> torch.Tensor:
    """Writes to the pages and their scales; gives the rotated q, contiguous, or an empty tensor without one."""
    k, v, q = _unit_stride(k), _unit_stride(v), None if q is None else _unit_stride(q)
    tokens, kv_heads, dim = k.shape
    q_heads = 0 if q is None else q.shape[1]
    q_out = torch.empty(0 if q is None else q.shape, dtype=k.dtype, device=k.device)
    code, most = _CODES.get(k_pages.dtype, ("none", 1.0))
    if code == "e4m3":
        k_pages, v_pages = k_pages.view(torch.uint8), v_pages.view(torch.uint8)
    if cos is not None and sin is not None and (cos.stride() != sin.stride() or cos.stride(-1) > 2):
        cos, sin = cos.contiguous(), sin.contiguous()
    shape = {
        "tokens": tokens, "q_heads": q_heads, "kv_heads": kv_heads, "dim": max(dim, v.shape[2]),
        "bytes": k.element_size(), "quantised": int(code != "none"),
    }  # fmt: skip
    facts = device.facts(k.device)
    config = tune.pick(APPEND, facts, shape)
    no_strides = (0, 0, 0)
    launch(
        append_kv, (tokens * config.splits,),
        k, v, q, None if q is None else q_out, k_pages, v_pages, k_scale, v_scale, slots, cos, sin, rates, positions,
        *k.stride()[:2], *v.stride()[:2], *((0, 0) if q is None else q.stride()[:2]),
        *k_pages.stride()[:3], *v_pages.stride()[:3],
        *(no_strides if k_scale is None else k_scale.stride()), *(no_strides if v_scale is None else v_scale.stride()),
        slots.stride(0), 0 if cos is None else cos.stride(-2), 0 if positions is None else positions.stride(0),
        q_heads, kv_heads, k_pages.shape[0] * k_pages.shape[1], 0 if cos is None else cos.shape[-2], scaling,
        PAGE_SIZE=k_pages.shape[1], CODE=code, MOST=most, INTERLEAVED=interleaved,
        TABLE_STEP=1 if cos is None else cos.stride(-1), K_DIM=dim, V_DIM=v.shape[2], V_COLUMNS=power_of_2(v.shape[2]),
        ROTARY=rotary, PAIRS=power_of_2(rotary // 2), REST=power_of_2(dim - rotary) if dim > rotary else 0,
        SPLITS=config.splits, Q_HEADS=tile(q_heads, config.splits), KV_HEADS=tile(kv_heads, config.splits),
        num_warps=config.warps, **pdl_options(facts),
    )  # fmt: skip
    return q_out


def _unit_stride(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
