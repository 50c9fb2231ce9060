"""The attention kernels as a torch operator.

A mask and a score function are expressions, which no operator can take as arguments. Their text can: it names a
template, and the tensors they read travel as a list.
"""

import torch
from torch import Tensor

from flashkernel.blocks import expression as ex
from flashkernel.blocks.mask import Mask, recalled
from flashkernel.core.arguments import unit_stride
from flashkernel.core.library import KernelOp
from flashkernel.core.op import resolve
from flashkernel.ops.attention.params import AttentionInputs, AttentionParams


def attention(
    kernels: str, inputs: AttentionInputs, mask: Mask | None, score: ex.Traced | None, scale: float, softcap: float,
    dropout: float, seed: int | Tensor, deterministic: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(o, lse) by the kernels of a backend; differentiable in every tensor of `inputs`."""
    on_device = isinstance(seed, Tensor)
    return _attention(
        *inputs, seed if on_device else None,
        [] if mask is None else list(mask.tables), [] if score is None else list(score.tables),
        "" if mask is None else mask.text, "" if score is None else score.text,
        scale, softcap, dropout, 0 if on_device else seed, deterministic, kernels,
    )  # fmt: skip


def _params(
    device_seed, mask_tables, score_tables, mask, score, scale, softcap, dropout, seed, deterministic
) -> AttentionParams:
    return AttentionParams(
        recalled(mask, mask_tables) if mask else None, scale, softcap,
        ex.recall(score, score_tables) if score else None, dropout, seed if device_seed is None else device_seed,
        deterministic,
    )  # fmt: skip


def _inputs(q, k, v, bias, sinks, alibi_slopes) -> AttentionInputs:
    return AttentionInputs(
        unit_stride(q), unit_stride(k), unit_stride(v),
        None if bias is None else bias.reshape((1,) * (4 - bias.ndim) + tuple(bias.shape)),
        None if sinks is None else sinks.contiguous(),
        None if alibi_slopes is None else alibi_slopes.float().contiguous(),
    )  # fmt: skip


def _forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, alibi_slopes: Tensor | None,
    device_seed: Tensor | None, mask_tables: list[Tensor], score_tables: list[Tensor], mask: str, score: str,
    scale: float, softcap: float, dropout: float, seed: int, deterministic: bool, kernels: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    params = _params(device_seed, mask_tables, score_tables, mask, score, scale, softcap, dropout, seed, deterministic)
    return resolve(kernels).forward(_inputs(q, k, v, bias, sinks, alibi_slopes), params)


def _fake_forward(q, k, v, *_):
    batch, seqlen_q, heads, _ = q.shape
    return q.new_empty((batch, seqlen_q, heads, v.shape[3])), q.new_empty((batch, heads, seqlen_q), dtype=torch.float32)


def _backward(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None,
    alibi_slopes: Tensor | None, o: Tensor, lse: Tensor, device_seed: Tensor | None, mask_tables: list[Tensor],
    score_tables: list[Tensor], mask: str, score: str, scale: float, softcap: float, dropout: float, seed: int,
    deterministic: bool, want_bias: bool, kernels: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv, dbias, dsinks, dslopes); those without an input, or not wanted, are empty."""
    params = _params(device_seed, mask_tables, score_tables, mask, score, scale, softcap, dropout, seed, deterministic)
    dq, dk, dv, dbias, dsinks, dslopes = resolve(kernels).backward(
        unit_stride(do), None if dlse is None else dlse.contiguous(), _inputs(q, k, v, bias, sinks, alibi_slopes),
        o, lse, params, want_bias and bias is not None,
    )  # fmt: skip
    empty = [q.new_empty(0) for _ in range(3)]
    return (
        dq, dk, dv,
        empty[0] if dbias is None or bias is None else dbias.view(bias.shape),
        empty[1] if dsinks is None else dsinks,
        empty[2] if dslopes is None or alibi_slopes is None else dslopes.to(alibi_slopes.dtype),
    )  # fmt: skip


def _fake_backward(do, dlse, q, k, v, bias, sinks, alibi_slopes, *settings):
    want = settings[-2]
    optional = [
        q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (bias if want else None, sinks, alibi_slopes)
    ]  # fmt: skip
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), *optional


def _setup_context(ctx, inputs, output):
    q, k, v, bias, sinks, alibi_slopes, device_seed, mask_tables, score_tables, *settings = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, bias, sinks, alibi_slopes, device_seed, *output, *mask_tables, *score_tables)
    ctx.counts = (len(mask_tables), len(score_tables))
    ctx.settings = settings
    ctx.want_bias = bias is not None and bias.requires_grad


def _autograd_backward(ctx, do, dlse):
    q, k, v, bias, sinks, alibi_slopes, device_seed, o, lse, *tables = ctx.saved_tensors
    num_mask_tables, num_score_tables = ctx.counts
    if do is None:
        do = torch.zeros_like(o)
    *settings, kernels = ctx.settings
    gradients = _attention_backward(
        do, dlse, q, k, v, bias, sinks, alibi_slopes, o, lse, device_seed, tables[:num_mask_tables],
        tables[num_mask_tables:], *settings, ctx.want_bias, kernels,
    )  # fmt: skip
    given = (q, k, v, bias if ctx.want_bias else None, sinks, alibi_slopes)
    picked = [None if x is None else gradient for x, gradient in zip(given, gradients)]
    return *picked, None, [None] * num_mask_tables, [None] * num_score_tables, *[None] * 8


_attention_backward = KernelOp("attention_backward", _backward, _fake_backward)
_attention = KernelOp("attention", _forward, _fake_forward, setup_context=_setup_context, backward=_autograd_backward)
