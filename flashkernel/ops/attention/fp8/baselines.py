"""Implementations that FP8 attention is benchmarked against."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from flashkernel.blocks.mask import causal
from flashkernel.core.op import Case, Op
from flashkernel.ops.attention.fp8.reference import dequantized
from flashkernel.ops.attention.torch import same

Function = Callable[..., Tensor]


def _is_causal(case: Case) -> bool:
    """True for a causal mask, False for none; raises for any other option."""
    mask = case.options.get("mask")
    if set(case.options) - {"mask"} or case.present or (mask and not same(mask.expression, causal().expression)):
        raise ValueError("only a causal mask or none, and no other option, is benchmarked")
    return mask is not None


def eager(op: Op, case: Case) -> Function:
    """Dequantizes to bfloat16 and calls torch's scaled_dot_product_attention."""
    is_causal = _is_causal(case)

    def attention(q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor, k_scale: Tensor, v_scale: Tensor) -> Tensor:
        scaled = ((q, q_scale), (k, k_scale), (v, v_scale))
        grouped = q.shape[2] != k.shape[2]
        q, k, v = (dequantized(x, scale, torch.bfloat16).transpose(1, 2) for x, scale in scaled)
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=grouped).transpose(1, 2)

    return attention


def fa3(op: Op, case: Case) -> Function:
    """FlashAttention-3 in FP8, with one scale per batch entry and kv head. It takes V with contiguous head dims and
    transposes it itself: V with another layout is copied once, outside the measured time."""
    from fa3_fwd_interface import flash_attn_func

    if case.axes["q_blocks"] or case.axes["k_blocks"] or case.axes["v_blocks"]:
        raise ValueError("fa3 takes one scale per head")
    if case.axes["heads"] != case.axes["kv_heads"]:
        raise ValueError("fa3 takes one scale for all queries of a kv head")
    settings = {"causal": _is_causal(case)}
    copies: dict[int, tuple[Tensor, Tensor]] = {}  # by address; the original is kept, so that its address is not reused

    def attention(q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor, k_scale: Tensor, v_scale: Tensor) -> Tensor:
        scales = {"q_descale": q_scale, "k_descale": k_scale, "v_descale": v_scale}
        if v.stride(3) != 1:
            if v.data_ptr() not in copies:
                copies[v.data_ptr()] = v, v.contiguous()
            v = copies[v.data_ptr()][1]
        found = flash_attn_func(q, k, v, **scales, **settings)
        return found[0] if isinstance(found, tuple) else found

    return attention
