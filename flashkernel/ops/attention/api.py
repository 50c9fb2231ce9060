"""The public attention: argument checks and dispatch."""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks import expression as ex
from flashkernel.blocks.dropout import check_dropout, draw_seed
from flashkernel.blocks.mask import Mask, checked, narrowed, source_of
from flashkernel.blocks.tile_ranges import max_visible_keys
from flashkernel.core.arguments import (
    autocast,
    autocast_dtype,
    check_scores,
    is_float,
    needs_gradients,
    without_autocast,
)
from flashkernel.core.dispatch import choose
from flashkernel.core.replay import replayed
from flashkernel.ops.attention import library, spec
from flashkernel.ops.attention.arguments import check_tensors, checked_score
from flashkernel.ops.attention.params import AttentionInputs
from flashkernel.ops.attention.support import FEW_KEYS
from flashkernel.ops.attention.varlen.document_lengths import packed_lengths
from flashkernel.ops.attention.varlen.documents import attention_of_documents


@replayed
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    *,
    causal: bool = False,
    window: int | None = None,
    mask: Mask | Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    score: Callable[..., Any] | ex.Traced | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * q kT) v, without ever holding the scores.

    Query head h reads key/value head h // (heads // kv_heads). To a score are applied, in this order: `softcap`, ALiBi,
    `bias`, the function `score`, and the mask. A query that sees nothing gives zeros, and an lse of -inf. All tensors
    are differentiable, and so is the lse. Under autocast q, k, v and bias are cast as for scaled_dot_product_attention.

    Args:
        q: (batch, seqlen_q, heads, head_dim), any strides.
        k: (batch, seqlen_k, kv_heads, head_dim), in q's dtype.
        v: (batch, seqlen_k, kv_heads, value_dim), in q's dtype.
        bias: added to the scores; it broadcasts to (batch, heads, seqlen_q, seqlen_k).
        sinks: (heads,), learned logits that take part in the softmax without a value (gpt-oss).
        alibi_slopes: (heads,) or (batch, heads); a score loses slope times the distance of its query and key.
        causal: a query sees the keys up to its own position; the last query is aligned with the last key.
        window: a query sees so many keys up to its own, itself included, and no later ones (Transformers'
            sliding_window); None is no window. `mask=flashkernel.window(left, right)` has two sides.
        mask: a `Mask` (see `causal`, `window`, `documents` and others, which compose with &, | and ~), or a boolean
            tensor that broadcasts to (batch, heads, seqlen_q, seqlen_k), True where a pair is visible. A pair must be
            visible by `causal`, by `window` and by `mask`.
        scale: what q kT is multiplied by; None is 1 / sqrt(head_dim).
        softcap: a score s becomes softcap * tanh(s / softcap); 0 is none.
        score: a function of (score, b, h, q, k), written with operators, that returns the new score. There are no
            gradients of the tables that it reads.
        dropout: the share of probabilities that are dropped, others at each call.
        seed: a number, or int64 of one element on q's device, that fixes which are dropped. None draws one from torch's
            generator of the device, on the device, so torch.manual_seed and activation checkpointing repeat it, and a
            CUDA graph draws another at each replay.
        deterministic: gradients are bit-equal on repeat. On Hopper dq then has a kernel of its own: seven matrix
            products instead of five. The Triton kernels always compute seven, and refuse it with a bias; the CUDA C++
            kernels refuse it with gradients.
        return_lse: also return the logarithm of each query's sum of exponentials.
        backend: "hopper", "triton", "torch" or "reference"; None chooses (see `explain`).

    Returns:
        (batch, seqlen_q, heads, value_dim) in q's dtype; with `return_lse` also the lse, float32
        (batch, heads, seqlen_q).

    Example:
        >>> import torch
        >>> import flashkernel as fk
        >>> q = torch.randn(1, 8, 4, 16, requires_grad=True)
        >>> k, v = torch.randn(1, 8, 2, 16), torch.randn(1, 8, 2, 16)
        >>> out = fk.attention(q, k, v, causal=True, window=4)
        >>> out.shape
        torch.Size([1, 8, 4, 16])
        >>> out.sum().backward()
        >>> same = fk.attention(q, k, v, mask=fk.causal() & fk.window(4))
        >>> torch.allclose(out, same)
        True
    """
    lower = autocast_dtype(q)
    if lower is not None:
        q, k, v = autocast(q, lower), autocast(k, lower), autocast(v, lower)
        bias = None if bias is None else autocast(bias, lower)
    check_tensors(q, k, v)
    _check_extras(q, k, bias, sinks, alibi_slopes)
    mask = checked(mask, "attention", (q.shape[0], q.shape[2], q.shape[1], k.shape[1]), q.device)
    if causal is not False or window is not None:
        mask = narrowed(mask, causal, window, "attention")
    check_dropout("attention", dropout, seed, q.device)
    check_scores("attention", scale, softcap)
    score = checked_score(score, "attention")
    lengths = packed_lengths(mask, q, k) if mask is not None and mask.tables else None
    chosen = choose(
        spec.ATTENTION, backend, q.device, q.dtype, needs_gradients(q, k, v, bias, sinks, alibi_slopes),
        head_dim=q.shape[-1], value_dim=v.shape[-1],
        has_tables=mask is not None and len(mask.tables) > 0 and lengths is None,
        has_score=score is not None, has_bias=bias is not None, has_slopes=alibi_slopes is not None,
        has_dropout=dropout > 0, deterministic=deterministic, few_keys=_few_keys(q, k, mask),
    )  # fmt: skip
    if seed is None:
        seed = draw_seed(q.device) if dropout > 0 else 0
    if chosen.composite:
        with without_autocast(q):
            return chosen.run(
                q, k, v, bias, sinks, alibi_slopes,
                mask=mask, scale=scale, softcap=softcap, score=score, dropout=dropout, seed=seed, return_lse=return_lse,
            )  # fmt: skip
    if lengths is not None and mask is not None and chosen.name == "hopper":
        return attention_of_documents(
            q, k, v, sinks, mask, lengths,
            scale=scale, softcap=softcap, deterministic=deterministic, return_lse=return_lse, backend="hopper",
        )  # fmt: skip
    arguments = library.AttentionArguments(
        source_of(mask), source_of(score), q.shape[-1] ** -0.5 if scale is None else float(scale), float(softcap),
        float(dropout), bool(deterministic),
        seed if isinstance(seed, Tensor) or type(seed) is int else operator.index(seed),
    )  # fmt: skip
    inputs = AttentionInputs(q, k, v, bias, sinks, alibi_slopes)
    out, lse = library.attention(inputs, arguments, chosen.target)
    return (out, lse) if return_lse else out


def _few_keys(q: Tensor, k: Tensor, mask: Mask | None) -> bool:
    """Whether a mask leaves each tile of queries few of many keys; under torch.compile sizes may be symbols, and it is
    taken not to."""
    if mask is None or mask.tables or k.shape[1] < 4 * FEW_KEYS or torch.compiler.is_compiling():
        return False
    return max_visible_keys(mask, q.shape[0], q.shape[2], q.shape[1], k.shape[1]) <= FEW_KEYS


def _check_extras(q: Tensor, k: Tensor, bias: Tensor | None, sinks: Tensor | None, alibi_slopes: Tensor | None) -> None:
    batch, queries, heads, _ = q.shape
    for label, x in (("bias", bias), ("sinks", sinks), ("alibi_slopes", alibi_slopes)):
        if x is None:
            continue
        if not is_float(x):
            raise ValueError(f"attention: {label} must be a float tensor, not {x.dtype}; a mask goes into mask=")
        if x.device != q.device:
            raise ValueError(f"attention: {label} is on {x.device} but q is on {q.device}; move one of them")
    if bias is not None:
        full = (batch, heads, queries, k.shape[1])
        given = (1,) * (4 - bias.ndim) + tuple(bias.shape)
        if len(given) != 4 or any(size not in (1, whole) for size, whole in zip(given, full)):
            raise ValueError(
                f"attention: bias has shape {tuple(bias.shape)}, which does not broadcast to "
                f"(batch, heads, queries, keys) = {full}"
            )
    if sinks is not None and tuple(sinks.shape) != (heads,):
        raise ValueError(f"attention: sinks has shape {tuple(sinks.shape)}; it must have one logit a head, ({heads},)")
    if alibi_slopes is not None and tuple(alibi_slopes.shape) not in ((heads,), (batch, heads)):
        raise ValueError(
            f"attention: alibi_slopes has shape {tuple(alibi_slopes.shape)}; it must be ({heads},), one slope a head, "
            f"or ({batch}, {heads})"
        )
