"""The FP8 attention kernels as a torch operator; it has no gradient."""

from typing import NamedTuple

import torch
from torch import Tensor

from flashkernel.blocks.fp8 import FP8
from flashkernel.blocks.mask import Source
from flashkernel.core.library import KernelOp
from flashkernel.core.op import resolve
from flashkernel.ops.attention.library import empty_outputs


class Fp8Scales(NamedTuple):
    """What the 8-bit values are multiplied by."""

    q_scale: Tensor
    k_scale: Tensor
    v_scale: Tensor


def _forward(
    q: Tensor, k: Tensor, v: Tensor, scales: Fp8Scales, sinks: Tensor | None, mask: Source, scale: float,
    softcap: float, out_dtype: torch.dtype, kernels: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    q, k, v = q.view(FP8), k.view(FP8), v.view(FP8)
    sinks = None if sinks is None else sinks.contiguous()
    return resolve(kernels).forward(q, k, v, *scales, sinks, mask.mask, scale, softcap, out_dtype)


def _fake_forward(q, k, v, scales, sinks, mask, scale, softcap, out_dtype, kernels):
    out, lse = empty_outputs(q, v)
    return out.new_empty(out.shape, dtype=out_dtype), lse


attention_fp8 = KernelOp("attention_fp8", _forward, _fake_forward)
