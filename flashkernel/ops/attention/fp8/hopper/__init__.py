"""Launches the FP8 attention forward kernel for Hopper."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks.constants import LOG2E
from flashkernel.blocks.mask import Mask
from flashkernel.blocks.tile_ranges import mean_visible_keys
from flashkernel.core import device, tune
from flashkernel.core.gluon import TensorDescriptor, gl
from flashkernel.core.launch import launch
from flashkernel.ops.attention.fp8.configs import HOPPER, HopperFp8
from flashkernel.ops.attention.fp8.hopper.forward_kernel import Fp8Traits, attention_forward_fp8
from flashkernel.ops.attention.fp8.params import Fp8Inputs
from flashkernel.ops.attention.hopper.block_ranges import every_row_visible
from flashkernel.ops.attention.hopper.forward_configs import PRODUCER_REGISTERS
from flashkernel.ops.attention.hopper.forward_launch import schedule_forward
from flashkernel.ops.attention.hopper.launch_options import allocate_outputs, without_keys
from flashkernel.ops.attention.params import AttentionParams

_GLUON_DTYPES = {torch.float8_e4m3fn: gl.float8e4nv, torch.bfloat16: gl.bfloat16, torch.float16: gl.float16,
                 torch.float32: gl.float32}  # fmt: skip


def forward(inputs: Fp8Inputs, params: AttentionParams, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns o (batch, seqlen_q, heads, head_dim) in `out_dtype` and lse (batch, heads, seqlen_q) in float32."""
    (q, k, v, *scales, sinks), (mask, scale, softcap, *_) = inputs, params
    batch, seqlen_q, heads, head_dim = q.shape
    seqlen_k, kv_heads = k.shape[1], k.shape[2]
    o, lse = allocate_outputs(q, head_dim, out_dtype)
    if batch == 0 or seqlen_q == 0:
        return o, lse
    if seqlen_k == 0:
        return without_keys(o, lse, sinks)
    scales = [x.contiguous() for x in scales]
    per_block = [x.ndim == 3 for x in scales]
    config = _config(q, k, mask, out_dtype, per_block[1] or per_block[2])
    scheduled = schedule_forward(mask, q, k, config, 2 * seqlen_k * head_dim, unmasked_kv_heads=1)
    lazy_rescale = config.lazy_rescale and every_row_visible(mask, seqlen_q, seqlen_k)
    retry_flags = scheduled.retry_flags() if lazy_rescale else None
    traits = Fp8Traits(
        NUM_CONSUMERS=config.num_consumers,
        NUM_STAGES=config.num_stages,
        BLOCK_N=config.block_n,
        HEAD_DIM=head_dim,
        VALUE_DIM=head_dim,
        PACK_GQA=config.pack_gqa,
        LAZY_RESCALE=lazy_rescale,
        OVERFLOW_RETRY=lazy_rescale,
        POLYNOMIAL_EXP2=config.polynomial_exp2,
        SOFTCAP=softcap > 0,
        SCALE_FIRST=scale <= 0,
        HAS_SINKS=sinks is not None,
        Q_BLOCK_SCALES=int(per_block[0]),
        K_BLOCK_SCALES=int(per_block[1]),
        V_BLOCK_SCALES=int(per_block[2]),
        CONSUMER_REGISTERS=config.consumer_registers,
        PRODUCER_REGISTERS=PRODUCER_REGISTERS,
    )
    visible, _, _, _, mask_tables = params.functions()
    launch(
        attention_forward_fp8, (scheduled.num_programs,),
        lse, _q_descriptor(q, config), _k_descriptor(k, config.block_n), _v_descriptor(v, config.block_n),
        _q_descriptor(o, config), sinks, *scales, retry_flags, mask_tables, *scheduled.arguments, heads,
        heads // kv_heads, seqlen_q, seqlen_k, *(x.shape[2] if x.ndim == 3 else 1 for x in scales),
        scale if softcap > 0 else scale * LOG2E, softcap,
        MASK=visible, TRAITS=traits, num_warps=4,
    )  # fmt: skip
    return o, lse


