"""Attention by torch: scaled_dot_product_attention where it can serve the call, else tile by tile (tiled.py)."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from flashkernel.blocks import expression as ex
from flashkernel.blocks.mask import Mask, causal
from flashkernel.ops.attention import reference
from flashkernel.ops.attention.params import AttentionOptions, AttentionParams
from flashkernel.ops.attention.tiled import Tiled, TiledAttention, wider

DENSE_LIMIT = 2**22  # pairs up to which a mask, or all scores, may lie in memory


def attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None, **given: Any,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """The reference's attention, with the options of `AttentionOptions`."""
    options = AttentionOptions(**given)
    extended = sinks is not None or alibi_slopes is not None or options.extended
    extended = extended or (options.scale is not None and options.scale <= 0)  # for which torch may return NaN
    if not extended and _fused_can(q, k, v, bias, options.mask):
        return _fused(q, k, v, bias, options.mask, options.scale)
    if _untiled(q):
        return _in_one_piece(q, k, v, bias, sinks, alibi_slopes, **given)
    scale = 1 / math.sqrt(q.shape[-1]) if options.scale is None else options.scale
    score = None if options.score is None else ex.trace_score(options.score)
    params = AttentionParams(options.mask, scale, options.softcap, score, options.dropout, options.seed)
    call = TiledAttention(q.shape[0], q.shape[2], k.shape[2], q.shape[1], k.shape[1], params)
    out, lse = Tiled.apply(q, k, v, bias, sinks, alibi_slopes, call)
    return (out, lse) if options.return_lse else out


def _untiled(q: Tensor) -> bool:
    """Whether a call cannot loop over the tiles that a mask leaves: a graph (torch.compile), tensors without values
    (FakeTensor, meta) and transforms (torch.func, forward mode) have no mask to look at, or no such loop."""
    return (
        torch.compiler.is_compiling()
        or q.is_meta
        or type(q).__torch_dispatch__ is not Tensor.__torch_dispatch__
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
    )


def _in_one_piece(q: Tensor, k: Tensor, v: Tensor, *extras: Tensor | None, **options: Any) -> Any:
    """The definition itself, in float32."""
    wide = wider(q.dtype)
    found: Any = reference.attention(q.to(wide), k.to(wide), v.to(wide), *extras, **options)
    return (found[0].to(q.dtype), found[1]) if isinstance(found, tuple) else found.to(q.dtype)


def _fused_can(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Mask | None) -> bool:
    """Whether torch's operator takes the call without holding more than a small dense mask."""
    batch, seqlen_q, heads, head_dim = q.shape
    seqlen_k = k.shape[1]
    if 0 in (*q.shape, *k.shape, *v.shape) or (bias is not None and bias.dtype != q.dtype):
        return False
    unfused = bias is not None or v.shape[-1] != head_dim  # torch may then hold all scores
    if unfused and batch * heads * seqlen_q * seqlen_k > DENSE_LIMIT:
        return False
    if mask is None or _is_causal(mask, seqlen_q, seqlen_k):
        return True
    depends = mask.depends
    pairs = (batch if "b" in depends else 1) * (heads if "h" in depends else 1) * seqlen_q * seqlen_k
    return pairs <= DENSE_LIMIT


def _is_causal(mask: Mask, seqlen_q: int, seqlen_k: int) -> bool:
    """Whether it is the mask that torch calls causal, which is aligned with the first key."""
    if seqlen_q == seqlen_k:  # a branch: a symbol of the tracer is no bool
        return same(mask.expression, causal().expression)
    return False


def same(left: ex.Expression, right: ex.Expression) -> bool:
    """Whether two expressions are written alike; those that read tables never are."""
    if isinstance(left, ex.Variable) and isinstance(right, ex.Variable):
        return left.name == right.name
    if isinstance(left, ex.Constant) and isinstance(right, ex.Constant):
        return left.value == right.value
    if isinstance(left, ex.Operation) and isinstance(right, ex.Operation):
        alike = left.name == right.name and len(left.args) == len(right.args)
        return alike and all(same(one, other) for one, other in zip(left.args, right.args))
    return False


def _fused(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Mask | None, scale: float | None) -> Tensor:
    batch, seqlen_q, heads, _ = q.shape
    seqlen_k = k.shape[1]
    is_causal = mask is not None and bias is None and _is_causal(mask, seqlen_q, seqlen_k)
    allowed, sees_nothing = None, None
    if mask is not None and not is_causal:
        allowed = mask.visible(batch, heads, seqlen_q, seqlen_k, q.device)
    if bias is not None:
        added = bias.expand(torch.broadcast_shapes(bias.shape, (1, 1, seqlen_q, seqlen_k)))
        allowed = added if allowed is None else torch.where(allowed, added, -math.inf)
    if allowed is not None:  # torch leaves open what a row that sees nothing gives: let it see all, then clear it
        sees_nothing = (~allowed if allowed.dtype == torch.bool else allowed == -math.inf).all(-1, keepdim=True)
        allowed = allowed | sees_nothing if allowed.dtype == torch.bool else allowed.masked_fill(sees_nothing, 0)
    grouped = {"enable_gqa": True} if heads != k.shape[2] else {}  # a branch: a symbol of the tracer is no bool
    rows, columns, values = (_aligned(x).transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(
        rows, columns, values,
        attn_mask=allowed, is_causal=is_causal, scale=scale, **grouped,
    ).to(q.dtype)  # fmt: skip
    if sees_nothing is not None:
        out = out.masked_fill(sees_nothing, 0)
    return out.transpose(1, 2)


def _aligned(x: Tensor) -> Tensor:
    """cuDNN reads 16 bytes at a time, and gives wrong results, not an error, where rows, or the tensor itself, do not
    begin at such places. A tracer knows no address: there it is always copied, by the kernel that computes it."""
    if x.device.type != "cuda":
        return x
    if torch.compiler.is_compiling():
        return x.clone(memory_format=torch.contiguous_format)
    places = (x.storage_offset(), *x.stride()[:3])
    if any(place * x.element_size() % 16 for place in places):
        return x.clone(memory_format=torch.contiguous_format)
    return x
