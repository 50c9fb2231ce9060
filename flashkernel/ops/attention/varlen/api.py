"""The public `attention_varlen`: argument checks and dispatch."""

from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks.mask import Mask, check_causal_window, checked
from flashkernel.core.argument_types import described, plain_number
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
from flashkernel.ops.attention.arguments import check_packed_tensors, checked_score
from flashkernel.ops.attention.varlen import library, spec
from flashkernel.ops.attention.varlen.document_lengths import joined_lengths
from flashkernel.ops.attention.varlen.params import NO_LIMIT, sides
from flashkernel.ops.attention.varlen.schedule_cache import shared_schedule


@replayed
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    mask: Mask | Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    deterministic: bool = False,
    return_lse: bool = False,
    backend: str | None = None,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` over packed sequences of different lengths, one behind the other.

    Sequence n has the queries q[cu_seqlens_q[n] : cu_seqlens_q[n + 1]] and sees the keys of `cu_seqlens_k` likewise.
    Tokens behind the last sequence see nothing. Nothing waits for the device. Hopper's kernels make their tile schedule
    from the lengths by one launch, and all calls with the same tensor of lengths share it until it is written to; pass
    one tensor to all layers. Writes that torch does not count (collectives of torch.distributed, NumPy, `.data`) are
    not seen: pass such lengths as a new tensor. In a CUDA graph the lengths may change between replays.

    Args:
        q: (tokens, heads, head_dim).
        k: (tokens, kv_heads, head_dim), in q's dtype.
        v: (tokens, kv_heads, value_dim), in q's dtype.
        cu_seqlens_q: int32 or int64 (sequences + 1,), the cumulative lengths of the queries, from 0 on. They must not
            decrease or go beyond the tokens, which is checked on a CPU alone, since it would wait for the device.
        cu_seqlens_k: the same of the keys; None for those of the queries.
        sinks: (heads,), learned logits (see `attention`).
        causal: a query sees the keys up to its own position; the last query of a sequence is aligned with its last key.
        window: a query sees so many keys up to its own, itself included, and no later ones; None is no window. A pair
            (left, right) is how many it sees before and behind its own, None for all.
        mask: hides more, in packed positions. A mask of documents (see `documents`) with sorted ids is read from the
            device once for each version of the ids, so that Hopper's kernels can cut the sequences there.
        scale: what q kT is multiplied by; None is 1 / sqrt(head_dim).
        softcap: a score s becomes softcap * tanh(s / softcap); 0 is none.
        deterministic: gradients are bit-equal on repeat; what it costs, see `attention`.
        return_lse: also return the logarithm of each query's sum of exponentials.
        backend: "hopper", "triton", "cuda", "torch" or "reference"; None chooses (see `explain`).
        options: others of `attention`: bias, alibi_slopes, score, dropout and seed, in packed positions.

    Returns:
        (tokens, heads, value_dim) in q's dtype; with `return_lse` also the lse, float32 (heads, tokens).

    Example:
        >>> import torch
        >>> import flashkernel as fk
        >>> q = k = v = torch.randn(7, 2, 16)
        >>> cu_seqlens = torch.tensor([0, 3, 7])  # sequences of 3 and 4 tokens
        >>> out = fk.attention_varlen(q, k, v, cu_seqlens, causal=True)
        >>> first = fk.attention(q[None, :3], k[None, :3], v[None, :3], causal=True)
        >>> torch.allclose(out[:3], first[0], atol=1e-6)
        True
    """
    lower = autocast_dtype(q)
    if lower is not None:
        q, k, v = autocast(q, lower), autocast(k, lower), autocast(v, lower)
    check_packed_tensors(q, k, v)
    lengths_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    _check_lengths(q, cu_seqlens_q, lengths_k)
    _check_options(q, sinks, options)
    window = _checked_window(causal, window)
    check_scores("attention_varlen", scale, softcap)
    if options.get("score") is not None:
        options["score"] = checked_score(options["score"], "attention_varlen")
    if mask is not None:
        mask = checked(mask, "attention_varlen", (1, q.shape[1], q.shape[0], k.shape[0]), q.device)
    joined = None if mask is None else joined_lengths(mask, cu_seqlens_q, lengths_k, q[None], k[None])
    given = options.get
    (tokens, heads, head_dim), (keys, kv_heads, value_dim) = q.shape, v.shape
    gradients = needs_gradients(q, k, v, sinks, given("bias"), given("alibi_slopes"))
    chosen = choose(
        spec.ATTENTION_VARLEN, backend, q.device, q.dtype, gradients,
        head_dim=head_dim, value_dim=value_dim, has_mask=mask is not None and joined is None,
        has_score=given("score") is not None, has_bias=given("bias") is not None,
        has_slopes=given("alibi_slopes") is not None, has_dropout=bool(given("dropout")), deterministic=deterministic,
    )  # fmt: skip
    if chosen.composite:
        if chosen.name != "reference":
            options["deterministic"] = deterministic
        with without_autocast(q):
            return chosen.run(
                q, k, v, cu_seqlens_q, lengths_k, sinks=sinks, causal=causal, window=window, mask=mask, scale=scale,
                softcap=softcap, return_lse=return_lse, **options,
            )  # fmt: skip
    before, behind = sides(causal, window)
    if mask is not None and joined is not None:
        form = mask.packed_form
        assert form is not None
        cu_seqlens_q = lengths_k = joined
        before, behind = _narrower(before, form.left), _narrower(behind, form.right)
    left, right = NO_LIMIT if before is None else before, NO_LIMIT if behind is None else behind
    in_order = bool(deterministic and gradients)
    schedule = shared_schedule(
        cu_seqlens_q, lengths_k, tokens, keys, heads, kv_heads, head_dim, value_dim, q.dtype, left, right, gradients,
        in_order, chosen.target,
    )  # fmt: skip
    out, lse = library.attention_varlen(
        q, k, v, sinks, schedule, cu_seqlens_q.shape[0] - 1, left, right,
        head_dim**-0.5 if scale is None else float(scale), float(softcap), in_order, chosen.target,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def _narrower(one: int | None, other: int | None) -> int | None:
    """The smaller of two limits; None is no limit."""
    given = [limit for limit in (one, other) if limit is not None]
    return min(given) if given else None


def _checked_window(causal: bool, window: Any) -> Any:
    if not isinstance(window, tuple):
        return check_causal_window("attention_varlen", causal, window)
    check_causal_window("attention_varlen", causal, None)
    window = tuple([plain_number(side) for side in window])
    if len(window) != 2 or any(side is not None and (type(side) is not int or side < 0) for side in window):
        raise ValueError(
            f"attention_varlen: window is {window}; a pair is (left, right), the keys before and behind a query's own, "
            "0 or more, or None for all"
        )
    return window if window != (None, None) else None


_FURTHER = ("bias", "alibi_slopes", "score", "dropout", "seed")


def _check_options(q: Tensor, sinks: Tensor | None, options: dict[str, Any]) -> None:
    for name in options:
        if name not in _FURTHER:
            raise TypeError(f"attention_varlen: there is no argument {name!r}; see those of attention")
        if name in ("bias", "alibi_slopes") and not isinstance(options[name], (Tensor, type(None))):
            raise TypeError(f"attention_varlen: {name} is {described(options[name])}; it must be a tensor or None")
    if sinks is None:
        return
    if not is_float(sinks) or tuple(sinks.shape) != (q.shape[1],) or sinks.device != q.device:
        raise ValueError(
            f"attention_varlen: sinks is {sinks.dtype} {tuple(sinks.shape)} on {sinks.device}; it must have one float "
            f"logit a head, ({q.shape[1]},), on {q.device}"
        )


def _check_lengths(q: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
    for label, lengths in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        whole = lengths.ndim == 1 and lengths.shape[0] >= 2 and lengths.dtype in (torch.int32, torch.int64)
        if not whole or lengths.device != q.device or lengths.shape != cu_seqlens_q.shape:
            raise ValueError(
                f"attention_varlen: {label} is {lengths.dtype} {tuple(lengths.shape)} on {lengths.device}; it must be "
                f"whole numbers (sequences + 1,) on {q.device}, int32 or int64, as many for keys as for queries"
            )
