"""Launchers of the Hopper attention kernels."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks.mask import Mask
from flashkernel.core import device, tune
from flashkernel.core.gluon import described, fields_of, gl
from flashkernel.core.launch import launch, pdl_options
from flashkernel.ops.attention.hopper.backward import attention_backward
from flashkernel.ops.attention.hopper.backward_wide import attention_backward_wide
from flashkernel.ops.attention.hopper.configs import (
    BACKWARD,
    FORWARD,
    WIDE,
    Backward,
    Forward,
    Wide,
    block,
    shares_output,
)
from flashkernel.ops.attention.hopper.forward import attention_forward
from flashkernel.ops.attention.hopper.order import Lines, order
from flashkernel.ops.attention.hopper.preprocess import attention_backward_postprocess, attention_backward_preprocess
from flashkernel.ops.attention.hopper.walks import all_see, span, walks
from flashkernel.ops.attention.triton import Problem

__all__ = ["Problem", "backward", "forward"]

_LOG2E = 1.4426950408889634
_APART = 4  # heads that are read at a time where all items are alike
_L2_SHARE = 0.6  # of L2, for the keys and values of the heads that are worked on together


def forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, slopes: Tensor | None, problem: Problem
) -> tuple[Tensor, Tensor]:
    """(o, lse): o is (batch, queries, heads, value_dim) in q's dtype, lse (batch, heads, queries) in float32."""
    batch, queries, heads, width = q.shape
    keys, pairs, values = k.shape[1], k.shape[2], v.shape[3]
    o = torch.empty((batch, queries, heads, values), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, queries), dtype=torch.float32, device=q.device)
    if batch == 0 or queries == 0:
        return o, lse
    if keys == 0:  # nothing is seen, and a descriptor of nothing is not allowed
        nothing = lse.new_full((heads,), float("-inf")) if sinks is None else sinks.float()
        return o.zero_(), lse.copy_(nothing.view(1, -1, 1))
    config = _forward_config(q, k, v, problem)
    tiles = tune.ceil_div(queries, config.groups * config.rows)
    facing = (queries, keys, config.rows, config.columns, config.groups)
    walk = walks(problem.mask, batch, heads, *facing, q.device, spare_first=config.groups == 3)
    mask, _, _, _, mask_tables = problem.functions()
    facts = device.facts(q.device)
    count = batch * heads // config.pack
    programs = min(facts.sms, tiles * count)
    one = keys * (width + values) * k.element_size()
    together = _together(facts, one, heads // pairs // config.pack, count, problem)
    lines = Lines(count, tiles, heads // config.pack, config.pack, together)
    items = order(problem.mask, walk, lines, programs, facing)
    fixed_max = _can_fix_max(q, k, problem)
    retry_flags = torch.empty((programs, items.shape[1]), dtype=torch.int32, device=q.device) if fixed_max else None
    early = problem.softcap > 0 or problem.scale <= 0  # elsewhere the largest product belongs to the largest score
    launch(
        attention_forward, (programs,),
        lse, _tiled(q, (config.rows, config.pack)), _tiled(k, (config.columns, 1)), _tiled(v, (config.columns, 1)),
        _tiled(o, (config.rows, config.pack)), sinks, retry_flags, mask_tables, walk.runs, walk.plans, walk.loads,
        walk.counts, items, walk.runs.shape[-2], walk.loads.shape[-2], *walk.strides, items.shape[1], heads,
        heads // pairs, queries, keys, 1.0 if early else problem.scale * _LOG2E, problem.scale, problem.softcap,
        MASK=mask, TRAITS=_traits(problem.mask, config.groups == 2), CAP=problem.softcap > 0, EARLY=early,
        HAS_SINKS=sinks is not None, GROUPS=config.groups, STAGES=config.stages, COLUMNS=config.columns,
        WIDTH=block(width), VALUES=block(values), PACK=config.pack, SHARE=shares_output(config, width, values),
        OVERLAP=config.overlap, FIXED_MAX=fixed_max, REGISTERS=config.registers, num_warps=4,
    )  # fmt: skip
    return o, lse


def backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    slopes: Tensor | None,
    o: Tensor,
    lse: Tensor,
    problem: Problem,
    want_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """(dq, dk, dv, None, dsinks, None)."""
    if k.shape[1] == 0 or q.numel() == 0:
        return _backward_of_nothing(dlse, q, k, v, sinks)
    config = _backward_config(q, k, v, problem)
    batch, queries, heads, width = q.shape
    query_tiles = tune.ceil_div(queries, config.rows)
    padded = query_tiles * config.rows
    stats = torch.empty((2, batch, heads, padded), dtype=torch.float32, device=q.device)
    buffer = torch.empty((batch, heads, padded, block(width)), dtype=torch.float32, device=q.device)
    partial = _preprocess(do, dlse, sinks, o, lse, stats, buffer, 1 / problem.scale if config.fold_norm else _LOG2E)
    dsinks = None if sinks is None else torch.empty(sinks.shape, dtype=sinks.dtype, device=sinks.device)
    dk, dv = _backward(do, q, k, v, stats, buffer, problem, config)
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    launch(
        attention_backward_postprocess, (heads * query_tiles * batch,),
        buffer, dq, partial, dsinks, problem.scale, heads, queries, query_tiles,
        0 if partial is None else partial.shape[2],
        HAS_SINKS=sinks is not None, WIDTH=width, BLOCK=block(width), ROWS=config.rows, ORDER=config.dq, num_warps=8,
        **pdl_options(device.facts(q.device)),
    )  # fmt: skip
    return dq, dk, dv, None, dsinks, None


def _backward_of_nothing(
    dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, None, Tensor | None, None]:
    """Gradients where no query sees a key: zeros; the lse is then the sink's logit."""
    dsinks = None
    if sinks is not None:
        dsinks = torch.zeros_like(sinks) if dlse is None else dlse.sum((0, 2)).to(sinks.dtype)
    dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    return dq, dk, dv, None, dsinks, None


def _preprocess(
    do: Tensor, dlse: Tensor | None, sinks: Tensor | None, o: Tensor, lse: Tensor, stats: Tensor, buffer: Tensor,
    unit: float,
) -> Tensor | None:  # fmt: skip
    """Fill the stats and the buffer; the gradient of the sinks comes in parts, [batch, heads, blocks]."""
    batch, queries, heads, values = o.shape
    padded, rows = stats.shape[3], 64
    blocks = padded // rows
    dsinks = None if sinks is None else torch.empty((batch, heads, blocks), dtype=torch.float32, device=o.device)
    launch(
        attention_backward_preprocess, (heads * blocks * batch,),
        o, do, lse, dlse, sinks, stats, buffer, dsinks, *do.stride()[:3], heads, queries, padded, unit,
        HAS_DLSE=dlse is not None, HAS_SINKS=sinks is not None, BLOCK=rows, VALUES=values, BLOCK_V=block(values),
        WIDTH=buffer.shape[3], PDL=pdl_options(device.facts(o.device))["PDL"], num_warps=4,
    )  # fmt: skip
    return dsinks


def _backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, stats: Tensor, buffer: Tensor, problem: Problem,
    config: Backward | Wide,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    batch, queries, heads, width = q.shape
    keys, pairs, values = k.shape[1], k.shape[2], v.shape[3]
    dk = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    walk = walks(problem.mask, batch, heads, queries, keys, config.keys, config.rows, 1, q.device, turned=True)
    mask, _, _, _, mask_tables = problem.functions()
    tiles, lines = tune.ceil_div(keys, config.keys), batch * pairs
    # Of each query head q, do and the buffer for dq, which is added to all the time; of each key head k, v, dk and dv.
    one = heads // pairs * queries * (q.element_size() * (width + values) + 4 * block(width))
    one += 2 * keys * (width + values) * k.element_size()
    facts = device.facts(q.device)
    # Under a mask at least as many heads as are worked on anyway, and two: fewer programs then ask for the same tiles.
    least = 1 if problem.mask is None else max(2, facts.sms // tiles)
    together = _evened(lines, min(lines, max(least, _together(facts, one, 1, lines, problem))))
    # Where nothing is known of their lengths, every item gets a program, and the device hands them out.
    known = problem.mask is None or not problem.mask.tables
    programs = min(facts.sms, tiles * lines) if known else tiles * lines
    turned = Lines(lines, tiles, pairs, 1, together, turned=True, group=heads // pairs)
    items = order(problem.mask, walk, turned, programs, (queries, keys, config.rows, config.keys))
    box, held = (config.rows, 1), (config.keys, 1)
    variant: dict[str, Any] = {}
    if isinstance(config, Wide):
        kernel, roomy = attention_backward_wide, False
    else:
        kernel, roomy = attention_backward, config.rows == block(width) == 64
        variant = {
            "FOLD_NORM": config.fold_norm, "FOLD_DELTA": config.fold_delta, "APART": config.dq == "apart",
            "SENT": config.dq == "sent", "ROWS": config.rows, "HELD": config.held,
        }  # fmt: skip
    launch(
        kernel, (programs,),
        _summed(buffer) if config.dq == "sent" else buffer, _tiled(q, box), _tiled(do, box), _tiled(k, held),
        _tiled(v, held), _line(stats, config.rows), _tiled(dk, held), _tiled(dv, held), mask_tables,
        walk.runs, walk.plans, walk.loads, walk.counts, items, walk.runs.shape[-2], walk.loads.shape[-2], *walk.strides,
        items.shape[1], lines, pairs, heads // pairs, stats.shape[3] // config.rows, queries, keys,
        problem.scale * _LOG2E, problem.scale, problem.softcap,
        MASK=mask, TRAITS=_traits(problem.mask, roomy), CAP=problem.softcap > 0, STAGES=config.stages,
        WIDTH=block(width), VALUES=block(values), **variant, num_warps=4, **pdl_options(facts),
    )  # fmt: skip
    return dk, dv


def _shape(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> dict[str, int]:
    """What configs depend on."""
    batch, queries, heads, width = q.shape
    return {
        "queries": queries, "keys": k.shape[1], "span": span(problem.mask, batch, heads, queries, k.shape[1]),
        "head_dim": width, "value_dim": v.shape[3], "group": heads // k.shape[2],
        "fixed_max": int(_can_fix_max(q, k, problem)), "masked": int(problem.mask is not None),
    }  # fmt: skip


def _forward_config(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Forward:
    """The config for a call; heads whose masks differ do not share a tile."""
    config: Forward = tune.pick(FORWARD, device.facts(q.device), _shape(q, k, v, problem))
    if problem.mask is not None and "h" in problem.mask.depends:
        return replace(config, pack=1)
    return config


def _backward_config(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Backward | Wide:
    facts, shape = device.facts(q.device), _shape(q, k, v, problem)
    if max(q.shape[3], v.shape[3]) > 128:
        wide: Wide = tune.pick(WIDE, facts, shape)
        return wide
    config: Backward = tune.pick(BACKWARD, facts, shape)
    if problem.softcap != 0 or problem.scale == 0:
        return replace(config, fold_norm=False, fold_delta=False)
    return config


def _traits(mask: Mask | None, roomy: bool) -> int:
    """1 for a mask that looks at differences of positions alone, and 2 for one that sees to the last key. The first
    takes registers, where there is room for it."""
    return 0 if mask is None else (mask.relative and roomy) + 2 * mask.bounded


def _can_fix_max(q: Tensor, k: Tensor, problem: Problem) -> bool:
    """Whether the forward kernel uses the row max of an item's first tile for all its tiles (overflow_retry.py).

    float16 has no range for that. Rows that see no key cannot be told from rows that underflowed: under masks that may
    leave such rows, all items would be computed twice.
    """
    return q.dtype == torch.bfloat16 and all_see(problem.mask, q.shape[1], k.shape[1])


def _together(facts: device.Device, one: int, sharing: int, lines: int, problem: Problem) -> int:
    """How many heads are worked on at the same time: a few times the `sharing` ones that read the same `one` bytes, so
    that not all multiprocessors ask for the same tile at once. Under a mask items differ in length and are sorted over
    as many heads as have what they read in L2."""
    held = max(1, int(facts.l2_bytes * _L2_SHARE) // one)
    return min(lines, sharing * (min(held, _APART) if problem.mask is None else held))


def _evened(lines: int, together: int) -> int:
    """As many lines at a time as `together`, or a few more: with a small rest, its longest items would start last."""
    return tune.ceil_div(lines, max(1, lines // together))


def _tiled(x: Tensor, box: tuple[int, int]) -> Any:
    """(batch, sequence, heads, width) in tiles of `box` positions and heads; what lies outside reads as zero."""
    x = _aligned(x)
    shape = x.shape
    # A stride along one element is never taken, but must be a legal one.
    strides = [stride if size > 1 else shape[3] for size, stride in zip(shape, x.stride())]
    strides[3] = 1
    return described(_boxes(box, shape[3], x.dtype), x, shape, strides)


def _line(x: Tensor, count: int) -> Any:
    """All numbers of a float32 tensor in a row, `count` at a time."""
    return described(_segment(count), x, [x.numel()], [1])


def _summed(x: Tensor) -> Any:
    """Rows of a float32 buffer, 64 at a time."""
    rows = x.view(-1, x.shape[-1])
    return described(_sums(rows.shape[1]), rows, rows.shape, list(rows.stride()))


@lru_cache(maxsize=256)
def _sums(width: int) -> dict[str, Any]:
    layout = gl.NVMMASharedLayout.get_default_for([64, width], gl.float32)
    return fields_of(torch.empty((64, width), dtype=torch.float32, device="meta"), [64, width], layout)


@lru_cache(maxsize=256)
def _boxes(box: tuple[int, int], width: int, dtype: torch.dtype) -> dict[str, Any]:
    shape = [1, *box, block(width)]
    layout = gl.NVMMASharedLayout.get_default_for(shape, gl.bfloat16 if dtype == torch.bfloat16 else gl.float16)
    whole = torch.empty((1, *box, shape[3]), dtype=dtype, device="meta")
    return fields_of(whole, shape, layout)


@lru_cache(maxsize=256)
def _segment(count: int) -> dict[str, Any]:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    whole = torch.empty(count, dtype=torch.float32, device="meta")
    return fields_of(whole, [count], layout)


def _aligned(x: Tensor) -> Tensor:
    """The tensor, copied where the tile loads cannot step through it: strides and address must be 16 bytes apart."""
    unit = 16 // x.element_size()
    if x.data_ptr() % 16 == 0:
        for size, stride in zip(x.shape[:3], x.stride()):
            if size > 1 and (stride % unit or not stride):
                break
        else:
            return x
    return x.clone(memory_format=torch.contiguous_format)