def _config(q: Tensor, k: Tensor, mask: Mask | None, out_dtype: torch.dtype, block_scales: bool) -> HopperFp8:
    """Returns the config of a call; heads are not packed if the mask differs between them."""
    batch, seqlen_q, heads, head_dim = q.shape
    visible_keys = mean_visible_keys(mask, batch, heads, seqlen_q, k.shape[1])
    shape = {
        "seqlen_q": seqlen_q, "mean_visible_keys": visible_keys, "head_dim": head_dim,
        "group_size": heads // k.shape[2], "out_bytes": out_dtype.itemsize, "block_scales": int(block_scales),
    }  # fmt: skip
    config: HopperFp8 = tune.pick(HOPPER, device.properties(q.device), shape)
    return replace(config, pack_gqa=1) if mask is not None and "h" in mask.depends else config


def _descriptor(x: Tensor, shape: list[int], strides: list[int], box: list[int]) -> Any:
    """Returns a TMA descriptor of tiles of `box`; elements outside read as zero. TMA never follows the stride of a dim
    of size 1, but it must be a legal one."""
    layout = gl.NVMMASharedLayout.get_default_for(box, _GLUON_DTYPES[x.dtype])
    strides = [stride if size > 1 else 16 for size, stride in zip(shape, strides)]
    return TensorDescriptor(x, shape, [*strides[:-1], 1], box, layout)


def _q_descriptor(x: Tensor, config: HopperFp8) -> Any:
    """Q or O (batch, seqlen_q, heads, head_dim): tiles of a consumer's 64 rows."""
    x = x if _tma_compatible(x) else x.clone(memory_format=torch.contiguous_format)
    return _descriptor(x, list(x.shape), list(x.stride()), [1, config.block_m, config.pack_gqa, x.shape[3]])


def _k_descriptor(k: Tensor, block_n: int) -> Any:
    """K (batch, seqlen_k, kv_heads, head_dim) seen as (batch, pair, quad, one, kv_heads * head_dim), where
    key = 4 quad + 2 pair + one."""
    batch, seqlen_k, kv_heads, head_dim = k.shape
    padded = tune.ceil_div(seqlen_k, 4) * 4
    end = k.storage_offset() + (batch - 1) * k.stride(0) + (padded - 1) * k.stride(1) + kv_heads * head_dim
    heads_contiguous = kv_heads == 1 or k.stride(2) == head_dim
    if not _tma_compatible(k) or not heads_contiguous or end > k.untyped_storage().nbytes():
        # TMA reads the last quad whole: keys past the end are masked, but their memory must exist.
        copy = torch.zeros((batch, padded, kv_heads, head_dim), dtype=torch.uint8, device=k.device).view(k.dtype)
        k = copy[:, :seqlen_k].copy_(k)
    step = k.stride(1)
    shape = [batch, 2, padded // 4, 2, kv_heads * head_dim]
    return _descriptor(k, shape, [k.stride(0), 2 * step, 4 * step, step, 1], [1, 2, block_n // 4, 2, head_dim])


def _v_descriptor(v: Tensor, block_n: int) -> Any:
    """V^T (batch, kv_heads, head_dim, seqlen_k) with contiguous keys; copied if V has another layout."""
    v = v.permute(0, 2, 3, 1)
    if not _tma_compatible(v):
        padded = tune.ceil_div(v.shape[3], 16) * 16
        copy = torch.empty((*v.shape[:3], padded), dtype=torch.uint8, device=v.device).view(v.dtype)
        v = copy[..., : v.shape[3]].copy_(v)
    return _descriptor(v, list(v.shape), list(v.stride()), [1, 1, v.shape[2], block_n])


def _tma_compatible(x: Tensor) -> bool:
    """True if TMA can load it: the last dim is contiguous, address and strides are multiples of 16 bytes."""
    strides = [stride for size, stride in zip(x.shape[:3], x.stride()) if size > 1]
    aligned = all(stride and stride * x.element_size() % 16 == 0 for stride in strides)
    return aligned and x.data_ptr() % 16 == 0 and x.stride(3) == 1
