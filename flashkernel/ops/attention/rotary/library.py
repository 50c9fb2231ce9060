"""The rotary attention kernels as a torch operator. cos and sin have no gradient."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flashkernel.blocks.mask import Source
from flashkernel.core.arguments import unit_stride
from flashkernel.core.library import Gradient, KernelOp, empty_gradients
from flashkernel.core.op import resolve
from flashkernel.ops.attention.library import empty_outputs


def _tables(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return cos.float().contiguous(), sin.float().contiguous()


class RotaryArguments(NamedTuple):
    """What a call computes beyond its tensors."""

    mask: Source
    interleaved: bool
    scale: float


def _forward(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, arguments: RotaryArguments, kernels: str
) -> tuple[Tensor, Tensor]:
    q, k, v = (unit_stride(x) for x in (q, k, v))
    mask, interleaved, scale = arguments
    return resolve(kernels).forward(q, k, v, *_tables(cos, sin), interleaved, mask.mask, scale)


def _fake_forward(q, k, v, *_):
    return empty_outputs(q, v)


def _backward(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, cos: Tensor, sin: Tensor,
    arguments: RotaryArguments, kernels: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    do, q, k, v = (unit_stride(x) for x in (do, q, k, v))
    dlse = None if dlse is None else dlse.contiguous()
    mask, interleaved, scale = arguments
    dq, dk, dv = resolve(kernels).backward(
        do, dlse, q, k, v, o, lse, *_tables(cos, sin), interleaved, mask.mask, scale
    )  # fmt: skip
    return dq, dk, dv


def _fake_backward(do, dlse, q, k, v, *_):
    return empty_gradients((q, k, v), (True, True, True))


def _setup_context(ctx, inputs, output):
    q, k, v, cos, sin, arguments, ctx.kernels = inputs
    (text, tables), *ctx.numbers = arguments
    ctx.text = text
    ctx.save_for_backward(q, k, v, *output, cos, sin, *tables)


def _autograd_backward(ctx, wanted, do, dlse):
    q, k, v, o, lse, cos, sin, *tables = ctx.saved_tensors
    arguments = RotaryArguments(Source(ctx.text, tables), *ctx.numbers)
    if do is None:
        do = torch.zeros_like(o)
    return _rotary_backward(do, dlse, q, k, v, o, lse, cos, sin, arguments, ctx.kernels)


_rotary_backward = KernelOp("rotary_attention_backward", _backward, _fake_backward)
rotary_attention = KernelOp(
    "rotary_attention", _forward, _fake_forward, Gradient(_setup_context, _autograd_backward, ("q", "k", "v"))
)
