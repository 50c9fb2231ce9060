"""The public FP8 attention: argument checks, dispatch, registration."""

import torch
from torch import Tensor

from flashkernel.blocks import expression as ex
from flashkernel.blocks.mask import Mask, recalled
from flashkernel.core.dispatch import choose
from flashkernel.core.library import KernelOp
from flashkernel.core.op import resolve
from flashkernel.ops.attention.fp8 import spec
from flashkernel.ops.attention.fp8.reference import FP8, SCALE_BLOCK

OUTPUTS = (torch.bfloat16, torch.float16, torch.float32)


def attention_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    *,
    mask: Mask | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    return_lse: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` of tensors in float8_e4m3fn, each times its scales; the result is in `out_dtype`. For inference.

    q is (batch, queries, heads, head_dim), k (batch, keys, kv_heads, head_dim), v (batch, keys, kv_heads, value_dim).
    A scale is float32 and positive: one for each head, (batch, heads), or one for each head and 128 positions,
    (batch, heads, blocks). `quantize_fp8` makes them; `transpose=True` lays v out so that no kernel has to copy it.
    q and k may have been rotated there, since their products do not change.

    `mask`, `scale`, `sinks`, `softcap` and `return_lse` are those of `attention`. Both products run in FP8 on Hopper,
    with probabilities rounded to e4m3 as well; sums and the softmax are in float32.
    """
    _check_tensors(q, k, v)
    _check_scales(q, k, q_scale, k_scale, v_scale)
    _check_settings(q, mask, sinks, softcap, out_dtype)
    chosen = choose(
        spec.ATTENTION_FP8, backend, q.device, q.dtype, head_dim=q.shape[-1], value_dim=v.shape[-1],
    )  # fmt: skip
    if chosen.composite:
        return chosen.run(
            q, k, v, q_scale, k_scale, v_scale,
            mask=mask, scale=scale, sinks=sinks, softcap=softcap, return_lse=return_lse, out_dtype=out_dtype,
        )  # fmt: skip
    bytes_of = [x.view(torch.uint8) for x in (q, k, v)]  # torch's tools know few operations on float8
    out, lse = _attention_fp8(
        *bytes_of, q_scale, k_scale, v_scale, sinks, [] if mask is None else list(mask.tables),
        "" if mask is None else mask.text, q.shape[-1] ** -0.5 if scale is None else float(scale), float(softcap),
        out_dtype, chosen.target,
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
    if k.shape[1:3] != v.shape[1:3]:
        raise ValueError(
            f"attention_fp8: k has {k.shape[1]} positions of {k.shape[2]} heads but v has {v.shape[1]} of "
            f"{v.shape[2]}; every key needs its value"
        )
    if q.shape[3] != k.shape[3] or q.shape[3] == 0:
        raise ValueError(
            f"attention_fp8: q has head_dim {q.shape[3]} and k has {k.shape[3]}; they must be equal, and not zero"
        )
    heads, kv_heads = q.shape[2], k.shape[2]
    if heads == 0 or kv_heads == 0 or heads % kv_heads:
        raise ValueError(
            f"attention_fp8: {heads} query heads cannot share {kv_heads} key/value heads; Hq must be a multiple of Hkv"
        )


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


def _check_settings(q: Tensor, mask: Mask | None, sinks: Tensor | None, softcap: float, out_dtype: torch.dtype) -> None:
    if mask is not None and not isinstance(mask, Mask):
        raise TypeError(
            f"attention_fp8: mask is a {type(mask).__name__}; it must be a Mask such as flashkernel.causal(), and a "
            "function or a tensor becomes one by flashkernel.custom(...)"
        )
    for table in () if mask is None else ex.tables(mask.expression):
        if table.device != q.device:
            raise ValueError(
                f"attention_fp8: a table of {mask} is on {table.device} but q is on {q.device}; move one of them"
            )
    if sinks is not None:
        if tuple(sinks.shape) != (q.shape[2],) or not sinks.is_floating_point() or sinks.device != q.device:
            raise ValueError(
                f"attention_fp8: sinks are {sinks.dtype} {tuple(sinks.shape)} on {sinks.device}; they must be a float "
                f"for each head, ({q.shape[2]},), on {q.device}"
            )
        if torch.is_grad_enabled() and sinks.requires_grad:
            raise ValueError("attention_fp8: it has no gradient; call it under torch.no_grad(), or detach the sinks")
    if softcap < 0:
        raise ValueError(f"attention_fp8: softcap is {softcap}; it must be positive, or 0 for none")
    if out_dtype not in OUTPUTS:
        raise ValueError(f"attention_fp8: out_dtype is {out_dtype}; it must be bfloat16, float16 or float32")


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    sinks: Tensor | None,
    mask_tables: list[Tensor],
    mask: str,
    scale: float,
    softcap: float,
    out_dtype: torch.dtype,
    kernels: str,
) -> tuple[Tensor, Tensor]:
    known = recalled(mask, mask_tables) if mask else None
    q, k, v = q.view(FP8), k.view(FP8), v.view(FP8)
    sinks = None if sinks is None else sinks.contiguous()
    return resolve(kernels).forward(q, k, v, q_scale, k_scale, v_scale, sinks, known, scale, softcap, out_dtype)


def _fake_forward(q, k, v, q_scale, k_scale, v_scale, sinks, mask_tables, mask, scale, softcap, out_dtype, kernels):
    batch, queries, heads, _ = q.shape
    out = q.new_empty((batch, queries, heads, v.shape[3]), dtype=out_dtype)
    return out, q.new_empty((batch, heads, queries), dtype=torch.float32)


_attention_fp8 = KernelOp("attention_fp8", _forward, _fake_forward)
