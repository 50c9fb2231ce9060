"""Launcher of the FP8 attention kernel for Hopper."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks.mask import Mask
from flashkernel.core import device, tune
from flashkernel.core.gluon import TensorDescriptor, gl
from flashkernel.core.launch import launch
from flashkernel.ops.attention.fp8.configs import HOPPER, Hopper
from flashkernel.ops.attention.fp8.hopper.forward import attention_forward_fp8
from flashkernel.ops.attention.hopper.order import Lines, order
from flashkernel.ops.attention.hopper.walks import all_see, span, walks
from flashkernel.ops.attention.triton import Problem

_LOG2E = 1.4426950408889634
_L2_SHARE = 0.6  # of L2, for the keys and values of the heads that are worked on together
_KINDS = {torch.float8_e4m3fn: gl.float8e4nv, torch.bfloat16: gl.bfloat16, torch.float16: gl.float16,
          torch.float32: gl.float32}  # fmt: skip


def forward(
    q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor, k_scale: Tensor, v_scale: Tensor, sinks: Tensor | None,
    mask: Mask | None, scale: float, softcap: float, out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(o, lse): o is (batch, queries, heads, head_dim) in `out_dtype`, lse (batch, heads, queries) in float32."""
    batch, queries, heads, width = q.shape
    keys, pairs = k.shape[1], k.shape[2]
    o = torch.empty((batch, queries, heads, width), dtype=out_dtype, device=q.device)
    lse = torch.empty((batch, heads, queries), dtype=torch.float32, device=q.device)
    if batch == 0 or queries == 0:
        return o, lse
    if keys == 0:  # nothing is seen, and a descriptor of nothing is not allowed
        nothing = lse.new_full((heads,), float("-inf")) if sinks is None else sinks.float()
        return o.zero_(), lse.copy_(nothing.view(1, -1, 1))
    facts = device.facts(q.device)
    scales = [x.contiguous() for x in (q_scale, k_scale, v_scale)]
    blocked = [x.ndim == 3 for x in scales]
    config = _config(facts, q, k, mask, out_dtype, blocked[1] or blocked[2])
    tiles = tune.ceil_div(queries, config.groups * config.rows)
    walk = walks(mask, batch, heads, queries, keys, config.rows, config.columns, config.groups, q.device)
    visible, _, _, _, mask_tables = Problem(mask, scale, softcap, None, 0.0, 0).functions()
    count, sharing = batch * heads // config.pack, heads // pairs // config.pack
    together = _together(facts, 2 * keys * width, sharing, count, mask is not None)
    programs = min(facts.sms, tiles * count)
    lines = Lines(count, tiles, heads // config.pack, config.pack, together)
    items = order(mask, walk, lines, programs, (queries, keys, config.rows, config.columns, config.groups))
    lazy = config.lazy and all_see(mask, queries, keys)
    retry_flags = torch.empty((programs, items.shape[1]), dtype=torch.int32, device=q.device) if lazy else None
    launch(
        attention_forward_fp8, (programs,),
        lse, _rows(q, config), _quads(k, config.columns), _columns(v, config.columns), _rows(o, config),
        sinks, *scales, retry_flags, mask_tables, walk.runs, walk.plans, walk.loads, walk.counts, items,
        items.shape[1], walk.runs.shape[-2], walk.loads.shape[-2], *walk.strides, heads,
        heads // pairs, queries, keys, *(x.shape[2] if x.ndim == 3 else 1 for x in scales),
        scale if softcap > 0 else scale * _LOG2E, softcap,
        MASK=visible, CAP=softcap > 0, EARLY=scale <= 0, HAS_SINKS=sinks is not None, Q_STEP=int(blocked[0]),
        K_STEP=int(blocked[1]), V_STEP=int(blocked[2]), GROUPS=config.groups, STAGES=config.stages,
        COLUMNS=config.columns, WIDTH=width, PACK=config.pack, LAZY=lazy,
        POLYNOMIAL=config.polynomial, REGISTERS=config.registers, num_warps=4,
    )  # fmt: skip
    return o, lse


def _config(
    facts: device.Device, q: Tensor, k: Tensor, mask: Mask | None, out_dtype: torch.dtype, blocked: bool
) -> Hopper:
    """The config for a call; heads whose masks differ do not share a tile."""
    batch, queries, heads, width = q.shape
    shape = {
        "queries": queries, "span": span(mask, batch, heads, queries, k.shape[1]), "head_dim": width,
        "group": heads // k.shape[2], "out_bytes": out_dtype.itemsize, "blocked": int(blocked),
    }  # fmt: skip
    config: Hopper = tune.pick(HOPPER, facts, shape)
    return replace(config, pack=1) if mask is not None and "h" in mask.depends else config


def _together(facts: device.Device, one: int, sharing: int, lines: int, masked: bool) -> int:
    """How many heads are worked on at the same time: the `sharing` ones that read the same `one` bytes, and without a
    mask no more; with one, items differ in length and are sorted over as many heads as have what they read in L2."""
    if not masked:
        return min(lines, sharing)
    return min(lines, sharing * max(1, int(facts.l2_bytes * _L2_SHARE) // one))


def _described(x: Tensor, shape: list[int], strides: list[int], box: list[int]) -> Any:
    """Tiles of `box`; what lies outside reads as zero. A stride along one element is never taken, but must be legal."""
    layout = gl.NVMMASharedLayout.get_default_for(box, _KINDS[x.dtype])
    strides = [stride if size > 1 else 16 for size, stride in zip(shape, strides)]
    return TensorDescriptor(x, shape, [*strides[:-1], 1], box, layout)


def _rows(x: Tensor, config: Hopper) -> Any:
    """Queries or outputs: tiles of a warpgroup's 64 rows."""
    x = x if _even(x) else x.clone(memory_format=torch.contiguous_format)
    return _described(x, list(x.shape), list(x.stride()), [1, config.rows, config.pack, x.shape[3]])


def _quads(k: Tensor, columns: int) -> Any:
    """Keys as (batch, pair, quad, one, heads and dims): key = 4 quad + 2 pair + one."""
    batch, keys, pairs, width = k.shape
    padded = tune.ceil_div(keys, 4) * 4
    last = k.storage_offset() + (batch - 1) * k.stride(0) + (padded - 1) * k.stride(1) + pairs * width
    side_by_side = pairs == 1 or k.stride(2) == width
    if not _even(k) or not side_by_side or last > k.untyped_storage().nbytes():
        # The last quad is read whole: what it has beyond the keys is masked, but must be there.
        roomy = torch.zeros((batch, padded, pairs, width), dtype=torch.uint8, device=k.device).view(k.dtype)
        k = roomy[:, :keys].copy_(k)
    step = k.stride(1)
    shape = [batch, 2, padded // 4, 2, pairs * width]
    return _described(k, shape, [k.stride(0), 2 * step, 4 * step, step, 1], [1, 2, columns // 4, 2, width])


def _columns(v: Tensor, columns: int) -> Any:
    """Values as (batch, heads, head_dim, keys), keys side by side; copied where they lie otherwise."""
    v = v.permute(0, 2, 3, 1)
    if not _even(v):
        room = tune.ceil_div(v.shape[3], 16) * 16
        roomy = torch.empty((*v.shape[:3], room), dtype=torch.uint8, device=v.device).view(v.dtype)
        v = roomy[..., : v.shape[3]].copy_(v)
    return _described(v, list(v.shape), list(v.stride()), [1, 1, v.shape[2], columns])


def _even(x: Tensor) -> bool:
    """Whether the tile loads can step through it: rows side by side, strides and address 16 bytes apart."""
    steps = [stride for size, stride in zip(x.shape[:3], x.stride()) if size > 1]
    apart = all(step and step * x.element_size() % 16 == 0 for step in steps)
    return apart and x.data_ptr() % 16 == 0 and x.stride(3) == 1
