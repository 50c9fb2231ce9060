"""The FP8 attention kernels as a torch operator; it has no gradient."""

import torch
from torch import Tensor

from flashkernel.blocks.fp8 import FP8
from flashkernel.blocks.mask import recalled
from flashkernel.core.library import KernelOp
from flashkernel.core.op import resolve


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


attention_fp8 = KernelOp("attention_fp8", _forward, _fake_forward)
