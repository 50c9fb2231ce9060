"""What FP8 attention is timed against."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from flashkernel.blocks.mask import causal
from flashkernel.core.op import Case, Op
from flashkernel.ops.attention.fp8.reference import dequantised
from flashkernel.ops.attention.torch import same

Function = Callable[..., Tensor]


def _is_causal(case: Case) -> bool:
    """Whether the mask is causal; there may be none, and no other setting."""
    mask = case.options.get("mask")
    if set(case.options) - {"mask"} or case.present or (mask and not same(mask.expression, causal().expression)):
        raise ValueError("it is called here with a causal mask or none, and nothing else")
    return mask is not None


def eager(op: Op, case: Case) -> Function:
    """Dequantised to bfloat16, and torch's own attention."""
    turned = _is_causal(case)

    def attention(q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor, k_scale: Tensor, v_scale: Tensor) -> Tensor:
        pairs = ((q, q_scale), (k, k_scale), (v, v_scale))
        grouped = q.shape[2] != k.shape[2]
        q, k, v = (dequantised(x, scale, torch.bfloat16).transpose(1, 2) for x, scale in pairs)
        return F.scaled_dot_product_attention(q, k, v, is_causal=turned, enable_gqa=grouped).transpose(1, 2)

    return attention


def fa3(op: Op, case: Case) -> Function:
    """FlashAttention-3 in FP8, with one scale for each batch and key head. It wants the dims of values side by side
    and turns them itself: values that lie otherwise are copied once, and not in the time of a call."""
    from fa3_fwd_interface import flash_attn_func

    if case.axes["q_blocks"] or case.axes["k_blocks"] or case.axes["v_blocks"]:
        raise ValueError("fa3 has one scale a head")
    if case.axes["heads"] != case.axes["kv_heads"]:
        raise ValueError("fa3 has one scale for the queries of a key head")
    settings = {"causal": _is_causal(case)}
    copies: dict[int, tuple[Tensor, Tensor]] = {}  # by address, which stays taken as long as the original is here

    def attention(q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor, k_scale: Tensor, v_scale: Tensor) -> Tensor:
        scales = {"q_descale": q_scale, "k_descale": k_scale, "v_descale": v_scale}
        if v.stride(3) != 1:
            if v.data_ptr() not in copies:
                copies[v.data_ptr()] = v, v.contiguous()
            v = copies[v.data_ptr()][1]
        found = flash_attn_func(q, k, v, **scales, **settings)
        return found[0] if isinstance(found, tuple) else found

    return attention
