"""Elementwise and gated activations."""

from flashkernel.ops.activation.api import geglu, gelu, gpt_oss_glu, reglu, relu, silu, squared_relu, swiglu

__all__ = ["geglu", "gelu", "gpt_oss_glu", "reglu", "relu", "silu", "squared_relu", "swiglu"]
