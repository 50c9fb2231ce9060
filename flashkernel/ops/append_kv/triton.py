"""Keys and values into pages in Triton: rotation of q and k, quantization and the write, in one launch.

A program holds the heads of one token, or some of them: cos, sin and the slot are loaded once, and every load is issued
before the first store.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from flashkernel.blocks.codec_triton import encode_e4m3, encode_int8, largest_bits
from flashkernel.blocks.pdl_triton import pdl_enter
from flashkernel.blocks.rope import Rotation
from flashkernel.blocks.rope_triton import Angles, AngleStrides, load_pairs, rotate_pairs, store_pairs, token_cos_sin
from flashkernel.core import device, tune
from flashkernel.core.arguments import unit_stride
from flashkernel.core.head_configs import heads_per_program
from flashkernel.core.launch import launch, pdl_options
from flashkernel.core.tune import power_of_2
from flashkernel.ops.append_kv.configs import APPEND
from flashkernel.ops.append_kv.params import NewTokens, Pages
from flashkernel.ops.append_kv.reference import CODE_MAX


class TokenPointers(NamedTuple):
    """The new tokens, [tokens, heads, dim] each; q and q_out are None where no queries are rotated."""

    k: Any
    v: Any
    q: Any
    q_out: Any


class PagePointers(NamedTuple):
    """The pages [pages, page_size, kv_heads, dim] and their scales [pages, page_size, kv_heads]."""

    k: Any
    v: Any
    k_scale: Any
    v_scale: Any


class TokenStrides(NamedTuple):
    k_token: Any
    k_head: Any
    v_token: Any
    v_head: Any
    q_token: Any
    q_head: Any


class PageStrides(NamedTuple):
    """Strides of a page, of a slot in it and of a head."""

    k_page: Any
    k_slot: Any
    k_head: Any
    v_page: Any
    v_slot: Any
    v_head: Any
    k_scale_page: Any
    k_scale_slot: Any
    k_scale_head: Any
    v_scale_page: Any
    v_scale_slot: Any
    v_scale_head: Any


@triton.jit
def _load_dims(source, valid, FIRST: tl.constexpr, LAST: tl.constexpr, BLOCK: tl.constexpr):
    """The dims [FIRST, LAST) of each head, [HEADS, BLOCK]; source and valid are [HEADS, 1]."""
    dim = FIRST + tl.arange(0, BLOCK)[None, :]
    return tl.load(source + dim, mask=valid & (dim < LAST), other=0.0)


@triton.jit
def _store_dims(target, valid, values, FIRST: tl.constexpr, LAST: tl.constexpr, BLOCK: tl.constexpr):
    dim = FIRST + tl.arange(0, BLOCK)[None, :]
    tl.store(target + dim, values, mask=valid & (dim < LAST))


@triton.jit
def _scale_of(bits, CODE_MAX: tl.constexpr):
    """(the scale that is stored, what to divide by), each [HEADS, 1]; a head of zeros is stored with scale 0."""
    scale = tl.div_rn(bits.to(tl.float32, bitcast=True), tl.full(bits.shape, CODE_MAX, tl.float32))[:, None]
    return scale, tl.where(scale > 0, scale, 1.0)


@triton.jit
def _encode(values, divisor, pages, CODE: tl.constexpr):
    """Values as the pages hold them; `divisor` is [HEADS, 1]."""
    if CODE == "none":
        return values.to(pages.dtype.element_ty)
    else:
        scaled = tl.div_rn(values.to(tl.float32), tl.broadcast_to(divisor, values.shape))
        if CODE == "int8":
            return encode_int8(scaled)
        else:
            return encode_e4m3(scaled)


@triton.jit
def append_kv_kernel(
    tokens, pages, slots, angles, token_strides, page_strides,
    slots_stride, table_stride, positions_stride, q_heads, kv_heads, num_slots, table_rows, scaling,
    PAGE_SIZE: tl.constexpr, CODE: tl.constexpr, CODE_MAX: tl.constexpr, INTERLEAVED: tl.constexpr,
    TABLE_STEP: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROTARY_DIM: tl.constexpr, PAIRS: tl.constexpr, BLOCK_REST: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_Q_HEADS: tl.constexpr, BLOCK_KV_HEADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Writes one token's heads, or one of SPLITS parts of them. Keys are PAIRS and BLOCK_REST dims not rotated."""
    HALF: tl.constexpr = ROTARY_DIM // 2
    if PDL:
        pdl_enter()
    split = tl.program_id(0) % SPLITS
    token = (tl.program_id(0) // SPLITS).to(tl.int64)
    slot = tl.load(slots + token * slots_stride).to(tl.int64)

    head = (split * BLOCK_KV_HEADS + tl.arange(0, BLOCK_KV_HEADS))[:, None].to(tl.int64)  # [BLOCK_KV_HEADS, 1]
    valid = head < kv_heads
    k_source = tokens.k + token * token_strides.k_token + head * token_strides.k_head
    if ROTARY_DIM > 0:
        k_first, k_second = load_pairs(k_source, valid, HALF, PAIRS, INTERLEAVED)
    if BLOCK_REST > 0:
        k_rest = _load_dims(k_source, valid, ROTARY_DIM, HEAD_DIM, BLOCK_REST)
    v_source = tokens.v + token * token_strides.v_token + head * token_strides.v_head
    v = _load_dims(v_source, valid, 0, VALUE_DIM, BLOCK_DV)
    if tokens.q is not None:
        q_head = (split * BLOCK_Q_HEADS + tl.arange(0, BLOCK_Q_HEADS))[:, None].to(tl.int64)  # [BLOCK_Q_HEADS, 1]
        q_valid = q_head < q_heads
        q_source = tokens.q + token * token_strides.q_token + q_head * token_strides.q_head
        q_target = tokens.q_out + (token * q_heads + q_head) * HEAD_DIM
        q_first, q_second = load_pairs(q_source, q_valid, HALF, PAIRS, INTERLEAVED)
    if ROTARY_DIM > 0:
        strides = AngleStrides(0, table_stride, 0, positions_stride)
        cosine, sine = token_cos_sin(angles, strides, 0, token, table_rows, scaling, HALF, PAIRS, TABLE_STEP)
        k_first, k_second = rotate_pairs(k_first, k_second, cosine, sine)

    page = slot // PAGE_SIZE
    offset = slot % PAGE_SIZE
    written = valid & (slot >= 0) & (slot < num_slots)
    k_target = pages.k + page * page_strides.k_page + offset * page_strides.k_slot + head * page_strides.k_head
    v_target = pages.v + page * page_strides.v_page + offset * page_strides.v_slot + head * page_strides.v_head
    k_divisor = 1.0
    v_divisor = 1.0
    if CODE != "none":
        k_max = tl.zeros((BLOCK_KV_HEADS,), tl.int32)
        if ROTARY_DIM > 0:
            pair_valid = tl.arange(0, PAIRS)[None, :] < HALF  # the padding holds NaN
            k_max = tl.maximum(k_max, largest_bits(tl.where(pair_valid, k_first, 0.0)))
            k_max = tl.maximum(k_max, largest_bits(tl.where(pair_valid, k_second, 0.0)))
        if BLOCK_REST > 0:
            k_max = tl.maximum(k_max, largest_bits(k_rest.to(tl.float32)))
        k_scale, k_divisor = _scale_of(k_max, CODE_MAX)
        v_scale, v_divisor = _scale_of(largest_bits(v.to(tl.float32)), CODE_MAX)
        k_scale_target = pages.k_scale + page * page_strides.k_scale_page + offset * page_strides.k_scale_slot
        v_scale_target = pages.v_scale + page * page_strides.v_scale_page + offset * page_strides.v_scale_slot
        tl.store(k_scale_target + head * page_strides.k_scale_head, k_scale, mask=written)
        tl.store(v_scale_target + head * page_strides.v_scale_head, v_scale, mask=written)
    if ROTARY_DIM > 0:
        k_first = _encode(k_first, k_divisor, pages.k, CODE)
        k_second = _encode(k_second, k_divisor, pages.k, CODE)
        store_pairs(k_target, written, k_first, k_second, HALF, PAIRS, INTERLEAVED)
    if BLOCK_REST > 0:
        _store_dims(k_target, written, _encode(k_rest, k_divisor, pages.k, CODE), ROTARY_DIM, HEAD_DIM, BLOCK_REST)
    _store_dims(v_target, written, _encode(v, v_divisor, pages.v, CODE), 0, VALUE_DIM, BLOCK_DV)

    if tokens.q is not None:
        q_first, q_second = rotate_pairs(q_first, q_second, cosine, sine)
        q_first, q_second = q_first.to(tokens.q_out.dtype.element_ty), q_second.to(tokens.q_out.dtype.element_ty)
        store_pairs(q_target, q_valid, q_first, q_second, HALF, PAIRS, INTERLEAVED)
        if BLOCK_REST > 0:
            q_rest = _load_dims(q_source, q_valid, ROTARY_DIM, HEAD_DIM, BLOCK_REST)
            _store_dims(q_target, q_valid, q_rest, ROTARY_DIM, HEAD_DIM, BLOCK_REST)


_CODES = {torch.float8_e4m3fn: "e4m3", torch.int8: "int8"}


def forward(new: NewTokens, pages: Pages, slots: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Writes the pages and their scales; returns the rotated q, contiguous, or an empty tensor without one."""
    k, v, q = unit_stride(new.k), unit_stride(new.v), None if new.q is None else unit_stride(new.q)
    tokens, kv_heads, head_dim = k.shape
    value_dim, rotary_dim = v.shape[2], rotation.dim
    q_heads = 0 if q is None else q.shape[1]
    q_out = torch.empty(0 if q is None else q.shape, dtype=k.dtype, device=k.device)
    code, code_max = _CODES.get(pages.k.dtype, "none"), CODE_MAX.get(pages.k.dtype, 1.0)
    k_pages, v_pages = (x.view(torch.uint8) if code == "e4m3" else x for x in (pages.k, pages.v))
    cos, sin, positions = rotation.cos, rotation.sin, rotation.positions
    if cos is not None and sin is not None and (cos.stride() != sin.stride() or cos.stride(-1) > 2):
        cos, sin = cos.contiguous(), sin.contiguous()
    shape = {
        "tokens": tokens, "q_heads": q_heads, "kv_heads": kv_heads, "dim": max(head_dim, value_dim),
        "bytes": k.element_size(), "quantized": int(code != "none"),
    }  # fmt: skip
    gpu = device.properties(k.device)
    config = tune.pick(APPEND, gpu, shape)
    scale_strides = [(0, 0, 0) if x is None else x.stride() for x in (pages.k_scale, pages.v_scale)]
    launch(
        append_kv_kernel, (tokens * config.splits,),
        TokenPointers(k, v, q, None if q is None else q_out),
        PagePointers(k_pages, v_pages, pages.k_scale, pages.v_scale), slots,
        Angles(cos, sin, rotation.rates, positions),
        TokenStrides(*k.stride()[:2], *v.stride()[:2], *((0, 0) if q is None else q.stride()[:2])),
        PageStrides(*k_pages.stride()[:3], *v_pages.stride()[:3], *scale_strides[0], *scale_strides[1]),
        slots.stride(0), 0 if cos is None else cos.stride(-2), 0 if positions is None else positions.stride(0),
        q_heads, kv_heads, k_pages.shape[0] * k_pages.shape[1], 0 if cos is None else cos.shape[-2], rotation.scaling,
        PAGE_SIZE=k_pages.shape[1], CODE=code, CODE_MAX=code_max, INTERLEAVED=rotation.interleaved,
        TABLE_STEP=1 if cos is None else cos.stride(-1), HEAD_DIM=head_dim, VALUE_DIM=value_dim,
        BLOCK_DV=power_of_2(value_dim), ROTARY_DIM=rotary_dim, PAIRS=power_of_2(rotary_dim // 2),
        BLOCK_REST=power_of_2(head_dim - rotary_dim) if head_dim > rotary_dim else 0, SPLITS=config.splits,
        BLOCK_Q_HEADS=heads_per_program(q_heads, config.splits),
        BLOCK_KV_HEADS=heads_per_program(kv_heads, config.splits), num_warps=config.num_warps, **pdl_options(gpu),
    )  # fmt: skip
    return q_out
