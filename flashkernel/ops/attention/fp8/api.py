"""The public `attention_fp8`: argument checks and dispatch to a backend."""

import torch
from torch import Tensor

from flashkernel.blocks.fp8 import FP8, SCALE_BLOCK
from flashkernel.blocks.mask import Mask, checked, narrowed, source_of
from flashkernel.core.arguments import check_scores, is_float, without_autocast
from flashkernel.core.dispatch import choose
from flashkernel.core.replay import replayed
from flashkernel.ops.attention.arguments import check_heads
from flashkernel.ops.attention.fp8 import library, spec
from flashkernel.ops.attention.fp8.params import Fp8Inputs

OUTPUTS = (torch.bfloat16, torch.float16, torch.float32)


@replayed
def attention_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    *,
    causal: bool = False,
    window: int | None = None,
    mask: Mask | Tensor | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    return_lse: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention of FP8 tensors, each multiplied by its scales. Forward only.

    On Hopper both matrix products run in FP8: P is rounded to e4m3 as well. Sums and the softmax are in float32.
    `quantize_fp8` makes q, k, v and their scales. q and k may be rotated there, since Q K^T does not change.

    Args:
        q: Queries (batch, seqlen_q, heads, head_dim), float8_e4m3fn.
        k: Keys (batch, seqlen_k, kv_heads, head_dim), float8_e4m3fn; heads must be a multiple of kv_heads.
        v: Values (batch, seqlen_k, kv_heads, value_dim), float8_e4m3fn. `quantize_fp8(v, transpose=True)` gives them
            the memory layout that the Hopper kernel needs; others are copied.
        q_scale: Scales of q, float32 and positive: (batch, heads), or (batch, heads, blocks) with one scale for every
            128 positions.
        k_scale: Scales of k: (batch, kv_heads) or (batch, kv_heads, blocks).
        v_scale: Scales of v, shaped as those of k.
        causal: Query i sees keys up to i + seqlen_k - seqlen_q.
        window: A query sees so many keys up to its own, itself included; None is no limit.
        mask: A `Mask`, a boolean tensor that broadcasts to (batch, heads, seqlen_q, seqlen_k), or None.
        scale: Softmax scale; by default 1 / sqrt(head_dim).
        sinks: One logit per head (heads,) that joins the softmax denominator, or None.
        softcap: Scores become softcap * tanh(scores / softcap), if above 0.
        return_lse: Also return the log-sum-exp of the scores.
        out_dtype: Dtype of the output: bfloat16, float16 or float32.
        backend: Name of a backend; by default the fastest one that serves the call.

    Returns:
        The output (batch, seqlen_q, heads, value_dim) in `out_dtype`; with `return_lse` also the float32 LSE
        (batch, heads, seqlen_q).

    Example:
        >>> import torch
        >>> import flashkernel as fk
        >>> x = torch.randn(1, 16, 2, 64)
        >>> (q, q_scale), (k, k_scale) = fk.quantize_fp8(x), fk.quantize_fp8(x)
        >>> v, v_scale = fk.quantize_fp8(x, transpose=True)
        >>> out = fk.attention_fp8(q, k, v, q_scale, k_scale, v_scale, causal=True)
        >>> out.shape, out.dtype
        (torch.Size([1, 16, 2, 64]), torch.bfloat16)
    """
    _check_tensors(q, k, v)
    _check_scales(q, k, q_scale, k_scale, v_scale)
    mask = checked(mask, "attention_fp8", (q.shape[0], q.shape[2], q.shape[1], k.shape[1]), q.device)
    if causal is not False or window is not None:
        mask = narrowed(mask, causal, window, "attention_fp8")
    _check_settings(q, sinks, out_dtype)
    check_scores("attention_fp8", scale, softcap)
    chosen = choose(
        spec.ATTENTION_FP8, backend, q.device, q.dtype, head_dim=q.shape[-1], value_dim=v.shape[-1],
    )  # fmt: skip
    if chosen.composite:
        with without_autocast(q):
            return chosen.run(
                q, k, v, q_scale, k_scale, v_scale,
                mask=mask, scale=scale, sinks=sinks, softcap=softcap, return_lse=return_lse, out_dtype=out_dtype,
            )  # fmt: skip
    # As bytes: torch.compile and autograd support few float8 operations.
    inputs = Fp8Inputs(
        q.view(torch.uint8), k.view(torch.uint8), v.view(torch.uint8), q_scale, k_scale, v_scale, sinks
    )  # fmt: skip
    out, lse = library.attention_fp8(
        inputs, source_of(mask),
        q.shape[-1] ** -0.5 if scale is None else float(scale), float(softcap), out_dtype, chosen.target,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for label, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4 or x.dtype != FP8:
            raise ValueError(
                f"attention_fp8: {label} must be float8_e4m3fn (batch, sequence, heads, head_dim), not {x.dtype} "
                f"{tuple(x.shape)}; flashkernel.quantize_fp8 makes it so"
            )
        if x.device != q.device or x.shape[0] != q.shape[0]:
            raise ValueError(
                f"attention_fp8: {label} has a batch of {x.shape[0]} on {x.device} but q has one of {q.shape[0]} on "
                f"{q.device}; they must agree"
            )
    check_heads(q, k, v, "attention_fp8")


def _check_scales(q: Tensor, k: Tensor, q_scale: Tensor, k_scale: Tensor, v_scale: Tensor) -> None:
    for label, scale, x in (("q_scale", q_scale, q), ("k_scale", k_scale, k), ("v_scale", v_scale, k)):
        batch, sequence, heads, _ = x.shape
        by_block = (batch, heads, -(-sequence // SCALE_BLOCK))
        if tuple(scale.shape) not in ((batch, heads), by_block) or scale.dtype != torch.float32:
            raise ValueError(
                f"attention_fp8: {label} is {scale.dtype} {tuple(scale.shape)}; it must be float32 {(batch, heads)}, "
                f"one a head, or {by_block}, one for {SCALE_BLOCK} positions"
            )
        if scale.device != x.device:
            raise ValueError(f"attention_fp8: {label} is on {scale.device} but q is on {x.device}; move one of them")


def _check_settings(q: Tensor, sinks: Tensor | None, out_dtype: torch.dtype) -> None:
    if sinks is not None:
        if tuple(sinks.shape) != (q.shape[2],) or not is_float(sinks) or sinks.device != q.device:
            raise ValueError(
                f"attention_fp8: sinks are {sinks.dtype} {tuple(sinks.shape)} on {sinks.device}; they must be a float "
                f"for each head, ({q.shape[2]},), on {q.device}"
            )
        if torch.is_grad_enabled() and sinks.requires_grad:
            raise ValueError("attention_fp8: it has no gradient; call it under torch.no_grad(), or detach the sinks")
    if out_dtype not in OUTPUTS:
        raise ValueError(f"attention_fp8: out_dtype is {out_dtype}; it must be bfloat16, float16 or float32")
