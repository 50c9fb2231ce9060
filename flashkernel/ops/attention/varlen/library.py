"""The kernels of attention over packed sequences as torch operators: the tile schedule, forward and backward."""

import torch
from torch import Tensor

from flashkernel.core.arguments import unit_stride
from flashkernel.core.library import Gradient, KernelOp
from flashkernel.core.op import resolve
from flashkernel.ops.attention.varlen.params import HeadShape, VarlenInputs, VarlenParams, schedule_size


def _schedule(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, tokens_q: int, tokens_k: int, heads: int, kv_heads: int, head_dim: int,
    value_dim: int, dtype: torch.dtype, left: int, right: int, gradients: bool, deterministic: bool,
    kernels: str,
) -> Tensor:  # fmt: skip
    params = VarlenParams(cu_seqlens_q.shape[0] - 1, left, right, 1.0, 0.0, deterministic)
    return resolve(kernels).schedule(
        cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous(), (tokens_q, tokens_k),
        HeadShape(heads, kv_heads, head_dim, value_dim), dtype, params, gradients,
    )  # fmt: skip


def _fake_schedule(cu_seqlens_q, cu_seqlens_k, tokens_q, tokens_k, heads, *_):
    size = schedule_size(cu_seqlens_q.shape[0] - 1, tokens_q, tokens_k, heads)
    return cu_seqlens_q.new_empty((size,), dtype=torch.int32)


def _inputs(q, k, v, sinks) -> VarlenInputs:
    return VarlenInputs(
        unit_stride(q), unit_stride(k), unit_stride(v), None if sinks is None else sinks.contiguous()
    )  # fmt: skip


def _forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, schedule: Tensor, num_sequences: int, left: int, right: int,
    scale: float, softcap: float, deterministic: bool, kernels: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    params = VarlenParams(num_sequences, left, right, scale, softcap, deterministic)
    return resolve(kernels).forward(_inputs(q, k, v, sinks), schedule, params)


def _fake_forward(q, k, v, *_):
    tokens, heads, _ = q.shape
    return q.new_empty((tokens, heads, v.shape[2])), q.new_empty((heads, tokens), dtype=torch.float32)


def _backward(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, o: Tensor, lse: Tensor,
    schedule: Tensor, num_sequences: int, left: int, right: int, scale: float, softcap: float,
    deterministic: bool, kernels: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv, dsinks); dsinks is empty without sinks."""
    params = VarlenParams(num_sequences, left, right, scale, softcap, deterministic)
    dq, dk, dv, dsinks = resolve(kernels).backward(
        unit_stride(do), None if dlse is None else dlse.contiguous(), _inputs(q, k, v, sinks), o, lse, schedule, params
    )
    return dq, dk, dv, q.new_empty(0) if dsinks is None else dsinks


def _fake_backward(do, dlse, q, k, v, sinks, *_):
    dsinks = q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def _setup_context(ctx, inputs, output):
    q, k, v, sinks, schedule, *settings = inputs
    ctx.save_for_backward(q, k, v, sinks, *output, schedule)
    ctx.settings = settings


def _autograd_backward(ctx, wanted, do, dlse):
    q, k, v, sinks, o, lse, schedule = ctx.saved_tensors
    if do is None:
        do = torch.zeros_like(o)
    return _varlen_backward(do, dlse, q, k, v, sinks, o, lse, schedule, *ctx.settings)


schedule = KernelOp("attention_varlen_schedule", _schedule, _fake_schedule)
_varlen_backward = KernelOp("attention_varlen_backward", _backward, _fake_backward)
attention_varlen = KernelOp(
    "attention_varlen", _forward, _fake_forward, Gradient(_setup_context, _autograd_backward, ("q", "k", "v", "sinks"))
)
