"""The rotary attention kernels as a torch operator. cos and sin have no gradient."""

import torch
from torch import Tensor

from flashkernel.blocks.mask import Mask, recalled
from flashkernel.core.arguments import unit_stride
from flashkernel.core.library import KernelOp
from flashkernel.core.op import resolve


def _tables(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return cos.float().contiguous(), sin.float().contiguous()


def _mask(mask: str, mask_tables: list[Tensor]) -> Mask | None:
    return recalled(mask, mask_tables) if mask else None


def _forward(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, mask_tables: list[Tensor], mask: str,
    interleaved: bool, scale: float, kernels: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    q, k, v = (unit_stride(x) for x in (q, k, v))
    return resolve(kernels).forward(q, k, v, *_tables(cos, sin), interleaved, _mask(mask, mask_tables), scale)


def _fake_forward(q, k, v, *_):
    batch, seqlen_q, heads, _ = q.shape
    return q.new_empty((batch, seqlen_q, heads, v.shape[3])), q.new_empty((batch, heads, seqlen_q), dtype=torch.float32)


def _backward(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, cos: Tensor, sin: Tensor,
    mask_tables: list[Tensor], mask: str, interleaved: bool, scale: float, kernels: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    do, q, k, v = (unit_stride(x) for x in (do, q, k, v))
    dlse = None if dlse is None else dlse.contiguous()
    dq, dk, dv = resolve(kernels).backward(
        do, dlse, q, k, v, o, lse, *_tables(cos, sin), interleaved, _mask(mask, mask_tables), scale
    )
    return dq, dk, dv


def _fake_backward(do, dlse, q, k, v, *_):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx, inputs, output):
    q, k, v, cos, sin, mask_tables, *settings = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, cos, sin, *mask_tables)
    ctx.settings = settings


def _autograd_backward(ctx, do, dlse):
    q, k, v, o, lse, cos, sin, *mask_tables = ctx.saved_tensors
    if do is None:
        do = torch.zeros_like(o)
    gradients = _rotary_backward(do, dlse, q, k, v, o, lse, cos, sin, mask_tables, *ctx.settings)
    return *gradients, None, None, [None] * len(mask_tables), None, None, None, None


_rotary_backward = KernelOp("rotary_attention_backward", _backward, _fake_backward)
rotary_attention = KernelOp(
    "rotary_attention", _forward, _fake_forward, setup_context=_setup_context, backward=_autograd_backward
)
