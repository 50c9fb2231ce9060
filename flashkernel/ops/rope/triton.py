"""Rotary position embedding in Triton: q and k in one launch, forward and backward by the same kernel.

A program holds the heads of one token, or a share of them, so that cos and sin are loaded once and every load is issued
before the first store. The backward is the rotation by the opposite angle.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashkernel.blocks.rope import Rotation
from flashkernel.blocks.rope_triton import Angles, AngleStrides, load_pairs, rotate_pairs, store_pairs, token_cos_sin
from flashkernel.core import device, tune
from flashkernel.core.arguments import unit_stride
from flashkernel.core.head_configs import heads_per_program
from flashkernel.core.launch import launch
from flashkernel.core.tune import ceil_div, power_of_2
from flashkernel.ops.rope.configs import ROTATE


class Heads(NamedTuple):
    """Tensors (batch, seq, heads, head_dim); in place, the outputs are the inputs."""

    q: Tensor
    k: Tensor | None
    q_out: Tensor
    k_out: Tensor | None


class Strides(NamedTuple):
    batch: int
    seq: int
    head: int


@triton.jit
def _store_rotated(
    target, inside, first, second, cosine, sine,
    HALF: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    real, imaginary = rotate_pairs(first, second, cosine, sine)
    store_pairs(target, inside, real.to(first.dtype), imaginary.to(first.dtype), HALF, PAIRS, INTERLEAVED)


@triton.jit
def _copy_rest(source, target, inside, HEAD_DIM: tl.constexpr, ROTARY: tl.constexpr, REST: tl.constexpr):
    column = ROTARY + tl.arange(0, REST)[None, :]
    inside = inside & (column < HEAD_DIM)
    tl.store(target + column, tl.load(source + column, mask=inside), mask=inside)


@triton.jit
def rope_rotate(
    heads, angles, q_strides, k_strides, angle_strides, batches, seq, q_heads, k_heads, table_rows, scaling,
    INVERSE: tl.constexpr, INTERLEAVED: tl.constexpr, IN_PLACE: tl.constexpr, TABLE_STEP: tl.constexpr,
    HEAD_DIM: tl.constexpr, ROTARY: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
    SPLITS: tl.constexpr, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = ROTARY // 2
    share = tl.program_id(0) % SPLITS
    seq_index = (tl.program_id(0) // SPLITS).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    if batch >= batches:
        return
    token = batch * seq + seq_index

    head = (share * Q_HEADS + tl.arange(0, Q_HEADS))[:, None]  # [Q_HEADS, 1]
    q_inside = head < q_heads
    q_source = heads.q + batch * q_strides.batch + seq_index * q_strides.seq + head.to(tl.int64) * q_strides.head
    q_target = q_source if IN_PLACE else heads.q_out + (token * q_heads + head) * HEAD_DIM
    q_first, q_second = load_pairs(q_source, q_inside, HALF, PAIRS, INTERLEAVED)
    if heads.k is not None:
        head = (share * K_HEADS + tl.arange(0, K_HEADS))[:, None]  # [K_HEADS, 1]
        k_inside = head < k_heads
        k_source = heads.k + batch * k_strides.batch + seq_index * k_strides.seq + head.to(tl.int64) * k_strides.head
        k_target = k_source if IN_PLACE else heads.k_out + (token * k_heads + head) * HEAD_DIM
        k_first, k_second = load_pairs(k_source, k_inside, HALF, PAIRS, INTERLEAVED)
    cosine, sine = token_cos_sin(
        angles, angle_strides, batch, seq_index, table_rows, scaling, HALF, PAIRS, TABLE_STEP
    )  # fmt: skip
    if INVERSE:
        sine = -sine

    _store_rotated(q_target, q_inside, q_first, q_second, cosine, sine, HALF, PAIRS, INTERLEAVED)
    if heads.k is not None:
        _store_rotated(k_target, k_inside, k_first, k_second, cosine, sine, HALF, PAIRS, INTERLEAVED)
    if REST > 0 and not IN_PLACE:
        _copy_rest(q_source, q_target, q_inside, HEAD_DIM, ROTARY, REST)
        if heads.k is not None:
            _copy_rest(k_source, k_target, k_inside, HEAD_DIM, ROTARY, REST)


def forward(q: Tensor, k: Tensor | None, rotation: Rotation, inverse: bool) -> tuple[Tensor, Tensor]:
    """(q, k) rotated, both contiguous; without a k, an empty tensor stands for it."""
    q = unit_stride(q)
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k = None if k is None else unit_stride(k)
    k_out = torch.empty(0 if k is None else k.shape, dtype=q.dtype, device=q.device)
    _launch(Heads(q, k, q_out, None if k is None else k_out), rotation, inverse, in_place=False)
    return q_out, k_out


def forward_in_place(q: Tensor, k: Tensor | None, rotation: Rotation) -> None:
    """Rotates q and k where they are; each element is read and written by one program."""
    _launch(Heads(q, k, q, k), rotation, inverse=False, in_place=True)


def _launch(heads: Heads, rotation: Rotation, inverse: bool, in_place: bool) -> None:
    (q, k, _, _), (cos, sin, rates, positions, scaling, rotary, interleaved) = heads, rotation
    batch, seq, q_heads, head_dim = q.shape
    k_heads = 0 if k is None else k.shape[2]
    if cos is not None and sin is not None and (cos.stride() != sin.stride() or cos.stride(-1) > 2):
        cos, sin = cos.contiguous(), sin.contiguous()
    shape = {"tokens": batch * seq, "q_heads": q_heads, "k_heads": k_heads, "dim": rotary, "bytes": q.element_size()}
    config = tune.pick(ROTATE, device.properties(q.device), shape)
    across = min(batch, 65535)  # what a grid's second axis holds; the third takes the rest
    strides = AngleStrides(
        cos.stride(0) if cos is not None and cos.ndim == 3 and cos.shape[0] > 1 else 0,
        0 if cos is None else cos.stride(-2),
        positions.stride(0) if positions is not None and positions.ndim == 2 and positions.shape[0] > 1 else 0,
        0 if positions is None else positions.stride(-1),
    )  # fmt: skip
    launch(
        rope_rotate, (seq * config.splits, across, ceil_div(batch, max(1, across))),
        heads, Angles(cos, sin, rates, positions), Strides(*q.stride()[:3]),
        Strides(*((0, 0, 0) if k is None else k.stride()[:3])), strides,
        batch, seq, q_heads, k_heads, 0 if cos is None else cos.shape[-2], scaling,
        INVERSE=inverse, INTERLEAVED=interleaved, IN_PLACE=in_place, TABLE_STEP=1 if cos is None else cos.stride(-1),
        HEAD_DIM=head_dim, ROTARY=rotary, PAIRS=power_of_2(rotary // 2),
        REST=power_of_2(head_dim - rotary) if head_dim > rotary else 0,
        SPLITS=config.splits, Q_HEADS=heads_per_program(q_heads, config.splits),
        K_HEADS=heads_per_program(k_heads, config.splits), num_warps=config.num_warps,
    )  # fmt: skip
