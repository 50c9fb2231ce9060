"""The public `rotary_attention`: argument checks and dispatch to a backend."""

from torch import Tensor

from flashkernel.blocks.mask import Mask, checked, narrowed, source_of
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
from flashkernel.ops.attention.arguments import check_tensors
from flashkernel.ops.attention.rotary import library, spec


@replayed
def rotary_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    causal: bool = False,
    window: int | None = None,
    mask: Mask | Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention of q and k rotated by their positions (RoPE), in one kernel.

    Key j is at position j and query i at i + seqlen_k - seqlen_q, so the last query is aligned with the last key. The
    kernel rotates q and k in shared memory: rotated tensors are never written. Every tile of queries rotates the keys
    it reads again, so for long sequences, and where a faster attention kernel serves (Triton, Hopper), `rope` followed
    by `attention` is faster. The backward pass rotates q and k again, in torch. Under autocast q, k and v are cast
    as for `attention`.

    Args:
        q: (batch, seqlen_q, heads, head_dim), any strides.
        k: (batch, seqlen_k, kv_heads, head_dim), in q's dtype.
        v: (batch, seqlen_k, kv_heads, value_dim), in q's dtype.
        cos: (positions, rotary_dim / 2), cosines of the angles of each position; at least seqlen_k positions. The first
            rotary_dim dims of a head are rotated.
        sin: The sines, shaped as cos.
        interleaved: Pairs are neighbors (2 i, 2 i + 1) (GPT-J) instead of (i, i + rotary_dim / 2) (Llama).
        causal: A query sees the keys up to its own position.
        window: A query sees so many keys up to its own, itself included; None is no limit.
        mask: A `Mask`, a boolean tensor that broadcasts to (batch, heads, seqlen_q, seqlen_k), or None.
        scale: Softmax scale; None is 1 / sqrt(head_dim).
        return_lse: Also return the log-sum-exp of the scores.
        backend: "cuda", "torch" or "reference"; None chooses (see `explain`).

    Returns:
        (batch, seqlen_q, heads, value_dim) in q's dtype; with `return_lse` also the lse, float32
        (batch, heads, seqlen_q).

    Example:
        >>> import torch
        >>> import flashkernel as fk
        >>> q, k, v = (torch.randn(1, 8, 2, 16) for _ in range(3))
        >>> angles = torch.arange(8.0)[:, None] * 10000.0 ** (-torch.arange(8.0) / 8)
        >>> out = fk.rotary_attention(q, k, v, angles.cos(), angles.sin(), causal=True)
        >>> out.shape
        torch.Size([1, 8, 2, 16])
    """
    lower = autocast_dtype(q)
    if lower is not None:
        q, k, v = autocast(q, lower), autocast(k, lower), autocast(v, lower)
    check_tensors(q, k, v, "rotary_attention")
    _check_tables(q, k, cos, sin)
    mask = checked(mask, "rotary_attention", (q.shape[0], q.shape[2], q.shape[1], k.shape[1]), q.device)
    if causal is not False or window is not None:
        mask = narrowed(mask, causal, window, "rotary_attention")
    check_scores("rotary_attention", scale)
    chosen = choose(
        spec.ROTARY_ATTENTION, backend, q.device, q.dtype, needs_gradients(q, k, v),
        head_dim=q.shape[-1], value_dim=v.shape[-1], rotary_dim=2 * cos.shape[-1],
    )  # fmt: skip
    if chosen.composite:
        with without_autocast(q):
            return chosen.run(
                q, k, v, cos, sin, interleaved=interleaved, mask=mask, scale=scale, return_lse=return_lse
            )  # fmt: skip
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    arguments = library.RotaryArguments(source_of(mask), bool(interleaved), scale)
    out, lse = library.rotary_attention(q, k, v, cos, sin, arguments, chosen.target)
    return (out, lse) if return_lse else out


def _check_tables(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    for label, table in (("cos", cos), ("sin", sin)):
        if table.ndim != 2 or not is_float(table) or table.shape != cos.shape:
            raise ValueError(
                f"rotary_attention: {label} must be a float tensor (positions, rotary_dim / 2), both alike, not "
                f"{table.dtype} {tuple(table.shape)}"
            )
        if table.device != q.device:
            raise ValueError(f"rotary_attention: {label} is on {table.device} but q is on {q.device}; move one of them")
    if cos.shape[0] < k.shape[1]:
        raise ValueError(
            f"rotary_attention: cos has {cos.shape[0]} positions for {k.shape[1]} keys; make the table longer"
        )
    if not 0 < 2 * cos.shape[1] <= q.shape[3]:
        raise ValueError(
            f"rotary_attention: cos has {cos.shape[1]} columns, one for each pair, for heads of {q.shape[3]}; it takes "
            "at least 1 and at most half as many"
        )
