"""The attention kernels as a torch operator.

A mask and a score function are expressions, which no operator can take as arguments. Their text can: it names a
template, and the tensors they read travel as a list.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flashkernel.blocks import expression as ex
from flashkernel.blocks.mask import Source
from flashkernel.core.arguments import unit_stride
from flashkernel.core.library import Gradient, KernelOp, empty_gradients
from flashkernel.core.op import resolve
from flashkernel.ops.attention.params import AttentionInputs, AttentionParams, OutputGradients


class AttentionArguments(NamedTuple):
    """`AttentionParams` as an operator takes them."""

    mask: Source
    score: Source
    scale: float
    softcap: float
    dropout: float
    deterministic: bool
    seed: int | Tensor

    @property
    def params(self) -> AttentionParams:
        score = ex.recall(self.score.text, self.score.tables) if self.score.text else None
        return AttentionParams(
            self.mask.mask, self.scale, self.softcap, score, self.dropout, self.seed, self.deterministic
        )


def _dense(inputs: AttentionInputs) -> AttentionInputs:
    """The inputs as kernels read them."""
    q, k, v, bias, sinks, alibi_slopes = inputs
    return AttentionInputs(
        unit_stride(q), unit_stride(k), unit_stride(v),
        None if bias is None else bias.reshape((1,) * (4 - bias.ndim) + tuple(bias.shape)),
        None if sinks is None else sinks.contiguous(),
        None if alibi_slopes is None else alibi_slopes.float().contiguous(),
    )  # fmt: skip


def _forward(inputs: AttentionInputs, arguments: AttentionArguments, kernels: str) -> tuple[Tensor, Tensor]:
    """(o, lse) by the kernels of a backend; differentiable in every tensor of `inputs`."""
    return resolve(kernels).forward(_dense(inputs), arguments.params)


def _fake_forward(inputs, arguments, kernels):
    return empty_outputs(inputs.q, inputs.v)


def empty_outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialized (o, lse), as a fake function returns them."""
    batch, seqlen_q, heads, _ = q.shape
    return q.new_empty((batch, seqlen_q, heads, v.shape[3])), q.new_empty((batch, heads, seqlen_q), dtype=torch.float32)


def _backward(
    outputs: OutputGradients, inputs: AttentionInputs, arguments: AttentionArguments, want_bias: bool, kernels: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dbias, dsinks, dslopes); those without an input, or not wanted, are empty."""
    bias, slopes = inputs.bias, inputs.alibi_slopes
    o, lse, do, dlse = outputs
    given = OutputGradients(o, lse, unit_stride(do), None if dlse is None else dlse.contiguous())
    dq, dk, dv, dbias, dsinks, dslopes = resolve(kernels).backward(
        given, _dense(inputs), arguments.params, want_bias and bias is not None
    )
    empty = [dq.new_empty(0) for _ in range(3)]
    return (
        dq, dk, dv,
        empty[0] if dbias is None or bias is None else dbias.view(bias.shape),
        empty[1] if dsinks is None else dsinks,
        empty[2] if dslopes is None or slopes is None else dslopes.to(slopes.dtype),
    )  # fmt: skip


def _fake_backward(outputs, inputs, arguments, want_bias, kernels):
    return empty_gradients(inputs, (True, True, True, want_bias, True, True))


def _setup_context(ctx, inputs, output):
    given, arguments, ctx.kernels = inputs
    mask, score, *ctx.numbers, seed = arguments
    on_device = isinstance(seed, Tensor)
    ctx.save_for_backward(*given, *output, seed if on_device else None, *mask.tables, *score.tables)
    ctx.seed, ctx.texts, ctx.num_mask_tables = 0 if on_device else seed, (mask.text, score.text), len(mask.tables)


def _autograd_backward(ctx, wanted, do, dlse):
    q, k, v, bias, sinks, alibi_slopes, o, lse, device_seed, *tables = ctx.saved_tensors
    if do is None:
        do = torch.zeros_like(o)
    mask = Source(ctx.texts[0], tables[: ctx.num_mask_tables])
    score = Source(ctx.texts[1], tables[ctx.num_mask_tables :])
    seed = ctx.seed if device_seed is None else device_seed
    arguments = AttentionArguments._make((mask, score, *ctx.numbers, seed))
    inputs = AttentionInputs(q, k, v, bias, sinks, alibi_slopes)
    return _attention_backward(OutputGradients(o, lse, do, dlse), inputs, arguments, wanted[3], ctx.kernels)


_attention_backward = KernelOp("attention_backward", _backward, _fake_backward)
attention = KernelOp(
    "attention", _forward, _fake_forward, Gradient(_setup_context, _autograd_backward, AttentionInputs._fields)
)
