"""The FP8 attention kernels as a torch operator; it has no gradient."""

import torch
from torch import Tensor

from flashkernel.blocks.fp8 import FP8
from flashkernel.blocks.mask import Source
from flashkernel.core.library import KernelOp
from flashkernel.core.op import resolve
from flashkernel.ops.attention.fp8.params import Fp8Inputs
from flashkernel.ops.attention.library import empty_outputs
from flashkernel.ops.attention.params import AttentionParams


def _forward(
    inputs: Fp8Inputs, mask: Source, scale: float, softcap: float, out_dtype: torch.dtype, kernels: str
) -> tuple[Tensor, Tensor]:
    q, k, v, *_, sinks = inputs
    sinks = None if sinks is None else sinks.contiguous()
    inputs = inputs._replace(q=q.view(FP8), k=k.view(FP8), v=v.view(FP8), sinks=sinks)
    return resolve(kernels).forward(inputs, AttentionParams(mask.mask, scale, softcap, None, 0.0, 0), out_dtype)


def _fake_forward(inputs, mask, scale, softcap, out_dtype, kernels):
    out, lse = empty_outputs(inputs.q, inputs.v)
    return out.new_empty(out.shape, dtype=out_dtype), lse


attention_fp8 = KernelOp("attention_fp8", _forward, _fake_forward)
