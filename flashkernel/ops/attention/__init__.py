"""Attention. `flashkernel.blocks.mask` has the masks it takes."""

from flashkernel.ops.attention.api import attention
from flashkernel.ops.attention.fp8 import attention_fp8, quantize_fp8
from flashkernel.ops.attention.rotary import rotary_attention
from flashkernel.ops.attention.varlen import attention_varlen

__all__ = ["attention", "attention_fp8", "attention_varlen", "quantize_fp8", "rotary_attention"]
