"""Attention over packed sequences by torch: on a CPU one sequence after the other, elsewhere under a mask."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks.mask import Mask
from flashkernel.core.library import traced
from flashkernel.ops.attention.api import attention
from flashkernel.ops.attention.varlen import by_mask
from flashkernel.ops.attention.varlen.params import NO_LIMIT, VarlenParams, Window, sides


def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *, mask: Mask | None = None,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """`attention_varlen` by attention in torch."""
    packed = mask is not None or bool(options.get("dropout"))  # options that count in packed positions
    packed = packed or any(options.get(name) is not None for name in ("bias", "alibi_slopes", "score"))
    if packed or q.device.type != "cpu" or traced(q) or traced(cu_seqlens_q):
        return by_mask.attention_varlen("torch", q, k, v, cu_seqlens_q, cu_seqlens_k, mask=mask, **options)
    return _one_by_one(q, k, v, _parts(cu_seqlens_q, q, "q"), _parts(cu_seqlens_k, k, "k"), **options)


def _parts(cu_seqlens: Tensor, x: Tensor, label: str) -> list[int]:
    """The numbers of tokens before the first sequence, of each sequence, and behind the last one."""
    ends = [0, *cu_seqlens.tolist(), x.shape[0]]
    parts = [end - start for start, end in pairwise(ends)]
    if min(parts) < 0:
        raise ValueError(
            f"attention_varlen: cu_seqlens_{label} is {cu_seqlens.tolist()}; cumulative lengths must not decrease, or "
            f"go beyond the {x.shape[0]} tokens of {label}"
        )
    return parts


def _one_by_one(
    q: Tensor, k: Tensor, v: Tensor, parts_q: list[int], parts_k: list[int], *, causal: bool = False,
    window: Window = None, return_lse: bool = False, **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Sequence by sequence: what one holds does not reach another, and no tile is computed to be hidden."""
    left, right = sides(causal, window)
    limits = NO_LIMIT if left is None else left, NO_LIMIT if right is None else right
    mask = VarlenParams(1, *limits, 1.0, 0.0).mask
    last = len(parts_q) - 1
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    for number, (rows, keys, values) in enumerate(zip(q.split(parts_q), k.split(parts_k), v.split(parts_k))):
        if number in (0, last):  # tokens of no sequence
            keys, values = keys[:0], values[:0]
        if rows.shape[0] > 0 or (number == last and not outs):
            found = attention(
                rows[None], keys[None], values[None], mask=mask, return_lse=return_lse, backend="torch", **options
            )
            out, lse = found if isinstance(found, tuple) else (found, None)
            outs.append(out[0])
            if lse is not None:
                lses.append(lse[0])
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    return (out, lses[0] if len(lses) == 1 else torch.cat(lses, 1)) if return_lse else out
