"""What attention is timed against. Each gives a function of (q, k, v, sinks), its mask bound; none binds the shapes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashkernel.blocks import expression as ex
from flashkernel.blocks.mask import Mask, causal, window
from flashkernel.core.op import Case, Op
from flashkernel.ops.attention.random_cases import mask_of
from flashkernel.ops.attention.torch import same

Function = Callable[..., Tensor]


@dataclass(frozen=True)
class PeerCall:
    """A case in the terms that the peers share: causal or not, and how many keys a query sees."""

    mask: Mask | None
    causal: bool
    window: int | None
    sinks: bool


def _peer_call(case: Case) -> PeerCall:
    beyond = set(case.options) - {"causal", "mask", "window"} | set(case.present) - {"sinks"}
    if beyond:
        raise ValueError(f"it is called here with a mask and sinks only, not with {', '.join(sorted(beyond))}")
    mask = mask_of(case.options)
    sinks = "sinks" in case.present
    if mask is None or same(mask.expression, causal().expression):
        return PeerCall(mask, mask is not None, None, sinks)
    widths = [width for width in _numbers(mask.expression) if isinstance(width, int) and width > 0]
    found = [width for width in widths if same(mask.expression, (causal() & window(width)).expression)]
    return PeerCall(mask, bool(found), found[0] if found else None, sinks)


def _numbers(expression: ex.Expression) -> list[Any]:
    if isinstance(expression, ex.Constant):
        return [expression.value]
    return [value for child in ex.children(expression) for value in _numbers(child)]


def _simple(
    case: Case, name: str, windows: bool = False, sinks: bool = False, aligned_at_end: bool = False
) -> PeerCall:
    """The call, where a peer that knows causal masks, and perhaps windows and learned sinks, can do it.
    `aligned_at_end`: under its causal mask the last query sees the last key."""
    call = _peer_call(case)
    if call.mask is not None and not call.causal:
        raise ValueError(f"{name} has no such mask: {call.mask}")
    if call.window is not None and not windows:
        raise ValueError(f"{name} has no window")
    if call.sinks and not sinks:
        raise ValueError(f"{name} has no learned sinks")
    if call.mask is not None and case.axes["queries"] != case.axes["keys"] and not aligned_at_end:
        raise ValueError(f"{name} may align a causal mask otherwise where queries and keys differ in number")
    return call


def eager(op: Op, case: Case) -> Function:
    """Softmax attention as a model without a fused kernel has it: scores in memory, softmax in float32."""
    call = _peer_call(case)

    @functools.cache
    def hidden(batch: int, heads: int, queries: int, keys: int, device: torch.device) -> Tensor:
        assert call.mask is not None
        return ~call.mask.visible(batch, heads, queries, keys, device)

    def attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        groups = q.shape[2] // k.shape[2]
        rows = q.transpose(1, 2)  # [B, Hq, Sq, D]
        columns, values = (x.transpose(1, 2).repeat_interleave(groups, dim=1) for x in (k, v))
        scores = rows @ columns.transpose(2, 3) / math.sqrt(q.shape[-1])  # [B, Hq, Sq, Sk]
        if call.mask is not None:
            scores = scores.masked_fill(hidden(*scores.shape, q.device), -math.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        return (weights[..., : k.shape[1]] @ values).transpose(1, 2)

    return attention


def _scaled_dot_product(case: Case, name: str, kind: SDPBackend | None) -> Function:
    call = _simple(case, name)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows, columns, values = (x.transpose(1, 2) for x in (q, k, v))
        grouped = q.shape[2] != k.shape[2]
        out = F.scaled_dot_product_attention(rows, columns, values, is_causal=call.causal, enable_gqa=grouped)
        return out.transpose(1, 2)

    if kind is None:
        return attention

    def restricted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(kind):
            return attention(q, k, v)

    return restricted


def sdpa(op: Op, case: Case) -> Function:
    """torch's scaled_dot_product_attention, by its own choice of kernel."""
    return _scaled_dot_product(case, "sdpa", None)


def cudnn(op: Op, case: Case) -> Function:
    return _scaled_dot_product(case, "cudnn", SDPBackend.CUDNN_ATTENTION)


def fa2(op: Op, case: Case) -> Function:
    """FlashAttention-2, as torch ships it."""
    return _scaled_dot_product(case, "fa2", SDPBackend.FLASH_ATTENTION)


def flex(op: Op, case: Case) -> Function:
    """FlexAttention with our mask's own expression; learned sinks by rescaling with the lse, as Transformers does."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    call = _peer_call(case)
    if call.mask is not None and ex.tables(call.mask.expression):
        raise ValueError("flex is given masks without tables here")

    @functools.cache
    def blocks(batch: int, heads: int, queries: int, keys: int, device: str) -> Any:
        assert call.mask is not None
        expression, depends = call.mask.expression, call.mask.depends

        def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return ex.evaluate(expression, {"b": b, "h": h, "q": q, "k": k, "sq": queries, "sk": keys})

        sizes = (batch if "b" in depends else None, heads if "h" in depends else None)
        return create_block_mask(visible, *sizes, queries, keys, device=device)

    @functools.partial(torch.compile, dynamic=False)
    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, block_mask: Any) -> Tensor:
        rows, columns, values = (x.transpose(1, 2) for x in (q, k, v))
        grouped = q.shape[2] != k.shape[2]
        if sinks is None:
            out = flex_attention(rows, columns, values, block_mask=block_mask, enable_gqa=grouped)
            return out.transpose(1, 2)
        out, lse = flex_attention(rows, columns, values, block_mask=block_mask, enable_gqa=grouped, return_lse=True)
        share = torch.sigmoid(lse - sinks.view(1, -1, 1))  # of the softmax that is not the sink's
        return (out * share.unsqueeze(-1)).to(q.dtype).transpose(1, 2)

    def attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        sizes = (q.shape[0], q.shape[2], q.shape[1], k.shape[1], str(q.device))
        return run(q, k, v, sinks, None if call.mask is None else blocks(*sizes))

    return attention


def fa3(op: Op, case: Case) -> Function:
    """FlashAttention-3; what can be installed has the forward pass only."""
    from fa3_fwd_interface import flash_attn_func

    call = _simple(case, "fa3", windows=True, aligned_at_end=True)
    left = -1 if call.window is None else call.window - 1
    settings = {"causal": call.causal, "window_size": (left, 0 if call.window else -1)}

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _first(flash_attn_func(q, k, v, **settings))

    return attention


def fa4(op: Op, case: Case) -> Function:
    """FlashAttention-4, with windows and learned sinks."""
    from flash_attn.cute import flash_attn_func

    call = _simple(case, "fa4", windows=True, sinks=True, aligned_at_end=True)
    settings = {
        "causal": call.causal,
        "window_size": (None, None) if call.window is None else (call.window - 1, 0),
    }

    def attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        return _first(flash_attn_func(q, k, v, learnable_sink=sinks, **settings))

    return attention


def _first(outputs: Any) -> Tensor:
    return outputs[0] if isinstance(outputs, tuple) else outputs
