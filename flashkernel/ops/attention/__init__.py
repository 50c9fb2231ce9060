"""Attention, and the masks it takes."""

from flashkernel.blocks.expression import Table
from flashkernel.blocks.mask import (
    Mask,
    block_sparse,
    causal,
    column_intervals,
    custom,
    documents,
    prefix,
    sink_tokens,
    tensor_mask,
    window,
)
from flashkernel.ops.attention.api import attention
from flashkernel.ops.attention.fp8 import attention_fp8, quantize_fp8
from flashkernel.ops.attention.rotary import rotary_attention
from flashkernel.ops.attention.varlen import attention_varlen

__all__ = [
    "Mask",
    "Table",
    "attention",
    "attention_fp8",
    "attention_varlen",
    "block_sparse",
    "causal",
    "column_intervals",
    "custom",
    "documents",
    "prefix",
    "quantize_fp8",
    "rotary_attention",
    "sink_tokens",
    "tensor_mask",
    "window",
]
